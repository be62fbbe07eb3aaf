"""A child process that reads HDF5 with libhdf5, so that a damaged file can't harm the parent.

Its ``__main__.py`` is run by path, and nothing of it is imported by the parent: it needs the standard library
and h5py alone. Requests come as lines of JSON on standard input; each answer is frames on standard output: a
byte for the kind, the length in 4 bytes, the payload. Links are listed and never followed; external and
virtual storage is described and never read.

Source: the HDF5 file format specification and the h5py low-level API.
"""

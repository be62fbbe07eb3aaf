"""Containers of bytes: bounded readers and writers of zips, pickles, HDF5, tables, protocol buffers.

They know no checkpoint. The memory and time that a file can cost are bounded by the bytes that it stores.
Deflate makes a thousand bytes of one, and honest files of zeros do that. Values are therefore streamed
without a limit, but structure, which is kept in memory, has one budget for all records of a file.
"""

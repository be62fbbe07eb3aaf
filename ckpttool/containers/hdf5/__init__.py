"""HDF5: read in a child process, in which a crash of the library ends nothing else, and written."""

"""Keras: ``.keras``, ``.weights.h5``, legacy HDF5, and its sharded weights."""

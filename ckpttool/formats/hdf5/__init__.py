"""HDF5 of any content, and what formats on top of it share."""

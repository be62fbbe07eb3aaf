"""NumPy: ``.npy`` and ``.npz`` files (``files``, ``npz_writer``), and arrays in pickles (``objects``)."""

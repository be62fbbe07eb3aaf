"""HDF5 files of any content (``plain``, ``writer``); ``tensors`` is shared with Keras' formats."""

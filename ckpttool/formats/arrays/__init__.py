"""NumPy's files, and its arrays in pickles."""

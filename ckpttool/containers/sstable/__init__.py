"""Sorted string tables of LevelDB, as TensorFlow keeps its indexes."""

"""Directories of checkpoints over time: what is there, which is newest, and which can go."""

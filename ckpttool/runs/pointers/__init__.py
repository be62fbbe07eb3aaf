"""Pointers: files that name checkpoints, and the protection of their targets."""

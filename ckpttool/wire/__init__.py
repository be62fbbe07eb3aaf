"""Containers of bytes, shared by formats; this room knows no checkpoint."""

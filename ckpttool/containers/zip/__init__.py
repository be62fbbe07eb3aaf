"""Zips: read strictly, written, and rescued when damaged."""

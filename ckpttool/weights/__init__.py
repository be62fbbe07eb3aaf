"""Tensors of two checkpoints, or on their way from one format to another: paired, compared, converted."""

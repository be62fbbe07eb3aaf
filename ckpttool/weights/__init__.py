"""Tensors of two checkpoints, or on their way from one format to another.

``pairing`` tells which tensor of one is which of another, and how it lies there; ``comparing`` whether values
are equal, and if not, how far they are apart; ``converting`` selects, renames, casts and lays out.
"""

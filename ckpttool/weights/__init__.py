"""Operations on the tensors of checkpoints: pair, compare and convert them.

``pairing`` finds the tensors of two checkpoints that correspond, and their layouts. ``comparing`` decides
whether the values of a pair are equal and measures how far they differ. ``converting`` selects, renames,
casts and rearranges tensors for another format or framework.
"""

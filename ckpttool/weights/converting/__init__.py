"""A checkpoint's content on its way to another format: selected, renamed, cast and laid out, lazily.

A tree is what a checkpoint holds besides names and numbers (``Checkpoint.tree``): plain Python, the tensors
in their places, and inert nodes for the rest. Formats without a place for it store it as JSON beside the
tensors. Only names from the list of harmless ones ever get into a pickle that ckpttool writes.
"""

"""Pairing of the tensors of two checkpoints.

``pair_up`` runs the steps from certain to likely: the user's map, equal names, naming conventions of the
frameworks, and at last equal content, the layer, shape and position. A step pairs two tensors only if each is
the only one with its key on its side, and ``Pair.how`` records the step.

Across frameworks, both sides are first brought to PyTorch's names and layouts (``layers``, ``layouts``) as
lazy tensors that read the stored elements in another order (``rearrangement``). Conventions aren't the file
format: a converted file keeps the names and layouts of its source (``Checkpoint.conventions``). A rule that
fits a layer's shape may still be the wrong one, as for a Dense after a Flatten: convert refuses such
weights, and diff lists them as undecided.
"""

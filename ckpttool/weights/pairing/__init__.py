"""Which tensor of one checkpoint is which of another: by names, layouts, content, or a map.

Pairing goes from what is certain to what is likely: the map, equal names, conventions of the frameworks,
and at last equal content, the layer, shape and position. Each step pairs tensors only if its key belongs to
one tensor on each side, and a pair says how it came about.

A layout is a lazy tensor: its elements are the stored ones in another order, and nothing that reads it
knows of layouts. Conventions are not the format: a converted file keeps the names and layouts of its
source, and says so (``Checkpoint.conventions``). Only between families of conventions is anything
transposed. A rule that fits a layer may still be the wrong one, for a Dense behind a Flatten, say: convert
refuses such weights, and diff lists them as undecided.
"""

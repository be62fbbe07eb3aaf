"""What every room builds on: checkpoints, tensors and their lazy values, findings, errors, names.

A ``Checkpoint`` is a mapping of lazy tensors (``tensor``), whose elements come from ``values``: a few sources
of blocks, and what is made of them. ``report`` has findings, ``errors`` what a user is told in one line.
``naming``, ``name_patterns`` and ``metric_names`` read epochs, steps and metrics out of names, ``roles`` what
a tensor serves, ``training`` what is said of the training. ``options`` says an option of a command once,
``suggest`` which known word a misspelled one was meant to be.
"""

"""Base of all packages: checkpoints, tensors and their lazy values, findings, errors, names, options.

A ``Checkpoint`` is a mapping of lazy tensors (``tensor``, with their roles), whose elements come from
``values``: stored bytes (``readable``), and combinations of them (``gather`` puts them in order).
``parameters`` counts the elements of a model. ``naming`` reads epochs, steps and metrics from names by
``name_patterns``; ``training`` reads the training state from metadata. ``report`` has findings, ``result``
results and their JSON documents, ``errors`` the tree of errors, ``text`` numbers, sizes and names as users
read them. ``options`` declares each option of a command once, as a field of a record.
``name_lists`` reads the lists of names that packages carry.
"""

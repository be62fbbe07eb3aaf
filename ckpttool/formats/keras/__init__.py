"""Keras: ``.keras``, ``.weights.h5``, legacy HDF5, and its sharded weights.

``model`` is the core: all layers of a configuration, with the kind of each. ``layer_tree`` reads one layer:
wiring, groups, parts and weights; ``layers`` is the table of their classes. The others ask the model:
``orders`` follows the features from layer to layer and says which weights a Flatten turns, ``compare``
compares the configuration with the weights in the file, and ``places`` gives weights their places in a file
of the other kind. ``config`` judges what a configuration could run, before and without a model.
"""

"""Keras: whole models (``.keras``, ``.h5``) and weights (``.weights.h5``), also in shards.

Three layouts of variables are read, all in HDF5:

- listed: ``.h5``, also weights of Keras 1 and 2. Attributes list layers (``layer_names``) and the weights
  of each (``weight_names``), by name and in order.
- numbered: ``.weights.h5``, whole or in shards. ``layers/dense_1/vars/0``: groups are named after the
  classes of layers, and variables have numbers.
- ``.keras``: a zip of ``config.json``, ``metadata.json`` and such a ``model.weights.h5``.

``zip``, ``h5`` and ``sharded`` recognise and open them; ``members`` reads the records of the zip, and
``layout`` gives variables their names, in each layout.

``model`` is the core: all layers of a configuration, with the kind of each. ``layer_tree`` reads one layer:
wiring, groups, parts and weights; ``layers`` is the table of their classes. Others ask the model: ``orders``
follows the features from layer to layer and finds the weights that a Flatten reorders, ``compare`` compares
the configuration with the weights in the file, and ``places`` gives weights their places in a file of the
other layout, for ``writer``. ``config`` judges what loading a configuration could run, without a model.
"""

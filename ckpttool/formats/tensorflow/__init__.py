"""TensorFlow checkpoints: tensor bundles (version 2), tables (version 1), and the state file ``checkpoint``.

A bundle is ``<prefix>.index`` and one or more shards ``<prefix>.data-00000-of-00002``. It is read like this:

1. ``checkpoint.py`` recognises a prefix from any of its files; ``prefix.py`` has the rules for their names.
2. ``reader.py`` reads the index: a table (``containers/table.py``) of sorted keys and protocol buffers, the
   header first, then an entry for each tensor with its type, shape, shard, offset, size and CRC-32C
   (``bundle.py``). It compares the entries with the sizes of the shards; no element is read.
3. ``object_graph.py`` reads the entry ``_CHECKPOINTABLE_OBJECT_GRAPH`` of ``tf.train.Checkpoint``, and gives
   each key the path that its owner knows it by, and its role.
4. ``values.py`` has the elements that aren't one block of fixed-size items: partitioned variables, strings,
   variants.

``v1.py`` reads the older tables, which hold the elements themselves. ``writer.py`` writes bundles with
``bundle_writer.py``; ``native.py`` keeps the keys and the object graph through a conversion. ``state.py``
parses the state file, which lists the prefixes of a run, and ``checkpoint_list.py`` rewrites it.
"""

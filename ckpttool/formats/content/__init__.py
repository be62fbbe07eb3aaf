"""Content trees and their parts, shared by all formats.

- ``tree``: the tree of a checkpoint's objects: walks, ``fold``, and ``flatten`` into tensors by path.
- ``assembly``: a ``Checkpoint`` from the nodes of a pickle.
- ``plain_data``: descriptions of everything that isn't a tensor.
- ``tree_json``: the tree as JSON and back, for sidecars.
- ``boxes``: whole tensors from parts in several files.
"""

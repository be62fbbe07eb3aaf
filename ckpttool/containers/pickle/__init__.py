"""Pickles, read without running anything, and written.

``interpreter`` carries out ``opcodes`` on a stack ``machine`` that builds plain data, and inert nodes
(``pickle_nodes``: ``Global``, ``Call``, ``Persistent``) where a real unpickler would import or call.
``constructors`` judges each call when it is made, by the lists in ``lists/``, and ``numpy_types`` the states
of NumPy's types; ``pickle_safety`` turns anything else into findings. ``pickler`` writes trees of such nodes.
Nothing recurses, and the objects built have a budget in bytes.
"""

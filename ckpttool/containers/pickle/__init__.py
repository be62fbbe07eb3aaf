"""Pickles, read without running anything, and written.

``interpreter`` carries out ``opcodes`` on a stack ``machine`` that builds plain data, and inert nodes
(``Global``, ``Call``, ``Persistent``) where a real unpickler would import or call. ``constructors`` judges
each call when it is made, by the lists in ``lists/``; ``pickle_safety`` turns what isn't on the lists into
findings. Nothing recurses, and what is built has a budget in bytes.
"""

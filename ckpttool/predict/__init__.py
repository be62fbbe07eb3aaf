"""Loading a checkpoint with its own framework and running it, in a child process.

The only room that imports frameworks, and only the child does: ``child.py`` and the ``*_models.py`` modules.
"""

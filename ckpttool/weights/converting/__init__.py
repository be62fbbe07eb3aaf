"""Lazy conversion of a checkpoint's ``Content`` before it is written: select, rename, cast, rearrange.

``Content.tree`` is the object structure of a checkpoint (``Checkpoint.tree``): plain Python containers with
the tensors in them, and inert nodes for other objects. Formats that can't store it get it as JSON next to the
tensors. A pickle that ckpttool writes only names globals from the list of harmless ones.
"""

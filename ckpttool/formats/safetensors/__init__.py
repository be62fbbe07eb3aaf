"""safetensors: a JSON header of names, types and offsets, then the elements of all tensors.

``reader.py`` reads a file, ``writer.py`` writes one, or several shards with an index. Sets of shards are read
by ``ckpttool/formats/sharded.py``, as are those of PyTorch's ``.bin`` files.
"""

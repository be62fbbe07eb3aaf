"""What TensorFlow needs to find its variables again: the graph of objects, and the keys that tensors have.

``tensorflow.object_graph`` is the graph as it was saved; it is missing where there was none.
``tensorflow.keys`` is JSON, from the name of each tensor to its key; without a graph, of those whose key is
another. Bytes that are no UTF-8 are lone surrogates. There is neither where names alone describe the graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.tensor import Tensor
from ckpttool.formats.tensorflow.object_graph import graph_of, path_of_key, read_graph

GRAPH, KEYS = "tensorflow.object_graph", "tensorflow.keys"
_ANY_BYTES = "surrogateescape"


def native_of(
    keys: Mapping[str, bytes], message: bytes | None, tensors: Iterable[Tensor] = ()
) -> dict[str, bytes]:
    """Return the native parts of a checkpoint.

    Args:
        keys: The key of each tensor, by name.
        message: The graph of objects, None where there is none.
        tensors: All tensors, those that share another's bytes too.
    """
    texts = {name: key.decode("utf-8", _ANY_BYTES) for name, key in keys.items()}
    if message is None:
        return {KEYS: _json({name: key for name, key in texts.items() if name != key})}
    if message == graph_of(keys, ties_in(tensors)):
        return {}
    return {GRAPH: message, KEYS: _json(texts)}


def _json(keys: Mapping[str, str]) -> bytes:
    return json.dumps(keys, separators=(",", ":")).encode()


def ties_in(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return which tensors share the bytes of another, and its name."""
    return {tensor.name: tensor.shares_with for tensor in tensors if tensor.shares_with is not None}


def known_keys(native: Mapping[str, bytes]) -> dict[str, str] | None:
    """Return the keys that the native parts tell, by name; None if they tell none."""
    try:
        keys = parse_json("", native.get(KEYS, b""), KEYS, surrogates=True)
    except CheckpointError:
        return None
    is_mapping = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    return keys if is_mapping else None


def keys_from(native: Mapping[str, bytes], tensors: Sequence[Tensor]) -> dict[str, bytes] | None:
    """Return the keys that tensors have by the native parts; None if these don't fit them.

    They fit where a reader finds each tensor by its key under its path again.
    """
    known = known_keys(native)
    if known is None:
        return None
    try:
        keys = {
            tensor.name: known.get(tensor.name, tensor.name).encode("utf-8", _ANY_BYTES) for tensor in tensors
        }
        graph = read_graph("", native[GRAPH]) if GRAPH in native else {}
    except (UnicodeEncodeError, DamagedCheckpoint):
        return None
    fits = len(set(keys.values())) == len(tensors) and all(
        path_of_key(readable(keys[tensor.name]), graph) == tensor.path for tensor in tensors
    )
    return keys if fits else None


def readable(key: bytes) -> str:
    """Return a key as text; what is no UTF-8 is spelled out."""
    return key.decode("utf-8", "backslashreplace")

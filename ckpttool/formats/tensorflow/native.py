"""Native parts of a TensorFlow checkpoint: its object graph, and the keys of its tensors.

TensorFlow restores a variable by its key, so a conversion keeps both next to the tensors, for the way back:

- ``tensorflow.object_graph`` is the saved graph; absent if the checkpoint had none.
- ``tensorflow.keys`` is JSON, an object from names to keys; without a graph, only of tensors whose key isn't
  the name. Bytes that aren't UTF-8 are lone surrogates.

Both are absent if the graph is the one that a writer would derive from the names anyway.
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
        message: The object graph; None if there is none.
        tensors: All tensors, including tied ones.
    """
    texts = {name: key.decode("utf-8", _ANY_BYTES) for name, key in keys.items()}
    if message is None:
        return {KEYS: _json({name: key for name, key in texts.items() if name != key})}
    if message == graph_of(keys, ties_of(tensors)):
        return {}
    return {GRAPH: message, KEYS: _json(texts)}


def _json(keys: Mapping[str, str]) -> bytes:
    return json.dumps(keys, separators=(",", ":")).encode()


def ties_of(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return the names of tied tensors, each with the name of the tensor whose bytes it shares."""
    return {tensor.name: tensor.shares_with for tensor in tensors if tensor.shares_with is not None}


def stored_keys(native: Mapping[str, bytes]) -> dict[str, str] | None:
    """Return the keys in the native parts, by name; None if absent or malformed."""
    try:
        keys = parse_json("", native.get(KEYS, b""), KEYS, surrogates=True)
    except CheckpointError:
        return None
    is_mapping = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    return keys if is_mapping else None


def keys_from(native: Mapping[str, bytes], tensors: Sequence[Tensor]) -> dict[str, bytes] | None:
    """Return each tensor's key according to the native parts; None if these don't match the tensors.

    They match if a reader would find each tensor under the same path again.
    """
    known = stored_keys(native)
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
        path_of_key(key_text(keys[tensor.name]), graph) == tensor.path for tensor in tensors
    )
    return keys if fits else None


def key_text(key: bytes) -> str:
    """Return a key as text; bytes that aren't UTF-8 become escapes."""
    return key.decode("utf-8", "backslashreplace")

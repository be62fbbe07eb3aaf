"""Writer of TensorFlow checkpoints: a tensor bundle with an object graph.

Content from a TensorFlow checkpoint keeps its keys and its object graph. For other content both are derived
from names: ``fc.weight`` is restored into ``tf.train.Checkpoint(fc=module)``, where ``module.weight`` is a
variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.tensorflow.bundle_writer import MAX_KEY, NUMBERS, refused_type, write_bundle
from ckpttool.formats.tensorflow.native import GRAPH, KEYS, key_text, keys_from, stored_keys, ties_of
from ckpttool.formats.tensorflow.object_graph import (
    GRAPH_KEY,
    MAX_NODES,
    graph_of,
    key_of,
    objects_of,
    prune_graph,
)
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer

NATIVE_PREFIX = "tensorflow."
"""Prefix of the native parts that are stored in a TensorFlow checkpoint itself, not in the sidecar."""

_FROM_TENSORS = re.compile("(key|tensor) ").match
"""Origins of training state that a reader finds in the tensors again."""
_GRAPHS = "meta_graphs"  # in the metadata of a SavedModel
_RESERVED = frozenset({b"", GRAPH_KEY.encode(), ENTRY.encode()})


class TensorFlowWriter(Writer):
    """Writer of a bundle with one shard."""

    name: ClassVar[str] = "tensorflow"
    dtypes: ClassVar[frozenset[str]] = frozenset(NUMBERS)
    shape = "prefix"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        if original_keys(content) is None:
            yield from refused_names(content)
        for tensor in content.tensors:
            yield from refused_type(tensor)

    def dropped_native(self, content: Content) -> frozenset[str]:
        names = {tensor.name for tensor in content.tensors}
        is_selection = not names >= (stored_keys(content.native) or {}).keys()
        return frozenset({GRAPH, KEYS}) if is_selection else frozenset()

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        content = without_graph_metadata(content)
        own = original_keys(content)
        keys, graph = own or derived_keys(content)
        # The sidecar holds what a bundle can't store; keys and graph are in the bundle itself.
        native = {name: part for name, part in content.native.items() if not name.startswith(NATIVE_PREFIX)}
        is_plain = content.tree is None and not content.metadata and not native and not content.conventions
        if own and is_plain and all(map(_FROM_TENSORS, content.training.origin.values())):
            sidecar = None
        else:
            sidecar = sidecar_of(replace(content, native=native))
        texts = {GRAPH_KEY.encode(): graph, ENTRY.encode(): sidecar}
        tensors = ((keys[tensor.name], tensor) for tensor in content.owned)
        write_bundle(target, "", tensors, {key: text for key, text in texts.items() if text is not None})


def original_keys(content: Content) -> tuple[Mapping[str, bytes], bytes | None] | None:
    """Return the keys and the graph that the content had in TensorFlow; None if renamed, or without keys."""
    if len(content.owned) < len(content.tensors):
        return None
    keys = keys_from(content.native, content.tensors)
    # A key that begins with NUL would be read as that of a slice, and the empty key is the header's.
    if keys is None or any(key in _RESERVED or key[0] == 0 or len(key) > MAX_KEY for key in keys.values()):
        return None
    graph = content.native.get(GRAPH)
    if graph is not None:
        kept = {key_text(key) for key in keys.values()}
        known = stored_keys(content.native) or {}
        removed = {key for name, key in known.items() if name not in keys}
        graph = prune_graph(GRAPH, graph, kept, removed - kept)
    return keys, graph


def derived_keys(content: Content) -> tuple[Mapping[str, bytes], bytes]:
    """Return keys and an object graph derived from the names of tensors."""
    keys = {tensor.name: key_of(tensor.name).encode() for tensor in content.owned}
    return keys, graph_of(keys, ties_of(content.tensors))


def refused_names(content: Content) -> Iterator[str]:
    """Yield reasons why names can't become keys and an object graph."""
    for tensor in content.tensors:
        try:
            key = key_of(tensor.name).encode()
        except UnicodeEncodeError:
            yield f"{tensor.name}: its name is not valid text (use --map)"
            continue
        if tensor.name == ENTRY:
            yield f"{tensor.name}: this name is reserved for the sidecar (use --map)"
        if key[0] == 0:
            yield f"{tensor.name}: a name in a TensorFlow checkpoint can't begin with NUL (use --map)"
        if len(key) > MAX_KEY:
            length = f"{len(key):,} bytes; at most {MAX_KEY:,} are allowed"
            yield f"{tensor.name}: its key would have {length} (use --map)"
    objects, _ = objects_of(tensor.name for tensor in content.tensors)
    count = len(objects.children) + 1  # with the counter of saves
    if count > MAX_NODES:
        yield f"its names describe {count:,} objects; an object graph may have {MAX_NODES:,}"


def without_graph_metadata(content: Content) -> Content:
    """Return the content without a SavedModel's metadata, which describes a graph that isn't written."""
    has_graphs = content.source_format == "savedmodel" and _GRAPHS in content.metadata
    return replace(content, metadata={}) if has_graphs else content

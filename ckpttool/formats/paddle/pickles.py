"""Pickles of ``paddle.save``: state dicts, optimizers, and any object that holds tensors.

A state dict maps names to NumPy arrays. In other objects a tensor is pickled as ``tuple((name, array))``.

Source: PaddlePaddle/Paddle, ``io.py`` and ``io_utils.py`` in ``python/paddle/framework``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Call
from ckpttool.containers.pickle.pickle_safety import attach_safety, read_pickles
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.readable import Readable, reader_from
from ckpttool.core.report import error, note, warning
from ckpttool.core.tensor import Extent, Path, Role, Span, Tensor
from ckpttool.core.values import Concatenated
from ckpttool.formats.arrays.objects import array_as_tensor, numpy_leaf
from ckpttool.formats.content.assembly import name_tensors, training_of, tree_builder
from ckpttool.formats.content.tree import Flat, Leaf, TensorParts, flatten, mark_none
from ckpttool.formats.interface import Probe
from ckpttool.formats.paddle.operators import layers_of
from ckpttool.formats.paddle.parts import role_of
from ckpttool.storage import fs

_NAMES = "StructuredToParameterName@@"
"""Key of the parameters' generated names (``linear_0.w_0``) by their names in the state dict."""
_SCHEDULER = "LR_Scheduler"
_PIECES = "UnpackBigParamInfor@@"
"""Key of the shapes and pieces of arrays that were too large for one pickle string."""
# Paddle 2 has no uint16 tensors, and pickles bfloat16 as arrays of uint16 without any mark.
_UINT16, _BFLOAT16 = BY_NAME["uint16"], BY_NAME["bfloat16"]


def open_saved_pickle(probe: Probe, name: str) -> Checkpoint:
    """Open a file that ``paddle.save`` wrote; ``name`` is the format's name."""
    source = probe.source
    judged = read_pickles(source, 0, source.size)
    objects = _ArrayReader(probe.path)
    root = judged.pickles[0].root
    with attach_safety(judged.safety):
        flat = flatten(root, objects.leaf, probe.path, _unwrap)
        # Spans are of the arrays as they are stored. A tensor that is joined from pieces has no extent.
        stored = list(flat.tensors)
        _join_pieces(flat, probe.path)
    findings = []
    if judged.trailing:
        message = f"{judged.trailing:,} bytes after the pickle are not a pickle"
        findings.append(error("trailing-bytes", message))
    if (others := len(judged.pickles) - 1) > 0:
        message = f"{others:,} pickles after the first, which Paddle does not read"
        findings.append(warning("more-pickles", message))
    if objects.bfloats:
        message = f"{objects.bfloats:,} arrays of uint16 read as bfloat16, which Paddle saves without a mark"
        findings.append(note("uint16-is-bfloat16", message))
    tensors = name_tensors([*_with_roles(flat.tensors)], flat.plain)
    metadata = flat.plain if isinstance(flat.plain, dict) else {}
    return Checkpoint(
        path=probe.path,
        format=name,
        variant="pickle",
        tensors=tensors,
        files=(FileEntry(probe.path, source.size),),
        spans=lambda: _spans(source, stored),
        metadata=lambda: metadata,
        training=lambda: _with_scheduler_rate(training_of(metadata, tensors, probe.name), metadata),
        layers=lambda: layers_of(tensors, {}, _parameter_names(metadata)),
        tree=lambda: mark_none(_tree(root, objects, tensors, probe.path)),
        producer=Producer("paddle"),
        findings=tuple(findings),
        safety=judged.safety,
        close=probe.close,
    )


def _with_roles(tensors: Iterable[tuple[Path, TensorParts]]) -> Iterator[tuple[Path, TensorParts]]:
    """Yield tensors with the roles that their names determine; the only tensor of a file gets a name."""
    # ``role_of`` takes every name but an accumulator's for a weight's, which holds at the top of a state dict
    # only. Further down its answer counts if it is OPTIMIZER, and ``name_tensors`` infers the rest. Master
    # weights are the copies that mixed precision keeps with an optimizer.
    for path, parts in tensors:
        is_master = path[:1] == ("master_weights",)
        role = Role.OPTIMIZER if is_master else role_of(str(path[-1]) if path else "")
        if len(path) <= 1 or role is Role.OPTIMIZER:
            parts = replace(parts, role=role)
        yield path or ("tensor",), parts


def _with_scheduler_rate(state: TrainingState, metadata: Mapping[str, Any]) -> TrainingState:
    """Return a training state, with the learning rate of a pickled scheduler if no other is known."""
    levels = {"": metadata}
    levels |= {f"{key}.": value for key, value in metadata.items() if isinstance(value, Mapping)}
    for place, level in levels.items():
        scheduler = level.get(_SCHEDULER)
        rate = scheduler.get("last_lr") if isinstance(scheduler, Mapping) else None
        if state.learning_rate is None and type(rate) in (int, float):
            origin = {**state.origin, "learning_rate": f"key {place}{_SCHEDULER}.last_lr"}
            state = replace(state, learning_rate=rate, origin=origin)
    return state


def _parameter_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated names of parameters by tensor name, from ``_NAMES`` at any level of a dict."""
    parameters: dict[str, str] = {}
    pending: list[tuple[str, Mapping[str, Any]]] = [("", metadata)]
    while pending:
        prefix, level = pending.pop()
        for key, value in level.items():
            if key == _NAMES and isinstance(value, Mapping):
                names = {name: parameter for name, parameter in value.items() if isinstance(parameter, str)}
                parameters |= {f"{prefix}{name}": parameter for name, parameter in names.items()}
            elif isinstance(value, Mapping):
                pending.append((f"{prefix}{key}.", value))
    return parameters


def generated_names(path: str) -> dict[Path, str]:
    """Return the generated names of the tensors that a pickle has as ``tuple((name, array))``, by path.

    ``predict`` uses them to give an optimizer's state to the parameters (``predict/paddle_models.py``).
    """
    with fs.open_source(path) as source:
        (root, *_) = (pickle.root for pickle in read_pickles(source, 0, source.size).pickles)
        names: dict[Path, str] = {}
        pending: list[tuple[Path, object]] = [((), root)]
        seen: set[int] = set()
        while pending:
            path_in_tree, node = pending.pop()
            if isinstance(node, Call) and _unwrap(node) is not node and len(node.args) == 1:
                names[path_in_tree] = node.args[0][0]
            elif isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                pending += [
                    ((*path_in_tree, key), child) for key, child in node.items() if isinstance(key, str)
                ]
        return names


class _ArrayReader:
    """Reads the arrays of one pickle; ``bfloats`` counts the uint16 arrays read as bfloat16."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: dict[int, Leaf[TensorParts] | None] = {}
        self.bfloats = 0

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        """Return a node's tensor, or None if it isn't an array."""
        if not isinstance(node, Call):
            return None
        if id(node) not in self._seen:
            self._seen[id(node)] = numpy_leaf(node, self._path, self._tensor_parts)
        return self._seen[id(node)]

    def _tensor_parts(self, dtype: Any, shape: tuple[int, ...], values: Any, *place: Any) -> TensorParts:
        self.bfloats += dtype is _UINT16
        return TensorParts(_BFLOAT16 if dtype is _UINT16 else dtype, shape, values, *place)


def _unwrap(node: object) -> object:
    """Return the array of ``tuple((name, array))``; any other node as it is."""
    if not isinstance(node, Call) or not node.is_of("builtins", "tuple") or node.state is not None:
        return node
    pair = node.args[0] if len(node.args) == 1 else None
    return pair[1] if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) else node


def _join_pieces(flat: Flat[TensorParts], path: str) -> None:
    """Replace the pieces of large arrays by whole tensors.

    Raises:
        DamagedCheckpoint: A piece is missing, or the pieces don't make the recorded shape.
    """
    # With pickle protocols 2 and 3 Paddle cuts arrays of 2^30 bytes or more into flat pieces ``<key>@@.<i>``,
    # and records their shapes and the pieces' names under ``_PIECES``.
    split = flat.plain.pop(_PIECES, None) if isinstance(flat.plain, dict) else None
    if not isinstance(split, dict):
        return
    tensors = dict(flat.tensors)
    for name, entry in split.items():
        try:
            shape, names = tuple(entry["OriginShape"]), [str(piece) for piece in entry["slices"]]
            pieces = [tensors.pop((piece,)) for piece in names]
        except (KeyError, TypeError) as failure:
            what = f"a piece is missing or not listed: {failure}"
            raise DamagedCheckpoint(path, what, where=name, code="piece-missing") from failure
        dtypes = {piece.dtype for piece in pieces}
        is_shape = all(type(length) is int and length >= 0 for length in shape)
        if len(dtypes) != 1 or not is_shape or math.prod(shape) != sum(math.prod(p.shape) for p in pieces):
            what = f"{len(pieces)} pieces that don't make a tensor of shape {list(shape)}"
            raise DamagedCheckpoint(path, what, where=name, code="piece-missing")
        values = tuple(piece.values for piece in pieces if piece.values is not None)
        tensors[name,] = TensorParts(dtypes.pop(), shape, Concatenated(values))
    flat.tensors[:] = list(tensors.items())


def _tree(root: object, objects: _ArrayReader, tensors: tuple[Tensor, ...], path: str) -> object:
    """Return the content tree of a pickle, with whole tensors in place of pieces."""
    tree = tree_builder(root, objects.leaf, path, array_as_tensor, _unwrap)(tensors)
    split = tree.pop(_PIECES, None) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(split, dict):
        return tree
    pieces = {str(piece) for entry in split.values() for piece in entry["slices"]}
    by_path = {tensor.path: tensor for tensor in tensors}
    rest: dict[object, object] = {key: part for key, part in tree.items() if key not in pieces}
    return rest | {name: by_path[name,] for name in split}


def _spans(source: Readable, stored: list[tuple[Path, TensorParts]]) -> Iterator[Span]:
    """Yield the spans of contiguous arrays by offset; a pickle has no checksums."""
    spans: dict[Extent, Span] = {}
    for path, parts in stored:
        if parts.storage is not None and parts.storage not in spans:
            where = ".".join(map(str, path))
            span = Span(parts.storage, where, source.read_into, None, parts.dtype, parts.byteorder)
            spans[parts.storage] = span._replace(read=reader_from(source, parts.storage.offset))
    yield from sorted(spans.values(), key=lambda span: span.extent.offset)

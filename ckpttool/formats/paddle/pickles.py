"""Pickles of ``paddle.save``: state dicts, optimizers, and any object that holds tensors.

Source: PaddlePaddle/Paddle, ``io.py`` and ``io_utils.py`` in ``python/paddle/framework``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.dtypes import BY_NAME
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.arrays.objects import numpy_leaf
from ckpttool.formats.content.assembly import name_tensors, training_of
from ckpttool.formats.content.flattening import Flat, Leaf, flatten
from ckpttool.formats.content.tree import build_tree, mark_none
from ckpttool.formats.interface import Format, Probe, open_with
from ckpttool.formats.paddle.fluid_parts import role_of
from ckpttool.formats.paddle.operators import layers_of
from ckpttool.formats.pickles import PaddlePickle, PlainPickle
from ckpttool.formats.torch.objects import TensorParts
from ckpttool.report import Finding, error, note, warning
from ckpttool.tensor import Extent, Path, Role, Span, Tensor, Values
from ckpttool.wire.pickle_nodes import Call
from ckpttool.wire.pickle_safety import read_pickles
from ckpttool.wire.readable import Readable, reader_from
from ckpttool.wire.source import Source

NAMES = "StructuredToParameterName@@"
_SCHEDULER = "LR_Scheduler"
PIECES = "UnpackBigParamInfor@@"
_UINT16, _BFLOAT16 = BY_NAME["uint16"], BY_NAME["bfloat16"]


def open_saved(probe: Probe, name: str) -> Checkpoint:
    """Return the checkpoint of a file that ``paddle.save`` pickled; ``name`` is its format's."""
    source = probe.source
    judged = read_pickles(source, 0, source.size)
    objects = _ArrayReader(probe.path)
    root = judged.pickles[0].root
    try:
        flat = flatten(root, objects.leaf, probe.path, unwrapped)
        stored = list(flat.tensors)
        _rejoin(flat, probe.path)
    except DamagedCheckpoint as failure:
        failure.safety = judged.safety
        raise
    findings = list(_trailing_findings(judged.trailing, len(judged.pickles)))
    if objects.bfloats:
        message = f"{objects.bfloats:,} arrays of uint16 read as bfloat16, which Paddle saves without a mark"
        findings.append(note("uint16-is-bfloat16", message))
    flat.tensors[:] = [(path or ("tensor",), _with_role(path, parts)) for path, parts in flat.tensors]
    tensors = name_tensors(flat.tensors, flat.plain)
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
        layers=lambda: layers_of(tensors, {}, _parameters(metadata)),
        tree=lambda: mark_none(_tree(root, objects, tensors, probe.path)),
        producer=Producer("paddle"),
        findings=tuple(findings),
        safety=judged.safety,
        close=probe.close,
    )


def _with_scheduler_rate(state: TrainingState, metadata: Mapping[str, Any]) -> TrainingState:
    """Return a training state with the learning rate that a scheduler set last, where no other is known."""
    levels = {"": metadata, **{f"{key}.": one for key, one in metadata.items() if isinstance(one, Mapping)}}
    for place, level in levels.items():
        scheduler = level.get(_SCHEDULER)
        rate = scheduler.get("last_lr") if isinstance(scheduler, Mapping) else None
        if state.learning_rate is None and type(rate) in (int, float):
            origin = {**state.origin, "learning_rate": f"key {place}{_SCHEDULER}.last_lr"}
            state = replace(state, learning_rate=rate, origin=origin)
    return state


def _parameters(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that Paddle made up for parameters, by those of tensors; at any level of a dict."""
    found: dict[str, str] = {}
    pending: list[tuple[str, Mapping[str, Any]]] = [("", metadata)]
    while pending:
        place, level = pending.pop()
        for key, one in level.items():
            if not isinstance(one, Mapping):
                continue
            if key == NAMES:
                found |= {f"{place}{name}": own for name, own in one.items() if isinstance(own, str)}
            else:
                pending.append((f"{place}{key}.", one))
    return found


def names_in(path: str) -> dict[Path, str]:
    """Return the names that Paddle made up for the tensors of one pickle, which stand beside each of them."""
    with Source(path) as source:
        (root, *_) = (one.root for one in read_pickles(source, 0, source.size).pickles)
        found: dict[Path, str] = {}
        pending: list[tuple[Path, object]] = [((), root)]
        seen: set[int] = set()
        while pending:
            place, node = pending.pop()
            if isinstance(node, Call) and unwrapped(node) is not node and len(node.args) == 1:
                found[place] = node.args[0][0]
            elif isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                pending += [((*place, key), one) for key, one in node.items() if isinstance(key, str)]
        return found


def open_pickle(path: str) -> Checkpoint:
    """Return the checkpoint that one pickle of Paddle's is."""
    return open_with(path, _format_of_pickle)


def _format_of_pickle(probe: Probe) -> Format:
    if not PlainPickle().matches(probe):
        raise DamagedCheckpoint(probe.path, "no pickle", expected="one of paddle.save")
    return PaddlePickle()


class _ArrayReader:
    """Reads the arrays of one pickle; ``bfloats`` counts those that stand for bfloat16."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: dict[int, Leaf[TensorParts] | None] = {}
        self.bfloats = 0

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        """Return the tensor that a node is, or None."""
        if not isinstance(node, Call):
            return None
        if id(node) not in self._seen:
            self._seen[id(node)] = numpy_leaf(node, self._path, self._tensor_parts)
        return self._seen[id(node)]

    def _tensor_parts(self, dtype: Any, shape: tuple[int, ...], values: Any, *place: Any) -> TensorParts:
        self.bfloats += dtype is _UINT16
        return TensorParts(_BFLOAT16 if dtype is _UINT16 else dtype, shape, values, *place)


def unwrapped(node: object) -> object:
    """Return the array that Paddle wraps in ``tuple((name, array))`` or ``eval("data", {"data": array})``."""
    if not isinstance(node, Call) or node.kwargs or node.state is not None:
        return node
    args = node.args
    if node.is_of("builtins", "tuple") or node.is_of("__builtin__", "tuple"):
        pair = args[0] if len(args) == 1 else None
        return pair[1] if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) else node
    if node.is_of("builtins", "eval") or node.is_of("__builtin__", "eval"):
        names = args[1] if len(args) == 2 and args[0] == "data" else None
        return names["data"] if isinstance(names, dict) and list(names) == ["data"] else node
    return node


def _with_role(path: Path, parts: TensorParts) -> TensorParts:
    """Return a tensor with the role that its name tells, at the top of a state dict or of an optimizer's."""
    name = str(path[-1]) if path else ""
    guessed = role_of(name)
    is_told = len(path) <= 1 or guessed is Role.OPTIMIZER or path[0] == "master_weights"
    role = Role.OPTIMIZER if path[:1] == ("master_weights",) else guessed
    return replace(parts, role=role) if is_told else parts


def _trailing_findings(trailing: int, count: int) -> Iterator[Finding]:
    if trailing:
        yield error("trailing-bytes", f"{trailing:,} bytes behind the pickle are no pickle")
    if count > 1:
        yield warning("more-pickles", f"{count - 1:,} pickles behind the first, which Paddle does not read")


class _JoinedPieces(NamedTuple):
    """Elements that lie in several pieces, one after the other."""

    pieces: tuple[Values, ...]

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for piece in self.pieces:
            yield from piece.blocks(limit)

    def once(self) -> _JoinedPieces:
        return self


def _rejoin(flat: Flat[TensorParts], path: str) -> None:
    """Put together the tensors that were saved in pieces, for protocols that hold no large ones."""
    told = flat.plain.pop(PIECES, None) if isinstance(flat.plain, dict) else None
    if not isinstance(told, dict):
        return
    found = dict(flat.tensors)
    for name, one in told.items():
        try:
            shape, names = tuple(one["OriginShape"]), [str(piece) for piece in one["slices"]]
            pieces = [found.pop((piece,)) for piece in names]
        except (KeyError, TypeError) as failure:
            what = f"a piece is missing or not told of: {failure}"
            raise DamagedCheckpoint(path, what, where=name, code="piece-missing") from failure
        dtypes = {piece.dtype for piece in pieces}
        is_shape = all(type(length) is int and length >= 0 for length in shape)
        if len(dtypes) != 1 or not is_shape or math.prod(shape) != sum(math.prod(p.shape) for p in pieces):
            what = f"{len(pieces)} pieces that make no tensor of shape {list(shape)}"
            raise DamagedCheckpoint(path, what, where=name, code="piece-missing")
        values = tuple(piece.values for piece in pieces if piece.values is not None)
        found[name,] = TensorParts(dtypes.pop(), shape, _JoinedPieces(values))
    flat.tensors[:] = list(found.items())


def _tree(root: object, objects: _ArrayReader, tensors: tuple[Tensor, ...], path: str) -> object:
    """Return the tree of a pickle, with tensors for arrays, and whole ones for their pieces."""
    tree = build_tree(root, objects.leaf, tensors, path, unwrap=unwrapped, arrays=False)
    told = tree.pop(PIECES, None) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(told, dict):
        return tree
    pieces = {str(piece) for one in told.values() for piece in one["slices"]}
    whole = {tensor.path: tensor for tensor in tensors}
    left: dict[object, object] = {key: part for key, part in tree.items() if key not in pieces}
    return left | {name: whole[name,] for name in told}


def _spans(source: Readable, stored: list[tuple[Path, TensorParts]]) -> Iterator[Span]:
    """Yield the values that lie in one piece, in the order of the file; a pickle has no checksums."""
    spans: dict[Extent, Span] = {}
    for path, parts in stored:
        if parts.storage is not None and parts.storage not in spans:
            where = ".".join(map(str, path))
            span = Span(parts.storage, where, source.read_into, None, parts.dtype, parts.byteorder)
            spans[parts.storage] = replace(span, read=reader_from(source, parts.storage.offset))
    yield from sorted(spans.values(), key=lambda span: span.extent.offset)

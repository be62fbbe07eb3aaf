"""What running a SavedModel does besides computing, told from its ops and from the Keras layers in it.

An op that no list knows is registered by a library that must be loaded first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ckpttool.errors import CheckpointError
from ckpttool.formats.savedmodel_graph import SAVER_OPS, MetaGraph
from ckpttool.formats.savedmodel_objects import MAX_METADATA
from ckpttool.formats.savedmodel_walk import message_in
from ckpttool.report import Finding, Severity, error, warning
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.source import Source

_NAMES = Path(__file__).with_name("names")
_FROM_ASSETS = "InitializeTableFromTextFile"
_OLD_SAVER = frozenset({"Save", "SaveSlices", "Restore", "RestoreSlice"})
_SHOWN = 8


def judge_ops(graph: MetaGraph) -> Iterator[Finding]:
    """Yield what the ops of a graph, and of all functions in its library, do besides computing."""
    for (op, in_saver), where in sorted(graph.places.items()):
        finding = _judged(graph, op, in_saver, where)
        if finding is not None:
            yield finding
    foreign = sorted(graph.ops.keys() - _known() - graph.functions)
    if foreign:
        shown = ", ".join(name[:80] for name in foreign[:_SHOWN])
        more = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
        place = graph.places.get((foreign[0], False))
        yield warning("custom-ops", f"it needs ops that other libraries register: {shown}{more}", place)


def _judged(graph: MetaGraph, op: str, in_saver: bool, where: str) -> Finding | None:
    if op in SAVER_OPS and in_saver:
        return None
    if op in SAVER_OPS - _OLD_SAVER:
        return warning("unsafe-op", f"{op}, which touches files, stands outside the saver", where)
    if op.startswith(_FROM_ASSETS) and not graph.assets:
        return error("unsafe-op", f"{op} reads a file, and the model has no assets", where)
    severity = _severity(op)
    if severity is None:
        return None
    message = f"{op} does more than compute: it touches files, processes or other machines"
    return Finding("unsafe-op", severity, message, where)


def _severity(op: str) -> Severity | None:
    """Return how much it matters that a graph uses an op; None where it only computes."""
    told = (severity for severity, glob in _unsafe() if fnmatchcase(op, glob))
    return next(told, None)


@cache
def _known() -> frozenset[str]:
    return frozenset(_lines("tf_ops.txt"))


@cache
def _unsafe() -> tuple[tuple[Severity, str], ...]:
    pairs = (line.split() for line in _lines("tf_unsafe_ops.txt"))
    return tuple((Severity(severity), glob) for severity, glob in pairs)


def _lines(file: str) -> list[str]:
    """Return a list's entries, without comments and empty lines."""
    text = (_NAMES / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


# Keras ----------------------------------------------------------------------------------------------


def judge_keras(path: str) -> Iterator[Finding]:
    """Yield what the layers in a ``keras_metadata.pb`` would run.

    Raises:
        CheckpointError: It can't be read.
    """
    with Source(path) as source:
        for number, _, node in message_in(source).fields():
            parts = {at: part for at, _, part in node.fields()} if number == 1 else {}
            if 5 in parts:
                where = parts[3].text() if 3 in parts else None
                yield from judge_layer(parts[5].data(MAX_METADATA), path, where)


def judge_layer(metadata: bytes, path: str, where: str | None) -> Iterator[Finding]:
    """Yield what the description of a Keras layer, as JSON, would run."""
    try:
        tree = parse_json(path, metadata, "keras-metadata", constants=True)
    except CheckpointError as failure:
        yield warning("not-scanned", f"the layer's description can't be read: {failure.reason}", where)
        return
    if "Lambda" in set(_class_names(tree)):
        yield error("keras-lambda", "a Lambda layer holds Python code, which Keras runs", where)


def _class_names(tree: Any) -> Iterator[str]:
    """Yield the class of every layer at any depth; JSON inside of texts is looked into, too."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            name = node.get("class_name")
            if isinstance(name, str):
                yield name.rpartition(">")[2]
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, str) and "class_name" in node and node.startswith("{"):
            pending.append(_inner(node))


def _inner(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

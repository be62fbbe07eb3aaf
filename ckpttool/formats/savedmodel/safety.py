"""What running a SavedModel does besides computing, told from its ops and from the Keras layers in it.

An op that no list knows is registered by a library that must be loaded first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.formats.interface import scan
from ckpttool.formats.keras.config import judge
from ckpttool.formats.savedmodel.file_names import FILE_INPUTS
from ckpttool.formats.savedmodel.graph import MAX_BROKEN, MetaGraph, SavedModel
from ckpttool.formats.savedmodel.layout import (
    ASSETS,
    BINARY,
    CHUNKED,
    TEXT,
    VARIABLES,
    is_inside,
    require_inside,
)
from ckpttool.formats.savedmodel.objects import MAX_METADATA
from ckpttool.formats.savedmodel.ops import known_ops, severity_of
from ckpttool.formats.savedmodel.saver import SAVER_OPS
from ckpttool.formats.savedmodel.variables import KERAS_METADATA
from ckpttool.formats.savedmodel.walk import message_in
from ckpttool.formats.sharded import refusal
from ckpttool.storage import fs

_PRINT = "PrintV2"
_SHOWN = 8
_LONGEST = 200


def safety_of(
    model: SavedModel, directory: str, entries: Mapping[str, os.DirEntry[str]], nbytes: int
) -> Iterator[Finding]:
    """Yield what loading or running the model could do besides computing.

    ``nbytes`` is the size of its files.
    """
    for graph in model.graphs:
        yield from judge_ops(graph)
        for at, item in enumerate(graph.objects or ()):
            if item.keras:
                yield from judge_layer(item.keras, directory, f"object {at}", nbytes)
    yield from judge_paths(model, directory)
    if KERAS_METADATA in entries:
        try:
            require_inside(os.path.join(directory, KERAS_METADATA), directory)
            yield from judge_keras(os.path.join(directory, KERAS_METADATA), nbytes)
        except CheckpointError as failure:
            yield warning("not-scanned", f"it can't be read: {failure.reason}", KERAS_METADATA)
    if CHUNKED in entries or (BINARY in entries and TEXT in entries):
        yield warning("not-scanned", "one of two models was not looked at")


def judge_paths(model: SavedModel, directory: str) -> Iterator[Finding]:
    """Yield the files outside of the model that loading it would read: assets, and those of its variables."""
    for name in dict.fromkeys(name for graph in model.graphs for name in graph.assets):
        path = os.path.join(directory, ASSETS, name)
        if refusal(name) is not None or not is_inside(path, directory):
            yield error("asset-path", "loading it reads an asset outside of the SavedModel", name[:_LONGEST])
    variables = os.path.join(directory, VARIABLES)
    for entry in scan(variables).values() if fs.isdir(variables) else ():
        if not is_inside(entry.path, directory):
            where = f"{VARIABLES}/{entry.name}"
            yield error("path-outside", "loading it reads a file outside of the SavedModel", where)


def judge_ops(graph: MetaGraph) -> Iterator[Finding]:
    """Yield what the ops of a graph, and of all functions in its library, do besides computing."""
    for (op, is_harmless), where in sorted(graph.places.items()):
        finding = _judge_op(graph, op, is_harmless, where)
        if finding is not None:
            yield finding
    for op, where in sorted(graph.initializing.items()):
        message = f"{op} reads a file for the initializer of a variable, which no loader runs"
        yield warning("unsafe-op", message, where)
    for op, where in sorted(graph.uncalled.items()):
        yield note("uncalled-op", f"{op} is in an unused function", where)
    foreign = sorted(graph.ops.keys() - known_ops().keys() - graph.functions)
    if foreign:
        shown = ", ".join(name[:80] for name in foreign[:_SHOWN])
        more = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
        place = graph.places.get((foreign[0], False))
        yield warning("custom-ops", f"it needs ops that other libraries register: {shown}{more}", place)


def _judge_op(graph: MetaGraph, op: str, is_harmless: bool, where: str) -> Finding | None:
    if is_harmless and op == _PRINT:
        return warning("unsafe-op", f"{op} writes to the terminal or the log", where)
    severity = None if is_harmless else severity_of(op)
    if severity is None:
        return None
    message = f"{op} does more than compute: it touches files, processes or other machines"
    if op in SAVER_OPS:
        message = f"{op} touches files, and isn't the saver's, or not those that the loader names"
    elif op in FILE_INPUTS:
        message = f"{op} reads a file that is none of the model's assets"
    return Finding("unsafe-op", severity, message, where)


def judge_links(graph: MetaGraph) -> Iterator[Finding]:
    """Yield an error for each body whose nodes take or call what isn't there, and for such signatures."""
    for function, reference in graph.broken:
        yield error(
            "graph-broken", f"it takes {reference[:_LONGEST]!r}, which isn't there", _body_name(function)
        )
    unknown = graph.called.keys() - graph.functions - known_ops().keys()
    for name in islice(sorted(unknown), MAX_BROKEN):
        message = f"it calls the function {name[:_LONGEST]!r}, which isn't there"
        yield error("graph-broken", message, _body_name(graph.called[name]))
    for name, signature in graph.signatures.items():
        sides = (*signature.get("inputs", {}).values(), *signature.get("outputs", {}).values())
        names = [tensor["name"] for tensor in sides if tensor.get("name")]
        lost = [name for name in names if graph.links is None or not graph.links.has(name)]
        if lost:
            message = f"it names {str(lost[0])[:_LONGEST]!r}, which isn't in the graph"
            yield error("graph-broken", message, f"signature {name}")


def _body_name(function: str) -> str:
    return f"function {function}" if function else "the graph"


# Keras ----------------------------------------------------------------------------------------------


def judge_keras(path: str, nbytes: int) -> Iterator[Finding]:
    """Yield what the layers in a ``keras_metadata.pb`` would run."""
    with fs.open_source(path) as source:
        for number, node in message_in(source).parts():
            parts = {at: part for at, part in node.parts()} if number == 1 else {}
            if 5 in parts:
                where = parts[3].text() if 3 in parts else None
                yield from judge_layer(parts[5].data(MAX_METADATA), path, where, nbytes)


def judge_layer(metadata: bytes, path: str, where: str | None, nbytes: int) -> Iterator[Finding]:
    """Yield what the description of a Keras layer, as JSON, would run."""
    try:
        tree = parse_json(path, metadata, "keras-metadata", constants=True)
    except CheckpointError as failure:
        yield warning("not-scanned", f"the layer's description can't be read: {failure.reason}", where)
        return
    yield from judge(tree, where or "keras_metadata.pb", nbytes)

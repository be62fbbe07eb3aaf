"""Safety findings of a SavedModel: ops, Keras layers and paths that do more than compute.

An unknown op is one that another library registers, which has to be loaded before the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, Sentence, error, not_scanned, note, warning
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
from ckpttool.formats.sharded import unsafe_path_reason
from ckpttool.storage import fs

_PRINT = "PrintV2"
_SHOWN = 8
_LONGEST = 200


def safety_of(
    model: SavedModel, directory: str, entries: Mapping[str, os.DirEntry[str]], nbytes: int
) -> Iterator[Finding]:
    """Yield findings about side effects of loading or running the model.

    ``nbytes`` is the size of all its files together.
    """
    for graph in model.graphs:
        yield from judge_ops(graph)
        for at, item in enumerate(graph.objects.nodes):
            if item.keras:
                yield from judge_layer(item.keras, directory, f"object {at}", nbytes)
    yield from judge_paths(model, directory)
    if KERAS_METADATA in entries:
        try:
            require_inside(os.path.join(directory, KERAS_METADATA), directory)
            yield from judge_keras(os.path.join(directory, KERAS_METADATA), nbytes)
        except CheckpointError as failure:
            yield not_scanned(KERAS_METADATA, f"it can't be read: {failure.reason}")
    # Only one of several models in the directory is read. The others are unjudged, so the verdict can't be
    # clean.
    if CHUNKED in entries or (BINARY in entries and TEXT in entries):
        yield not_scanned(None, "one of two models was not checked")


def judge_paths(model: SavedModel, directory: str) -> Iterator[Finding]:
    """Yield errors about assets and files of variables that are links to, or names of, files outside."""
    for name in dict.fromkeys(name for graph in model.graphs for name in graph.assets):
        path = os.path.join(directory, ASSETS, name)
        if unsafe_path_reason(name) is not None or not is_inside(path, directory):
            yield error("asset-path", "loading it reads an asset outside of the SavedModel", name[:_LONGEST])
    variables = os.path.join(directory, VARIABLES)
    for entry in scan(variables).values() if fs.isdir(variables) else ():
        if not is_inside(entry.path, directory):
            where = f"{VARIABLES}/{entry.name}"
            yield error("path-outside", "loading it reads a file outside of the SavedModel", where)


def judge_ops(graph: MetaGraph) -> Iterator[Finding]:
    """Yield findings about unsafe and unknown ops of a graph and of its functions."""
    for (op, is_harmless), where in sorted(graph.op_places.items()):
        finding = _judge_op(graph, op, is_harmless, where)
        if finding is not None:
            yield finding
    for op, where in sorted(graph.initializer_ops.items()):
        message = f"{op} reads a file for the initializer of a variable, which no loader runs"
        yield warning("unsafe-op", message, where)
    for op, where in sorted(graph.uncalled_ops.items()):
        yield note("uncalled-op", f"{op} is in an unused function", where)
    foreign = sorted(graph.ops.keys() - known_ops().keys() - graph.functions)
    if foreign:
        shown = ", ".join(name[:80] for name in foreign[:_SHOWN])
        more = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
        place = graph.op_places.get((foreign[0], False))
        yield warning("custom-ops", f"it needs ops that other libraries register: {shown}{more}", place)


def _judge_op(graph: MetaGraph, op: str, is_harmless: bool, where: str) -> Finding | None:
    if is_harmless and op == _PRINT:
        return warning("unsafe-op", f"{op} writes to the terminal or the log", where)
    severity = None if is_harmless else severity_of(op)
    if severity is None:
        return None
    message = f"{op} does more than compute: it touches files, processes or other machines"
    if op in SAVER_OPS:
        message = (
            f"{op} touches files, but isn't part of the saver, or touches other files than the loader names"
        )
    elif op in FILE_INPUTS:
        message = f"{op} reads a file that is not one of the model's assets"
    return Finding("unsafe-op", severity, Sentence(message), where)


def judge_links(graph: MetaGraph) -> Iterator[Finding]:
    """Yield errors about references to nodes, functions and tensors that don't exist."""
    for function, reference in graph.broken_references:
        yield error(
            "graph-broken", f"it takes the unknown input {reference[:_LONGEST]!r}", _body_name(function)
        )
    unknown = graph.first_callers.keys() - graph.functions - known_ops().keys()
    for name in islice(sorted(unknown), MAX_BROKEN):
        message = f"it calls the unknown function {name[:_LONGEST]!r}"
        yield error("graph-broken", message, _body_name(graph.first_callers[name]))
    for name, signature in graph.signatures.items():
        sides = (*signature.get("inputs", {}).values(), *signature.get("outputs", {}).values())
        names = [tensor["name"] for tensor in sides if tensor.get("name")]
        lost = [name for name in names if not graph.body.has(name)]
        if lost:
            message = f"it names {str(lost[0])[:_LONGEST]!r}, which isn't in the graph"
            yield error("graph-broken", message, f"signature {name}")


def _body_name(function: str) -> str:
    return f"function {function}" if function else "the graph"


# Keras ----------------------------------------------------------------------------------------------


def judge_keras(path: str, nbytes: int) -> Iterator[Finding]:
    """Yield findings about code in the layers of a ``keras_metadata.pb``."""
    # SavedMetadata has repeated nodes (field 1), with path (3) and JSON (5); a Lambda layer has bytecode in
    # it.
    with fs.open_source(path) as source:
        for number, node in message_in(source).parts():
            parts = {at: part for at, part in node.parts()} if number == 1 else {}
            if 5 in parts:
                where = parts[3].text() if 3 in parts else None
                yield from judge_layer(parts[5].data(MAX_METADATA), path, where, nbytes)


def judge_layer(metadata: bytes, path: str, where: str | None, nbytes: int) -> Iterator[Finding]:
    """Yield findings about code in a Keras layer, given its description as JSON."""
    try:
        tree = parse_json(path, metadata, "keras-metadata", constants=True)
    except CheckpointError as failure:
        yield not_scanned(where, f"the layer's description can't be read: {failure.reason}")
        return
    yield from judge(tree, where or "keras_metadata.pb", nbytes)

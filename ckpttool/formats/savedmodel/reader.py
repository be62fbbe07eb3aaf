"""Reader of SavedModels: parses the graph and compares it with variables, assets and fingerprint.

The tensors of the checkpoint are the variables, in a tensor bundle. Constants of the graph aren't listed,
since their names mean nothing to users; their size is in the metadata.

Source: tensorflow/tensorflow ``cc/saved_model/constants.h``, ``core/protobuf/saved_model.proto``,
``core/protobuf/fingerprint.proto``, ``python/saved_model/loader_impl.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from zlib import crc32

from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer, own_names_of
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, Unsupported
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.formats.content.plain_data import describe_content
from ckpttool.formats.interface import scan
from ckpttool.formats.opening import OpenedParts, file_entry
from ckpttool.formats.savedmodel.computation import describe_computation
from ckpttool.formats.savedmodel.graph import MetaGraph, SavedModel, read_model
from ckpttool.formats.savedmodel.layout import (
    ASSETS,
    BINARY,
    CHUNKED,
    SIDECAR,
    TEXT,
    is_inside,
    require_inside,
)
from ckpttool.formats.savedmodel.pbtext import text_message
from ckpttool.formats.savedmodel.safety import judge_links, safety_of
from ckpttool.formats.savedmodel.variables import (
    INDEX,
    Fingerprint,
    compare_variables,
    fingerprint_findings,
    layers_of_variables,
    name_variables,
    needs_variables,
    read_fingerprint,
)
from ckpttool.formats.savedmodel.walk import message_in
from ckpttool.formats.sharded import unsafe_path_reason
from ckpttool.formats.sidecar import apply_sidecar
from ckpttool.formats.tensorflow.reader import training_of
from ckpttool.storage import fs

MAX_ASSETS = 1 << 26
"""Limit on the bytes of assets that are read for checksums, for all together."""

_FORMAT = "savedmodel"
_BUNDLE = "tensorflow"
_SCHEMA = 1
_ASSETS_BELOW = (f"{ASSETS}{os.sep}", f"{ASSETS}.extra{os.sep}")
_FROZEN_BYTES = 4096
"""Bytes of constants that may be frozen weights in a model without variables; shapes and axes take less."""


def open_model(directory: str, names: tuple[str, ...]) -> Checkpoint:
    """Return the SavedModel in a directory.

    Args:
        directory: Path of the directory.
        names: Names of the files that may have the model; the first that exists is read.
    """
    entries = scan(directory)
    file, model = _read_graph(directory, entries, names)
    graph = next((graph for graph in model.graphs if graph.objects.nodes), None)  # of TensorFlow 2
    fingerprint, findings = read_fingerprint(directory)
    with OpenedParts("variables") as parts:
        parts.findings += [*findings, *_description_findings(model, directory)]
        parts.complete = not any(finding.code == "asset-missing" for finding in parts.findings)
        bundle, tensors = _variables(parts, model, graph, directory)
        if INDEX in parts.parts:
            parts.findings += fingerprint_findings(fingerprint, os.path.join(directory, INDEX))
        for name in (BINARY, TEXT, CHUNKED):
            if name in entries and name != file:
                message = f"next to {file}; not checked"
                parts.findings.append(warning("not-part", message, name))

        def own_names() -> Mapping[str, str]:
            # The object graph in the bundle has the variables' names in Python; tensors were renamed since.
            names = own_names_of(bundle) if bundle else {}
            known = {one.key: names.get(one.name) for one in bundle.tensors} if bundle else {}
            return {one.name: name for one in tensors if (name := known.get(one.key)) is not None}

        def native() -> Mapping[str, bytes]:
            # The native parts have keys by name, so they are of use only if no tensor was renamed.
            is_renamed = bundle and [one.name for one in bundle.tensors] != [one.name for one in tensors]
            return {} if bundle is None or is_renamed else bundle.native

        files = tuple(_files(directory))
        checkpoint = parts.checkpoint(
            path=directory,
            format=_FORMAT,
            variant="v1" if graph is None else "v2",
            tensors=tensors,
            files=files,
            spans=lambda: chain(parts.spans(), _other_spans(directory)),
            metadata=cache(lambda: _metadata(model, directory, file, fingerprint)),
            layers=lambda: layers_of_variables(directory, graph.objects.nodes if graph else (), tensors),
            own_names=own_names,
            training=lambda: training_of(tensors, os.path.basename(directory.rstrip(os.sep))),
            native=native,
            producer=Producer("tensorflow", model.graphs[0].version),
            safety=tuple(safety_of(model, directory, entries, sum(file.nbytes for file in files))),
            derives_metadata=True,  # digests of all that a graph computes take their time
        )
        return _with_sidecar(checkpoint, directory)


def _read_graph(directory: str, entries: Collection[str], names: Iterable[str]) -> tuple[str, SavedModel]:
    """Return the name of the file with the model, and its contents."""
    if {BINARY, TEXT, CHUNKED}.isdisjoint(entries):
        found = f"the variables of a SavedModel without its graph: no {BINARY}"
        raise DamagedCheckpoint(os.path.join(directory, BINARY), found, code="no-meta-graph")
    file = next((name for name in names if name in entries and name != CHUNKED), None)
    if file is None:
        found = "a model split into chunks, which only TensorFlow reads"
        raise Unsupported(os.path.join(directory, CHUNKED), found, expected=f"{BINARY} or {TEXT}")
    path = os.path.join(directory, file)
    with fs.open_source(path) as source:
        model = read_model(text_message(source) if file == TEXT else message_in(source))
    if not model.graphs:
        found = f"{fs.getsize(path):,} bytes without a meta graph"
        raise DamagedCheckpoint(path, found, expected="a SavedModel", code="no-meta-graph")
    return file, model


def _with_sidecar(checkpoint: Checkpoint, directory: str) -> Checkpoint:
    """Return the checkpoint with the sidecar, if a conversion to SavedModel wrote one."""
    sidecar = os.path.join(directory, SIDECAR)
    if not fs.isfile(sidecar) or not is_inside(sidecar, directory):
        return checkpoint
    try:
        with fs.open_source(sidecar) as source:
            data = source.read(0, source.size)
    except CheckpointError as failure:
        checkpoint.findings += (warning("content-entry", failure.reason, SIDECAR),)
        return checkpoint
    return apply_sidecar(checkpoint, data, SIDECAR)


def _metadata(
    model: SavedModel, directory: str, file: str, fingerprint: Fingerprint | None
) -> dict[str, object]:
    """Return the metadata, as plain data; slow for large models, see ``computation.py``."""
    seen: Counter[str] = Counter()
    computations = {}
    for graph in model.graphs:
        tags = ",".join(sorted(graph.tags))
        seen[tags] += 1
        computations[tags if seen[tags] == 1 else f"{tags} ({seen[tags]})"] = describe_computation(graph)
    # Values in the text form have other sizes than in the binary form.
    constants = None if file == TEXT else sum(graph.constant_bytes for graph in model.graphs)
    return {
        "schema_version": model.schema,
        "file": file,
        "fingerprint": fingerprint,
        "constant_bytes": constants,
        "meta_graphs": [graph.as_metadata() for graph in model.graphs],
        "graph": computations,
        "files": dict(_assets(directory)),
    }


def _assets(directory: str) -> Iterator[tuple[str, str]]:
    """Yield relative path and checksum of each file in ``assets`` and ``assets.extra``."""
    left = MAX_ASSETS
    for file in _files(directory):
        name = os.path.relpath(file.path, directory)
        if not name.startswith(_ASSETS_BELOW) or name == SIDECAR or not is_inside(file.path, directory):
            continue
        if file.nbytes > left:
            yield name, f"<{file.nbytes:,} bytes of a file that was not read>"
            continue
        left -= file.nbytes
        with fs.open_source(file.path) as source:
            yield name, describe_content(source.size, crc32(source.read(0, source.size)))


def _files(directory: str) -> Iterator[FileEntry]:
    for parent, below, names in fs.walk(directory):
        below.sort()
        paths = (os.path.join(parent, name) for name in sorted(names))
        yield from (file_entry(path) for path in paths if fs.isfile(path))


def _other_spans(directory: str) -> Iterator[Span]:
    """Yield all files but the variables, as spans without a checksum."""
    for file in _files(directory):
        name = os.path.relpath(file.path, directory)
        is_variables = os.path.dirname(name) == os.path.dirname(INDEX)
        if not is_variables and is_inside(file.path, directory):
            yield Span(Extent(file.path, 0, file.nbytes), name, partial(_read_into, file.path))


def _read_into(path: str, offset: int, buffer: memoryview) -> None:
    with fs.open_source(path) as source:
        source.read_into(offset, buffer)


# Variables ------------------------------------------------------------------------------------------


def _variables(
    parts: OpenedParts, model: SavedModel, graph: MetaGraph | None, directory: str
) -> tuple[Checkpoint | None, tuple[Tensor, ...]]:
    """Open the bundle of the variables, and compare it with the object graph; return it and the tensors."""
    path = os.path.join(directory, INDEX)
    if not fs.lexists(path):
        if any(map(needs_variables, model.graphs)):
            parts.fault("variables-missing", "missing, but the model has variables", INDEX)
        return None, ()
    bundle = parts.add(INDEX, lambda: _bundle(path, directory))
    if bundle is None:
        return None, ()
    if graph is None:
        return bundle, bundle.tensors
    findings = list(compare_variables(bundle.tensors, graph.objects.nodes))
    parts.findings += findings
    parts.complete &= not any(finding.code == "variable-missing" for finding in findings)
    return bundle, name_variables(bundle.tensors, graph.objects.nodes)


def _bundle(path: str, directory: str) -> Checkpoint:
    """Open the bundle of the variables."""
    from ckpttool.formats import open_checkpoint

    # The bundle's reader opens shards by their names, and would follow a link out of the model. So all files
    # next to the index are checked before it is opened.
    for entry in scan(os.path.dirname(path)).values():
        require_inside(entry.path, directory)
    if not fs.isfile(path):
        raise DamagedCheckpoint(path, "not a regular file", expected="the index of a tensor bundle")
    bundle = open_checkpoint(path)
    if bundle.format != _BUNDLE:
        bundle.close()
        raise DamagedCheckpoint(path, f"a {bundle.format} file", expected="the index of a tensor bundle")
    return bundle


# Findings -------------------------------------------------------------------------------------------


def _description_findings(model: SavedModel, directory: str) -> Iterator[Finding]:
    """Yield findings about the model's version, meta graphs, references, assets and constants."""
    if model.schema != _SCHEMA:
        yield warning("schema-version", f"unknown schema version {model.schema} (known: {_SCHEMA})")
    if len(model.graphs) > 1:
        tags = "; ".join(",".join(sorted(graph.tags)) or "no tags" for graph in model.graphs[:8])
        yield note("meta-graphs", f"{len(model.graphs):,} graphs in one model, with the tags {tags}")
    yield from (finding for graph in model.graphs for finding in judge_links(graph))
    for name in dict.fromkeys(name for graph in model.graphs for name in graph.assets):
        # The name is judged before the file system is asked, as even a test for existence would reveal
        # something about files outside of the model.
        why = unsafe_path_reason(name)
        path = os.path.join(directory, ASSETS, name)
        if why is not None:
            yield error("asset-path", f"{why}; not checked", name[:200])
        elif not fs.isfile(path):
            yield error("asset-missing", "no such file", f"{ASSETS}/{name}")
        elif not is_inside(path, directory):
            message = "a link that points outside the SavedModel; not checked"
            yield error("asset-path", message, f"{ASSETS}/{name}")
    constants = max(graph.constant_bytes for graph in model.graphs)
    if constants >= _FROZEN_BYTES and not any(map(needs_variables, model.graphs)):
        message = f"{constants:,} bytes of constants in the graph, frozen weights perhaps, are not listed"
        yield note("constants-not-listed", message)

"""What of a source stays behind, whatever the target: said before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.content.digests import RECORDS
from ckpttool.formats.content.objects import dropped
from ckpttool.formats.keras.native import ASSET
from ckpttool.ops.conversion import Dropped
from ckpttool.report import Severity
from ckpttool.writing.content import Content

_PROGRAMS = {
    "torchscript": Dropped("code", "the program"),
    "torch-export": Dropped("models", "the program"),
    "paddle inference": Dropped("program", "what is computed"),
    "paddle training": Dropped("program", "what is computed"),
    "fluid inference": Dropped("program", "what is computed"),
}
"""What computes with the tensors, by format or variant: no other format could run it."""
_GRAPHS = Dropped("saved_model.pb", "the graph, its functions and signatures")
_FILES = {
    "savedmodel": ("files",),
    "torchscript": ("extra", RECORDS),
    "torch-export": (RECORDS,),
    "keras": (RECORDS,),
}
"""Under which keys a reader tells of files that are neither tensors nor read, by format."""
_NOT_READ = frozenset(
    {
        "bytes-unused",
        "content-entry",
        "hdf5-soft-link",
        "layout-not-read",
        "metadata-duplicate-key",
        "more-pickles",
        "not-part",
        "part-not-checked",
        "part-unrecognised",
        "trailing-bytes",
        "unknown-field",
        "unused-storage",
        "weights-not-read",
    }
)
"""Warnings that say that something of the source was not read."""


def left_behind(checkpoint: Checkpoint, content: Content) -> Iterator[Dropped]:
    """Yield what of a source is not in the content that was made of it, or can't be carried at all."""
    yield from _programs(checkpoint)
    yield from _files(checkpoint, content)
    for finding in checkpoint.findings:
        if finding.severity is Severity.WARNING and finding.code in _NOT_READ:
            path = ENTRY if finding.code == "content-entry" else finding.where or finding.code
            yield Dropped(path, finding.message)
    if content.tree is not None:
        yield from (Dropped(*one) for one in dropped(content.tree))


def _programs(checkpoint: Checkpoint) -> Iterator[Dropped]:
    format, variant = checkpoint.format, checkpoint.variant
    program = _PROGRAMS.get(format) or _PROGRAMS.get(f"{format} {variant}")
    if program is not None:
        yield program
    graphs = checkpoint.metadata.get("graph") if format == "savedmodel" else None
    if isinstance(graphs, Mapping) and any(map(_computes, graphs.values())):
        yield _GRAPHS


def _computes(graph: object) -> bool:
    """Tell whether a graph of a SavedModel has nodes, functions or signatures: one of variables has none."""
    if not isinstance(graph, Mapping):
        return True
    return any(value and not str(value).startswith("<0 ") for value in graph.values())


def _files(checkpoint: Checkpoint, content: Content) -> Iterator[Dropped]:
    for key in _FILES.get(checkpoint.format, ()):
        told = checkpoint.metadata.get(key)
        for name in told if isinstance(told, Mapping) else ():
            if ASSET + name not in content.native:
                yield Dropped(name, "a file of its own, of which only size and checksum are known")

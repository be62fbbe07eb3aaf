"""Distributed checkpoints in safetensors: the chunks of each rank in files of its own.

The directory has no ``.metadata``. The header of each file has, under ``DCP_SHARDING_INFO``, JSON with the
offsets of each chunk in its tensor (``saved_offsets``); the shape of a whole tensor is where its chunks end.
If the chunks were consolidated, the whole tensors are a set of shards with an index, and the chunks in the
subdirectory ``sharded``.

Source: PyTorch ``torch/distributed/checkpoint/hf_storage.py``, ``_consolidate_hf_safetensors.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.core.checkpoint import Checkpoint, Producer
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.report import note, warning
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.core.training import training_state
from ckpttool.formats.content.boxes import Box, Piece, assemble
from ckpttool.formats.interface import Format, Probe, scan
from ckpttool.formats.opening import OpenedParts, file_entry
from ckpttool.formats.sharded import indexes, open_set, read_index

_RANK_FILE = re.compile(r"shard-(?P<rank>\d{5,9})-model-(?P<part>\d{5,9})-of-(?P<total>\d{5,9})\.safetensors")
_SHARDING, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_SHARDED = "sharded"
"""Subdirectory of the chunks that were consolidated."""
_MAX_INT64 = (1 << 63) - 1


class DcpSafetensors(Format):
    """A directory of chunks that ``HuggingFaceStorageWriter`` wrote with ``save_distributed``."""

    name: ClassVar[str] = "torch-dcp"

    def matches(self, probe: Probe) -> bool:
        return any(_is_rank_file(entry) for entry in probe.entries.values())

    def open(self, probe: Probe) -> Checkpoint:
        names = [name for name, entry in probe.entries.items() if _is_rank_file(entry)]
        with OpenedParts("part", allows_losses=probe.allows_losses) as parts:
            merger = _ChunkMerger(probe.path, parts)
            for name in names:
                part = parts.add_file(name, probe.entries[name].path)
                if part is not None and part.format == DcpConsolidated.name:
                    merger.add(name, part)
                elif part is not None:
                    parts.fault("part-damaged", f"a {part.format} file, not safetensors", name)
            tensors = tuple(merger.tensors())
            _check_names(parts, names)
            # PyTorch's reader takes every .safetensors file for chunks.
            for name, entry in probe.entries.items():
                if name.endswith(".safetensors") and not _is_rank_file(entry):
                    parts.findings.append(warning("part-extra", "not named like a file of a rank", name))
            pairs = (pair for part in parts.parts.values() for pair in part.metadata.items())
            metadata = {key: value for key, value in pairs if key not in (_SHARDING, _VERSION)}
            return parts.checkpoint(
                path=probe.path,
                format=self.name,
                variant="safetensors",
                tensors=tensors,
                files=tuple(file_entry(probe.entries[name].path) for name in names),
                spans=parts.spans,
                metadata=lambda: metadata,
                training=lambda: training_state(metadata, {}, probe.name),
                producer=Producer("pytorch"),
            )


class DcpConsolidated(Format):
    """A set of shards that ``HuggingFaceStorageWriter`` consolidated, with their chunks below it."""

    name: ClassVar[str] = "safetensors"
    takes_in = True

    def matches(self, probe: Probe) -> bool:
        chunks = probe.entries.get(_SHARDED)
        if chunks is None or not chunks.is_dir(follow_symlinks=False) or len(_indexes(probe)) != 1:
            return False
        return any(_is_rank_file(entry) for entry in scan(chunks.path).values())

    def open(self, probe: Probe) -> Checkpoint:
        (name,) = _indexes(probe)
        index = read_index(os.path.join(probe.path, name))
        checkpoint = open_set(self.name, probe, index, allows_losses=probe.allows_losses)
        message = "the chunks that it was assembled from; not checked"
        checkpoint.findings = (*checkpoint.findings, note("not-part", message, _SHARDED))
        return checkpoint


def _is_rank_file(entry: os.DirEntry[str]) -> bool:
    return _RANK_FILE.fullmatch(entry.name) is not None and entry.is_file()


def _indexes(probe: Probe) -> list[str]:
    formats = indexes(probe.path, probe.entries)
    return [name for name, format in formats.items() if format == DcpConsolidated.name]


def _check_names(parts: OpenedParts, names: list[str]) -> None:
    """Add findings about missing files, by the numbers in ``shard-<rank>-model-<part>-of-<total>``."""
    matches = [match for name in names if (match := _RANK_FILE.fullmatch(name))]
    totals = {int(match["total"]) for match in matches}
    if len(totals) > 1:
        sizes = " and ".join(map(str, sorted(totals)[:4]))
        parts.fault("part-count", f"the file names are from sets of {sizes}", None)
        return
    missing = _first_missing({int(match["part"]) for match in matches}, max(totals))
    if missing is not None:
        parts.fault("part-missing", f"no rank has file {missing:,} of {max(totals):,}", None)
    ranks = {int(match["rank"]) for match in matches}
    missing = _first_missing(ranks, max(ranks))
    if missing is not None and any(finding.code == "chunks-wrong" for finding in parts.findings):
        parts.fault("part-missing", f"no file of rank {missing:,}", None)
    elif missing is not None:
        message = f"no file of rank {missing:,}; unless it had nothing to save, its file is lost"
        parts.findings.append(warning("part-missing", message))
    count = counted(max(ranks), "rank")
    message = f"{count}; the files don't record how many there were, so more may be lost"
    parts.findings.append(note("ranks-unknown", message))
    # A missing file comes first, as it explains the holes in tensors.
    parts.findings.sort(key=lambda finding: finding.code != "part-missing")


def _first_missing(numbers: set[int], last: int) -> int | None:
    """Return the first number from 1 to ``last`` that is missing, or None."""
    candidates = range(1, min(last, len(numbers) + 1) + 1)
    return next((number for number in candidates if number not in numbers), None)


class _ChunkMerger:
    """Assembles tensors from the chunks of all ranks and their offsets."""

    def __init__(self, path: str, parts: OpenedParts) -> None:
        self._path, self._parts = path, parts
        self._chunks: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}

    def add(self, name: str, part: Checkpoint) -> None:
        """Add the chunks of a file."""
        try:
            starts = dict(_starts(part))
        except DamagedCheckpoint as failure:
            where = name if failure.where is None else f"{name}: {failure.where}"
            self._parts.add_failure(failure, where)
            starts = {}
        for tensor in part.tensors:
            chunks = self._chunks.setdefault(tensor.name, [])
            start = starts.get(tensor.name)
            if start is None:
                continue
            first = chunks[0][1] if chunks else tensor
            if (tensor.dtype, len(tensor.shape)) == (first.dtype, len(first.shape)):
                chunks.append((start, tensor))
            else:
                other = f"another file has {first.dtype} {list(first.shape)}"
                message = f"{tensor.dtype} {list(tensor.shape)}, but {other}"
                self._parts.fault("metadata-disagrees", message, f"{name}: {tensor.name}")

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors; one that its chunks don't tile has no values."""
        for name, chunks in self._chunks.items():
            if chunks:
                yield self._merge(name, chunks)

    def _merge(self, name: str, chunks: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
        _, first = chunks[0]
        boxes = [Box(start, part.shape) for start, part in chunks]
        # No file states the whole tensor's shape, so it ends where the last chunk ends along each axis. A
        # missing last chunk therefore goes unnoticed here; the numbers in the names may show it.
        shape = tuple(map(max, zip(*(box.ends for box in boxes), strict=True))) if first.shape else ()
        empty = replace(first, shape=shape, values=None, extent=None, storage=None)
        if math.prod(shape) > _MAX_INT64:
            self._parts.fault("chunks-wrong", f"the chunks make a tensor of shape {list(shape)}", name)
            return replace(empty, shape=first.shape)
        pieces = [Piece(box, part) for box, (_, part) in zip(boxes, chunks, strict=True)]
        pieces = [piece for piece in pieces if piece.box.size] or pieces[:1]
        tensor, fault = assemble(self._path, name, empty, pieces)
        if fault is not None:
            self._parts.fault(fault.code, fault.message, name)
        return tensor


def _starts(part: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each chunk of a file, and its offsets in the tensor, one for each axis."""
    text = part.metadata.get(_SHARDING)
    info = parse_json(part.path, text.encode(), "metadata") if isinstance(text, str) else None
    if isinstance(info, DuplicateKeyObject):
        raise info.error(part.path, _SHARDING)
    for tensor in part.tensors:
        entry = info.get(tensor.name) if isinstance(info, Mapping) else None
        start = entry.get("saved_offsets") if isinstance(entry, Mapping) else None
        if info is None:
            start = [0] * len(tensor.shape)  # as PyTorch assumes
        if (
            not isinstance(start, list)
            or len(start) != len(tensor.shape)
            or not all(type(number) is int and 0 <= number <= _MAX_INT64 for number in start)
        ):
            found = "no saved_offsets" if start is None else f"saved_offsets {start!r:.60}"
            expected = f"{len(tensor.shape)} numbers"
            raise DamagedCheckpoint(
                part.path, found, expected=expected, where=tensor.name, code="metadata-malformed"
            )
        yield tensor.name, tuple(start)

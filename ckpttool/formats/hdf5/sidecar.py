"""The entry ``ckpttool.content`` of an HDF5 file: a dataset of one text, which is read without libhdf5."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from ckpttool.errors import CheckpointError
from ckpttool.formats.content.sidecar import MAX_DOCUMENT
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.hdf5 import Dataset
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.readable import Readable


def is_text(dataset: Dataset) -> bool:
    """Tell whether a dataset is one text that lies in one piece."""
    is_one = dataset.kind.family == "string" and not dataset.kind.is_variable and dataset.shape == ()
    in_place = dataset.layout == "contiguous" and dataset.offset is not None
    return is_one and in_place and dataset.stored == dataset.nbytes <= MAX_DOCUMENT


def reader_of(source: Readable, base: int, dataset: Dataset) -> Callable[[], bytes]:
    """Return what reads the text; the file begins at ``base`` of its source."""
    at, nbytes, name = base + (dataset.offset or 0), dataset.nbytes, dataset.name

    def read() -> bytes:
        source.check(at, nbytes, name)
        return source.read(at, nbytes, name).rstrip(b"\0")

    return read


def parts_of(path: Path) -> tuple[str, ...]:
    """Return the groups and the dataset that a tensor's path becomes; slashes in its parts make groups."""
    return tuple(part for one in path for part in str(one).split("/"))


def with_slashes(tensors: tuple[Tensor, ...], document: bytes) -> tuple[Tensor, ...]:
    """Return tensors in which parts of paths are as an entry tells them that have slashes."""
    own = {one.path for one in tensors}
    told = _paths(document, own) if b"/" in document else {}
    changed = {
        one.name: replace(one, path=told[one.path], key="/" + "/".join(map(str, one.path)))
        for one in tensors
        if one.path in told
    }
    names = {name: one.name for name, one in changed.items()}
    return tuple(
        replace(one, shares_with=names.get(one.shares_with, one.shares_with)) if one.shares_with else one
        for one in (changed.get(one.name, one) for one in tensors)
    )


def _paths(document: bytes, own: Set[Path]) -> dict[Path, Path]:
    """Return the paths with slashes that an entry tells, by those of their datasets; none of a damaged one.

    Those that tensors have already are left out.
    """
    try:
        told: Any = parse_json("", document, "entry")
    except CheckpointError:
        return {}
    tensors = told.get("tensors") if isinstance(told, dict) else None
    paths = [
        tuple(one["path"])
        for one in (tensors.values() if isinstance(tensors, dict) else ())
        if isinstance(one, dict) and _is_path(one.get("path"))
    ]
    return {parts_of(path): path for path in paths if len(parts_of(path)) != len(path) and path not in own}


def _is_path(path: object) -> bool:
    return isinstance(path, list) and all(type(part) in (str, int) for part in path)

"""The entry ``ckpttool.content`` of an HDF5 file: a dataset of one text, which is read without libhdf5."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from ckpttool.containers.hdf5.hdf5 import Dataset
from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import Readable
from ckpttool.core.tensor import Path, Tensor
from ckpttool.formats.sidecar import MAX_DOCUMENT


def is_text(dataset: Dataset) -> bool:
    """Tell whether a dataset is one text that lies in one piece."""
    is_one = dataset.kind.family == "string" and not dataset.kind.is_variable and dataset.shape == ()
    in_place = dataset.layout == "contiguous" and dataset.offset is not None
    return is_one and in_place and dataset.stored == dataset.nbytes <= MAX_DOCUMENT


def text_reader(source: Readable, base: int, dataset: Dataset) -> Callable[[], bytes]:
    """Return what reads the text; the file begins at ``base`` of its source."""
    offset, nbytes, name = base + (dataset.offset or 0), dataset.nbytes, dataset.name

    def read() -> bytes:
        source.check(offset, nbytes, name)
        return source.read(offset, nbytes, name).rstrip(b"\0")

    return read


def parts_of(path: Path) -> tuple[str, ...]:
    """Return the groups and the dataset that a tensor's path becomes; slashes in its parts make groups."""
    return tuple(name for part in path for name in str(part).split("/"))


def restore_slashes(tensors: tuple[Tensor, ...], document: bytes) -> tuple[Tensor, ...]:
    """Return tensors in which the parts of paths that have slashes are as the entry has them."""
    paths = _paths_with_slashes(document, {tensor.path for tensor in tensors}) if b"/" in document else {}
    changed = {
        tensor.name: replace(tensor, path=paths[tensor.path], key="/" + "/".join(map(str, tensor.path)))
        for tensor in tensors
        if tensor.path in paths
    }
    names = {name: tensor.name for name, tensor in changed.items()}
    restored = []
    for old in tensors:
        tensor = changed.get(old.name, old)
        if owner := tensor.shares_with:
            tensor = replace(tensor, shares_with=names.get(owner, owner))
        restored.append(tensor)
    return tuple(restored)


def _paths_with_slashes(document: bytes, taken: Set[Path]) -> dict[Path, Path]:
    """Return the paths with slashes that an entry has, by those of their datasets; none of a damaged one.

    Those that tensors have already are left out.
    """
    try:
        parsed: Any = parse_json("", document, "entry")
    except CheckpointError:
        return {}
    entries = parsed.get("tensors") if isinstance(parsed, dict) else None
    paths: dict[Path, Path] = {}
    for entry in entries.values() if isinstance(entries, dict) else ():
        path = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(path, list) and all(type(part) in (str, int) for part in path):
            parts = parts_of(tuple(path))
            if len(parts) != len(path) and tuple(path) not in taken:
                paths[parts] = tuple(path)
    return paths

"""Writes plain HDF5: a dataset for each tensor, in the groups of its path; tied tensors are hard links.

Source: the HDF5 file format specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ckpttool.containers.hdf5_writer import MAX_AXES, MAX_NAME, WRITABLE_TYPES, Plan, build_structure
from ckpttool.core.tensor import Tensor
from ckpttool.formats.hdf5.tensors import hdf5_path
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer

Parts = tuple[str, ...]


class Hdf5Writer(Writer):
    """A plain HDF5 file."""

    name: ClassVar[str] = "hdf5"
    dtypes: ClassVar[frozenset[str]] = WRITABLE_TYPES

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        paths = {tensor.name: hdf5_path(tensor.path) for tensor in content.tensors}
        taken: dict[str, str] = {}
        for name, path in paths.items():  # readers join groups by dots, which must give different names, too
            other = taken.setdefault(".".join(path), name)
            if other != name:
                yield f"{name}: same path as {other}, /{'/'.join(path)} (use --map)"
        yield from path_refusals(paths, content.tensors)

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        # A slash in a part of a path separates groups in HDF5, so that the tensor would be read with a longer
        # path: then the sidecar has the names.
        paths = {tensor.name: hdf5_path(tensor.path) for tensor in content.tensors}
        plan = hdf5_plan(paths, content.tensors)
        has_slashes = any(len(paths[tensor.name]) != len(tensor.path) for tensor in content.tensors)
        sidecar = sidecar_of(content, names=has_slashes)
        if sidecar is not None:
            plan.texts[(ENTRY,)] = sidecar
        build_structure(plan).stream(target.create())


def hdf5_plan(paths: Mapping[str, Parts], tensors: Iterable[Tensor]) -> Plan:
    """Return the plan of a file: datasets of tensors, and links for those that share another's elements."""
    plan = Plan()
    for tensor in tensors:
        path = paths[tensor.name]
        if path in plan.tensors:
            continue
        if tensor.shares_with is None:
            plan.tensors[path] = tensor
        else:
            plan.links[path] = paths[tensor.shares_with]
    return plan


def path_refusals(paths: Mapping[str, Parts], tensors: Iterable[Tensor]) -> Iterator[str]:
    """Yield a sentence for each reason why HDF5 can't hold tensors under their paths."""
    datasets = set(paths.values())
    for tensor in tensors:
        name, path = tensor.name, paths.get(tensor.name)
        if path is None:
            continue
        yield from (f"{name}: {why} (use --map)" for why in name_refusals(path))
        inner = next((path[:at] for at in range(1, len(path)) if path[:at] in datasets), None)
        if inner is not None:
            yield f"{name}: it would be inside /{'/'.join(inner)}, which is a tensor, not a group (use --map)"
        if path[:1] == (ENTRY,):
            yield f"{name}: this name is reserved for non-tensor content (use --map)"
        if len(tensor.shape) > MAX_AXES:
            yield f"{name}: {len(tensor.shape)} axes, and HDF5 has at most {MAX_AXES}"


def name_refusals(path: Parts) -> Iterator[str]:
    """Yield the reasons why HDF5 can't hold a path."""
    if not path:
        yield "it has no name"
    for part in path:
        if not part:
            yield "a part of its path is empty, and HDF5 needs a name"
        elif part == ".":
            yield "'.' means the group itself in HDF5"
        elif "/" in part:
            yield "'/' separates groups in HDF5"
        elif "\0" in part:
            yield "a NUL ends a name in HDF5"
        else:
            try:
                length = len(part.encode("utf-8"))
            except UnicodeEncodeError:
                yield "its name is not valid text"
                continue
            if length > MAX_NAME:
                yield f"a name of {length:,} bytes, and HDF5 has room for {MAX_NAME:,}"

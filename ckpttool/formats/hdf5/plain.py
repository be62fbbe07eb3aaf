"""HDF5 without a known convention: every dataset of numbers is a tensor, attributes are metadata.

Source: the HDF5 file format specification; h5py for its booleans, complex numbers and texts.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from ckpttool.checkpoint import Checkpoint, FileEntry
from ckpttool.errors import CheckpointError
from ckpttool.formats.content.sidecar import ENTRY
from ckpttool.formats.interface import Format, Probe
from ckpttool.roles import role_of
from ckpttool.tensor import Role, Tensor
from ckpttool.wire.h5worker import WORKER
from ckpttool.wire.hdf5 import SIGNATURE, Location

if TYPE_CHECKING:
    from ckpttool.formats.hdf5.tensors import OpenedHdf5
    from ckpttool.wire.hdf5 import Dataset

_STARTS = (0, 512, 1024, 2048)

_LINKS = {
    "external": "a link to another file, {}",
    "soft": "a link to {}",
    "again-group": "the same group as {}",
    "again-dataset": "the same dataset as {}",
}

_opened: WeakKeyDictionary[Probe, OpenedHdf5 | CheckpointError] = WeakKeyDictionary()


def is_hdf5(probe: Probe) -> bool:
    """Tell whether a file has HDF5's signature where a small user block lets it lie."""
    return any(probe.head.startswith(SIGNATURE, at) for at in _STARTS)


def opened_hdf5(probe: Probe) -> OpenedHdf5:
    """Return what an HDF5 file holds; it is walked once for all formats that ask."""
    if probe not in _opened:
        WORKER.begin(probe.path)  # it takes longer to start than the import of what takes its answer apart
        from ckpttool.formats.hdf5.tensors import open_h5

        location = Location(probe.path, 0, probe.source.size)
        try:
            _opened[probe] = open_h5(location, probe.source, 0)
        except CheckpointError as failure:
            _opened[probe] = failure
        finally:
            location.close()
    found = _opened[probe]
    if isinstance(found, CheckpointError):
        raise found
    return found


class Hdf5(Format):
    """Any HDF5 file."""

    name: ClassVar[str] = "hdf5"
    suffixes = (".hdf5", ".he5")

    def matches(self, probe: Probe) -> bool:
        return is_hdf5(probe)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.content.assembly import training_of

        opened = opened_hdf5(probe)
        tensors = _with_roles(opened)

        @functools.cache
        def metadata() -> dict[str, object]:
            return metadata_of(opened)

        found = Checkpoint(
            path=probe.path,
            format=self.name,
            variant=None,
            tensors=tensors,
            files=(FileEntry(probe.path, probe.source.size),),
            spans=opened.spans,
            metadata=metadata,
            training=lambda: training_of(metadata(), tensors, probe.name),
            findings=tuple(opened.findings),
            safety=tuple(opened.safety),
            complete=opened.complete,
            close=opened.with_it(probe.close),
        )
        return with_sidecar(found, opened)


def with_sidecar(checkpoint: Checkpoint, opened: OpenedHdf5, where: str = ENTRY) -> Checkpoint:
    """Return a checkpoint with what the entry in its file says of it, where there is one."""
    if opened.entry is None:
        return checkpoint
    from ckpttool.formats.content.sidecar import apply_sidecar
    from ckpttool.formats.hdf5.sidecar import with_slashes

    document = opened.entry()
    tensors = with_slashes(checkpoint.tensors, document)
    return apply_sidecar(checkpoint.but(tensors=tensors), document, where)


def _with_roles(opened: OpenedHdf5) -> tuple[Tensor, ...]:
    """Return the tensors with what they serve; where no name tells, they are weights, as in ``.npz``."""
    roles = {path: role_of(path, tensor.shape) for path, tensor in opened.tensors.items()}
    is_flat = all(len(path) <= 1 for path in roles)
    if not opened.described and (is_flat or set(roles.values()) == {Role.OTHER}):
        for path, role in roles.items():
            if role is not Role.TRAINING or opened.tensors[path].size != 1:
                roles[path] = Role.WEIGHTS
    return tuple(replace(tensor, role=roles[path]) for path, tensor in opened.tensors.items())


def metadata_of(opened: OpenedHdf5) -> dict[str, object]:
    """Return the attributes of the root, those of all else, what datasets hold but numbers, and links."""
    tree = opened.tree
    told: dict[str, object] = dict(tree.groups.get((), {}))
    attributes = {"/" + "/".join(path): dict(found) for path, found in tree.groups.items() if path and found}
    attributes |= {one.name: own for one in tree.datasets.values() if (own := _attributes(one))}
    if attributes:
        told["attributes"] = attributes
    if opened.described:
        told["datasets"] = opened.others
    if links := _links(opened):
        told["links"] = links
    return told


def _attributes(dataset: Dataset) -> dict[str, object]:
    """Return the attributes of a dataset, without the one that says what its opaque elements are."""
    is_told = dataset.kind.family == "opaque"
    return {key: value for key, value in dataset.attributes.items() if not (is_told and key == "dtype")}


def _links(opened: OpenedHdf5) -> dict[str, str]:
    """Return where the names and the values lead that lie elsewhere."""
    found = {
        "/" + "/".join(path): _LINKS[kind].format(target or "/")
        for path, kind, target in opened.tree.links
        if kind in _LINKS and path not in opened.tensors
    }
    elsewhere = [one for one in opened.tree.datasets.values() if one.layout == "external"]
    return found | {one.name: f"values in another file, {one.target}" for one in elsewhere}

"""HDF5 without a known convention: every dataset of numbers is a tensor, attributes are metadata.

libhdf5 runs in a child process (``ckpttool.containers.hdf5_worker``), which a hostile file may crash.

Source: the HDF5 file format specification; h5py for its booleans, complex numbers and texts.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from ckpttool.containers.hdf5 import SIGNATURE, USER_BLOCKS, Location
from ckpttool.containers.hdf5_worker import WORKER
from ckpttool.core.checkpoint import Checkpoint, FileEntry
from ckpttool.core.errors import CheckpointError
from ckpttool.core.tensor import Role, Tensor, role_of
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.sidecar import ENTRY, apply_sidecar

if TYPE_CHECKING:
    from ckpttool.formats.hdf5.tensors import OpenedHdf5

_LINKS = {
    "external": "a link to another file, {}",
    "soft": "a link to {}",
    "again-group": "the same group as {}",
    "again-dataset": "the same dataset as {}",
}
"""Descriptions of links in the metadata, by kind."""

_opened: WeakKeyDictionary[Probe, OpenedHdf5 | CheckpointError] = WeakKeyDictionary()


def is_hdf5(probe: Probe) -> bool:
    """Return whether a file has HDF5's signature at its start or after a small user block."""
    return any(probe.head.startswith(SIGNATURE, at) for at in USER_BLOCKS)


def opened_hdf5(probe: Probe) -> OpenedHdf5:
    """Return the opened HDF5 file of a probe; it is walked once, however many formats match it.

    Raises:
        CheckpointError: It can't be read; the same error each time.
    """
    if probe not in _opened:
        # The child starts while this process imports the reader of its answers.
        WORKER.begin(probe.path)
        from ckpttool.formats.hdf5.tensors import open_h5

        location = Location(probe.path, 0, probe.source.size)
        try:
            _opened[probe] = open_h5(location, probe.source, 0, allows_losses=probe.allows_losses)
        except CheckpointError as failure:
            _opened[probe] = failure
        finally:
            location.close()
    opened = _opened[probe]
    if isinstance(opened, CheckpointError):
        raise opened
    return opened


class Hdf5(Format):
    """Any HDF5 file."""

    name: ClassVar[str] = "hdf5"
    suffixes = (".hdf5", ".he5")

    def matches(self, probe: Probe) -> bool:
        return is_hdf5(probe)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.content.assembly import training_of

        opened = opened_hdf5(probe)
        tensors = _infer_roles(opened)

        metadata = functools.cache(lambda: _metadata_of(opened))
        checkpoint = Checkpoint(
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
            close=opened.close_then(probe.close),
        )
        return apply_hdf5_sidecar(checkpoint, opened)


def apply_hdf5_sidecar(checkpoint: Checkpoint, opened: OpenedHdf5, where: str = ENTRY) -> Checkpoint:
    """Return a checkpoint with the content of the sidecar in its file, if it has one."""
    if opened.entry is None:
        return checkpoint
    from ckpttool.formats.hdf5.tensors import restore_slashes

    document = opened.entry()
    tensors = restore_slashes(checkpoint.tensors, document)
    return apply_sidecar(checkpoint.replace(tensors=tensors), document, where)


def _infer_roles(opened: OpenedHdf5) -> tuple[Tensor, ...]:
    """Return the tensors with their roles."""
    # A file of numbers alone in which no name has a known role is taken for a model's, as in ``.npz``.
    roles = {path: role_of(path, tensor.shape) for path, tensor in opened.tensors.items()}
    is_flat = all(len(path) <= 1 for path in roles)
    if not opened.described and (is_flat or set(roles.values()) == {Role.OTHER}):
        for path, role in roles.items():
            if role is not Role.TRAINING or opened.tensors[path].size != 1:
                roles[path] = Role.WEIGHTS
    return tuple(replace(tensor, role=roles[path]) for path, tensor in opened.tensors.items())


def _metadata_of(opened: OpenedHdf5) -> dict[str, object]:
    """Return the root's attributes, and by kind other attributes, datasets without numbers, and links."""
    tree = opened.tree
    metadata: dict[str, object] = dict(tree.groups.get((), {}))
    attributes = {"/" + "/".join(path): dict(group) for path, group in tree.groups.items() if path and group}
    links = {
        "/" + "/".join(path): _LINKS[kind].format(target or "/")
        for path, kind, target in tree.links
        if kind in _LINKS and path not in opened.tensors
    }
    for dataset in tree.datasets.values():
        own = dict(dataset.attributes)
        if dataset.kind.family == "opaque":
            own.pop("dtype", None)  # the element type, which the tensor has
        if own:
            attributes[dataset.name] = own
        if dataset.layout == "external":
            links[dataset.name] = f"values in another file, {dataset.target}"
    if attributes:
        metadata["attributes"] = attributes
    if opened.described:
        metadata["datasets"] = opened.other_content
    if links:
        metadata["links"] = links
    return metadata

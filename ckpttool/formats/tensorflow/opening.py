"""From the files beside a TensorFlow prefix to a checkpoint, whole or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.formats.content.sidecar import ENTRY, restored
from ckpttool.formats.interface import grouped, natural, scan
from ckpttool.formats.parts import file_entry
from ckpttool.formats.tensorflow.bundle import BundleEntry
from ckpttool.formats.tensorflow.native import native_of
from ckpttool.formats.tensorflow.objects import GRAPH_KEY, Known, own_names
from ckpttool.formats.tensorflow.prefix import META, PART, TEMPORARY, parts_by_prefix, shard_name
from ckpttool.formats.tensorflow.reader import Bundle
from ckpttool.formats.tensorflow.training import training_of
from ckpttool.report import Finding, error, warning
from ckpttool.tensor import Role, Tensor

_ALL, _PUBLIC = "_all_variables", ("variables", "trainable_variables")


def open_prefix(prefix: str, shown: str | None = None) -> Checkpoint:
    """Return the checkpoint of a prefix, as far as its files are there.

    Args:
        prefix: What its files' names begin with.
        shown: How the user named it, where that isn't the prefix.

    Raises:
        CheckpointError: The index is damaged, or the operating system refuses a file.
    """
    with Bundle(prefix) as bundle:
        beside = _beside(prefix)
        if not os.path.lexists(bundle.path):
            bundle.fault("index-missing", "there is no index", os.path.basename(bundle.path))
            entries = {}
        else:
            entries = bundle.read_index()
            bundle.open_shards()
        objects = entries.pop(GRAPH_KEY.encode(), None)
        graph = bundle.graph(objects)
        content = bundle.text(_entry(entries), ENTRY)
        listed = [one for one in entries.values() if one.key[:1] != b"\0"]
        found = [bundle.tensor(one, graph, entries) for one in listed]
        keys = {tensor.name: one.key for tensor, one in zip(found, listed, strict=True)}
        tensors = tuple(map(_without_copies(found), sorted(found, key=_in_reading_order) if graph else found))
        bundle.findings += bundle.account()
        bundle.findings += _unfinished(bundle, prefix, beside)
        paths = [bundle.path, *(source.path for source in bundle.sources.values())]
        if not entries and not bundle.sources:
            paths += [os.path.join(os.path.dirname(prefix), name) for name in beside]
        paths.append(prefix + META)
        files = tuple(file_entry(path) for path in dict.fromkeys(paths) if os.path.isfile(path))
        path = shown or prefix
        opened = _checkpoint(
            bundle, path, tensors, files, graph, lambda: _native(bundle, objects, keys, whole.tensors)
        )
        whole = opened if content is None else restored(opened, content, ENTRY)
        return whole


def _entry(entries: dict[bytes, BundleEntry]) -> BundleEntry | None:
    """Take out the entry with what TensorFlow has no place for, if there is one."""
    found = entries.get(ENTRY.encode())
    if found is None or found.dtype.name != "string" or found.shape or found.slices:
        return None
    return entries.pop(ENTRY.encode())


def _native(
    bundle: Bundle, objects: BundleEntry | None, keys: Mapping[str, bytes], tensors: tuple[Tensor, ...]
) -> Mapping[str, bytes]:
    """Return the native parts; the graph of objects is read again for it."""
    if objects is None:
        return native_of(keys, None, tensors)
    source = bundle.sources.get(objects.shard)
    if source is None or GRAPH_KEY in bundle.told:  # damaged, which was found
        return {}
    return native_of(keys, bundle.string(source, objects), tensors)


def _without_copies(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what takes the private list that Keras's export makes of all variables for no weights."""
    is_export = any(tensor.path[0] in _PUBLIC for tensor in tensors)

    def named(tensor: Tensor) -> Tensor:
        is_copy = is_export and len(tensor.path) == 2 and tensor.path[0] == _ALL
        return replace(tensor, role=Role.OTHER) if is_copy else tensor

    return named


def _beside(prefix: str) -> tuple[str, ...]:
    """Return the shards of a prefix, and what its writer has not renamed."""
    directory, name = os.path.split(prefix)
    found = grouped(directory or os.curdir, parts_by_prefix).get(name, ())
    return tuple(one for one in found if os.path.isfile(os.path.join(directory, one)))


def _unfinished(bundle: Bundle, prefix: str, names: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what tells of a writer that was interrupted, or is at work."""
    if PART.fullmatch(os.path.basename(prefix)):
        bundle.complete = False
        yield error("save-unfinished", "a part that its writer has not merged", os.path.basename(prefix))
    own = {os.path.basename(shard_name(prefix, at, bundle.header.shards)) for at in bundle.sources}
    for name in names:
        if TEMPORARY.fullmatch(name):
            yield warning("save-unfinished", "a file that its writer has not renamed", name)
        elif ".data-" in name and name not in own and bundle.sources:
            yield warning("shard-extra", "a shard of another save; the index does not name it", name)


def _checkpoint(
    bundle: Bundle,
    path: str,
    tensors: tuple[Tensor, ...],
    files: tuple[FileEntry, ...],
    graph: Mapping[str, Known],
    native: Callable[[], Mapping[str, bytes]],
) -> Checkpoint:
    return Checkpoint(
        path=path,
        format="tensorflow",
        variant=None,
        tensors=tensors,
        files=files,
        spans=bundle.spans,
        training=lambda: training_of(tensors, os.path.basename(path)),
        own_names=lambda: own_names(tensors, graph),
        native=native,
        producer=Producer("tensorflow"),
        findings=tuple(bundle.findings),
        complete=bundle.complete,
        close=bundle.keep(),
    )


def open_stage(path: str) -> Checkpoint:
    """Return what lies in a directory that a writer fills: no checkpoint yet.

    Raises:
        CheckpointError: It can't be looked at.
    """
    names = [entry.path for entry in scan(path).values() if entry.is_file(follow_symlinks=False)]
    message = "its writer has not moved what lies in it to where it belongs"
    return Checkpoint(
        path=path,
        format="tensorflow",
        variant=None,
        tensors=(),
        files=tuple(file_entry(name) for name in names),
        spans=lambda: iter(()),
        producer=Producer("tensorflow"),
        findings=(error("save-unfinished", message),),
        complete=False,
    )


def _in_reading_order(tensor: Tensor) -> list[list[tuple[int, int, str]]]:
    return [natural(str(step)) for step in tensor.path]

"""Writes files of ``torch.save``: one file, or Hugging Face's shards with an index.

Source: PyTorch ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``; huggingface/transformers
``modeling_utils.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import ClassVar

from isal import isal_zlib

from ckpttool.containers.pickle.opcodes import PAYLOAD_BYTES
from ckpttool.containers.pickle.pickle_nodes import globals_in
from ckpttool.containers.pickle.pickler import Storages, imported_by, pickle_into
from ckpttool.containers.zip_writer import ALIGNMENT, END_BYTES, RECORD_BYTES, Piece, TorchZip
from ckpttool.core.dtypes import BY_STORAGE
from ckpttool.core.errors import Unsupported
from ckpttool.core.tensor import Tensor
from ckpttool.formats.content.tree import opaque_nodes
from ckpttool.formats.sharded import ShardFiles, shard_index, shard_names, shard_refusals, split_into_shards
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer
from ckpttool.storage.sink import Sink

_STEM, _SUFFIX = "pytorch_model", ".bin"
_INDEX = f"{_STEM}{_SUFFIX}.index.json"
_MAX_TENSORS = 350_000
"""Limit on tensors per file; the pickle of more would exceed the limit of our own reader."""
_MAX_UNSEALED = 16
"""Number of shards written before their checksums are filled in, which waits until all bytes are copied."""
ANONYMOUS = "archive"
"""Root directory in an archive that isn't a file of its own, as PyTorch names it for a buffer."""
WHOLE = frozenset(dtype.name for dtype in BY_STORAGE.values() if dtype.kind != "quantized")
"""Element types whose values need no scales."""
QUANTIZED = frozenset(dtype.name for dtype in BY_STORAGE.values() if dtype.kind == "quantized")
"""Element types whose values need scales and zero points."""
_VERSION = b"3\n"
_FORMAT_VERSION = b"1"
"""States that the storages are in the order in which the pickle first names them.

A PyTorch that is set to compute offsets of storages (``calculate_storage_offsets``) doesn't look at headers
then: it relies on this order, on the padding and on the data descriptors, as ``TorchZip`` writes them.
"""
_RECORDS_WITHOUT_TENSOR = 5
"""Number of records without a tensor: the pickle, two versions, byte order and alignment."""
_REFERENCE_GROWTH = 32
"""Bytes by which an entry of a long pickle may exceed that of a short one: memo indexes and keys grow."""
_RECORD_BYTES = RECORD_BYTES + 2 * len("pytorch_model-00001-of-00001/.storage_alignment") + len("1234567890")
"""Upper bound of the archive's own bytes for each record of a shard."""
_MAX_KEPT = 1 << 24
"""Limit in bytes on a pickle kept in memory; a longer one, which has arrays in it, is made twice."""


class PyTorchWriter(Writer):
    """One file of ``torch.save``, or a directory of shards."""

    name: ClassVar[str] = "pytorch"
    suffixes: ClassVar[tuple[str, ...]] = (".pth", ".pt", ".ckpt", ".pth.tar", ".bin")
    dtypes: ClassVar[frozenset[str]] = WHOLE | QUANTIZED
    takes_shards: ClassVar[bool] = True

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        limit = options.shard_size
        if content.tree is None or limit is not None:
            for tensor in content.owned:
                if tensor.dtype.name in QUANTIZED:
                    yield (f"{tensor.name}: {tensor.dtype} is meaningless without its scales")
            yield from name_refusals(tensor.name for tensor in content.tensors)
        else:
            yield from name_refusals({str(key) for tensor in content.tensors for key in tensor.path})
        if limit is not None:
            if any(tensor.dtype.name in QUANTIZED for tensor in content.owned):
                return
            shards = _shards(content, limit)
            yield from shard_refusals(shards, _index_metadata(content))
            for name, tensors in shards.items():
                yield from _too_many(name, tensors)
        else:
            yield from _too_many("", content.owned)

    def unsafe_globals(self, content: Content, options: WriteOptions) -> tuple[str, ...]:
        if options.shard_size is not None or content.tree is None:
            return ()
        try:
            names = imported_by(content.tree)
        except ValueError as failure:
            raise Unsupported(options.name, str(failure), where="data.pkl") from failure
        admitted = globals_in("weights_only.txt")  # what `torch.load(weights_only=True)` admits
        return tuple(sorted(str(one) for one in names if (one.module, one.name) not in admitted))

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        if options.shard_size is not None:
            shards, files = _shards(content, options.shard_size), ShardFiles(target)
            unsealed: list[TorchZip] = []
            for name, tensors in shards.items():
                of_shard = {tensor.name: tensor for tensor in tensors}
                unsealed.append(write_archive(files.create(name), root_of(name), of_shard))
                if len(unsealed) == _MAX_UNSEALED:
                    _seal(unsealed)
            _seal(unsealed)
            files.create(_INDEX).write(shard_index(shards, _index_metadata(content)))
            return
        root = root_of(options.name or os.path.basename(target.target))
        is_kept = next(opaque_nodes(content.tree), None) is None
        sidecar = sidecar_of(content, tree=not is_kept)
        tree = content.tree
        if tree is None:
            tree = {tensor.name: tensor for tensor in content.tensors}
        write_archive(target.create(), root, tree, sidecar).seal()


def _too_many(name: str, tensors: list[Tensor] | tuple[Tensor, ...]) -> Iterator[str]:
    if len(tensors) > _MAX_TENSORS:
        where = f"{name}: " if name else ""
        yield f"{where}{len(tensors):,} tensors are more than one file can list (at most {_MAX_TENSORS:,})"


def name_refusals(names: Iterable[str]) -> Iterator[str]:
    """Yield a refusal of each name longer than any key that our reader accepts."""
    for name in names:
        nbytes = len(name.encode("utf-8", "surrogatepass"))
        if nbytes > PAYLOAD_BYTES:
            yield f"{name}: a name of {nbytes:,} bytes; at most {PAYLOAD_BYTES:,} are read (use --map)"


def _index_metadata(content: Content) -> dict[str, str]:
    """Return the index's metadata besides the weight map."""
    sidecar = sidecar_of(content)
    return {} if sidecar is None else {ENTRY: sidecar.decode()}


def _shards(content: Content, limit: int) -> dict[str, list[Tensor]]:
    """Return the tensors of each shard, by the shard's name; no shard is empty."""
    # The limit is on whole files, so each tensor counts with its entry in the pickle and its record's
    # headers. Both are estimated from above, by the pickle of that tensor alone.
    empty = _pickle_bytes({})

    def overhead(tensor: Tensor) -> int:
        entry = _pickle_bytes({tensor.name: tensor}) - empty + _REFERENCE_GROWTH
        return entry + (_RECORD_BYTES if tensor.shares_with is None else 0)

    base = empty + _RECORDS_WITHOUT_TENSOR * _RECORD_BYTES + END_BYTES
    shards = [one for one in split_into_shards(content.tensors, limit, base=base, overhead=overhead) if one]
    return dict(zip(shard_names(_STEM, _SUFFIX, len(shards)), shards, strict=True))


def _pickle_bytes(tree: object) -> int:
    pickle = _MeasuredPickle()
    pickle_into(pickle.write, tree, Storages())
    return pickle.nbytes


def _seal(archives: list[TorchZip]) -> None:
    for archive in archives:
        archive.seal()
    archives.clear()


# Archives -------------------------------------------------------------------------------------------


def write_archive(sink: Sink, root: str, tree: object, sidecar: bytes | None = None) -> TorchZip:
    """Append an archive that holds an object, and return it; the caller seals its checksums.

    Args:
        root: The directory of all its records.
        tree: The object, as ``Content.tree`` has it.
        sidecar: Content of the sidecar record; None for no record.
    """
    storages, archive = Storages(), TorchZip(sink)
    try:
        _add_pickle(archive, f"{root}/data.pkl", tree, storages)
    except ValueError as failure:
        raise Unsupported(sink.path, str(failure), where="data.pkl") from failure
    archive.add(f"{root}/.format_version", _FORMAT_VERSION)
    archive.add(f"{root}/.storage_alignment", str(ALIGNMENT).encode())
    archive.add(f"{root}/byteorder", b"little")
    for key, tensor in enumerate(storages.tensors):
        archive.put(f"{root}/data/{key}", tensor)
    if sidecar is not None:
        archive.add(f"{root}/{ENTRY}", sidecar)
    archive.add(f"{root}/version", _VERSION)
    archive.finish()
    return archive


def _add_pickle(archive: TorchZip, name: str, tree: object, storages: Storages) -> None:
    pickle = _MeasuredPickle()  # freed before the tensors are copied
    pickle_into(pickle.write, tree, storages)
    if pickle.is_whole:
        archive.add(name, bytes(pickle.data))
    else:
        archive.stream(name, pickle.nbytes, pickle.crc, lambda write: pickle_into(write, tree, storages))


class _MeasuredPickle:
    """Length and checksum of a pickle written in pieces, and its bytes while it is short."""

    def __init__(self) -> None:
        self.nbytes = self.crc = 0
        self.data = bytearray()

    @property
    def is_whole(self) -> bool:
        """Return whether ``data`` is the whole pickle."""
        return self.nbytes <= _MAX_KEPT

    def write(self, piece: Piece) -> None:
        self.nbytes += len(piece)
        self.crc = isal_zlib.crc32(piece, self.crc)
        if self.is_whole:
            self.data += piece
        else:
            self.data.clear()


def root_of(name: str) -> str:
    """Return the root directory of the records that PyTorch derives from a file's name."""
    base = name.replace("\\", "/").rpartition("/")[2]
    stem = base.rpartition(".")[0] if "." in base else base
    return stem if stem and stem.isascii() else ANONYMOUS

"""One object as ``torch.save`` writes it: a zip with a pickle, and a record for the bytes of each tensor.

Source: PyTorch ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isal import isal_zlib

from ckpttool.dtypes import BY_STORAGE
from ckpttool.errors import Unsupported
from ckpttool.formats.content.carried import ENTRY
from ckpttool.wire.literals import PAYLOAD_BYTES
from ckpttool.wire.pickler import Storages, pickle_into
from ckpttool.wire.sink import Sink
from ckpttool.wire.zip_writing import ALIGNMENT, Piece, TorchZip

ANONYMOUS = "archive"
"""The directory of all records in what was not saved under a name of its own."""

WHOLE = frozenset(dtype.name for dtype in BY_STORAGE.values() if dtype.kind != "quantized")
"""The types of tensors that stand for themselves."""
QUANTIZED = frozenset(dtype.name for dtype in BY_STORAGE.values() if dtype.kind == "quantized")
"""The types whose tensors need scales beside them."""

_VERSION = b"3\n"
_FORMAT_VERSION = b"1"
"""Says that the storages follow each other in the order in which the pickle first names them."""
_KEPT = 1 << 24
"""Up to how many bytes a pickle is kept; a longer one, which has arrays in it, is made twice."""


def write_archive(sink: Sink, root: str, tree: object, entry: bytes | None = None) -> TorchZip:
    """Append an archive that holds an object; its checksums are still to be sealed.

    Args:
        root: The directory of all its records.
        tree: The object, as ``Content.tree`` has it.
        entry: What it can't hold, where there is anything.

    Raises:
        CheckpointError: The source can't be read, or the object be pickled.
        OSError: The target can't be written.
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
    if entry is not None:
        archive.add(f"{root}/{ENTRY}", entry)
    archive.add(f"{root}/version", _VERSION)
    archive.finish()
    return archive


def _add_pickle(archive: TorchZip, name: str, tree: object, storages: Storages) -> None:
    found = _Measured()
    pickle_into(found.write, tree, storages)
    if found.is_whole:
        archive.add(name, bytes(found.data))
    else:
        archive.stream(name, found.nbytes, found.crc, lambda write: pickle_into(write, tree, storages))


class _Measured:
    """Takes a pickle piece by piece: its length and checksum, and all of it where it is short."""

    def __init__(self) -> None:
        self.nbytes = self.crc = 0
        self.data = bytearray()

    @property
    def is_whole(self) -> bool:
        """Tell whether ``data`` is all there is."""
        return self.nbytes <= _KEPT

    def write(self, piece: Piece) -> None:
        """Take the next piece."""
        self.nbytes += len(piece)
        self.crc = isal_zlib.crc32(piece, self.crc)
        if self.is_whole:
            self.data += piece
        else:
            self.data.clear()


def name_refusals(names: Iterable[str]) -> Iterator[str]:
    """Yield which names are longer than any key that is read from a pickle."""
    for name in names:
        nbytes = len(name.encode("utf-8", "surrogatepass"))
        if nbytes > PAYLOAD_BYTES:
            yield f"{name}: a name of {nbytes:,} bytes, and at most {PAYLOAD_BYTES:,} are read (use --map)"


def root_of(name: str) -> str:
    """Return the directory that PyTorch puts all records of a file of this name in."""
    base = name.replace("\\", "/").rpartition("/")[2]
    stem = base.rpartition(".")[0] if "." in base else base
    return stem if stem and stem.isascii() else ANONYMOUS

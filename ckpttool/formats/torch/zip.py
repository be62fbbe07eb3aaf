"""PyTorch's zip serialization, which ``torch.save`` has written since 1.6.

All records are in one root directory, named after the file: ``data.pkl`` is the pickled object, with a
persistent id in place of each storage, ``data/<key>`` the bytes of a storage, ``byteorder`` and ``version``
texts. Records are stored without compression, aligned to 64 bytes, and the central directory has a CRC-32 of
each. TorchScript and exported programs use the same container, so ``Records`` and ``StorageRecords`` serve
them as well.

Source: PyTorch ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

from ckpttool.containers.npy import MAGIC as NPY_MAGIC
from ckpttool.containers.pickle.pickle_detection import is_pickle
from ckpttool.containers.pickle.pickle_safety import (
    PickleSequence,
    attach_safety,
    pickle_findings,
    read_pickles,
)
from ckpttool.containers.zip_reader import STORED, Archive, Member, duplicate_record
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.readable import Buffer, reader_from
from ckpttool.core.report import Finding, error, not_scanned, warning
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.assembly import checkpoint_of_tree, tree_builder
from ckpttool.formats.content.plain_data import describe_member
from ckpttool.formats.content.tree import TensorParts, flatten
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.sidecar import ENTRY, apply_sidecar_record
from ckpttool.formats.torch.objects import Storage, TorchObjects
from ckpttool.formats.torch.tree_nodes import torch_node
from ckpttool.formats.torch.types import storage_dtype

SUFFIXES = (".pth", ".pt", ".ckpt", ".pth.tar", ".bin")
VERSIONS = range(1, 11)
_MAX_TEXT_RECORD = 1024
_LAYOUT_RECORDS = frozenset(
    {"version", "byteorder", "archive_format", "archive_version", ".format_version", ".storage_alignment"}
    | {".data/serialization_id", ".data/version"}
)
"""Records about the archive's layout, which hold nothing of the user's."""
_OLD_SCRIPT = "model.json"
Tensors = list[tuple[Any, TensorParts]]
"""Tensors with their paths in the pickled object."""


class PytorchZip(Format):
    """A file that ``torch.save`` wrote."""

    name: ClassVar[str] = "pytorch"
    suffixes = SUFFIXES

    def matches(self, probe: Probe) -> bool:
        return "data.pkl" in probe.members and "constants.pkl" not in probe.members

    def open(self, probe: Probe) -> Checkpoint:
        records = Records(probe.archive, probe.path)
        judged = records.read_pickle("data.pkl")
        with attach_safety(judged.safety):
            storages = StorageRecords(records, "data")
            objects = TorchObjects(probe.path, storages)
            root = judged.pickles[0].root
            flat = flatten(root, objects.leaf, probe.path)
        findings = (*records.findings(), *storages.findings(flat.tensors), *trailing_findings(judged))
        checkpoint = checkpoint_of_tree(
            probe=probe,
            format=self.name,
            variant="zip",
            flat=flat,
            files=(FileEntry(probe.path, probe.source.size),),
            spans=lambda: records.spans(flat.tensors),
            producer=Producer("pytorch"),
            findings=findings,
            safety=(*judged.safety, *records.judge_others(("data.pkl",))),
            records=records.unknown(lambda name: name in ("data.pkl", ENTRY) or storages.holds(name)),
            tree=tree_builder(root, objects.leaf, probe.path, torch_node),
        )
        checkpoint = checkpoint.replace(missing=storages.loss_reasons(checkpoint.tensors))
        return apply_sidecar_record(checkpoint, probe.archive, records.by_name.get(ENTRY))


class Records:
    """The records of a PyTorch archive, by their names below the root directory, in lower case.

    PyTorch's reader ignores case, so two names that differ only in case are one record to it.
    """

    def __init__(self, archive: Archive, path: str) -> None:
        """Index the records."""
        self.archive = archive
        self.path = path
        self.by_name: dict[str, Member] = {}
        try:
            self._index()
        except DamagedCheckpoint as failure:
            # An archive that is refused for its names may still have pickles that another loader reads. They
            # are judged before the error is raised, since a refused file must not look like a safe one.
            failure.safety = tuple(self.judge_others())
            raise

    def _index(self) -> None:
        path, archive = self.path, self.archive
        # All records must be below one root. In a rescued archive, whose directory was rebuilt from damaged
        # bytes, the most frequent root counts, and records outside of it are left out.
        roots = Counter(member.name.partition("/")[0] for member in archive.members)
        self.lost = {name.partition("/")[2].casefold(): one for name, one in archive.lost.items()}
        self._findings: list[Finding] = list(archive.findings)
        if len(roots) != 1 and archive.rescue is None:
            found = f"{len(roots)} root directories"
            raise DamagedCheckpoint(
                path, found, expected="one", where=", ".join(sorted(roots)[:4]), code="zip-roots"
            )
        self.root = root = roots.most_common(1)[0][0] if roots else ""
        for member in archive.members:
            prefix, _, name = member.name.partition("/")
            folded = name.casefold()
            if prefix != root:  # its name is damaged
                self._findings.append(error("zip-roots", f"a record outside {root}; omitted", member.name))
                continue
            # Of two records with one name PyTorch loads either, depending on their order: a file that shows
            # one content to a scanner and another to PyTorch.
            if folded in self.by_name:
                raise duplicate_record(path, member.name)
            if folded != name and (folded.startswith("data/") or folded == "data.pkl"):
                self._findings.append(warning("zip-case", "unusual case in a record's name", member.name))
            self.by_name[folded] = member
        for other, member in (archive.rescue.aliases if archive.rescue else {}).items():
            self.by_name.setdefault(other.partition("/")[2].casefold(), member)

    # Records that the formats read -------------------------------------------------------------------

    def text(self, name: str) -> str | None:
        """Return the text of a small record, or None if there is none."""
        member = self.by_name.get(name)
        if member is None:
            return None
        if member.size > _MAX_TEXT_RECORD:
            found = f"a record of {member.size:,} bytes"
            raise DamagedCheckpoint(
                self.path, found, expected=f"at most {_MAX_TEXT_RECORD}", where=member.name
            )
        return self.archive.read(member).decode("ascii", "backslashreplace").strip()

    @cached_property
    def byteorder(self) -> Literal["little", "big"]:
        """Return the byte order of the storages."""
        order = self.text("byteorder")
        # It has two possible texts, so the checksum in the directory identifies the text of a lost record.
        if "byteorder" in self.lost:
            stated = self.lost["byteorder"].crc32
            order = next((one for one in ("little", "big") if zlib.crc32(one.encode()) == stated), None)
        if order in (None, "little"):
            return "little"
        if order == "big":
            return "big"
        raise DamagedCheckpoint(
            self.path, f"byte order {order!r}", expected="little or big", where="byteorder"
        )

    def read_pickle(self, name: str) -> PickleSequence:
        """Interpret a pickle record."""
        member = self.by_name.get(name)
        if member is None and name in self.lost:
            why = f"{self.lost[name].why}: the list of tensors can't be trusted"
            raise DamagedCheckpoint(self.path, why, where=name, code="checksum-mismatch")
        if member is None:
            raise DamagedCheckpoint(self.path, f"no {name}", where="zip directory")
        start = self.archive.offset(member)
        return read_pickles(self.archive.content(member), start, start + member.size, member.name)

    # Records that no format reads ---------------------------------------------------------------------

    def unknown(self, is_known: Callable[[str], bool]) -> dict[str, str]:
        """Return a description of each record that neither the format nor the archive uses, by name."""
        return {
            member.name.partition("/")[2]: self._describe(member)
            for name, member in self.by_name.items()
            if name not in _LAYOUT_RECORDS and name and not name.endswith("/") and not is_known(name)
        }

    def describe_directory(self, prefix: str) -> dict[str, str]:
        """Return a description of each record below a directory, by its name in there."""
        names = ((member.name.partition("/")[2], member) for member in self.archive.members)
        return {
            name[len(prefix) :]: self._describe(member) for name, member in names if name.startswith(prefix)
        }

    def _describe(self, member: Member) -> str:
        return describe_member(member, has_checksums=self.archive.has_checksums)

    # Other pickles in the archive -------------------------------------------------------------------

    def judge_others(
        self,
        read: Collection[str] = (),
        is_storage: Callable[[str], bool] = lambda name: name.startswith("data/"),
    ) -> Iterator[Finding]:
        """Judge all pickles and arrays of objects that are neither storages nor ``read``, by lower-case name.

        No framework loads them by itself, but a program that ships one may (``np.load`` opens any zip).
        """
        # Before version 1.2 a TorchScript archive named the records of its code in ``model.json``. A PyTorch
        # that still loads those reads that record, so code may be under any name.
        if _OLD_SCRIPT in self.by_name:
            message = "TorchScript from before version 1.2, whose code was not checked"
            yield not_scanned(self.by_name[_OLD_SCRIPT].name, message)
        for member in self.archive.members:
            name = member.name.partition("/")[2].casefold()
            if name in read or is_storage(name):
                continue
            if name == "data.pkl" or self._is_pickle(member):
                content, start = self.archive.content(member), self.archive.offset(member)
                yield from pickle_findings(content, start, start + member.size, member.name)
            elif self._head(member) == NPY_MAGIC:
                from ckpttool.formats.arrays.files import safety_of_member

                yield from safety_of_member(self.archive, member)

    def _is_pickle(self, member: Member) -> bool:
        try:
            content, start = self.archive.content(member), self.archive.offset(member)
            return is_pickle(content, start, start + member.size)
        except CheckpointError:  # what can't be inflated fails its checksum
            return False

    def _head(self, member: Member) -> bytes:
        try:
            content, start = self.archive.content(member), self.archive.offset(member)
            return content.read(start, min(member.size, len(NPY_MAGIC)), member.name)
        except CheckpointError:  # what can't be inflated fails its checksum
            return b""

    # The archive as a whole ---------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield findings about the archive: its directory, lost records, its version."""
        yield from self._findings
        for name, record in self.lost.items():
            if not name.startswith("data/"):  # a lost storage is a finding of its tensors
                yield error("checksum-mismatch", record.why, name)
        version = self.text("version") or self.text(".data/version")
        if version is None and not self.lost.keys().isdisjoint(("version", ".data/version")):
            return
        if version is None:
            yield warning("torch-version", "no version record")
        elif not version.isdigit() or int(version[:4]) not in VERSIONS:
            yield error("torch-version", f"archive version {version!r}; PyTorch reads 1 to 10", "version")

    def spans(self, tensors: Tensors) -> Iterator[Span]:
        """Yield each record with its checksum, and the element type of the tensors in it."""
        types = element_types(tensors)
        has_checksums = self.archive.has_checksums
        for member in self.archive.members:
            extent = Extent(self.path, member.payload, member.stored)
            # After ``torch.serialization.set_crc32_options(False)`` the checksum of every record is 0, which
            # means none, not a wrong one.
            crc = member.crc32 if has_checksums else None
            dtype = types.get((member.payload, member.stored)) if member.method == STORED else None
            read = reader_from(self.archive.content(member), self.archive.offset(member))
            inflated = None if member.method == STORED else member.size
            yield Span(extent, member.name, read, crc, dtype, self.byteorder, inflated)


def unused_storages(
    storages: Iterable[Storage], tensors: Tensors, unnamed: Iterable[int] = ()
) -> Iterator[Finding]:
    """Yield a warning if the file has storages that no tensor views, so their values aren't checked.

    ``storages`` are those that the pickle refers to (compressed ones aren't counted); ``unnamed`` has the
    sizes, in bytes, of those that it doesn't refer to.
    """
    used = {parts.storage for _, parts in tensors}.union(*(parts.described_by for _, parts in tensors))
    idle = [
        storage.nbytes for storage in storages if storage.extent is not None and storage.extent not in used
    ]
    sizes = [size for size in (*idle, *unnamed) if size]
    if sizes:
        message = f"{counted(len(sizes), 'record')} that no tensor uses, of {counted(sum(sizes), 'byte')}"
        yield warning("unused-storage", message)


def element_types(tensors: Tensors) -> dict[tuple[int, int], DType]:
    """Return the element type of each storage whose tensors agree on it, by offset and size in bytes."""
    # An untyped storage has no element type of its own. That of the tensors counts, if they agree: two
    # tensors may view the same bytes as different types.
    types: dict[tuple[int, int], DType | None] = {}
    for _, parts in tensors:
        if parts.storage is not None:
            key = (parts.storage.offset, parts.storage.nbytes)
            types[key] = parts.dtype if types.get(key, parts.dtype) is parts.dtype else None
    return {key: dtype for key, dtype in types.items() if dtype is not None}


def trailing_findings(judged: PickleSequence) -> Iterator[Finding]:
    """Yield an error if something follows the first pickle of ``data.pkl``."""
    if len(judged.pickles) > 1:
        yield error("pickle-trailing", f"{len(judged.pickles) - 1} more pickles after the first", "data.pkl")
    if judged.trailing:
        yield error("pickle-trailing", f"{judged.trailing:,} bytes after the pickle's STOP", "data.pkl")


class StorageRecords:
    """Finds the record of the storage that a persistent id names; the records are below ``directory``."""

    def __init__(self, records: Records, directory: str) -> None:
        self._records = records
        self._directory = directory
        self._byteorder = records.byteorder
        self._used: dict[str, Storage] = {}
        self._names: set[str] = set()  # of their records
        self._loss_reasons: dict[Extent, str] = {}

    def __call__(self, persistent_id: Any) -> Storage:
        """Return the storage."""
        path, archive = self._records.path, self._records.archive
        key, dtype, count = parse_persistent_id(path, persistent_id)
        where = f"{self._directory}/{key}"
        storage = self._used.get(key)
        if storage is None:
            member = self._records.by_name.get(where.casefold())
            if member is None and archive.rescue is not None:
                return self._lost(key, dtype, count, where)
            if member is None:
                found = "a tensor's record is missing"
                raise DamagedCheckpoint(path, found, where=where, code="storage-missing")
            content, offset = archive.content(member), archive.offset(member)
            extent = Extent(path, member.payload, member.stored) if member.method == STORED else None
            storage = Storage(key, dtype, member.size, content, offset, extent, self._byteorder)
            self._used[key] = storage
            self._names.add(where.casefold())
        # PyTorch compares the size of a record with the first persistent id of its key only. Another one with
        # a different type or count would read the same bytes as something else, so each of them is compared.
        expected = count * (1 if dtype is None else dtype.itemsize)
        if expected != storage.nbytes and archive.rescue is not None:
            return self._lost(key, dtype, count, where)
        if expected != storage.nbytes:
            found = f"a record of {storage.nbytes:,} bytes"
            raise DamagedCheckpoint(path, found, expected=f"{expected:,}", where=where, code="storage-size")
        return storage

    def _lost(self, key: str, dtype: DType | None, count: int, where: str) -> Storage:
        # A salvaged checkpoint keeps tensors whose record is lost. Their storage gets an extent of its own
        # beyond the end of the file, so that no two lost storages look shared, and reading one fails.
        path, nbytes = self._records.path, count * (1 if dtype is None else dtype.itemsize)
        extent = Extent(path, self._records.archive.source.size + 1 + len(self._used), nbytes)
        if (record := self._records.lost.get(where.casefold())) is not None:
            self._loss_reasons[extent] = f"{self._records.root}/{where}: {record.why}"
        self._used[key] = Storage(key, dtype, nbytes, Buffer(path, b""), 0, extent, self._byteorder)
        return self._used[key]

    def loss_reasons(self, tensors: Iterable[Tensor]) -> dict[str, str]:
        """Return the reason for each tensor whose record is lost, by name."""
        return {
            tensor.name: why
            for tensor in tensors
            if tensor.storage is not None and (why := self._loss_reasons.get(tensor.storage))
        }

    def holds(self, name: str) -> bool:
        """Return whether a record (name in lower case) is a storage that the pickle refers to."""
        return name in self._names

    def findings(self, tensors: Tensors) -> Iterator[Finding]:
        """Yield findings about all storages together; ``tensors`` are views of them."""
        archive = self._records.archive
        prefix = f"{self._directory}/"
        data = {name: member for name, member in self._records.by_name.items() if name.startswith(prefix)}
        idle = [member.size for name, member in data.items() if name not in self._names]
        yield from unused_storages(self._used.values(), tensors, idle)
        # ``torch.serialization.skip_data()`` leaves holes of zeros for the storages, and checksums of 0.
        filled = [member for member in data.values() if member.size]
        if filled and archive.has_checksums and not any(member.crc32 for member in filled):
            yield error(
                "values-not-written", "the tensors' values were never written (saved under skip_data)"
            )


def parse_persistent_id(path: str, persistent_id: Any) -> tuple[str, DType | None, int]:
    """Return key, element type and number of elements of a storage; None and bytes for an untyped one.

    The persistent id is ``("storage", class, key, location, count)``; Python 2 wrote byte strings.
    """
    try:
        if not isinstance(persistent_id, tuple | list):
            raise TypeError(f"a {type(persistent_id).__name__}")
        kind, storage_class, key, _, count = persistent_id[:5]
        if kind not in ("storage", b"storage") or type(count) is not int or count < 0:
            raise TypeError("an unknown kind, or no number of elements")
        key = key.decode("ascii") if isinstance(key, bytes) else key
        if not isinstance(key, str | int):
            raise TypeError(f"a key that is a {type(key).__name__}")
        return str(key), storage_dtype(storage_class), count
    except (TypeError, ValueError, UnicodeDecodeError) as failure:
        found = f"a persistent id that is not a storage: {failure}"
        raise DamagedCheckpoint(path, found, where="data.pkl", code="tensor-damaged") from failure

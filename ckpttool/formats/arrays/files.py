"""NumPy's own files: one array in ``.npy``, several of them in a zip, ``.npz``.

A ``.npy`` file is a magic number, a version, the length of a header, the header (a Python literal with
``descr``, ``fortran_order`` and ``shape``), and the elements. An array of Python objects has a pickle in
place of elements; it is scanned for dangerous calls, and no object of it is built.

Source: NumPy ``numpy/lib/_format_impl.py``, ``numpy/lib/_npyio_impl.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from ckpttool.containers.npy import MAGIC, ArrayHeader, itemsize, read_npy_header
from ckpttool.containers.pickle.pickle_nodes import Payload
from ckpttool.containers.pickle.pickle_safety import read_pickles
from ckpttool.containers.zip_reader import (
    EMPTY_MAGIC,
    STORED,
    Archive,
    Member,
    Rescue,
    duplicate_record,
    with_version_errors,
)
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, Truncated, error_of
from ckpttool.core.readable import Readable, reader_from, swap_width
from ckpttool.core.report import Finding, Severity, error, not_scanned, note, warning
from ckpttool.core.tensor import Extent, Path, Role, Span, Values, role_of
from ckpttool.core.values import Contiguous, Strided, is_contiguous
from ckpttool.formats.content.assembly import checkpoint_of_tree
from ckpttool.formats.content.plain_data import PayloadChecksums
from ckpttool.formats.content.tree import Flat, TensorParts
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.sidecar import ENTRY, apply_sidecar_record

_SUFFIX = ".npy"
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_OPAQUE = {"V1": "bits8", "V2": "bits16"}
"""Types by ``descr`` of arrays whose own type isn't recorded: NumPy writes bfloat16 as V2, float8 as V1."""
_MAX_INT64 = (1 << 63) - 1
MAX_BEHIND = 10_000
"""Limit on further arrays in one file that are scanned."""


class _Arrays:
    """The arrays of a file, and the findings about them.

    Attributes:
        descriptions: Arrays that are no tensors (text, dates, structures, objects), by name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.tensors: list[tuple[Path, TensorParts]] = []
        self.descriptions: dict[str, dict[str, object]] = {}
        self.findings: list[Finding] = []
        self.safety: list[Finding] = []

    def add(
        self,
        source: Readable,
        start: int,
        end: int,
        name: str,
        *,
        extent: bool,
        where: str | None,
        crc32: int | None = None,
    ) -> int:
        """Add the array between two offsets; return the offset after it.

        Args:
            source: Source of its bytes; ``start`` and ``end`` are offsets in it.
            name: Its name in the checkpoint.
            extent: Whether its elements are in the file as they are, neither compressed nor in another file.
            where: Name of its record, for errors.
            crc32: Checksum of the bytes between the two offsets, if it is known.
        """
        header = read_npy_header(source, start, end, where)
        try:
            nbytes = itemsize(header.descr) * math.prod(header.shape)
        except ValueError as failure:
            raise DamagedCheckpoint(self.path, str(failure), where=where, code="npy-header") from failure
        if header.has_objects:
            self.descriptions[name] = _describe_array(header, crc32)
            return self._add_objects(source, header, end, name, where)
        if nbytes > _MAX_INT64 or math.prod(header.shape) > _MAX_INT64:
            found = f"shape {list(header.shape)} overflows"
            raise DamagedCheckpoint(self.path, found, where=where, code="shape-overflow")
        if header.data + nbytes > end:
            found = f"truncated: {end - header.data:,} of {nbytes:,} bytes of elements"
            raise Truncated(self.path, found, where=where)
        dtype, order = element_type(header.descr)
        if dtype is None:
            self.descriptions[name] = _describe_array(header, crc32)
            return header.data + nbytes
        if dtype.is_opaque:
            message = f"elements of an unknown type of {dtype.itemsize} bytes, as of bfloat16 and float8"
            self.findings.append(note("opaque-type", message, where or name))
        storage = Extent(self.path, header.data, nbytes) if extent else None
        parts = _tensor_parts(name, header, dtype, order, source, nbytes, storage)
        self.tensors.append(((name,), parts))
        return header.data + nbytes

    def judge_rest(self, source: Readable, start: int, end: int, where: str | None) -> Finding:
        """Scan the bytes after an array, and return the finding about them."""
        # ``np.save`` into an open file appends arrays, and repeated ``np.load`` reads them: a warning. It
        # takes anything else for a pickle, so it is scanned as one, whatever it looks like: an error.
        offset, arrays = start, _Arrays(self.path)
        for _ in range(MAX_BEHIND):
            if not _begins_array(source, offset, end):
                break
            try:
                offset = arrays.add(source, offset, end, "", extent=False, where=where)
            except DamagedCheckpoint as failure:
                arrays.safety += failure.safety
                break
        self.safety += arrays.safety
        if offset >= end:
            return warning("trailing-bytes", f"{end - start:,} bytes after the array: another array", where)
        try:
            self.safety += read_pickles(source, offset, end, where).safety
        except DamagedCheckpoint as failure:
            self.safety += failure.safety
        message = f"{end - start:,} undeclared bytes after the array"
        return error("trailing-bytes", message, where)

    def _add_objects(
        self, source: Readable, header: ArrayHeader, end: int, name: str, where: str | None
    ) -> int:
        """Scan the pickle of an array of objects; return the offset of the next array, or ``end``."""
        self.findings.append(
            note("object-array", "Python objects in a pickle, which are not read", where or name)
        )
        # NumPy stores no length of the pickle, which ends at its STOP. If several arrays were saved into one
        # file, the next one begins there.
        judgement = read_pickles(source, header.data, end, where)
        self.safety += judgement.safety
        end_of_pickle = judgement.pickles[-1].end
        if len(judgement.pickles) == 1 and _begins_array(source, end_of_pickle, end):
            return end_of_pickle
        if judgement.trailing or len(judgement.pickles) > 1:
            self.findings.append(error("pickle-trailing", "data after the pickle's STOP", where or name))
        return end


def _begins_array(source: Readable, offset: int, end: int) -> bool:
    return offset < end and source.read(offset, min(end - offset, len(MAGIC))) == MAGIC


def _tensor_parts(
    name: str,
    header: ArrayHeader,
    dtype: DType,
    order: Literal["little", "big"],
    source: Readable,
    nbytes: int,
    storage: Extent | None,
) -> TensorParts:
    # An array in Fortran order is read through strides, in elements: the first axis is the densest. If such
    # an array has at most one axis longer than 1, both orders are the same bytes, and it is read as they are.
    shape, swap = header.shape, swap_width(dtype.word_bytes, order)
    strides = tuple(math.prod(shape[:axis]) for axis in range(len(shape)))
    values: Values
    in_place = not header.fortran_order or is_contiguous(shape, strides) or not nbytes
    if in_place:
        values = Contiguous(source, header.data, nbytes, swap)
    else:
        values = Strided(source, header.data, dtype.itemsize, shape, strides, swap)
    is_state = math.prod(shape) == 1 and role_of((name,), shape) is Role.TRAINING
    role = Role.TRAINING if is_state else None
    return TensorParts(dtype, shape, values, storage if in_place else None, storage, order, None, role)


def element_type(descr: Any) -> tuple[DType | None, Literal["little", "big"]]:
    """Return type and byte order of the elements of ``descr``; None for text, dates and structures."""
    if not isinstance(descr, str):
        return None, "little"
    order: Literal["little", "big"] = "big" if descr.startswith(">") else "little"
    code = descr.lstrip("<>|=")
    if code in ("b1", "?"):
        return BY_NAME["bool"], order
    if code in _OPAQUE:
        return BY_NAME[_OPAQUE[code]], order
    if code[:1] in _KINDS and code[1:].isdecimal() and len(code) <= 3:
        return BY_NAME.get(f"{_KINDS[code[0]]}{8 * int(code[1:])}"), order
    return None, order


def _describe_array(header: ArrayHeader, crc32: int | None) -> dict[str, object]:
    """Return metadata of an array that is no tensor; ``crc32`` is the checksum of header and elements."""
    dtype = header.descr if isinstance(header.descr, str) else repr(header.descr)[:1000]
    description: dict[str, object] = {"<class>": "numpy.ndarray", "dtype": dtype, "shape": list(header.shape)}
    return description if crc32 is None else {**description, "CRC-32": f"{crc32:08x}"}


class Npy(Format):
    """One array: ``.npy``."""

    name: ClassVar[str] = "numpy"
    suffixes = (".npy",)

    def matches(self, probe: Probe) -> bool:
        return probe.head.startswith(MAGIC)

    def open(self, probe: Probe) -> Checkpoint:
        source, arrays = probe.source, _Arrays(probe.path)
        end = arrays.add(source, 0, source.size, "tensor", extent=True, where=None)
        if end < source.size:
            arrays.findings.append(arrays.judge_rest(source, end, source.size, None))

        def spans() -> Iterator[Span]:
            for path, parts in arrays.tensors:
                if parts.storage is not None:
                    read = reader_from(source, parts.storage.offset)
                    yield Span(parts.storage, str(path[0]), read, None, parts.dtype, parts.byteorder)

        checkpoint = checkpoint_of_tree(
            probe=probe,
            format=self.name,
            variant="npy",
            flat=Flat(arrays.tensors, arrays.descriptions),
            files=(FileEntry(probe.path, source.size),),
            spans=spans,
            producer=Producer("numpy"),
            findings=tuple(arrays.findings),
            safety=tuple(arrays.safety),
        )
        if not arrays.descriptions:
            return checkpoint

        @functools.cache
        def metadata() -> Mapping[str, object]:
            # Such an array is compared by its checksum, for which the file is read on demand.
            checksum = PayloadChecksums().of(Payload(source, 0, source.size, "bytes"))
            if checksum is None:
                return arrays.descriptions
            ((name, description),) = arrays.descriptions.items()
            return {name: {**description, "CRC-32": f"{checksum[1]:08x}"}}

        return checkpoint.replace(metadata=metadata)


class Npz(Format):
    """Several arrays in a zip: ``.npz``."""

    name: ClassVar[str] = "numpy"
    suffixes = (".npz",)

    def matches(self, probe: Probe) -> bool:
        if not probe.is_zip:
            return False
        try:
            names = list(probe.archive.names)
        except CheckpointError:  # a damaged directory: the first record's own header still has a name
            names = [probe.first_record]
        if not names:  # an empty zip has no other sign than its suffix
            return probe.head.startswith(EMPTY_MAGIC) and probe.name.endswith(".npz")
        are_arrays = [name.endswith(_SUFFIX) or name == ENTRY for name in names]
        # In a rescued zip some names may be damaged.
        return all(are_arrays) or (probe.is_rescued_zip and sum(are_arrays) > len(names) / 2)

    def open(self, probe: Probe) -> Checkpoint:
        archive, arrays = probe.archive, _Arrays(probe.path)
        members = archive.members if archive.rescue is None else _rescued_arrays(archive.rescue)
        if len({member.name for member in members}) < len(members):
            raise duplicate_record(probe.path)
        arrays.findings += with_version_errors(archive.findings)
        entry = next((member for member in members if member.name == ENTRY), None)
        for member in members:
            if member is not entry:
                _add_member(archive, arrays, member)

        def spans() -> Iterator[Span]:
            for member in members:
                extent = Extent(probe.path, member.payload, member.stored)
                read = reader_from(archive.content(member), archive.offset(member))
                inflated = None if member.method == STORED else member.size
                yield Span(extent, member.name, read, member.crc32, inflated=inflated)

        checkpoint = checkpoint_of_tree(
            probe=probe,
            format=self.name,
            variant="npz",
            flat=Flat(arrays.tensors, arrays.descriptions),
            files=(FileEntry(probe.path, probe.source.size),),
            spans=spans,
            producer=Producer("numpy"),
            findings=tuple(arrays.findings),
            safety=tuple(arrays.safety),
        )
        # Without its directory, a zip doesn't record which arrays it had.
        missing = {name.removesuffix(_SUFFIX): one.why for name, one in archive.lost.items() if name != ENTRY}
        checkpoint = checkpoint.replace(
            complete=not archive.is_cut, names_all=not archive.is_cut, missing=missing
        )
        return apply_sidecar_record(checkpoint, archive, entry)


def _rescued_arrays(rescue: Rescue) -> tuple[Member, ...]:
    """Return rescued records; if directory and record differ in a name, the one that an array can have."""
    arrays = {one.name: name for name, one in rescue.aliases.items() if name.endswith(_SUFFIX)}
    return tuple(
        one if one.name.endswith(_SUFFIX) else one._replace(name=arrays.get(one.name, one.name))
        for one in rescue.members
    )


def safety_of(archive: Archive) -> list[Finding]:
    """Return the safety findings of all arrays in a zip."""
    arrays = _Arrays(archive.source.path)
    for member in archive.members:
        if member.name != ENTRY:
            _add_member(archive, arrays, member)
    return arrays.safety


def safety_of_array(source: Readable, name: str) -> list[Finding]:
    """Return the safety findings of a source that begins with an array."""
    arrays = _Arrays(source.path)
    arrays.add(source, 0, source.size, name, extent=False, where=name)
    return arrays.safety


def safety_of_member(archive: Archive, member: Member) -> list[Finding]:
    """Return the safety findings of the array in one record of a zip."""
    arrays = _Arrays(archive.source.path)
    _add_member(archive, arrays, member)
    return arrays.safety


def _add_member(archive: Archive, arrays: _Arrays, member: Member) -> None:
    content, start = archive.content(member), archive.offset(member)
    name, end = member.name.removesuffix(_SUFFIX), start + member.size
    try:
        in_place = member.method == STORED
        end_of_array = arrays.add(
            content, start, end, name, extent=in_place, where=member.name, crc32=member.crc32
        )
    except DamagedCheckpoint as failure:
        arrays.findings.append(error_of(failure, member.name))
        arrays.safety += failure.safety
        arrays.safety.append(not_scanned(member.name, "it could not be read"))
        return
    if end_of_array < end:
        finding = arrays.judge_rest(content, end_of_array, end, member.name)
        arrays.findings.append(finding._replace(severity=Severity.ERROR))

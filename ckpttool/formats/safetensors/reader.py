"""safetensors: a JSON header with type, shape and offsets of each tensor, then their elements; no code.

::

    uint64, little-endian    length of the header in bytes, at most ``MAX_HEADER``
    header                   {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets"}, ...}
    data                     elements in C order; offsets are bytes after the header

Sorted by offset, the tensors cover the data without gap or overlap. Each reason for which the library refuses
a file is an error with its own code here; oddities that it accepts are warnings.

Source: huggingface/safetensors, ``safetensors/src/tensor.rs`` and the format section of its README.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.dtypes import BY_SAFETENSORS, DType
from ckpttool.core.errors import DamagedCheckpoint, Truncated, require_at_most
from ckpttool.core.readable import reader_from
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.tensor import Extent, Role, Span, Tensor
from ckpttool.core.training import training_state
from ckpttool.core.values import Contiguous
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.sidecar import ENTRY, apply_sidecar
from ckpttool.storage.source import Source

MAX_HEADER = 100_000_000
"""Limit on the header's bytes, as in tensor.rs."""

MAX_AXES = 64
"""Limit on axes; NumPy and PyTorch hold no more."""

_MAX_U64 = (1 << 64) - 1
_LENGTH = struct.Struct("<Q")
_BLANKS = " \t\n\r"
# An object with no key or a key in quotes, for files whose header is too long to be believed.
_OBJECT_START = re.compile(rb'[ \t\n\r]*\{[ \t\n\r]*["}]')
_FIELDS = ("dtype", "shape", "data_offsets")
_METADATA = "__metadata__"
_OPTIMIZER = re.compile(r"(optim(izer)?s?|opt_state)([._]|$)")
_FRAMEWORKS = {"pt": "pytorch", "tf": "tensorflow", "flax": "flax", "np": "numpy", "mlx": "mlx"}


class Safetensors(Format):
    """One safetensors file."""

    name: ClassVar[str] = "safetensors"
    suffixes = (".safetensors",)

    def matches(self, probe: Probe) -> bool:
        # There is no magic number. With a plausible length, "{" after it is enough. With a longer one the
        # file is still recognised, and refused by ``open``, unless its first 8 bytes are text: then it is
        # JSON.
        head = probe.head
        if len(head) <= _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(head)
        if length <= MAX_HEADER:
            return head[_LENGTH.size :].lstrip(_BLANKS.encode()).startswith(b"{")
        is_text = all(9 <= byte < 127 for byte in head[: _LENGTH.size])
        return not is_text and _OBJECT_START.match(head, _LENGTH.size) is not None

    def open(self, probe: Probe) -> Checkpoint:
        source, path = probe.source, probe.path
        text = _read_header(source)
        header = parse_json(path, text, "header")
        if not isinstance(header, dict):
            raise DamagedCheckpoint(
                path,
                f"a header of type {type(header).__name__}",
                expected="an object",
                code="header-not-object",
            )
        if isinstance(header, DuplicateKeyObject):
            raise _damaged(path, "a duplicate name in the header", header.key, "duplicate-key")
        metadata = _read_metadata(path, header.pop(_METADATA, None))
        findings = tuple(_header_warnings(text, header, metadata))
        start = _LENGTH.size + len(text)
        tensors = tuple(_read_tensors(source, start, header))
        end = max((one.extent.end for one in tensors if one.extent), default=start)
        if source.size < end and not probe.allows_losses:
            raise Truncated(path, f"truncated: {source.size:,} of {end:,} bytes")
        if source.size > end:
            found = f"trailing bytes after the last tensor: {source.size - end:,}"
            if not probe.allows_losses:
                raise DamagedCheckpoint(path, found, expected=f"{end:,} in all", code="trailing-bytes")
            findings += (error("trailing-bytes", found),)
        entry = metadata.pop(
            ENTRY, None
        )  # ckpttool's sidecar: it is applied at the end, and is no metadata of the user

        def spans() -> Iterator[Span]:
            for tensor in tensors:
                if tensor.extent is not None:
                    read = reader_from(source, tensor.extent.offset)
                    yield Span(tensor.extent, tensor.name, read, None, tensor.dtype)

        checkpoint = Checkpoint(
            path=path,
            format=self.name,
            variant=None,
            tensors=tensors,
            files=(FileEntry(path, source.size),),
            spans=spans,
            metadata=lambda: metadata,
            training=lambda: training_state(metadata, {}, probe.name),
            producer=Producer(_FRAMEWORKS.get(metadata.get("format", ""))),
            findings=findings,
            close=probe.close,
        )
        return checkpoint if entry is None else apply_sidecar(checkpoint, entry, f"{_METADATA}.{ENTRY}")


def _damaged(path: str, found: str, where: str, code: str, expected: str | None = None) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, found, expected=expected, where=where, code=code)


def _read_header(source: Source) -> bytes:
    """Return the bytes of the header."""
    if source.size < _LENGTH.size:
        raise Truncated(source.path, f"truncated: {source.size} bytes", expected=f"at least {_LENGTH.size}")
    # The length is the first number of the file, and may be anything. It is compared with the library's limit
    # and with the size of the file before a byte of the header is read.
    (length,) = _LENGTH.unpack(source.read(0, _LENGTH.size))
    require_at_most(source.path, MAX_HEADER, length, "a header of {:,} bytes", code="header-too-large")
    if _LENGTH.size + length > source.size:
        found = f"truncated: {source.size:,} bytes"
        raise Truncated(source.path, found, expected=f"{_LENGTH.size + length:,} for the header alone")
    return source.read(_LENGTH.size, length, "header")


def _read_metadata(path: str, metadata: object) -> dict[str, str]:
    """Return ``__metadata__``, which maps text to text; null, which the library accepts, is empty."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise _damaged(path, f"type {type(metadata).__name__}", _METADATA, "metadata-not-text", "an object")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _damaged(
                path, f"{key!r} of type {type(value).__name__}", _METADATA, "metadata-not-text", "text"
            )
    return metadata


def _header_warnings(
    text: bytes, header: Mapping[str, Any], metadata: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield warnings about a header that the library accepts, although its own writer never makes one."""
    if text[:1].isspace() or text.rstrip(b" ")[-1:].isspace():
        yield warning("header-whitespace", "white space other than trailing spaces around the JSON", "header")
    if len(text) % 8:
        yield warning("unaligned-data", f"a header of {len(text):,} bytes, no multiple of 8", "header")
    if isinstance(metadata, DuplicateKeyObject):
        yield warning("metadata-duplicate-key", metadata.problem, _METADATA)
    if "" in header:
        yield warning("empty-name", "a tensor without a name", "header")
    large = [name for name, entry in header.items() if isinstance(entry, dict) and len(entry) > len(_FIELDS)]
    if large:
        field = next((field for field in header[large[0]] if field not in _FIELDS), "")
        message = f"fields that the format does not know, like {field!r}, in entries: {len(large):,}"
        yield warning("unknown-field", message, large[0])


_Entry = tuple[int, int, str, DType, tuple[int, ...]]
"""Entry of a tensor in the header: begin and end in bytes after the header, name, type, shape."""


def _read_tensors(source: Source, start: int, header: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors by offset; ``start`` is the offset of the data in bytes."""
    path = source.path
    entries = [_read_entry(path, name, entry) for name, entry in header.items()]
    # By both ends, so that an empty tensor comes before the one that begins at its offset: the extents then
    # follow each other without gaps or overlaps.
    entries.sort(key=lambda entry: entry[:2])
    _check_contiguous(path, entries)
    for begin, end, name, dtype, shape in entries:
        extent = Extent(path, start + begin, end - begin)
        values = Contiguous(source, start + begin, end - begin)
        role = Role.OPTIMIZER if _OPTIMIZER.match(name) else Role.WEIGHTS
        yield Tensor((name,), dtype, shape, role, values, extent, extent)


def _check_contiguous(path: str, entries: list[_Entry]) -> None:
    """Require that each extent begins at the end of the previous one.

    Raises:
        DamagedCheckpoint: There is a gap or an overlap.
    """
    # Every byte belongs to one tensor: overlaps could turn a small file into huge tensors, and a gap could
    # hide another file (a zip, a pickle) that some other program would load.
    expected, predecessor = 0, "the header"
    for begin, end, name, *_ in entries:
        if begin != expected:
            code = "offsets-gap" if begin > expected else "offsets-overlap"
            found = f"bytes {begin:,}..{end:,} do not follow {predecessor}"
            raise _damaged(path, found, name, code, f"to begin at {expected:,}")
        expected, predecessor = end, repr(name)


def _read_entry(path: str, name: str, entry: object) -> _Entry:
    """Return the entry of a tensor, with its fields checked."""
    if not isinstance(entry, dict):
        raise _damaged(
            path, f"an entry of type {type(entry).__name__}", name, "entry-not-object", "an object"
        )
    if isinstance(entry, DuplicateKeyObject):
        raise entry.error(path, name)
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as missing:
        raise _damaged(path, f"no {missing}", name, "field-missing") from missing
    if not isinstance(dtype, str) or dtype not in BY_SAFETENSORS:
        raise _damaged(path, f"dtype {dtype!r:.100}", name, "unknown-dtype", "one that the format knows")
    _check_numbers(path, name, shape, "shape")
    _check_numbers(path, name, offsets, "data_offsets")
    if len(offsets) != 2:
        raise _damaged(path, f"{len(offsets)} data_offsets", name, "offsets-not-two", "2")
    nbytes = _nbytes(path, name, BY_SAFETENSORS[dtype], shape)
    begin, end = offsets
    if begin > end:
        found = f"bytes {begin:,}..{end:,} end before they begin"
        raise _damaged(path, found, name, "offsets-reversed")
    if end - begin != nbytes:
        found = f"bytes {begin:,}..{end:,} are {end - begin:,}"
        raise _damaged(path, found, name, "size-mismatch", f"{nbytes:,} for {dtype} {shape}")
    return begin, end, name, BY_SAFETENSORS[dtype], tuple(shape)


def _check_numbers(path: str, name: str, numbers: object, field: str) -> None:
    """Require a list of 64-bit unsigned integers."""
    if not isinstance(numbers, list):
        raise _damaged(
            path, f"{field} of type {type(numbers).__name__}", name, "number-out-of-range", "a list"
        )
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MAX_U64:
            raise _damaged(path, f"{field} of {number!r:.100}", name, "number-out-of-range", "0 to 2^64 - 1")


def _nbytes(path: str, name: str, dtype: DType, shape: list[int]) -> int:
    """Return the bytes of a tensor."""
    require_at_most(path, MAX_AXES, len(shape), "{:,} axes", name, code="too-many-axes")
    # As in the library no step may exceed 64 bits, even if a later axis of 0 would make the product 0.
    bits = 1
    for number in (*shape, dtype.bits):
        bits *= number
        if bits > _MAX_U64:
            raise _damaged(path, f"shape {shape} overflows", name, "shape-overflow", "under 2^64 bits")
    if bits % 8:
        found = f"{dtype} {shape} has {bits:,} bits"
        raise _damaged(path, found, name, "sub-byte-size", "whole bytes")
    return bits // 8

"""Renders everything but tensors in a pickle or archive as plain data: JSON values and one-line descriptions.

Content that is too long to be shown, or of no JSON type, is described with its size and CRC-32, so that
``diff`` notices a change in it.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Call, Global, Payload, Persistent
from ckpttool.containers.zip_reader import Archive, Member
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.core.training import Scalar

MAX_SUMMED = 1 << 26
"""Limit on bytes of a file that are read for the checksums of descriptions; further ones have no checksum."""
MAX_WORDS = 1 << 20
"""Limit on the parts of all lines of one renderer; further objects are described by their class alone."""
_MAX_TEXT = 4096
_MAX_INTEGER_BITS = 4096
_MAX_LINE = 200
_SHOWN_BYTES = 16
_BLOCK = 1 << 20
_SMALL = 256
"""Byte strings up to this size are described again each time, which is faster than a look-up."""
_NO_LINE = 64
"""Limit on the parts of an object that is described in one line."""
RECORDS = "other records"
"""Metadata key of records of an archive that its format doesn't know."""


class KeyText(str):
    """Text of a key that isn't a string, such as 1; equal to the string "1", but of another type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Word:
    """Literal text in a line, such as a bracket; other pieces are nodes to be rendered."""

    text: str


class PlainDataRenderer:
    """Renders the nodes of one pickle; large ones are rendered once, however often they are shared."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, object]] = {}
        self._words = MAX_WORDS
        self._sums = PayloadChecksums()

    def render(self, node: object) -> object:
        """Return a node as plain data, or its description."""
        # Most nodes are short strings and numbers, which are returned as they are. Of the others, only those
        # whose description takes a checksum over many bytes are worth remembering.
        if node is None or isinstance(node, bool | float):
            return node
        if isinstance(node, str) and len(node) <= _MAX_TEXT:
            return node
        if isinstance(node, int) and node.bit_length() <= _MAX_INTEGER_BITS:
            return node
        if isinstance(node, complex | Global):
            return str(node)
        if not isinstance(node, Payload | str | int) and not (isinstance(node, bytes) and len(node) > _SMALL):
            return self._describe(node)
        known = self._known.get(id(node))
        if known is None:
            # The node is kept as well: an address alone could be reused for another node.
            known = self._known[id(node)] = node, self._describe(node)
        return known[1]

    def _describe(self, node: object) -> object:
        if isinstance(node, str):
            crc = zlib.crc32(node.encode("utf-8", "surrogatepass"))
            return f"{node[:_MAX_TEXT]}… ({len(node):,} characters, CRC-32 {crc:08x})"
        if isinstance(node, int):
            data = node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True)
            return f"<integer of {node.bit_length():,} bits, CRC-32 {zlib.crc32(data):08x}>"
        if isinstance(node, bytes | bytearray):
            return describe_bytes(node)
        if isinstance(node, Payload):
            return self._sums.describe(node)
        if isinstance(node, Call) and node.is_of("torch", "device"):
            return ":".join(str(self.render(arg)) for arg in node.args)
        return self._line(node)

    def _line(self, node: object) -> str:
        """Return a node with all its parts in one line; a long one is cut, with the CRC-32 of all of it."""
        # The line is never held as a whole: a small pickle can make one of many gigabytes by sharing, for
        # which ``MAX_WORDS`` is the limit, and only its beginning is shown.
        shown, length, crc = "", 0, 0
        for word in self._line_pieces(node):
            if self._words < 0:
                break
            length += len(word)
            crc = zlib.crc32(word.encode("utf-8", "surrogatepass"), crc)
            if len(shown) <= _MAX_LINE:
                shown += word
        if self._words < 0:
            name = node.function if isinstance(node, Call) and isinstance(node.function, Global) else ""
            return f"{name or type(node).__name__}(…)"
        if length <= _MAX_LINE:
            return shown
        return f"{shown[:_MAX_LINE]} … {length:,} characters, CRC-32 {crc:08x}"

    def _line_pieces(self, root: object) -> Iterator[str]:
        """Yield the pieces of a line, without recursion, up to ``MAX_WORDS``, as a cycle never ends."""
        pending: list[object] = [root]
        while pending and self._words >= 0:
            self._words -= 1
            node = pending.pop()
            if isinstance(node, _Word):
                yield node.text
            elif (parts := _pieces(node)) is not None:
                self._words -= len(parts)
                pending += reversed(parts)
            elif node is None or isinstance(node, str | int | float):
                yield repr(self.render(node))
            elif isinstance(node, bytes | bytearray | Payload | Global | complex):
                yield str(self.render(node))
            else:
                yield f"<{type(node).__name__}>"


def describe(node: object) -> object:
    """Return one node as plain data, or its description."""
    return PlainDataRenderer().render(node)


def describe_bytes(data: bytes | bytearray) -> str:
    """Return a description of bytes: in hexadecimal if they are few, otherwise their checksum."""
    if len(data) <= _SHOWN_BYTES:
        return f"<{len(data):,} bytes: {data.hex(' ')}>"
    return describe_content(len(data), zlib.crc32(data))


class PayloadChecksums:
    """Computes checksums of payloads in one file, reading ``MAX_SUMMED`` bytes at most."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Payload, tuple[int, int]]] = {}
        self._left = MAX_SUMMED

    def of(self, payload: Payload) -> tuple[int, int] | None:
        """Return size and CRC-32 of a payload; None if the limit would be exceeded."""
        if id(payload) not in self._known:
            if payload.nbytes > self._left:
                return None
            self._left -= payload.nbytes
            nbytes = crc = 0
            for data in payload.blocks(_BLOCK):
                nbytes, crc = nbytes + len(data), zlib.crc32(data, crc)
            self._known[id(payload)] = payload, (nbytes, crc)
        return self._known[id(payload)][1]

    def describe(self, payload: Payload) -> str:
        """Return a description of a payload."""
        checksum = self.of(payload)
        is_text = payload.kind == "text"
        if checksum is None:
            return f"<{payload.nbytes:,} bytes of {'text' if is_text else 'data'}>"
        return describe_content(*checksum, what="text of " if is_text else "")


# Objects in one line --------------------------------------------------------------------------------


def _pieces(node: object) -> list[object] | None:
    """Return the parts of a node with the punctuation of a line between them; None if it has no parts."""
    if isinstance(node, Call):
        kwargs = list(map(list, node.kwargs.items())) if isinstance(node.kwargs, dict) else []
        pieces: list[object] = [
            node.function,
            _Word("("),
            *_comma_separated([*node.args, *kwargs]),
            _Word(")"),
        ]
        for rest in (node.state, node.items, list(map(list, node.pairs))):
            if rest is not None and rest != []:
                pieces += [_Word(" with "), rest]
        return pieces
    if isinstance(node, dict):
        return [_Word("{"), *_comma_separated(map(list, node.items())), _Word("}")]
    if isinstance(node, list | tuple):
        return [_Word("["), *_comma_separated(node), _Word("]")]
    if isinstance(node, set | frozenset):
        return [_Word("{"), *_comma_separated(stable_order(node)), _Word("}")]
    if isinstance(node, Persistent):
        return [_Word("<a reference to "), node.id, _Word(">")]
    return None


def _comma_separated(parts: Iterable[object]) -> Iterator[object]:
    for index, part in enumerate(parts):
        if index:
            yield _Word(", ")
        yield part


def stable_order(items: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the items of a set in an order that doesn't depend on the process's hash seed."""
    return sorted(items, key=_order_key)


def _order_key(item: object) -> tuple[str, str]:
    if isinstance(item, int):
        return type(item).__name__, hex(item)  # ``str`` refuses integers of more than 4,300 digits
    if isinstance(item, str | float | bytes):
        return type(item).__name__, repr(item)
    if isinstance(item, tuple):
        return "tuple", repr([_order_key(part) if not isinstance(part, tuple) else "" for part in item])
    return type(item).__name__, str(item) if isinstance(item, Global) else ""


def small_call_nodes(call: Call) -> Sequence[object] | None:
    """Return all nodes below a call, at any depth; None if they are too many for one line."""
    nodes: list[object] = [call]
    index = 0
    while index < len(nodes):
        pieces = _pieces(nodes[index]) or ()
        nodes += [piece for piece in pieces if not isinstance(piece, _Word)]
        index += 1
        if len(nodes) > _NO_LINE:
            return None
    return nodes[1:]


# Records of archives, and operators of graphs ---------------------------------------------------------


def describe_content(nbytes: int, crc: int, *, what: str = "") -> str:
    """Return a description of content: a given text, its size and its checksum."""
    return f"<{what}{nbytes:,} bytes, CRC-32 {crc:08x}>"


def describe_member(member: Member, *, has_checksums: bool = True) -> str:
    """Return a description of a record of a zip from the directory; its content isn't read."""
    if not has_checksums:
        return f"<{member.size:,} bytes of a record without a checksum>"
    return describe_content(member.size, member.crc32)


def describe_members(archive: Archive, is_known: Callable[[str], bool]) -> dict[str, str]:
    """Return descriptions of the records of an archive for which ``is_known`` is false, by name."""
    return {
        member.name: describe_member(member, has_checksums=archive.has_checksums)
        for member in archive.members
        if not member.name.endswith("/") and not is_known(member.name)
    }


def other_records(records: Mapping[str, str], metadata: Mapping[str, object]) -> dict[str, object]:
    """Return records under ``RECORDS``, with ``'`` added while metadata has the key; {} without records."""
    key = RECORDS
    while key in metadata:
        key += "'"
    return {key: dict(sorted(records.items()))} if records else {}


def describe_operators(operators: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Return the number of operators of each kind in a graph, and the CRC-32 of their settings.

    ``operators`` has kind and settings of each, in any order.
    """
    kinds: dict[str, Counter[bytes]] = {}
    for kind, settings in operators:
        kinds.setdefault(kind, Counter())[settings] += 1
    return {
        kind: f"<{counted(count.total(), 'operator')}, CRC-32 {digest(sorted(count.elements())):08x}>"
        for kind, count in sorted(kinds.items())
    }


def digest(parts: Iterable[bytes]) -> int:
    """Return the CRC-32 of byte strings, each after its length: ("ab", "c") and ("a", "bc") differ."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), crc))
    return crc


_SCALARS = {"float64": "<d", "float32": "<f", "float16": "<e"}


def lazy_scalar(tensor: Tensor) -> Scalar:
    """Return a function that reads the one element of a tensor, or returns None if the file lacks it."""

    def read() -> float | int | None:
        data = tensor.tobytes()
        if len(data) != tensor.nbytes:
            return None
        if tensor.dtype.name in _SCALARS:
            (number,) = struct.unpack(_SCALARS[tensor.dtype.name], data)
            return float(number) if tensor.dtype.name == "float64" else shortest_decimal(number)
        # The 16 bits of a bfloat16 are the upper half of a float32, and worth three decimal digits.
        if tensor.dtype.name == "bfloat16":
            (number,) = struct.unpack("<f", b"\0\0" + data)
            return float(f"{number:.3g}")
        if tensor.dtype.kind == "integer":
            return int.from_bytes(data, "little", signed=tensor.dtype.name.startswith("int"))
        return None

    return read


def shortest_decimal(number: float) -> float:
    """Return the shortest decimal of a float32: 0.02 for 0.019999999552965164."""
    # 6 digits always survive a float32, and 9 always identify one.
    if not math.isfinite(number):
        return number
    same = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next(short for short in candidates if struct.pack("<f", short) == same)

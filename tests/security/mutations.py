"""Structure-aware mutations: what is changed is a part of the format, and its checksums are right again."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from zipfile import BadZipFile, ZipFile

from fixtures import zip_raw
from fixtures.table_raw import masked
from fixtures.zip_raw import DEFLATED, UTF8, Member

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    127,
    128,
    255,
    256,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)
OPCODES = b"(.0123456789FGIJKLMNPQRSTUVXabcdeghijloqprstu}])" + bytes(range(0x80, 0x99))
DANGEROUS = (
    ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"),
    ("builtins", "getattr"), ("__builtin__", "eval"), ("functools", "partial"),
    ("numpy.random._pickle", "__generator_ctor"),
    ("torch._tensor", "_rebuild_from_type_v2"), ("torch.storage", "_load_from_bytes"), ("_codecs", "encode"),
    ("copyreg", "_reconstructor"), ("builtins", "map"),
    ("collections", "defaultdict"), ("pathlib", "PosixPath"),
)  # fmt: skip
SPARE = (
    *(f"c{module}\n{name}\n".encode() for module, name in DANGEROUS),
    *(b"\x8c" + bytes([len(a)]) + a + b"\x8c" + bytes([len(b)]) + b + b"\x93"
      for a, b in ((module.encode(), name.encode()) for module, name in DANGEROUS)),
    b"X\1\0\0\0a\x85R", b"R", b"\x81", b"b", b"2", b"\x94", b"q\0", b"h\0", b"h\1", b"r\0\0\0\0", b"(",
    b"t", b"o", b"0", b"1", b"s", b"u", b"a", b"e", b"N", b"}", b"]", b")", b"\x85", b"\x86", b"\x8f",
    b"\x90", b"\x91", b"\x92", b"Q", b"ios\nsystem\n", b"\x95" + bytes(8), b"\x82\1", b"g0\n", b"p0\n",
    b"I1\n", b"F1.5\n", b"K\1", b".",
)  # fmt: skip
"""Opcodes that are put into pickles, beside those of other pickles."""


def opcodes(data: bytes) -> list[bytes]:
    """Return the opcodes of the pickles that lie one behind the other, with their arguments."""
    parts: list[bytes] = []
    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        start = stream.tell()
        try:
            starts = [position for _, _, position in pickletools.genops(stream) if position is not None]
        except (ValueError, IndexError, UnicodeDecodeError, struct.error):
            return [*parts, data[start:]]
        ends = [*starts[1:], stream.tell()]
        parts += [data[begin:end] for begin, end in zip(starts, ends, strict=True)]
    return parts


def pickle_stream(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a pickle with a few opcodes replaced, added, removed, repeated, changed or spliced."""
    parts = opcodes(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(parts)) if parts else 0
        until = min(len(parts), at + random.randint(1, 4))
        match random.randrange(8):
            case 0:
                parts[at:until] = [random.choice(SPARE)]
            case 1:
                parts.insert(at, random.choice(SPARE))
            case 2:
                del parts[at:until]
            case 3:
                parts[at:at] = parts[at:until]
            case 4 if parts:
                parts[at] = _argument(parts[at], random)
            case 5 if parts:
                parts[at] = bytes([random.choice(OPCODES)]) + parts[at][1:]
            case 6 if others:
                other = opcodes(random.choice(others))
                cut = random.randrange(len(other))
                parts[at:] = other[cut:] if random.random() < 0.5 else other[cut : cut + 8] + parts[at:]
            case _:
                target = random.randrange(len(parts)) if parts else 0
                parts[target:target] = parts[at:until]
    return b"".join(parts)


def _argument(part: bytes, random: Random) -> bytes:
    """Return an opcode with another argument."""
    code, argument = part[:1], bytearray(part[1:])
    if not argument:
        return random.choice(SPARE)
    if len(argument) in (1, 2, 4, 8) and random.random() < 0.7:
        number = random.choice(NUMBERS) & ((1 << 8 * len(argument)) - 1)
        return code + number.to_bytes(len(argument), "little")
    argument[random.randrange(len(argument))] = random.choice(b"\0\n.0aA_\x80\xff")
    return code + bytes(argument)


def any_bytes(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return bytes with a few of them changed, removed or repeated, most at their beginning or end."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        if not out:
            return bytes(random.randrange(256) for _ in range(8))
        near = min(len(out), random.choice((16, 256, 4096, len(out))))
        at = random.randrange(near)
        at = at if random.random() < 0.7 else len(out) - 1 - at
        match random.randrange(5):
            case 0:
                out[at] ^= 1 << random.randrange(8)
            case 1:
                size = random.choice((1, 2, 4, 8))
                number = random.choice(NUMBERS) & ((1 << 8 * size) - 1)
                out[at : at + size] = number.to_bytes(size, "little")
            case 2:
                del out[at : at + random.randint(1, 16)]
            case 3:
                out[at:at] = out[at : at + random.randint(1, 16)]
            case _:
                del out[len(out) - random.randint(0, 16) :]
    return bytes(out)


def json_text(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a JSON document with a value replaced, removed, repeated or nested."""
    try:
        tree = json.loads(data)
    except ValueError:
        return any_bytes(data, random)
    for _ in range(random.randint(1, 3)):
        tree = _changed(tree, random, random.randint(0, 6))
    return json.dumps(tree).encode()


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 64, 1.5, "", "x", "../x", "F32", [], {}, [[]], [0, -1], "__lambda__", "Lambda",
    "builtins", "eval", "os", "function", "\ud800", {"class_name": "Lambda", "config": {}},
)  # fmt: skip


def _changed(tree: Any, random: Random, depth: int) -> Any:
    if depth and isinstance(tree, dict) and tree:
        key = random.choice(list(tree))
        made = {**tree, key: _changed(tree[key], random, depth - 1)}
        if random.random() < 0.1:
            made[random.choice(("", "x", "module", "class_name", "config"))] = made.pop(key)
        return made
    if depth and isinstance(tree, list) and tree:
        at = random.randrange(len(tree))
        return [*tree[:at], _changed(tree[at], random, depth - 1), *tree[at + random.randint(0, 1) :]]
    if isinstance(tree, int) and random.random() < 0.5:
        return random.choice((tree + 1, tree - 1, -tree, *NUMBERS))
    return random.choice((*VALUES, [tree], {"a": tree}))


def safetensors(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a file whose header is changed and as long as it says."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json_text(data[8 : 8 + length], random)
    if random.random() < 0.1:
        header += b" " * random.randint(1, 9)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def npy(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return an array whose header is changed and as long as it says, or whose pickle is."""
    if len(data) < 10 or data[6] != 1:
        return any_bytes(data, random)
    (length,) = struct.unpack("<H", data[8:10])
    header, body = data[10 : 10 + length], data[10 + length :]
    if b"|O" in header and random.random() < 0.7:
        return data[: 10 + length] + pickle_stream(body, random, others)
    words = [
        b"'|O'",
        b"'<f8'",
        b"'<f4'",
        b"True",
        b"False",
        b"(2,)",
        b"(-1,)",
        b"(1 << 9,)",
        b"()",
        b"None",
        b"[]",
        b"(",
    ]
    parts = header.split(b" ")
    parts[random.randrange(len(parts))] = random.choice(words) + random.choice((b"", b","))
    changed = b" ".join(parts) if random.random() < 0.7 else any_bytes(header, random)
    return data[:8] + struct.pack("<H", len(changed) & 0xFFFF) + changed + body


def archive(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return an archive with a changed record, its headers and checksums right, or one header wrong."""
    try:
        with ZipFile(io.BytesIO(data)) as opened:
            members = [Member(info.filename, opened.read(info)) for info in opened.infolist()]
    except (BadZipFile, NotImplementedError, RuntimeError, ValueError, OSError, zlib.error):
        return any_bytes(data, random)
    if not members:
        return any_bytes(data, random)
    at = random.randrange(len(members))
    pickles = [place for place, member in enumerate(members) if member.name.endswith(".pkl")]
    if pickles and random.random() < 0.6:
        at = random.choice(pickles)
    member = members[at]
    fields: dict[str, Any] = {"data": mutated(member.data, random, others, member.name)}
    match random.randrange(12):
        case 0:
            fields = {"flags": random.choice((0, UTF8, UTF8 | 1, UTF8 | 8, 0x20, 0xFFFF))}
        case 1:
            fields = (
                {"method": random.choice((DEFLATED, 1, 9, 12, 99))}
                if random.random() < 0.3
                else {"method": DEFLATED}
            )
        case 2:
            fields = {"size": random.choice(NUMBERS[:14]) & 0xFFFFFFFF}
        case 3:
            fields = {"name": random.choice(members).name}
        case 4:
            fields = {"local_name": "x"}
        case 5:
            members.insert(random.randrange(len(members)), member)
    changed = Member(**{"name": member.name, "data": member.data, **fields})
    members[at] = changed
    return zip_raw.build(members)


def messages(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a protocol buffer with fields changed at any depth, and lengths that are right."""
    fields = _fields(data)
    if not fields:
        return any_bytes(data, random)
    for _ in range(random.randint(1, 3)):
        _change_field(fields, random)
    return b"".join(_tag(number, kind) + _value(kind, value) for number, kind, value in fields)


def _change_field(fields: list[tuple[int, int, Any]], random: Random) -> None:
    if not fields:
        return
    at = random.randrange(len(fields))
    number, kind, value = fields[at]
    match random.randrange(6):
        case 0:
            del fields[at]
        case 1:
            fields.insert(at, fields[at])
        case 2:
            fields[at] = (random.choice((1, 2, 3, 9, 1000, number + 1)), kind, value)
        case _ if kind == 2:
            inner = (
                messages(value, random)
                if len(value) > 2 and random.random() < 0.8
                else any_bytes(value, random)
            )
            fields[at] = (number, kind, inner)
        case _ if kind == 0:
            fields[at] = (number, kind, random.choice(NUMBERS))
        case _:
            fields[at] = (number, kind, any_bytes(value, random)[: len(value)].ljust(len(value), b"\0"))


def _fields(data: bytes) -> list[tuple[int, int, Any]] | None:
    """Return number, wire type and value of each field, or None where it is no message."""
    fields: list[tuple[int, int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, size = tag & 7, {1: 8, 5: 4}.get(tag & 7)
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                size, at = _varint(data, at)
            if size is None or at + size > len(data):
                return None
            value, at = data[at : at + size], at + size
        if at < 0 or not tag >> 3:
            return None
        fields.append((tag >> 3, kind, value))
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data) and shift < 70:
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return number, at
        shift += 7
    return 0, len(data) + 1


def _tag(number: int, kind: int) -> bytes:
    return _number(number << 3 | kind)


def _value(kind: int, value: Any) -> bytes:
    if kind == 0:
        return _number(value)
    return _number(len(value)) + value if kind == 2 else value


def _number(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def sstable(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return a table with a byte of one block changed and that block's CRC32C right again."""
    out = bytearray(data)
    blocks = [(start, size) for start, size in _blocks(data) if size > 0 and start + size + 5 <= len(data)]
    if not blocks:
        return any_bytes(data, random)
    start, size = random.choice(blocks)
    for _ in range(random.randint(1, 3)):
        at = start + random.randrange(size + 1 if random.random() < 0.05 else size)
        out[at] = random.choice((out[at] ^ (1 << random.randrange(8)), 0, 1, 0x7F, 0x80, 0xFF))
    out[start + size + 1 : start + size + 5] = struct.pack("<I", masked(bytes(out[start : start + size + 1])))
    return bytes(out)


def _blocks(data: bytes) -> list[tuple[int, int]]:
    """Return the places of the blocks, as the footer and the index block say."""
    if len(data) < 48:
        return []
    numbers, at = [], len(data) - 48
    for _ in range(4):
        number, at = _varint(data, at)
        numbers.append(number)
    places = [(numbers[0], numbers[1]), (numbers[2], numbers[3])]
    start, size = places[1]
    index, at = data[start : start + size], 0
    while at < len(index) - 8:
        _, at = _varint(index, at)
        key, at = _varint(index, at)
        length, at = _varint(index, at)
        at += key
        begin, behind = _varint(index, at)
        places.append((begin, _varint(index, behind)[0]))
        at += length
    return places


MUTATORS: dict[str, Callable[[bytes, Random, Sequence[bytes]], bytes]] = {
    "pickle": pickle_stream,
    "zip": archive,
    "safetensors": safetensors,
    "json": json_text,
    "npy": npy,
    "sstable": sstable,
    "protobuf": messages,
    "bytes": any_bytes,
}


def kind_of(data: bytes, name: str) -> str:
    """Return which mutator knows the content."""
    suffix = Path(name).suffix
    if data.startswith(b"PK\3\4"):
        return "zip"
    if data.startswith(b"\x93NUMPY"):
        return "npy"
    if suffix == ".index" and len(data) > 48:
        return "sstable"
    if suffix in (".pb", ".pdmodel") or name.endswith("__model__"):
        return "protobuf"
    if suffix == ".safetensors":
        return "safetensors"
    if data[:1] in b"{[" and suffix in ("", ".json", ".index"):
        return "json"
    if (
        data[:1] == b"\x80"
        or suffix in (".pkl", ".pdparams", ".pdopt", ".metadata")
        or name.endswith(".metadata")
    ):
        return "pickle"
    return "bytes"


def mutated(data: bytes, random: Random, others: Sequence[bytes], name: str) -> bytes:
    """Return content changed by the mutator that knows it, now and then by the one of bytes."""
    kind = kind_of(data, name) if random.random() < 0.95 else "bytes"
    return MUTATORS[kind](data, random, others)

"""Streams of pickle opcodes: made at random so that they often run, and real pickles that were changed."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from fractions import Fraction
from pathlib import PurePosixPath

NAMES = [("m", "f"), ("m", "g"), ("n.o", "C"), ("torch._utils", "_rebuild_tensor_v2"), ("builtins", "eval")]


def named(choose: random.Random) -> bytes:
    """Return opcodes that push a name, in one of their spellings."""
    module, name = choose.choice(NAMES)
    if choose.random() < 0.5:
        return f"c{module}\n{name}\n".encode()
    between = choose.choice([b"", b"\x94", b"q\7"])
    return _short(module) + between + _short(name) + b"\x93"


def _short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def number(choose: random.Random) -> bytes:
    """Return opcodes that push a number."""
    value = choose.randrange(-300, 300)
    spelled = [
        b"K" + bytes([value & 0xFF]),
        b"M" + struct.pack("<H", value & 0xFFFF),
        b"J" + struct.pack("<i", value),
        b"I%d\n" % value,
        b"L%dL\n" % value,
        b"\x8a\2" + struct.pack("<h", value),
        b"\x8b\2\0\0\0" + struct.pack("<h", value),
        b"G" + struct.pack(">d", value / 7),
        b"F%d.5\n" % value,
        b"I01\n",
        b"I0x1f\n",
        b"I 7 \n",
        b"F1e3\n",
        b"L00\n",
        b"\x8a\0",
        b"\x8b\x0a\0\0\0" + choose.randbytes(10),
        b"\x8a\xff" + choose.randbytes(255),
    ]
    return choose.choice(spelled)


def text(choose: random.Random) -> bytes:
    """Return opcodes that push text or bytes."""
    letter = bytes([choose.choice(b"abmf")])
    spelled = [_short(letter.decode()), b"X\1\0\0\0" + letter, b"V" + letter + b"\n", b"S'" + letter + b"'\n"]
    spelled += [b"C\1" + letter, b"U\1" + letter, b"\x8d\1" + bytes(7) + letter, b"T\1\0\0\0" + letter]
    spelled += [b"B\1\0\0\0" + letter, b"\x8e\1" + bytes(7) + letter, b"\x96\1" + bytes(7) + letter]
    spelled += [choose.choice(ESCAPED), P_ID] if choose.random() < 0.2 else []
    return long_text(choose) if choose.random() < LONG_TEXTS else choose.choice(spelled)


LONG_TEXTS = 0.002
ESCAPED = [
    b"S'a\\x41\\n\\'b'\n",
    b'S"\\101\\q"\n',
    b"S 'a' \n",
    b"V\\u0041\\U0001f600\\n\n",
    b"X\4\0\0\0\xf0\x9f\x98\x80",
    b"X\3\0\0\0\xed\xa0\x80",
    b"U\2\xc3\xa4",
]
P_ID = b"Pm\n"


def long_text(choose: random.Random) -> bytes:
    """Return an opcode whose text or bytes stay in the file."""
    length = choose.choice([(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16])
    filled = "\u00e4" * (length // 2) + "a" * (length % 2)
    heads = [b"X" + struct.pack("<I", length), b"\x8d" + struct.pack("<Q", length)]
    heads += [
        b"B" + struct.pack("<I", length),
        b"\x8e" + struct.pack("<Q", length),
        b"T" + struct.pack("<I", length),
    ]
    heads += [b"\x96" + struct.pack("<Q", length)]
    return choose.choice(heads) + filled.encode()[:length]


def memo(choose: random.Random) -> bytes:
    """Return an opcode that puts into the memo, or gets from it."""
    at = choose.choice([0, 0, 1, 1, 2, 3, 5, 5, 255, 256, 70_000, 1 << 20])
    number = bytes([min(at, 255)])
    wide = struct.pack("<I", at)
    puts = [b"q" + number, b"r" + wide, b"p%d\n" % at, b"\x94", b"\x94", b"\x94"]
    return choose.choice([*puts, b"h" + number, b"h" + number, b"j" + wide, b"g%d\n" % at])


def call(choose: random.Random) -> bytes:
    """Return opcodes that call something, with what lies around it."""
    inner = b"".join(choose.choice(PUSHES)(choose) for _ in range(choose.randrange(3)))
    name = named(choose)
    module, attribute = choose.choice(NAMES)
    return choose.choice(
        [
            name + b"(" + inner + b"tR",
            name + b"(" + inner + b"t\x81",
            name + b"(" + inner + b"t}\x92",
            b"(" + name + inner + b"o",
            b"(" + inner + f"i{module}\n{attribute}\n".encode(),
            name + b")R",
            name + b")\x81",
        ]
    )


CONSTANTS = b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"("
BARE = [bytes([code]) for code in b"aesu\x90ltd\x85\x86\x87\x91R\x81\x92ob0122QQ\x98"]


def constant(choose: random.Random) -> bytes:
    """Return an opcode that pushes a constant, an empty container or a mark."""
    return choose.choice(CONSTANTS)


def bare(choose: random.Random) -> bytes:
    """Return an opcode without an argument that takes something from the stack."""
    return choose.choice(BARE)


def filled(choose: random.Random) -> bytes:
    """Return opcodes that make a container with something in it."""
    first, second = (choose.choice(PUSHES)(choose) for _ in range(2))
    key = choose.choice([number, text, named])(choose)
    return choose.choice(
        [
            b"](" + first + second + b"e",
            b"]" + first + b"a",
            b"}" + key + first + b"s",
            b"}(" + key + first + b"u",
            b"\x8f(" + key + b"\x90",
            b"(" + key + b"\x91",
            b"(" + key + first + b"d",
            first + second + b"\x86",
        ]
    )


PUSHES: list[Callable[[random.Random], bytes]] = [number, text, constant, named, memo, call, filled]


def stream(choose: random.Random) -> bytes:
    """Return a pickle of some opcodes, which often runs to its end."""
    makers = choose.choices([*PUSHES, bare, memo], k=choose.randrange(2, 14))
    parts = [make(choose) for make in makers]
    if choose.random() < 0.2:
        at = choose.randrange(len(parts))
        rest = b"".join(parts[at:])
        length = len(rest) + 1 if choose.random() < 0.7 else choose.randrange(300)
        parts[at:] = [b"\x95" + struct.pack("<Q", length), rest]
    if choose.random() < 0.1:
        parts.insert(choose.randrange(len(parts) + 1), choose.choice(RARE))
    return choose.choice(HEADS) + b"".join(parts) + choose.choice(TAILS)


HEADS = [b"\x80\4"] * 3 + [b"", b"\x80\0", b"\x80\1", b"\x80\2", b"\x80\3", b"\x80\5", b"\x80\4\x80\2"]
TAILS = [b"."] * 12 + [b"", b"e.", b"a."]
RARE = [b"\x82\1", b"\x83\1\0", b"\x84\1\0\0\0", b"\x97", b"\x80\6", b"\0", b"\xff"]


class Thing:
    """An object of a class of ours."""

    def __init__(self) -> None:
        self.value = [1, (2, 3)]


SHARED = [1, "a"]
VALUES = [
    {"epoch": 3, "loss": 0.5, "names": ["a", "b"], "w": (1, 2, 3), "shared": [SHARED, SHARED]},
    OrderedDict(a=1, b=defaultdict(list, x=[1])),
    [datetime(2024, 1, 2), Fraction(1, 3), PurePosixPath("a/b"), {1, 2}, frozenset({3}), deque([1, 2], 5)],
    {"o": Thing(), "c": 1 + 2j, "b": b"\0\xff" * 20, "n": 2**70, "t": True, "y": bytearray(b"ab")},
]
REAL = [pickle.dumps(value, protocol) for value in VALUES for protocol in range(6)]


def mutated(choose: random.Random) -> bytes:
    """Return a real pickle of which some opcodes are gone, doubled, exchanged or others."""
    data = choose.choice(REAL)
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    parts = [data[at:end] for at, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    parts = [part for part in parts if part[:1] != b"\x95"]  # frames would have other lengths
    for _ in range(choose.randrange(1, 4)):
        at, other = choose.randrange(len(parts)), choose.randrange(len(parts))
        kind = choose.randrange(5)
        if kind == 0:
            del parts[at]
        elif kind == 1:
            parts.insert(other, parts[at])
        elif kind == 2:
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 3:
            parts.insert(at, choose.choice([*PUSHES, bare])(choose))
        else:
            parts[at] = bytes([choose.randrange(256)]) + parts[at][1:]
        if not parts:
            break
    return b"".join(parts)

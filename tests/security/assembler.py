"""Pickles written opcode by opcode: an expression, and the protocol that spells it.

It shares nothing with ckpttool's pickler, so that both can't be wrong in the same way, and it writes what
no pickler would.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

PROTOCOLS = range(6)
FIRST_BYTES, FIRST_STACK_GLOBAL = 3, 4


@dataclass(frozen=True, eq=False)
class Name:
    """What the loader imports: a module's attribute, dotted from protocol 4 on."""

    module: str
    attribute: str


@dataclass(frozen=True, eq=False)
class Call:
    """A call; `how` is reduce, inst, obj, newobj or newobj_ex."""

    function: Any
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    how: str = "reduce"


@dataclass(frozen=True, eq=False)
class Build:
    """An object, and the state that is set on it."""

    target: Any
    state: Any


@dataclass(frozen=True, eq=False)
class Discarded:
    """What is evaluated and thrown away by POP, or with a mark by POP_MARK, before `then`."""

    value: Any
    then: Any = None
    by_mark: bool = False


@dataclass(frozen=True, eq=False)
class Code:
    """Opcodes as they are; they leave one value on the stack."""

    data: bytes


@dataclass(frozen=True, eq=False)
class PersistentId:
    """What the loader is asked for by a persistent id."""

    pid: Any


def call(module: str, attribute: str, *arguments: Any, how: str = "reduce") -> Call:
    """Return a call of a module's function."""
    return Call(Name(module, attribute), arguments, how=how)


def method(target: Any, attribute: str, *arguments: Any) -> Call:
    """Return a call of what ``getattr`` finds."""
    return Call(call("builtins", "getattr", target, attribute), arguments)


def pickled(expression: Any, protocol: int, *, framed: bool = True) -> bytes:
    """Return the whole pickle of an expression."""
    body = spelled(expression, protocol) + b"."
    if protocol < 2:
        return body
    if protocol >= FIRST_STACK_GLOBAL and framed:
        body = b"\x95" + struct.pack("<Q", len(body)) + body
    return b"\x80" + bytes([protocol]) + body


def spelled(value: Any, protocol: int) -> bytes:
    """Return opcodes that push a value.

    Raises:
        ValueError: The protocol has no opcode for it.
    """
    match value:
        case Code():
            return value.data
        case Name():
            return _name(value, protocol)
        case Call():
            return _call(value, protocol)
        case Build():
            return spelled(value.target, protocol) + spelled(value.state, protocol) + b"b"
        case Discarded(by_mark=True):
            return b"(" + spelled(value.value, protocol) + b"1" + spelled(value.then, protocol)
        case Discarded():
            return spelled(value.value, protocol) + b"0" + spelled(value.then, protocol)
        case PersistentId():
            return _persistent(value, protocol)
    return _data(value, protocol)


def _data(value: Any, protocol: int) -> bytes:
    match value:
        case None | bool() | int() | float():
            return _number(value, protocol)
        case str():
            return _text(value, protocol)
        case bytes():
            return _bytes(value, protocol)
        case tuple():
            return _tuple(value, protocol)
        case list():
            empty = b"]" if protocol else b"(l"
            return empty + b"".join(spelled(item, protocol) + b"a" for item in value)
        case dict():
            empty = b"}" if protocol else b"(d"
            return empty + b"".join(
                spelled(key, protocol) + spelled(item, protocol) + b"s" for key, item in value.items()
            )
    raise ValueError(f"no opcodes for {value!r}")


def _number(value: float | None, protocol: int) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return (b"\x89", b"\x88")[value] if protocol >= 2 else (b"I00\n", b"I01\n")[value]
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value) if protocol else f"F{value!r}\n".encode()
    if protocol == 0 or not -(1 << 31) <= value < 1 << 31:
        return f"L{value}L\n".encode()
    return b"J" + struct.pack("<i", value)


def _text(value: str, protocol: int) -> bytes:
    if protocol == 0:
        escaped = value.replace("\\", "\\u005c").replace("\n", "\\u000a").replace("\0", "\\u0000")
        return b"V" + escaped.encode("raw-unicode-escape") + b"\n"
    raw = value.encode("utf-8", "surrogatepass")
    if protocol >= FIRST_STACK_GLOBAL and len(raw) < 256:
        return b"\x8c" + bytes([len(raw)]) + raw
    return b"X" + struct.pack("<I", len(raw)) + raw


def _bytes(value: bytes, protocol: int) -> bytes:
    if protocol < FIRST_BYTES:
        return spelled(call("_codecs", "encode", value.decode("latin-1"), "latin1"), protocol)
    if len(value) < 256:
        return b"C" + bytes([len(value)]) + value
    return b"B" + struct.pack("<I", len(value)) + value


def _tuple(value: tuple[Any, ...], protocol: int) -> bytes:
    items = b"".join(spelled(item, protocol) for item in value)
    if protocol >= 2 and 1 <= len(value) <= 3:
        return items + (b"\x85", b"\x86", b"\x87")[len(value) - 1]
    if protocol and not value:
        return b")"
    return b"(" + items + b"t"


def _name(value: Name, protocol: int) -> bytes:
    if protocol >= FIRST_STACK_GLOBAL:
        return _text(value.module, protocol) + _text(value.attribute, protocol) + b"\x93"
    if "." in value.attribute:
        raise ValueError("a dotted name needs protocol 4")
    return f"c{value.module}\n{value.attribute}\n".encode()


def _call(value: Call, protocol: int) -> bytes:
    if value.keywords and value.how != "newobj_ex":
        raise ValueError("keywords need NEWOBJ_EX")
    pushed = b"".join(spelled(item, protocol) for item in value.arguments)
    if value.how == "inst":
        return b"(" + pushed + f"i{value.function.module}\n{value.function.attribute}\n".encode()
    function = spelled(value.function, protocol)
    if value.how == "obj":
        return b"(" + function + pushed + b"o"
    arguments = _tuple(value.arguments, protocol)
    if value.how == "newobj":
        return function + arguments + b"\x81"
    if value.how == "newobj_ex":
        return function + arguments + spelled(value.keywords, protocol) + b"\x92"
    return function + arguments + b"R"


def _persistent(value: PersistentId, protocol: int) -> bytes:
    if protocol == 0:
        raise ValueError("protocol 0 spells persistent ids as text alone")
    return spelled(value.pid, protocol) + b"Q"

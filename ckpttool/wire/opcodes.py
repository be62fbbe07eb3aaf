"""The pickle opcodes: one small function each, in a table by byte.

A function returns True only for STOP.

Source: CPython ``Lib/pickletools.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpttool.wire.pickled import Call, Global, Mapped, Persistent

if TYPE_CHECKING:
    from ckpttool.wire.interpreter import Interpreter

Operation = Callable[["Interpreter"], "bool | None"]

TABLE: list[Operation | None] = [None] * 256

PAYLOAD_BYTES = 1 << 16
"""Strings and byte strings above this stay in the file, as a ``Payload``."""

MAX_INTEGER_BYTES = 1 << 16
_NEWEST_PROTOCOL = 5

_U1, _U2, _U4, _U8 = (struct.Struct(layout) for layout in ("<B", "<H", "<I", "<Q"))
_I4 = struct.Struct("<i")
_DOUBLE = struct.Struct(">d")
_DECIMAL = re.compile(rb"\s*[-+]?[0-9]{1,4000}L?\s*")


def _opcode(code: int) -> Callable[[Operation], Operation]:
    def register(operation: Operation) -> Operation:
        TABLE[code] = operation
        return operation

    return register


# Constants and numbers ----------------------------------------------------------------------------


def _constant(code: int, value: object) -> None:
    def push(vm: Interpreter) -> None:
        vm.stack.append(value)

    TABLE[code] = push


def _integer(code: int, layout: struct.Struct) -> None:
    def push(vm: Interpreter) -> None:
        vm.stack.append(vm.fixed(layout))

    TABLE[code] = push


_constant(0x4E, None)  # N
_constant(0x88, True)
_constant(0x89, False)
_constant(0x29, ())  # )
_integer(0x4A, _I4)  # J
_integer(0x4B, _U1)  # K
_integer(0x4D, _U2)  # M


@_opcode(0x47)  # G
def _binfloat(vm: Interpreter) -> None:
    vm.stack.append(vm.fixed(_DOUBLE))


@_opcode(0x49)  # I
def _int(vm: Interpreter) -> None:
    line = vm.line()
    vm.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else _decimal(vm, line))


@_opcode(0x4C)  # L
def _long(vm: Interpreter) -> None:
    vm.stack.append(_decimal(vm, vm.line()))


def _decimal(vm: Interpreter, line: bytes) -> int:
    if not _DECIMAL.fullmatch(line):
        raise vm.damaged(f"{line[:40]!r} is no integer of at most 4,000 digits")
    return int(line.strip().removesuffix(b"L"))


@_opcode(0x46)  # F
def _float(vm: Interpreter) -> None:
    line = vm.line()
    try:
        vm.stack.append(float(line[:1000]))
    except ValueError:
        raise vm.damaged(f"{line[:40]!r} is no number") from None


def _little_endian(vm: Interpreter, nbytes: int) -> None:
    if not 0 <= nbytes <= MAX_INTEGER_BYTES:
        raise vm.exceeded(f"an integer of {nbytes:,} bytes")
    vm.push_text(vm.take(nbytes))
    vm.stack[-1] = int.from_bytes(vm.stack[-1], "little", signed=True)


@_opcode(0x8A)
def _long1(vm: Interpreter) -> None:
    _little_endian(vm, vm.fixed(_U1))


@_opcode(0x8B)
def _long4(vm: Interpreter) -> None:
    _little_endian(vm, vm.fixed(_I4))


# Text and bytes -----------------------------------------------------------------------------------


def _string(code: int, layout: struct.Struct, kind: str) -> None:
    """Register a string that is preceded by its length; long ones stay in the file."""

    def push(vm: Interpreter) -> None:
        nbytes = vm.fixed(layout)
        if nbytes > PAYLOAD_BYTES:
            vm.push_payload(nbytes, kind)
            return
        data = vm.take(nbytes)
        if kind == "bytes":
            vm.push_text(data)
            return
        try:
            vm.push_text(data.decode("utf-8" if kind == "text" else "latin-1", "surrogatepass"))
        except UnicodeDecodeError:
            raise vm.damaged(f"{data[:20]!r} is not UTF-8") from None

    TABLE[code] = push


_string(0x58, _U4, "text")  # X
_string(0x8C, _U1, "text")
_string(0x8D, _U8, "text")
_string(0x42, _U4, "bytes")  # B
_string(0x43, _U1, "bytes")  # C
_string(0x8E, _U8, "bytes")
_string(0x96, _U8, "bytes")  # a bytearray
_string(0x54, _I4, "8-bit")  # T: Python 2's str, bytes or text
_string(0x55, _U1, "8-bit")  # U


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_SHORT_ESCAPES = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


def _unescaped(match: re.Match[bytes]) -> bytes:
    """Return the byte that an escape of a Python 2 string literal stands for."""
    body = match[1]
    if body[:1] == b"x" and len(body) == 3:
        return bytes([int(body[1:], 16)])
    if body[:1].isdigit() and body[0] < ord("8"):
        return bytes([int(body, 8) & 0xFF])
    if body[0] in _SHORT_ESCAPES:
        return bytes([_SHORT_ESCAPES[body[0]]])
    return body if body in (b"\\", b"'", b'"') else b"\\" + body


@_opcode(0x53)  # S
def _quoted(vm: Interpreter) -> None:
    line = vm.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise vm.damaged(f"{line[:40]!r} is no quoted string")
    vm.push_text(_ESCAPE.sub(_unescaped, line[1:-1]).decode("latin-1"))


@_opcode(0x56)  # V
def _unicode_line(vm: Interpreter) -> None:
    line = vm.line()
    try:
        vm.push_text(line.decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        raise vm.damaged(f"{line[:40]!r} is no text") from None


# Containers ---------------------------------------------------------------------------------------


def _empty(code: int, make: Callable[[], object]) -> None:
    def push(vm: Interpreter) -> None:
        vm.grow(make())

    TABLE[code] = push


_empty(0x5D, list)  # ]
_empty(0x7D, dict)  # }
_empty(0x8F, set)


def _tuple_of(code: int, length: int) -> None:
    def push(vm: Interpreter) -> None:
        if len(vm.stack) < length:
            raise vm.damaged(f"a tuple of {length} from a stack of {len(vm.stack)}")
        items = tuple(vm.stack[-length:])
        del vm.stack[-length:]
        vm.grow(items)

    TABLE[code] = push


_tuple_of(0x85, 1)
_tuple_of(0x86, 2)
_tuple_of(0x87, 3)


@_opcode(0x28)  # (
def _mark(vm: Interpreter) -> None:
    vm.marks.append(vm.stack)
    vm.stack = []
    vm.charge(128)


@_opcode(0x74)  # t
def _tuple(vm: Interpreter) -> None:
    vm.grow(tuple(vm.to_mark()))


@_opcode(0x6C)  # l
def _list(vm: Interpreter) -> None:
    vm.grow(vm.to_mark())


@_opcode(0x64)  # d
def _dict(vm: Interpreter) -> None:
    items = vm.to_mark()
    vm.grow({})
    _set_all(vm, items)


@_opcode(0x91)
def _frozenset(vm: Interpreter) -> None:
    vm.grow(frozenset(map(vm.hashable, vm.to_mark())))


@_opcode(0x61)  # a
def _append(vm: Interpreter) -> None:
    item = vm.stack.pop()
    vm.extend(vm.stack[-1], [item])


@_opcode(0x65)  # e
def _appends(vm: Interpreter) -> None:
    items = vm.to_mark()
    vm.extend(vm.stack[-1], items)


TABLE[0x90] = _appends  # ADDITEMS, for sets


@_opcode(0x73)  # s
def _setitem(vm: Interpreter) -> None:
    value, key = vm.stack.pop(), vm.stack.pop()
    vm.set_items(vm.stack[-1], ((key, value),))


@_opcode(0x75)  # u
def _setitems(vm: Interpreter) -> None:
    _set_all(vm, vm.to_mark())


def _set_all(vm: Interpreter, items: list[Any]) -> None:
    if len(items) % 2:
        raise vm.damaged("a key without a value")
    vm.set_items(vm.stack[-1], zip(items[::2], items[1::2], strict=True))


# Stack and memo -----------------------------------------------------------------------------------


@_opcode(0x2E)  # .
def _stop(vm: Interpreter) -> bool:
    if not vm.stack:
        raise vm.damaged("STOP with nothing on the stack")
    return True


@_opcode(0x30)  # 0
def _pop(vm: Interpreter) -> None:
    if vm.stack:
        vm.stack.pop()
    else:
        vm.to_mark()


@_opcode(0x31)  # 1
def _pop_mark(vm: Interpreter) -> None:
    vm.to_mark()


@_opcode(0x32)  # 2
def _dup(vm: Interpreter) -> None:
    vm.remember(-1)
    vm.recall(-1)


@_opcode(0x71)  # q
def _binput(vm: Interpreter) -> None:
    vm.remember(vm.fixed(_U1))


@_opcode(0x72)  # r
def _long_binput(vm: Interpreter) -> None:
    vm.remember(vm.fixed(_U4))


@_opcode(0x70)  # p
def _put(vm: Interpreter) -> None:
    vm.remember(_decimal(vm, vm.line()))


@_opcode(0x94)
def _memoize(vm: Interpreter) -> None:
    vm.remember(len(vm.memo))


@_opcode(0x68)  # h
def _binget(vm: Interpreter) -> None:
    vm.recall(vm.fixed(_U1))


@_opcode(0x6A)  # j
def _long_binget(vm: Interpreter) -> None:
    vm.recall(vm.fixed(_U4))


@_opcode(0x67)  # g
def _get(vm: Interpreter) -> None:
    vm.recall(_decimal(vm, vm.line()))


# Names, calls, state ------------------------------------------------------------------------------


def _name(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


@_opcode(0x63)  # c
def _global(vm: Interpreter) -> None:
    module = _name(vm.line())
    vm.import_name(module, _name(vm.line()))


@_opcode(0x93)
def _stack_global(vm: Interpreter) -> None:
    name, module = vm.stack.pop(), vm.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise vm.damaged("a name to import that is no text")
    vm.import_name(module, name)


@_opcode(0x69)  # i
def _inst(vm: Interpreter) -> None:
    module = _name(vm.line())
    name = _name(vm.line())
    args = tuple(vm.to_mark())
    vm.import_name(module, name)
    vm.call(vm.stack.pop(), args)


@_opcode(0x6F)  # o
def _obj(vm: Interpreter) -> None:
    items = vm.to_mark()
    if not items:
        raise vm.damaged("OBJ without a class")
    vm.call(items[0], tuple(items[1:]))


@_opcode(0x52)  # R
def _reduce(vm: Interpreter) -> None:
    args, function = vm.stack.pop(), vm.stack.pop()
    vm.call(function, args)


TABLE[0x81] = _reduce  # NEWOBJ differs in what it would call, not in what is recorded


@_opcode(0x92)
def _newobj_ex(vm: Interpreter) -> None:
    kwargs, args, function = vm.stack.pop(), vm.stack.pop(), vm.stack.pop()
    vm.call(function, args, kwargs)


_MEMORY_VIEWS = frozenset({"__array_interface__", "__array_struct__"})


@_opcode(0x62)  # b
def _build(vm: Interpreter) -> None:
    state = vm.stack.pop()
    target = vm.stack[-1]
    if isinstance(state, dict) and not state.keys().isdisjoint(_MEMORY_VIEWS):
        vm.misused("an object that lets NumPy view any memory is made")
    if not isinstance(target, Call | Mapped):
        what = f"the name {target}" if isinstance(target, Global) else f"a {type(target).__name__.lower()}"
        vm.misused(f"a state is set on {what}")
    elif target.state is None:
        target.state = state
    else:
        vm.misused("a state is set twice on one object")


@_opcode(0x51)  # Q
def _binpersid(vm: Interpreter) -> None:
    vm.grow(Persistent(vm.stack.pop()))


@_opcode(0x50)  # P
def _persid(vm: Interpreter) -> None:
    vm.grow(Persistent(_name(vm.line())))


# Framing and what no checkpoint uses --------------------------------------------------------------


@_opcode(0x80)
def _proto(vm: Interpreter) -> None:
    protocol = vm.fixed(_U1)
    if protocol > _NEWEST_PROTOCOL:
        raise vm.damaged(f"pickle protocol {protocol}; the newest is {_NEWEST_PROTOCOL}")
    vm.pickle.protocol = max(vm.pickle.protocol, protocol)


@_opcode(0x95)
def _frame(vm: Interpreter) -> None:
    nbytes = vm.fixed(_U8)
    vm.require(nbytes)
    if vm.position < vm.frame_end:
        raise vm.damaged("a frame inside a frame")
    vm.frame_end = vm.position + nbytes


def _unused(code: int, what: str) -> None:
    def refuse(vm: Interpreter) -> None:
        raise vm.damaged(f"{what}, which no checkpoint holds")

    TABLE[code] = refuse


_unused(0x82, "an extension code")
_unused(0x83, "an extension code")
_unused(0x84, "an extension code")
_unused(0x97, "an out-of-band buffer")
_unused(0x98, "an out-of-band buffer")

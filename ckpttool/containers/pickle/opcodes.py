"""The pickle opcodes: one small function each, in a table by byte.

Source: CPython ``Lib/pickletools.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpttool.containers.pickle.pickle_nodes import ENTRY, Call, Global, Payload, Persistent

if TYPE_CHECKING:
    from ckpttool.containers.pickle.machine import PickleMachine

Operation = Callable[["PickleMachine"], "bool | None"]
"""Carries out one opcode; returns True only for STOP."""

TABLE: list[Operation | None] = [None] * 256

_NEWEST_PROTOCOL = 5
_USUAL_ENTRIES = 1 << 20  # memo indexes below need no check, see ``remember``

PAYLOAD_BYTES = 1 << 16
"""Strings and byte strings above this size aren't read: they become a ``Payload``."""

_MAX_DIGITS = 4300  # Python's own limit on decimal digits since 3.11
_BYTEARRAY = Global("builtins", "bytearray")

U1, U2, U4, U8 = (struct.Struct(layout) for layout in ("<B", "<H", "<I", "<Q"))
_I4 = struct.Struct("<i")
_DOUBLE = struct.Struct(">d")


def _opcode(code: int) -> Callable[[Operation], Operation]:
    def register(operation: Operation) -> Operation:
        TABLE[code] = operation
        return operation

    return register


# Constants and numbers ----------------------------------------------------------------------------


def _constant(code: int, value: object) -> None:
    def push(vm: PickleMachine) -> None:
        vm.stack.append(value)

    TABLE[code] = push


def _number(code: int, layout: struct.Struct) -> None:
    def push(vm: PickleMachine) -> None:
        vm.stack.append(vm.unpack(layout))

    TABLE[code] = push


_constant(0x4E, None)  # N
_constant(0x88, True)
_constant(0x89, False)
_constant(0x29, ())  # )
_number(0x4A, _I4)  # J
_number(0x4D, U2)  # M
_number(0x47, _DOUBLE)  # G


@_opcode(0x4B)  # K
def _binint1(vm: PickleMachine) -> None:
    vm.stack.append(vm.data[vm.at])
    vm.at += 1


@_opcode(0x49)  # I
def _int(vm: PickleMachine) -> None:
    line = vm.line()
    if line in (b"00", b"01"):
        vm.stack.append(line == b"01")
    else:
        # CPython's C code reads leading zeros as octal numbers, as C does.
        is_octal = line[:1] == b"0" and line.isdigit() and len(line) > 1
        vm.stack.append(integer(vm, line, 8 if is_octal else 0))


@_opcode(0x4C)  # L
def _long(vm: PickleMachine) -> None:
    vm.stack.append(integer(vm, vm.line().removesuffix(b"L"), 0))


def integer(vm: PickleMachine, line: bytes, base: int = 10) -> int:
    """Return the integer in a line."""
    if len(line) > _MAX_DIGITS:
        raise vm.damage(f"an integer of {len(line):,} digits")
    try:
        return int(line, base)
    except ValueError:
        raise vm.damage(f"{line[:40]!r} is not an integer") from None


@_opcode(0x46)  # F
def _float(vm: PickleMachine) -> None:
    line = vm.line()
    try:
        vm.stack.append(float(line[:1000]))
    except ValueError:
        raise vm.damage(f"{line[:40]!r} is not a number") from None


def _little_endian(code: int, layout: struct.Struct) -> None:
    def push(vm: PickleMachine) -> None:
        nbytes = vm.unpack(layout)
        if nbytes < 0:
            raise vm.damage(f"an integer of {nbytes:,} bytes")
        vm.push_text(vm.take(nbytes))
        vm.stack[-1] = int.from_bytes(vm.stack[-1], "little", signed=True)

    TABLE[code] = push


_little_endian(0x8A, U1)
_little_endian(0x8B, _I4)


# Text and bytes -----------------------------------------------------------------------------------


def _string_opcode(code: int, layout: struct.Struct, kind: str) -> Operation:
    """Register and return the opcode of a string with its length before it."""
    # A payload is only referred to, so that tensors and arrays in a pickle are read when they are asked for;
    # it takes no memory, whatever length a hostile pickle announces.
    codec = "utf-8" if kind == "text" else "latin-1"

    def push(vm: PickleMachine) -> None:
        nbytes = vm.unpack(layout)
        if nbytes > PAYLOAD_BYTES:
            vm.push_payload(nbytes, kind)
            return
        data = vm.take(nbytes)
        if kind == "bytes":
            vm.push_text(data)
            return
        try:
            vm.push_text(data.decode(codec, "surrogatepass"))
        except UnicodeDecodeError:
            raise vm.damage(f"{data[:20]!r} is not UTF-8") from None

    TABLE[code] = push
    return push


_string_opcode(0x58, U4, "text")  # X
_string_opcode(0x8C, U1, "text")
_string_opcode(0x8D, U8, "text")
_string_opcode(0x42, U4, "bytes")  # B
_string_opcode(0x43, U1, "bytes")  # C
_string_opcode(0x8E, U8, "bytes")
_string_opcode(0x54, _I4, "8-bit")  # T: Python 2's str, bytes or text
_string_opcode(0x55, U1, "8-bit")  # U
_bytes8 = _string_opcode(0x96, U8, "bytes")


@_opcode(0x96)
def _bytearray8(vm: PickleMachine) -> None:
    _bytes8(vm)
    made = Call(_BYTEARRAY, (vm.stack.pop(),))
    made.kind = "bytearray"
    vm.push(made)


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_LETTERS = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))


def _unescape(match: re.Match[str]) -> str:
    """Return the character of an escape in a Python 2 string literal."""
    hexadecimal, octal, letter = match.groups()
    if letter is not None:
        return _LETTERS.get(letter, match[0])
    return chr(int(hexadecimal, 16) if octal is None else int(octal, 8) & 0xFF)


@_opcode(0x53)  # S
def _quoted_line(vm: PickleMachine) -> None:
    line = vm.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise vm.damage(f"{line[:40]!r} is not a quoted string")
    vm.push_text(_ESCAPE.sub(_unescape, line[1:-1].decode("latin-1")))


@_opcode(0x56)  # V
def _unicode_line(vm: PickleMachine) -> None:
    line = vm.line()
    try:
        vm.push_text(line.decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        raise vm.damage(f"{line[:40]!r} is not text") from None


# Containers ---------------------------------------------------------------------------------------


def _empty(code: int, make: Callable[[], object]) -> None:
    def push(vm: PickleMachine) -> None:
        vm.push(make())

    TABLE[code] = push


_empty(0x5D, list)  # ]
_empty(0x7D, dict)  # }
_empty(0x8F, set)


def _tuple_of(code: int, length: int) -> None:
    def push(vm: PickleMachine) -> None:
        stack = vm.stack
        if len(stack) < length:
            raise vm.damage(f"a tuple of {length} from a stack of {len(stack)}")
        items = tuple(stack[-length:])
        del stack[-length:]
        vm.push(items)

    TABLE[code] = push


_tuple_of(0x85, 1)
_tuple_of(0x86, 2)
_tuple_of(0x87, 3)


@_opcode(0x28)  # (
def _mark(vm: PickleMachine) -> None:
    vm.marks.append(vm.stack)
    vm.stack = []
    vm.charge(128)


@_opcode(0x74)  # t
def _tuple(vm: PickleMachine) -> None:
    vm.push(tuple(vm.pop_to_mark()))


@_opcode(0x6C)  # l
def _list(vm: PickleMachine) -> None:
    vm.push(vm.pop_to_mark())


@_opcode(0x64)  # d
def _dict(vm: PickleMachine) -> None:
    items = vm.pop_to_mark()
    vm.push({})
    _set_all(vm, items)


@_opcode(0x91)
def _frozenset(vm: PickleMachine) -> None:
    vm.push(frozenset(map(vm.hashable, vm.pop_to_mark())))


@_opcode(0x61)  # a
def _append(vm: PickleMachine) -> None:
    item = vm.stack.pop()
    vm.extend(vm.stack[-1], [item])


@_opcode(0x65)  # e
def _appends(vm: PickleMachine) -> None:
    items = vm.pop_to_mark()
    vm.extend(vm.stack[-1], items)


TABLE[0x90] = _appends  # ADDITEMS, for sets


@_opcode(0x73)  # s
def _setitem(vm: PickleMachine) -> None:
    value, key = vm.stack.pop(), vm.stack.pop()
    vm.set_items(vm.stack[-1], ((key, value),))


@_opcode(0x75)  # u
def _setitems(vm: PickleMachine) -> None:
    _set_all(vm, vm.pop_to_mark())


def _set_all(vm: PickleMachine, items: list[Any]) -> None:
    if len(items) % 2:
        raise vm.damage("a key without a value")
    vm.set_items(vm.stack[-1], list(zip(items[::2], items[1::2], strict=True)))


# Stack and memo -----------------------------------------------------------------------------------


@_opcode(0x2E)  # .
def _stop(vm: PickleMachine) -> bool:
    if not vm.stack:
        raise vm.damage("STOP with nothing on the stack")
    return True


@_opcode(0x30)  # 0
def _pop(vm: PickleMachine) -> None:
    if vm.stack:
        vm.stack.pop()
    else:
        vm.pop_to_mark()


@_opcode(0x31)  # 1
def _pop_mark(vm: PickleMachine) -> None:
    vm.pop_to_mark()


@_opcode(0x32)  # 2
def _dup(vm: PickleMachine) -> None:
    vm.pushed_functions += id(vm.stack[-1]) in vm.functions
    vm.stack.append(vm.stack[-1])


@_opcode(0x71)  # q
def _binput(vm: PickleMachine) -> None:
    # ``remember`` inlined for speed: every fifth opcode is this one. The 256 entries aren't charged.
    index = vm.data[vm.at]
    vm.at += 1
    vm.memo[index] = vm.stack[-1]


@_opcode(0x72)  # r
def _long_binput(vm: PickleMachine) -> None:
    (index,) = U4.unpack_from(vm.data, vm.at)
    vm.at += 4
    if index > _USUAL_ENTRIES:
        vm.remember(index)
    else:  # ``remember`` inlined
        vm.memo[index] = vm.stack[-1]
        vm.budget.memory_used += ENTRY


@_opcode(0x70)  # p
def _put(vm: PickleMachine) -> None:
    vm.remember(integer(vm, vm.line()))


@_opcode(0x94)
def _memoize(vm: PickleMachine) -> None:
    vm.remember(len(vm.memo))


@_opcode(0x68)  # h
def _binget(vm: PickleMachine) -> None:
    # ``recall`` inlined but for names and missing entries: every tenth opcode is this one.
    node = vm.memo.get(vm.data[vm.at])
    if node is None or type(node) is Global:
        vm.recall(vm.byte())
    else:
        vm.at += 1
        vm.stack.append(node)


@_opcode(0x6A)  # j
def _long_binget(vm: PickleMachine) -> None:
    vm.recall(vm.unpack(U4))


@_opcode(0x67)  # g
def _get(vm: PickleMachine) -> None:
    vm.recall(integer(vm, vm.line()))


# Names, calls, state ------------------------------------------------------------------------------


def _name(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


@_opcode(0x63)  # c
def _global(vm: PickleMachine) -> None:
    module = _name(vm.line())
    vm.import_name(module, _name(vm.line()))


@_opcode(0x93)
def _stack_global(vm: PickleMachine) -> None:
    name, module = vm.stack.pop(), vm.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        for part in (module, name):
            vm.note_computed(part, "module and name to import")
        raise vm.damage("a name to import that is not text")
    vm.import_name(module, name)


@_opcode(0x69)  # i
def _inst(vm: PickleMachine) -> None:
    _global(vm)
    vm.call(vm.stack.pop(), tuple(vm.pop_to_mark()))


@_opcode(0x6F)  # o
def _obj(vm: PickleMachine) -> None:
    items = vm.pop_to_mark()
    if not items:
        raise vm.damage("OBJ without a class")
    vm.call(items[0], tuple(items[1:]))


@_opcode(0x52)  # R
def _reduce(vm: PickleMachine) -> None:
    args, function = vm.stack.pop(), vm.stack.pop()
    vm.call(function, args)


@_opcode(0x81)
def _newobj(vm: PickleMachine) -> None:
    args, function = vm.stack.pop(), vm.stack.pop()
    vm.call(function, args, is_new=True)


@_opcode(0x92)
def _newobj_ex(vm: PickleMachine) -> None:
    kwargs, args, function = vm.stack.pop(), vm.stack.pop(), vm.stack.pop()
    vm.call(function, args, kwargs, is_new=True)


@_opcode(0x62)  # b
def _build(vm: PickleMachine) -> None:
    state = vm.stack.pop()
    vm.set_state(vm.stack[-1], state)


@_opcode(0x51)  # Q
def _binpersid(vm: PickleMachine) -> None:
    vm.push(Persistent(vm.stack.pop()))


@_opcode(0x50)  # P
def _persid(vm: PickleMachine) -> None:
    vm.push(Persistent(_name(vm.line())))


# Frames, and opcodes that no checkpoint uses ------------------------------------------------------


@_opcode(0x80)
def _proto(vm: PickleMachine) -> None:
    protocol = vm.byte()
    if protocol > _NEWEST_PROTOCOL:
        raise vm.damage(f"pickle protocol {protocol}; the newest is {_NEWEST_PROTOCOL}")
    vm.pickle.protocol = max(vm.pickle.protocol, protocol)


@_opcode(0x95)
def _frame(vm: PickleMachine) -> None:
    nbytes = vm.unpack(U8)
    # CPython's two unpicklers treat wrong frames differently, so that one file is two pickles. If fewer bytes
    # follow than the frame has, C fails and Python goes on. If an argument reaches over the frame's end, C
    # drops the part inside. Both skip bytes of a frame after STOP. Each of these is noted as misuse.
    if not vm.begin_frame(nbytes):
        vm.note_misuse("a frame begins within another")
    if vm.position + nbytes > vm.end:
        vm.frame_is_cut = True


def _refusal(reason: str) -> Operation:
    def refuse(vm: PickleMachine) -> None:
        raise vm.damage(reason)

    return refuse


for _code in (0x82, 0x83, 0x84):
    TABLE[_code] = _refusal("an extension code, which no checkpoint holds")
TABLE[0x97] = _refusal("an out-of-band buffer, which no checkpoint holds")


@_opcode(0x98)
def _readonly_buffer(vm: PickleMachine) -> None:
    """Leave bytes as they are, as CPython does; raise for any other node."""
    if not isinstance(vm.stack[-1], bytes | Payload):
        raise vm.damage("a read-only view of a non-bytes object")


OPERATIONS: list[Operation] = [
    operation or _refusal(f"0x{code:02x} is not a pickle opcode") for code, operation in enumerate(TABLE)
]
"""Operation of each byte; those of bytes that are no opcode raise."""

"""The pickle opcodes that push a number, a text or bytes: one small function each, by byte.

Source: CPython ``Lib/pickletools.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpttool.wire.pickled import Call, Global

if TYPE_CHECKING:
    from ckpttool.wire.interpreter import Interpreter

Operation = Callable[["Interpreter"], "bool | None"]
"""Carries out one opcode; returns True only for STOP."""

LITERALS: dict[int, Operation] = {}

PAYLOAD_BYTES = 1 << 16
"""Strings and byte strings above this stay in the file, as a ``Payload``."""

_MAX_DIGITS = 4300  # more decimal ones no Python takes since 3.11
_BYTEARRAY = Global("builtins", "bytearray")

U1, U2, U4, U8 = (struct.Struct(layout) for layout in ("<B", "<H", "<I", "<Q"))
_I4 = struct.Struct("<i")
_DOUBLE = struct.Struct(">d")


def _opcode(code: int) -> Callable[[Operation], Operation]:
    def register(operation: Operation) -> Operation:
        LITERALS[code] = operation
        return operation

    return register


# Constants and numbers ----------------------------------------------------------------------------


def _constant(code: int, value: object) -> None:
    def push(vm: Interpreter) -> None:
        vm.stack.append(value)

    LITERALS[code] = push


def _integer(code: int, layout: struct.Struct) -> None:
    def push(vm: Interpreter) -> None:
        vm.stack.append(vm.fixed(layout))

    LITERALS[code] = push


_constant(0x4E, None)  # N
_constant(0x88, True)
_constant(0x89, False)
_constant(0x29, ())  # )
_integer(0x4A, _I4)  # J
_integer(0x4D, U2)  # M


@_opcode(0x4B)  # K
def _binint1(vm: Interpreter) -> None:
    vm.stack.append(vm.data[vm.at])
    vm.at += 1


@_opcode(0x47)  # G
def _binfloat(vm: Interpreter) -> None:
    vm.stack.append(vm.fixed(_DOUBLE))


@_opcode(0x49)  # I
def _int(vm: Interpreter) -> None:
    line = vm.line()
    if line in (b"00", b"01"):
        vm.stack.append(line == b"01")
    else:
        # CPython's C code reads leading zeros as octal numbers, as C does.
        is_octal = line[:1] == b"0" and line.isdigit() and len(line) > 1
        vm.stack.append(integer(vm, line, 8 if is_octal else 0))


@_opcode(0x4C)  # L
def _long(vm: Interpreter) -> None:
    vm.stack.append(integer(vm, vm.line().removesuffix(b"L"), 0))


def integer(vm: Interpreter, line: bytes, base: int = 10) -> int:
    """Return the number that a line spells."""
    if len(line) > _MAX_DIGITS:
        raise vm.damaged(f"an integer of {len(line):,} digits")
    try:
        return int(line, base)
    except ValueError:
        raise vm.damaged(f"{line[:40]!r} is no integer") from None


@_opcode(0x46)  # F
def _float(vm: Interpreter) -> None:
    line = vm.line()
    try:
        vm.stack.append(float(line[:1000]))
    except ValueError:
        raise vm.damaged(f"{line[:40]!r} is no number") from None


def _little_endian(vm: Interpreter, nbytes: int) -> None:
    if nbytes < 0:
        raise vm.damaged(f"an integer of {nbytes:,} bytes")
    vm.push_text(vm.take(nbytes))
    vm.stack[-1] = int.from_bytes(vm.stack[-1], "little", signed=True)


@_opcode(0x8A)
def _long1(vm: Interpreter) -> None:
    _little_endian(vm, vm.fixed(U1))


@_opcode(0x8B)
def _long4(vm: Interpreter) -> None:
    _little_endian(vm, vm.fixed(_I4))


# Text and bytes -----------------------------------------------------------------------------------


def _string(code: int, layout: struct.Struct, kind: str) -> None:
    """Register a string that is preceded by its length; long ones stay in the file."""
    codec = "utf-8" if kind == "text" else "latin-1"

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
            vm.push_text(data.decode(codec, "surrogatepass"))
        except UnicodeDecodeError:
            raise vm.damaged(f"{data[:20]!r} is not UTF-8") from None

    LITERALS[code] = push


_string(0x58, U4, "text")  # X
_string(0x8C, U1, "text")
_string(0x8D, U8, "text")
_string(0x42, U4, "bytes")  # B
_string(0x43, U1, "bytes")  # C
_string(0x8E, U8, "bytes")
_string(0x96, U8, "bytes")
_string(0x54, _I4, "8-bit")  # T: Python 2's str, bytes or text
_string(0x55, U1, "8-bit")  # U

_bytes8 = LITERALS[0x96]


@_opcode(0x96)
def _bytearray8(vm: Interpreter) -> None:
    _bytes8(vm)
    vm.grow(Call(_BYTEARRAY, (vm.stack.pop(),)))


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

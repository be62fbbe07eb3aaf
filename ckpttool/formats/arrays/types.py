"""A pickled ``numpy.dtype``: the one table's type where it holds numbers, and its name elsewhere.

Source: NumPy ``numpy/_core/src/multiarray/descriptor.c`` (``__reduce__``).
"""

from __future__ import annotations

from typing import Any, Literal

from ckpttool.dtypes import BY_NAME, DType
from ckpttool.formats.content.telling import plain
from ckpttool.wire.pickled import Call, Global

_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}

ByteOrder = Literal["little", "big"]


def element_type(dtype: object) -> tuple[DType, ByteOrder] | None:
    """Return the element type and byte order of a pickled ``numpy.dtype``; None for what holds no numbers."""
    if not isinstance(dtype, Call) or not dtype.is_of("numpy", "dtype") or not dtype.args:
        return _extension(dtype)
    text = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    if isinstance(text, Global):
        return _extension(text)
    if text == "b1":
        return BY_NAME["bool"], "little"
    if not isinstance(text, str) or text[:1] not in _KINDS or not text[1:].isdigit():
        return None
    element = BY_NAME.get(f"{_KINDS[text[0]]}{8 * int(text[1:])}")
    return None if element is None else (element, "big" if order == ">" else "little")


def _extension(dtype: object) -> tuple[DType, ByteOrder] | None:
    """Return a type of ml_dtypes, which is pickled by name."""
    if isinstance(dtype, Global) and dtype.module == "ml_dtypes" and dtype.name in BY_NAME:
        return BY_NAME[dtype.name], "little"
    return None


def spelled(dtype: object) -> str:
    """Return the name of a type, and all that is to be said of it where the name isn't all."""
    if not isinstance(dtype, Call) or not dtype.args or not isinstance(dtype.args[0], str):
        return str(plain(dtype))
    name, state = dtype.args[0], dtype.state
    if not isinstance(state, tuple) or len(state) < 5:
        return name
    order = ">" if state[1] == ">" else ""
    if state[2:5] == (None, None, None) and len(state) <= 8:
        return f"{order}{name}"
    if name in ("M8", "m8") and (unit := _unit(state)) is not None:
        return f"{order}{name}[{unit}]"
    return f"{order}{name} {plain(state[2:])}"


def _unit(state: tuple[Any, ...]) -> str | None:
    """Return the unit of a date, as NumPy writes it: how many of what."""
    try:
        code, count, one, event = state[8][1]
        return f"{count if count != 1 else ''}{code.decode('ascii')}" if (one, event) == (1, 1) else None
    except (AttributeError, IndexError, TypeError, ValueError):
        return None

"""Checks the states of pickled ``numpy.dtype`` objects, with offsets of fields and flags for pointers.

NumPy takes these values unchecked: a state could make it follow numbers as pointers, or read outside an
array. A type counts as plain data only if its state agrees with the type's name.

Source: NumPy ``numpy/_core/src/multiarray/descriptor.c`` (``arraydescr_reduce``, ``arraydescr_setstate``).
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TypeAlias

from ckpttool.containers.pickle.pickle_nodes import Call, Global

KINDS = ("dtype", "object-dtype", "open-dtype")
"""Kinds of types: of plain elements, with pointers to objects, and without the state that they need."""

_DTYPE = Global("numpy", "dtype")
_TYPECODE = re.compile(r"[<>=|]?[?biufcSVUOmM]\d{0,9}")
_NAMED_TYPE = re.compile(r"[<>=|]?([biufcSVUOmM])(\d{1,9})")
_USER_DEFINED = {"bfloat16": 2, "complex32": 4, "bcomplex32": 4}
"""Sizes in bytes of types of ml_dtypes; others have 1."""
_RECORDS = frozenset({("numpy", "record"), ("numpy.rec", "record"), ("numpy.core.records", "record")})
_SIZED = ("S", "U", "V", "user")
_POINTERS = 0b11  # NPY_ITEM_REFCOUNT and NPY_LIST_PICKLE
_OBJECT_FLAGS, _POINTERS_IN_FIELDS, _ALIGNED = 63, 27, 0x80
"""NPY_OBJECT_DTYPE_FLAGS, NPY_FROM_FIELDS and NPY_ALIGNED_STRUCT."""
_BYTE_ORDERS = ("|", "<", ">", "=")
_VERSIONS = range(5)
_ALIGNMENTS = frozenset({-1, 1, 2, 4, 8, 16, 32})
_POINTER_BYTES = 8
MAX_AXES = 64
_MOST_PARTS = 1 << 20


def is_typecode(node: object) -> bool:
    """Return whether a node is the text of a simple type, such as ``<f4``."""
    return isinstance(node, str) and _TYPECODE.fullmatch(node) is not None


def kind_without_state(dtype: object) -> str:
    """Return the kind of a type before BUILD sets its state."""
    if not isinstance(dtype, Call) or dtype.function != _DTYPE:
        return "dtype"
    letter, _ = _type_of(dtype) or ("V", -1)
    return {"O": "object-dtype", "V": "open-dtype", "user": "open-dtype"}.get(letter, "dtype")


def fields_of(call: Call) -> object:
    """Return the dictionary of fields in a type's state, which NumPy keeps without a copy, or None."""
    is_described = call.function == _DTYPE and isinstance(call.state, tuple) and len(call.state) > 4
    return call.state[4] if is_described else None


def is_known_version(state: object) -> bool:
    """Return whether a type's state has a version that NumPy reads."""
    return isinstance(state, tuple) and bool(state) and type(state[0]) is int and state[0] in _VERSIONS


def _type_of(dtype: Call) -> tuple[str, int] | None:
    """Return the letter and size of a type, -1 if only its state has the size; None if unknown."""
    spec = dtype.args[0] if dtype.args else None
    if isinstance(spec, Global):
        if (spec.module, spec.name) in _RECORDS:
            return "V", -1
        return ("user", _USER_DEFINED.get(spec.name, 1)) if spec.module == "ml_dtypes" else None
    match = _NAMED_TYPE.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        return None
    letter, count = match[1], int(match[2])
    return letter, {"U": 4 * count, "O": _POINTER_BYTES}.get(letter, count)


def kind_with_state(dtype: Call, state: object) -> str | None:
    """Return the kind of a type with its state; None if the state contradicts the type's name."""
    # Dangerous states have a size that makes elements reach beyond the array, fields outside the element or
    # over each other, or flags that make NumPy follow numbers as pointers or not count references to objects.
    # ``dtype(spec, False, True)`` makes a copy; without it, the state would be set on NumPy's own type, for
    # the whole process.
    known, numbers = _type_of(dtype), _size_alignment_flags(state)
    is_copy = [bool(argument) for argument in dtype.args[1:]] == [False, True]
    if known is None or numbers is None or not is_copy:
        return None
    (letter, nbytes), (size, alignment, flags) = known, numbers
    nbytes = size if nbytes < 0 else nbytes
    is_sized = size == nbytes or (size == -1 and letter not in _SIZED)
    parts = _parts(*state[2:5])  # type: ignore[index]
    if not is_sized or nbytes < 0 or alignment not in _ALIGNMENTS or parts is None:
        return None
    if any(offset < 0 or offset + size > nbytes or letter != "V" for offset, size, _ in parts):
        return None
    if letter in "mM" and not _has_unit(state):
        return None
    if any(pointers for _, _, pointers in parts):
        is_sound = flags & ~_ALIGNED in (_POINTERS_IN_FIELDS, _OBJECT_FLAGS) and not _overlap(parts)
    else:
        is_sound = flags == _OBJECT_FLAGS if letter == "O" else flags & _POINTERS == 0
    return ("object-dtype" if flags & _POINTERS else "dtype") if is_sound else None


def itemsize(dtype: Call) -> int | None:
    """Return the size of an element of a type in bytes; None if unknown."""
    letter, nbytes = _type_of(dtype) or ("", -1)
    numbers = _size_alignment_flags(dtype.state)
    if nbytes < 0 and letter and numbers is not None:
        nbytes = numbers[0]
    return nbytes if nbytes >= 0 else None


def number_of_parts(state: object) -> int:
    """Return the number of parts of a type at any depth; shared ones count as often as NumPy visits them."""
    # A type may be the type of several fields of another, which may be shared in turn: 40 levels of two
    # fields have 2^40 parts. The machine charges the count to the budget of the pickle.
    pending, count = [state], 0
    while pending and count < _MOST_PARTS:
        described = pending.pop()
        if isinstance(described, tuple) and len(described) > 4:
            base, _, fields = described[2:5]
            types = [base[0]] if isinstance(base, tuple) and base else []
            if isinstance(fields, dict):
                types += [field[0] for field in fields.values() if isinstance(field, tuple) and field]
            pending += [dtype.state for dtype in types if isinstance(dtype, Call)]
            count += len(types)
    return count


def _has_unit(state: object) -> bool:
    """Return whether the state of a date has its unit; without one NumPy reads invalid memory."""
    metadata = state[8] if isinstance(state, tuple) and len(state) == 9 else None
    unit = metadata[1] if isinstance(metadata, tuple) and len(metadata) == 2 else None
    return isinstance(unit, tuple) and len(unit) == 4 and all(type(part) is int for part in unit[1:])


def _size_alignment_flags(state: object) -> tuple[int, int, int] | None:
    """Return size, alignment and flags in the state of a type.

    (version, byte order, (base, shape), names, fields, size, alignment, flags[, metadata])
    """
    if not isinstance(state, tuple) or len(state) not in (8, 9) or state[1] not in _BYTE_ORDERS:
        return None
    if not is_known_version(state):
        return None
    return state[5:8] if all(type(number) is int for number in state[5:8]) else None


Part: TypeAlias = tuple[int, int, bool]
"""Offset and size in bytes of a part of a type, and whether it has pointers."""


def _overlap(parts: list[Part]) -> bool:
    """Return whether two parts share bytes, so that numbers could be taken for pointers."""
    ends = sorted((offset, offset + size) for offset, size, _ in parts)
    return any(end > start for (_, end), (start, _) in pairwise(ends))


def _parts(base: object, names: object, fields: object) -> list[Part] | None:
    """Return the parts of a type: its subarray, and its fields; None if one is malformed."""
    parts = [] if base is None else [_subarray(base)]
    if fields is not None or names:
        if not isinstance(fields, dict) or not isinstance(names, tuple):
            return None
        if not all(isinstance(name, str) and name in fields for name in names):
            return None
        parts += [
            _part(*field[:2])
            if isinstance(field, tuple) and len(field) in (2, 3) and type(field[1]) is int
            else None
            for field in fields.values()
        ]
    return None if None in parts else [part for part in parts if part is not None]


def _subarray(base: object) -> Part | None:
    """Return the part of a subarray ``(type, shape)``; None if it is malformed."""
    if not isinstance(base, tuple) or len(base) != 2:
        return None
    element, shape = _part(base[0]), base[1] if isinstance(base[1], tuple) else (base[1],)
    is_shape = len(shape) <= MAX_AXES and all(
        type(length) is int and 0 <= length < 1 << 31 for length in shape
    )
    if element is None or not is_shape or (element[1] == 0 and math.prod(shape) > 1):
        return None  # elements of 0 bytes could be any number
    return 0, element[1] * math.prod(shape), element[2]


def _part(dtype: object, offset: int = 0) -> Part | None:
    """Return the part for a type inside another; its own state was judged before."""
    if not isinstance(dtype, Call) or dtype.kind not in KINDS[:2]:
        return None
    known, numbers = _type_of(dtype), _size_alignment_flags(dtype.state)
    if known is None or (numbers is None and dtype.state is not None):
        return None
    return offset, max(numbers[0] if numbers else -1, known[1]), dtype.kind == "object-dtype"

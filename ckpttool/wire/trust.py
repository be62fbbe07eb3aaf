"""What a pickle's global means: plain data, code that a pickle has no business with, or nobody knows.

The lists lie beside this module in ``names/``, one entry a line, ``#`` starting a comment. The fixtures'
``make_names.py`` writes their generated parts.
"""

from __future__ import annotations

import enum
from functools import cache
from pathlib import Path
from typing import TypeAlias

Global: TypeAlias = tuple[str, str]
"""A module and a name in it, as the pickle spells them."""


class Trust(enum.Enum):
    """What loading a pickle that resolves a global would do."""

    PLAIN = "plain"
    """Data: to resolve it, to call it with plain arguments, or to set an instance's state does no harm."""

    SHAPED = "shaped"
    """Harmless to resolve, but only certain exact calls of it are harmless, or none.

    The caller checks the arguments of each call. A call that it has no shape for is dangerous, and so is
    to hand the global to another callable, even a plain one, which could call it unchecked.
    """

    DANGEROUS = "dangerous"
    """Another name of the standard library or of a widely installed package."""

    UNKNOWN = "unknown"
    """A module that nobody knows: ``__main__``, or the user's own."""


_NAMES = Path(__file__).with_name("names")

_COMMON: frozenset[Global] = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("builtins", "dict"),
        ("builtins", "set"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("torch", "BFloat16Storage"),
        ("torch", "BoolStorage"),
        ("torch", "ByteStorage"),
        ("torch", "CharStorage"),
        ("torch", "DoubleStorage"),
        ("torch", "FloatStorage"),
        ("torch", "HalfStorage"),
        ("torch", "IntStorage"),
        ("torch", "LongStorage"),
        ("torch", "ShortStorage"),
        ("torch", "Size"),
        ("torch", "Tensor"),
        ("torch", "bfloat16"),
        ("torch", "device"),
        ("torch", "float16"),
        ("torch", "float32"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch.serialization", "_get_layout"),
        ("torch.storage", "UntypedStorage"),
        ("torch.torch_version", "TorchVersion"),
    }
)
"""What nearly every checkpoint holds, kept here so that an ordinary one reads no list."""

_COMMON_SHAPED: frozenset[Global] = frozenset(
    {
        ("_codecs", "encode"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("copyreg", "_reconstructor"),
    }
)

_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_PYTHON_2_GLOBALS: dict[Global, Global] = {
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("UserDict", "IterableUserDict"): ("collections", "UserDict"),
    ("UserDict", "UserDict"): ("collections", "UserDict"),
    ("UserList", "UserList"): ("collections", "UserList"),
    ("UserString", "UserString"): ("collections", "UserString"),
}


def trust(module: str, name: str) -> Trust:
    """Return what the global `name` of `module` means; any text will do, and only exact names are trusted.

    A dotted name, which protocol 4 looks up attribute by attribute, is never plain, and a module that
    belongs to a known package is never unknown.
    """
    spelled = modern(module, name)
    if spelled in _COMMON:
        return Trust.PLAIN
    if spelled in _COMMON_SHAPED:
        return Trust.SHAPED
    if spelled in _pairs("plain.txt"):
        return Trust.PLAIN
    if spelled in _pairs("shaped.txt"):
        return Trust.SHAPED
    return Trust.DANGEROUS if module.partition(".")[0] in _known_packages() else Trust.UNKNOWN


def modern(module: str, name: str) -> Global:
    """Return the global as Python 3 spells it; protocols up to 2 use the names of Python 2."""
    renamed = _PYTHON_2_GLOBALS.get((module, name))
    return renamed or (_PYTHON_2_MODULES.get(module, module), name)


@cache
def _pairs(file: str) -> frozenset[Global]:
    pairs = (line.partition(" ") for line in _lines(file))
    return frozenset((module, name) for module, _, name in pairs)


@cache
def _known_packages() -> frozenset[str]:
    return frozenset(_lines("stdlib.txt") + _lines("packages.txt"))


def _lines(file: str) -> list[str]:
    """Return a list's entries, without comments and empty lines."""
    text = (_NAMES / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]

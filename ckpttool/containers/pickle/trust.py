"""What a global of a pickle means: a value, an object of known classes, or what nobody should load.

The lists lie beside this module in ``names/``, ``#`` starting a comment. Only ``values.txt`` and
``constructors.txt`` make anything safe; the others tell what is known to be dangerous from what is unknown.
"""

from __future__ import annotations

import enum
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeAlias

Global: TypeAlias = tuple[str, str]
"""A module and a name in it, as the pickle spells them."""


class Trust(enum.Enum):
    """What a name, or a call, of a pickle means to whoever loads it."""

    PLAIN = "plain"
    """Data, whatever the pickle does with it."""

    UNKNOWN = "unknown"
    """Nobody knows it: ``__main__``, or the user's own."""

    KNOWN = "known"
    """A name of a widely installed package that is on no list: to import it runs nothing that the pickle
    chose, to call it could do anything."""

    DANGEROUS = "dangerous"
    """Another name of the standard library, or one that is shaped to reach behind what it names."""


_NAMES = Path(__file__).with_name("names")
_SCRIPTS = frozenset({"__main__", "__mp_main__"})
_OWN_ROOTS = _SCRIPTS | {"__torch__"}
"""Modules of the user's whose names have underscores: scripts, and what TorchScript makes of classes."""
_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_PYTHON_2_GLOBALS: dict[Global, Global] = {
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"),
}


def modern(module: str, name: str) -> Global:
    """Return the global as Python 3 spells it; protocols up to 2 use the names of Python 2."""
    renamed = _PYTHON_2_GLOBALS.get((module, name))
    return renamed or (_PYTHON_2_MODULES.get(module, module), name)


def trust(module: str, name: str) -> Trust:
    """Return what the global `name` of `module` means where it is stored as data; any text will do.

    What it means to call it depends on the arguments: see ``constructors.evaluate``.
    """
    module, name = modern(module, name)
    return Trust.PLAIN if value_kind(module, name) is not None else stranger(module, name)


@lru_cache(1 << 12)
def value_kind(module: str, name: str) -> str | None:
    """Return the kind of data that a global is wherever it is stored, or None."""
    return _values().get((module, name))


def is_object(module: str, name: str) -> bool:
    """Tell whether honest pickles are known to call a global whose own code then runs."""
    return (module, name) in globals_in("objects.txt")


@lru_cache(1 << 12)
def stranger(module: str, name: str) -> Trust:
    """Return what a global that is neither a value nor a constructor means."""
    if is_object(module, name):
        return Trust.KNOWN
    standard_library = words_in("stdlib.txt")
    package, *below = f"{module}.{name}".split(".")
    reaches = "." in name and (module in _SCRIPTS or not standard_library.isdisjoint(name.split(".")))
    # A part ``__so__`` leads to all that Python has.
    has_dunder = any(map(is_dunder, below)) or (is_dunder(package) and package not in _OWN_ROOTS)
    if reaches or has_dunder or package in standard_library:
        return Trust.DANGEROUS
    if package not in words_in("packages.txt"):
        return Trust.UNKNOWN
    return Trust.DANGEROUS if name in standard_library else Trust.KNOWN


def is_dunder(name: str) -> bool:
    """Tell whether a name has two underscores on each side."""
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


@cache
def _values() -> dict[Global, str]:
    rows = (line.split() for line in lines("values.txt"))
    return {(module, name): kind for kind, module, *names in rows for name in names}


@cache
def globals_in(file: str) -> frozenset[Global]:
    """Return the globals of a list: in each line a module, and names in it."""
    rows = (line.split() for line in lines(file))
    return frozenset((module, name) for module, *names in rows for name in names)


@cache
def words_in(file: str) -> frozenset[str]:
    """Return the words of a list, of which a line may hold several."""
    return frozenset(word for line in lines(file) for word in line.split())


def lines(file: str) -> list[str]:
    """Return a list's entries, without comments and empty lines."""
    text = (_NAMES / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]

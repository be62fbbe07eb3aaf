"""What a pickle's global means: plain data, code that a pickle has no business with, or nobody knows.

The lists lie beside this module in ``names/``, ``#`` starting a comment. ``allowed.txt`` is the only one that
makes anything safe; the others tell what is known to be dangerous from what nobody knows.
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
    """It is on the list: data, whatever the pickle does with it."""

    UNKNOWN = "unknown"
    """Nobody knows it: ``__main__``, or the user's own."""

    KNOWN = "known"
    """A name of a widely installed package that is on no list: to import it runs nothing that the pickle
    chose, to call it could do anything."""

    DANGEROUS = "dangerous"
    """Another name of the standard library, or one that is shaped to reach behind what it names."""


CALLED_ONLY = frozenset(
    {"eval", "attribute", "instance", "latin1", "none_type", "partial", "reconstructor", "storage_bytes"}
)
"""The kinds of names that honest pickles call, with the very arguments of these calls, and never keep."""
UNVETTED = "unvetted"
"""The kind of names of packages that honest pickles call with data, and at whose code nobody looked."""
NEVER_AN_ARGUMENT = CALLED_ONLY - {"instance"}
"""Those that no tuple of arguments holds, as that of ``_reconstructor`` holds a class."""

_NAMES = Path(__file__).with_name("names")
_EVERY_NAME, _AND_BELOW = "*", ".*"
_SCRIPTS = frozenset({"__main__", "__mp_main__"})
_OWN_ROOTS = _SCRIPTS | {"__torch__"}
"""Modules of the user's whose names have underscores: scripts, and what TorchScript makes of classes."""
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


def modern(module: str, name: str) -> Global:
    """Return the global as Python 3 spells it; protocols up to 2 use the names of Python 2."""
    renamed = _PYTHON_2_GLOBALS.get((module, name))
    return renamed or (_PYTHON_2_MODULES.get(module, module), name)


def trust(module: str, name: str) -> Trust:
    """Return what the global `name` of `module` means where it is kept as data; any text will do.

    What it means to call it depends on the arguments: see ``calls.judge``.
    """
    module, name = modern(module, name)
    kind = kind_of(module, name)
    if kind in CALLED_ONLY:
        return Trust.DANGEROUS
    return stranger(module, name) if kind in (None, UNVETTED) else Trust.PLAIN


def is_made(module: str, name: str) -> bool:
    """Tell whether an object that `name` makes may be carried elsewhere, its arguments permitting."""
    kind = kind_of(module, name)
    return kind not in (None, UNVETTED) and kind not in NEVER_AN_ARGUMENT


@lru_cache(1 << 12)
def kind_of(module: str, name: str) -> str | None:
    """Return the kind under which a global, in Python 3's spelling, stands on the list, or None."""
    exact, families = _allowed()
    kind = exact.get((module, name))
    if kind is not None or not _is_plain(name):
        return kind
    for family, found in families:
        if module == family or (family.endswith(_AND_BELOW) and _lies_below(module, family)):
            is_class = name.lstrip("_")[:1].isupper()
            return found if is_class or found == "name" else None
    return None


@lru_cache(1 << 12)
def stranger(module: str, name: str) -> Trust:
    """Return what a global that is not on the list means."""
    package = module.partition(".")[0]
    reaches = "." in name and (
        module in _SCRIPTS or any(part in _standard_library() for part in name.split("."))
    )
    if reaches or package in _standard_library() or _has_dunder(module, name):
        return Trust.DANGEROUS
    if package not in _packages():
        return Trust.UNKNOWN
    return Trust.DANGEROUS if name in _standard_library() else Trust.KNOWN


def _has_dunder(module: str, name: str) -> bool:
    """Tell whether a part is ``__so__``, which leads to all that Python has."""
    root, *below = module.split(".")
    parts = [*name.split("."), *below, *([] if root in _OWN_ROOTS else [root])]
    return any(map(is_dunder, parts))


def is_dunder(name: str) -> bool:
    """Tell whether a name has two underscores on each side."""
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def _is_plain(name: str) -> bool:
    """Tell whether a name may stand for itself in a whole family of names."""
    return (
        name.isidentifier()
        and name.isascii()
        and not _has_dunder("", name)
        and name not in _standard_library()
    )


def _lies_below(module: str, family: str) -> bool:
    above = family.removesuffix(_AND_BELOW)
    return module == above or (
        module.startswith(f"{above}.") and all(map(_is_plain_part, module[len(above) + 1 :].split(".")))
    )


def _is_plain_part(part: str) -> bool:
    """Tell whether a part of a module's path is one: packages spell them in lower case."""
    return part.isidentifier() and part.isascii() and part.islower() and not _has_dunder("", part)


@cache
def _allowed() -> tuple[dict[Global, str], list[tuple[str, str]]]:
    """Return the kinds of names, and those of families of modules."""
    exact: dict[Global, str] = {}
    families: list[tuple[str, str]] = []
    for row in _lines("allowed.txt"):
        kind, module, *names = row.split()
        if names == [_EVERY_NAME]:
            families.append((module, kind))
        else:
            for name in names:
                exact.setdefault((module, name), kind)
    return exact, families


@cache
def admitted_by_weights_only() -> frozenset[Global]:
    """Return the globals that ``torch.load(weights_only=True)`` admits unless it is told of more."""
    rows = (row.split() for row in _lines("weights_only.txt"))
    return frozenset((module, name) for module, *names in rows for name in names)


@cache
def _standard_library() -> frozenset[str]:
    return frozenset(_lines("stdlib.txt"))


@cache
def _packages() -> frozenset[str]:
    return frozenset(_lines("packages.txt"))


def _lines(file: str) -> list[str]:
    """Return a list's entries, without comments and empty lines."""
    text = (_NAMES / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]

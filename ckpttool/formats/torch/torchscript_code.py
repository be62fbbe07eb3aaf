"""What the code of a TorchScript archive says, class by class, however its classes are called.

A class that a process has met before under its name gets another, ``__torch__.___torch_mangle_3.Net``, and
lies in a file of its own. Here classes of one name are numbered in the order in which the model leads to
them, so that two saves of one model say the same.

Source: PyTorch ``torch/csrc/jit/serialization/python_print.cpp``, ``torch/csrc/jit/api/compilation_unit.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from zlib import crc32

from ckpttool.formats.content.digests import described

_PREFIX = "code/"
_DEFINITION = re.compile(rb"^(?=(?:class|def) )", re.MULTILINE)
_METHOD = re.compile(rb"^(?=  def )", re.MULTILINE)
_TEMPORARY = re.compile(rb"(?<![\w.\"'])_\d+\b(?![\"'])")
_NAME = re.compile(rb"(?:class|def) (\w+)")
_REFERENCE = re.compile(rb"__torch__(?:\.\w+)+")
_MANGLE = re.compile(rb"___torch_mangle_\d+\.")


def told_code(definitions: Mapping[bytes, bytes], root: str) -> dict[str, str]:
    """Return size and checksum of each class and function, by its name without what a process adds.

    Args:
        definitions: What ``definitions_of`` returned.
        root: Name of the model's class.
    """
    numbers = _numbered(definitions, root.encode())
    found = {}
    for name, text in definitions.items():
        canonical = _REFERENCE.sub(
            lambda match: numbers.get(match[0], without_mangles(match[0])), _renumbered(text)
        )
        found[numbers[name].decode("utf-8", "backslashreplace")] = described(len(canonical), crc32(canonical))
    return dict(sorted(found.items()))


def definitions_of(files: Iterable[tuple[str, bytes]]) -> dict[bytes, bytes]:
    """Return the texts of classes and functions, by their full names; what is none, by its file's.

    Args:
        files: Names of the files, ``code/__torch__.py``, and their texts.
    """
    found: dict[bytes, bytes] = {}
    for file, text in files:
        module = file.removeprefix(_PREFIX).removesuffix(".py").replace("/", ".").encode()
        for part in _DEFINITION.split(text):
            named = _NAME.match(part)
            name = module + b"." + named[1] if named else module
            if stripped := part.strip():
                found[name] = found.get(name, b"") + _in_order(stripped) + b"\n"
    return found


def _renumbered(definition: bytes) -> bytes:
    """Return a definition with its temporaries counted from 0; printing counts through a whole file."""
    numbers: dict[bytes, bytes] = {}
    return _TEMPORARY.sub(lambda match: numbers.setdefault(match[0], b"_%d" % len(numbers)), definition)


def _in_order(definition: bytes) -> bytes:
    """Return a definition with its attributes by name: a class's constants come in the order of a set."""
    head, *rest = _METHOD.split(definition, maxsplit=1)
    first, *attributes = head.split(b"\n")
    if not first.startswith(b"class "):
        return definition
    return b"\n".join([first, *sorted(filter(None, attributes)), *rest])


def _numbered(definitions: Mapping[bytes, bytes], root: bytes) -> dict[bytes, bytes]:
    """Return the names that definitions are told under, in the order in which the first leads to them."""
    counts: dict[bytes, int] = {}
    numbers: dict[bytes, bytes] = {}
    found = sorted((without_mangles(name), without_mangles(text), name) for name, text in definitions.items())
    pending = [*(name for _, _, name in reversed(found)), root]
    while pending:
        name = pending.pop()
        if name in numbers or name not in definitions:
            continue
        bare = without_mangles(name)
        counts[bare] = counts.get(bare, 0) + 1
        numbers[name] = bare if counts[bare] == 1 else b"%s (%d)" % (bare, counts[bare])
        pending += reversed(_REFERENCE.findall(definitions[name]))
    return numbers


def without_mangles(text: bytes) -> bytes:
    """Return a text without what a process adds to the names of classes."""
    return _MANGLE.sub(b"", text)

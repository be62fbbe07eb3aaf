"""PyTorch's operators and C++ classes; some do more than compute.

Source: PyTorch ``aten/src/ATen/native/native_functions.yaml``, ``torch/csrc/jit/runtime/register_*.cpp``,
``torch/custom_class.h``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ckpttool.core.name_lists import OperatorLists, lines_of
from ckpttool.core.report import Finding, warning

_LISTS = Path(__file__).with_name("lists")
_SHOWN = 8

OPERATORS = OperatorLists(_LISTS, "torch")
CLASSES = "__torch__.torch.classes."
"""Prefix of the names of C++ classes in pickles, before namespace and name."""


def judge_classes(names: Iterable[str], where: str) -> Iterator[Finding]:
    """Yield a warning for C++ classes that are unknown, or that don't check their settings."""
    known, found = _known_classes(), set(names)
    foreign = sorted(found - known.keys())
    unchecked = sorted(name for name in found & known.keys() if known[name])
    if foreign:
        shown = ", ".join(name[:80] for name in foreign[:_SHOWN])
        yield warning("custom-ops", f"it uses C++ classes that only other code registers: {shown}", where)
    if unchecked:
        message = f"it uses C++ classes that don't check their settings: {', '.join(unchecked)}"
        yield warning("unchecked-ops", message, where)


@cache
def _known_classes() -> dict[str, bool]:
    """Return the known classes, with whether each takes settings without checking them."""
    rows = (line.partition(" ") for line in lines_of(_LISTS / "torch_classes.txt"))
    return {name: bool(mark) for name, _, mark in rows}

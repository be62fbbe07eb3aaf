"""Formats that can be written: one module for each, which the format's row in
``formats/traits.py`` names.

``ops.convert`` opens a source, brings its content into the wished form, asks the writer what it can't hold,
lets it write into a staged target, opens that again and compares every tensor before it appears.
"""

from __future__ import annotations

from importlib import import_module

from ckpttool.formats.traits import TRAITS
from ckpttool.writing.interface import Writer

WRITABLE = tuple(format for format, traits in TRAITS.items() if traits.writer)
"""The names of the formats that can be written."""


def format_of(name: str, *, has_architecture: bool) -> str | None:
    """Return the format that a target's name means, or None.

    Args:
        name: The last part of its path.
        has_architecture: Whether it is known which model the weights are of.
    """
    endings = {ending: format for format in WRITABLE for ending in TRAITS[format].suffixes}
    if has_architecture:
        endings |= {ending: format for format in WRITABLE for ending in TRAITS[format].model_suffixes}
    meant = [ending for ending in endings if name.lower().endswith(ending)]
    return endings[max(meant, key=len)] if meant else None


def writer_of(name: str) -> Writer:
    """Return the writer of a format, which is one of ``WRITABLE``."""
    module, _, kind = TRAITS[name].writer.partition(":")
    made: Writer = getattr(import_module(f"ckpttool.writing.{module}"), kind)()
    return made

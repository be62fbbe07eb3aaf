"""A configuration that is in force, as text: one line a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.render.terminal import display_width, pad
from ckpttool.containers.toml import as_toml
from ckpttool.core.text import printable

if TYPE_CHECKING:
    from ckpttool.cli.config import ConfigDocument
    from ckpttool.cli.config_tables import ConfigEntry

NOT_SET = "-"


def config_text(document: ConfigDocument | None, entries: Sequence[ConfigEntry]) -> str:
    """Return the file, or that there is none, and each key with its value and where that comes from."""
    doubt = None if document is None else document.trust_doubt()
    found = "no configuration (`ckpttool init` writes one)"
    if document is not None:
        found = f"{printable(document.path)} ({printable(doubt.text) if doubt else 'trusted'})"
    rows = [(printable(one.name), *_value_and_source(one, is_trusted=doubt is None)) for one in entries]
    widths = [max(display_width(row[at]) for row in rows) for at in range(2)]
    lines = (f"{pad(name, widths[0])}  {pad(value, widths[1])}  {source}" for name, value, source in rows)
    return "\n".join([found, *lines])


def _value_and_source(entry: ConfigEntry, *, is_trusted: bool) -> tuple[str, str]:
    value = NOT_SET if entry.value is None else printable(as_toml(entry.value))
    if entry.needs_trust and not is_trusted:
        return value, "file, refused"
    return value, "file" if entry.is_from_file else "default"

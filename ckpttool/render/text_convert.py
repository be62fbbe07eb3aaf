"""What people read of ``convert`` and ``merge``: what stands there now, and what of the source does not."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.ops.conversion import Converted
from ckpttool.render.numbers import file_size
from ckpttool.render.terminal import printable
from ckpttool.report import counted

_MAX_ROWS = 40
_BOLD, _YELLOW = 1, 33


def convert_text(converted: Converted, *, colour: bool = False) -> str:
    """Return what a conversion made, a line, and below it what was dropped and what is to be known.

    Args:
        converted: What to tell.
        colour: Whether to write colour.
    """
    head = _head(converted)
    lines = [f"\x1b[{_BOLD}m{head}\x1b[0m" if colour else head]
    lines += [f"  {printable(note)}" for note in converted.notes]
    lines += _dropped(converted, colour)
    return "\n".join(lines)


def _head(converted: Converted) -> str:
    sources = converted.sources
    source = sources[0] if len(sources) == 1 else f"{len(sources):,} parts"
    size = f"{counted(converted.tensors, 'tensor')}, {file_size(converted.nbytes)}"
    where = f"{printable(source)} → {printable(converted.target)}"
    if converted.dry_run:
        return f"{where}: would write {size} as {converted.format}"
    name = "" if _says(converted) else f" as {converted.format}"
    return f"{where}: {size}{name}, read back and equal"


def _says(converted: Converted) -> bool:
    """Tell whether the target's name says its format."""
    return os.path.basename(converted.target).lower().endswith(f".{converted.format}")


def _dropped(converted: Converted, colour: bool) -> Iterator[str]:
    if not converted.dropped:
        return
    head = f"not carried: {counted(len(converted.dropped), 'thing')}"
    yield f"  \x1b[{_YELLOW}m{head}\x1b[0m" if colour else f"  {head}"
    for one in converted.dropped[:_MAX_ROWS]:
        yield f"    {printable(one.path)}: {printable(one.why)}"
    if len(converted.dropped) > _MAX_ROWS:
        yield f"    … {len(converted.dropped) - _MAX_ROWS:,} more"

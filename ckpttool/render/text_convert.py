"""What people read of ``convert`` and ``merge``: what stands there now, and what of the source does not."""

from __future__ import annotations

import os

from ckpttool.core.report import counted
from ckpttool.ops.conversion import Converted
from ckpttool.render.numbers import file_size
from ckpttool.render.terminal import Style, printable, styled

_MAX_ROWS = 40


def convert_text(converted: Converted, *, colour: bool = False) -> str:
    """Return a line for what a conversion made, and below it its notes and what was dropped."""
    sources = converted.sources
    source = sources[0] if len(sources) == 1 else f"{len(sources):,} parts"
    size = f"{counted(converted.tensors, 'tensor')}, {file_size(converted.nbytes)}"
    if converted.dry_run:
        result = f"would write {size} as {converted.format}"
    else:
        names_format = os.path.basename(converted.target).lower().endswith(f".{converted.format}")
        result = f"{size}{'' if names_format else f' as {converted.format}'}, read back and equal"
    head = f"{printable(source)} → {printable(converted.target)}: {result}"
    lines = [styled(head, Style.BOLD, colour)]
    lines += [f"  {printable(note)}" for note in converted.notes]
    if dropped := converted.dropped:
        count = f"not carried: {counted(len(dropped), 'thing')}"
        lines.append(f"  {styled(count, Style.YELLOW, colour)}")
        lines += [f"    {printable(one.path)}: {printable(one.why)}" for one in dropped[:_MAX_ROWS]]
        if len(dropped) > _MAX_ROWS:
            lines.append(f"    … {len(dropped) - _MAX_ROWS:,} more")
    return "\n".join(lines)

"""What people read of ``rename``: old and new names side by side, directory by directory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckpttool.render.aligned import columns, padded
from ckpttool.render.escape import printable
from ckpttool.report import counted
from ckpttool.series.renaming.rename import Renamed

REFUSED = "  can't be given"
"""Stands behind a name in a plan that can't be carried out."""


def rename_text(renamed: Renamed) -> str:
    """Return old and new names, and what it comes to."""
    directories: dict[str, list[tuple[str, str]]] = defaultdict(list)
    refused = {one.path for one in renamed.planned.plan.refused}
    for old, new in renamed.renames:
        told = printable(os.path.basename(new)) + (REFUSED if old in refused else "")
        directories[os.path.dirname(old) or os.curdir].append((printable(os.path.basename(old)), told))
    parts = ["\n".join(_lines(directory, pairs)) for directory, pairs in directories.items()]
    return "\n\n".join([*parts, total_line(renamed)])


def _lines(directory: str, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield printable(directory)
    width = max(columns(old) for old, _ in pairs)
    for old, new in pairs:
        yield f"  {padded(old, width)}  ->  {new}"


def total_line(renamed: Renamed) -> str:
    """Return what a rename came to, in one line."""
    plan = renamed.planned.plan
    checkpoints = counted(plan.count, "checkpoint")
    count = len(renamed.renames)
    if renamed.failed:
        wanted = counted(len(plan.renamings), "checkpoint")
        return f"renamed {count:,} of {wanted}; {counted(len(renamed.failed), 'failure')}"
    if renamed.declined or renamed.is_refused:
        return f"nothing renamed of {checkpoints}"
    if plan.refused:
        return f"would rename none of {checkpoints}: {counted(len(plan.refused), 'name')} can't be given"
    if not plan.renamings:
        return f"nothing to rename among {checkpoints}"
    follows = f"; {_followers(renamed.planned.follows)}" if renamed.planned.follows else ""
    if renamed.dry_run:
        return f"would rename {count:,} of {checkpoints}{follows}"
    return f"renamed {count:,} of {checkpoints}{follows}"


def _followers(count: int) -> str:
    return f"{counted(count, 'reference')} to them {'follows' if count == 1 else 'follow'}"

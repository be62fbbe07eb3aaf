"""The text of ``rename`` and ``undo``: old and new names, directory by directory, and what came back."""

from __future__ import annotations

import os
from collections import defaultdict

from ckpttool.core.report import counted
from ckpttool.render.terminal import display_width, pad, printable
from ckpttool.runs.renaming.rename import RenameResult
from ckpttool.runs.undo import Undone
from ckpttool.transaction.history import moment_of
from ckpttool.transaction.paths import NotUndone

REFUSED = "  can't be used"
"""Stands behind a name in a plan that can't be carried out."""
_COMMANDS = {"trash": "prune --trash", "rename": "rename", "restore": "undo"}


def rename_text(renamed: RenameResult) -> str:
    """Return old and new names, and what it comes to."""
    directories: dict[str, list[tuple[str, str]]] = defaultdict(list)
    refused = {one.path for one in renamed.planned.plan.refused}
    for old, new in renamed.renames:
        name = printable(os.path.basename(new)) + (REFUSED if old in refused else "")
        directories[os.path.dirname(old) or os.curdir].append((printable(os.path.basename(old)), name))
    parts = []
    for directory, pairs in directories.items():
        width = max(display_width(old) for old, _ in pairs)
        lines = (f"  {pad(old, width)}  ->  {new}" for old, new in pairs)
        parts.append("\n".join([printable(directory), *lines]))
    return "\n\n".join([*parts, rename_total_line(renamed)])


def rename_total_line(renamed: RenameResult) -> str:
    """Return what a rename came to, in one line."""
    plan = renamed.planned.plan
    checkpoints = counted(plan.count, "checkpoint")
    count = len(renamed.renames)
    if renamed.failed:
        planned = counted(len(plan.renamings), "checkpoint")
        return f"renamed {count:,} of {planned}; {counted(len(renamed.failed), 'failure')}"
    if renamed.declined or renamed.is_refused:
        return f"nothing renamed of {checkpoints}"
    if plan.refused:
        return f"would rename none of {checkpoints}: {counted(len(plan.refused), 'name')} can't be used"
    if not plan.renamings:
        return f"nothing to rename among {checkpoints}"
    references = renamed.planned.update_count
    follow = "follows" if references == 1 else "follow"
    follows = f"; {counted(references, 'reference')} to them {follow}" if references else ""
    verb = "would rename" if renamed.dry_run else "renamed"
    return f"{verb} {count:,} of {checkpoints}{follows}"


def undo_text(done: Undone) -> str:
    """Return a heading, a line for each checkpoint and each pointer, and the total."""
    command = _COMMANDS[done.kind or "trash"]
    rows = [
        (one.path, "from the trash" if done.kind == "trash" else f"was {os.path.basename(one.was)}")
        for one in done.restored
    ]
    rows += [(path, "rewritten") for path in done.pointers]
    shown = [(printable(path), printable(what)) for path, what in rows]
    width = max((display_width(path) for path, _ in shown), default=0)
    lines = (f"  {pad(path, width)}  {what}" for path, what in shown)
    return "\n".join([f"{command} of {moment_of(done.identity or '')}", *lines, _undo_total(done)])


def _undo_total(done: Undone) -> str:
    verb = "would restore" if done.dry_run else "restored"
    if count := len(done.restored):
        return f"{verb} {counted(count, 'checkpoint')}"
    if done.pointers:
        return f"{verb} {counted(len(done.pointers), 'pointer')}; no checkpoint had moved"
    nothing = "would restore nothing" if done.dry_run else "nothing restored"
    if not done.problems:
        return f"{nothing}: everything is already as it was"
    others = f" (and {len(done.problems) - 1:,} more)" if len(done.problems) > 1 else ""
    problem = done.problems[0]
    why = problem.why if isinstance(problem, NotUndone) else problem.message
    return f"{nothing}: {printable(f'{os.path.basename(problem.path)}: {why}')}{others}"

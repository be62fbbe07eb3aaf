"""What ``undo`` prints: what is back, and which pointers went with it."""

from __future__ import annotations

import os

from ckpttool.render.aligned import columns, padded
from ckpttool.render.escape import printable
from ckpttool.report import counted
from ckpttool.series.changing.history import moment_of
from ckpttool.series.undoing.undo import Undone

_COMMANDS = {"trash": "prune --trash", "rename": "rename", "restore": "undo"}


def undo_text(done: Undone) -> str:
    """Return a heading, a line for each checkpoint and each pointer, and the total."""
    command = _COMMANDS[done.kind or "trash"]
    rows = [
        (one.path, "from the trash" if done.kind == "trash" else f"was {os.path.basename(one.was)}")
        for one in done.restored
    ]
    rows += [(path, "rewritten") for path in done.pointers]
    shown = [(printable(path), printable(what)) for path, what in rows]
    width = max((columns(path) for path, _ in shown), default=0)
    lines = (f"  {padded(path, width)}  {what}" for path, what in shown)
    return "\n".join([f"{command} of {moment_of(done.identity or '')}", *lines, _total(done)])


def _total(done: Undone) -> str:
    count = len(done.restored)
    if count:
        are = "would be back" if done.dry_run else ("is back" if count == 1 else "are back")
        return f"{counted(count, 'checkpoint')} {are}"
    if done.pointers:
        says, it = ("says", "it") if len(done.pointers) == 1 else ("say", "they")
        said = f"{'would say' if done.dry_run else says} again what {it} said"
        return f"{counted(len(done.pointers), 'pointer')} {said}; no checkpoint had moved"
    nothing = "nothing would be back" if done.dry_run else "nothing is back"
    if not done.problems:
        return f"{nothing}: all is as it was before already"
    others = f" (and {len(done.problems) - 1:,} more)" if len(done.problems) > 1 else ""
    why = done.problems[0].message.removeprefix("not taken back: ")
    name = os.path.basename(done.problems[0].path)
    return f"{nothing}: {printable(f'{name}: {why}')}{others}"

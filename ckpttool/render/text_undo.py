"""What ``undo`` prints: what is back, and which pointers went with it."""

from __future__ import annotations

import os

from ckpttool.render.escape import printable
from ckpttool.report import counted
from ckpttool.series.undoing import Undone

_COMMANDS = {"trash": "prune --trash", "rename": "rename", "restore": "undo"}


def undo_text(done: Undone) -> str:
    """Return a heading, a line for each checkpoint and each pointer, and the total."""
    moment = (done.identity or "").partition(".")[0]
    when = f"{moment[:4]}-{moment[4:6]}-{moment[6:8]} {moment[9:11]}:{moment[11:13]}:{moment[13:15]} UTC"
    command = _COMMANDS[done.kind or "trash"]
    lines = [f"{command} of {when}"]
    for one in done.restored:
        was = "from the trash" if done.kind == "trash" else f"was {os.path.basename(one.was)}"
        lines.append(f"  {printable(one.path)}  {printable(was)}")
    lines += [f"  {printable(path)}  rewritten" for path in done.pointers]
    are = "would be back" if done.dry_run else ("is back" if len(done.restored) == 1 else "are back")
    return "\n".join([*lines, f"{counted(len(done.restored), 'checkpoint')} {are}"])

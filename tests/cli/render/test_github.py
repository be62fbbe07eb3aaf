"""GitHub's annotations: the commands, and that nothing out of a file becomes one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial

from ckpttool import AccessDenied, Finding, Status, Verification
from ckpttool.core.report import error, note, warning
from tests.support.golden import Golden
from tests.support.rendering import escaped, report_of

Verified = Callable[..., Verification]
workflow_commands = partial(report_of, "github")
_COMMAND = re.compile(r"::(error|warning|notice) (?:file=([^:,\r\n]*),)?title=([^:,\r\n]*)::([^\r\n]*)")


def values(finding: Finding) -> Finding:
    return finding._replace(check="values")


def test_commands(golden: Golden, verified: Verified, several: list[Verification]) -> None:
    unread = [AccessDenied("run/locked.pth", "permission denied")]
    below = [verified(f"{place}/m.pth", error("nan", "1 NaN")) for place in ("/src/run", "/data")]
    first = [error("nan", f"{at} NaN") for at in range(20)]
    notes = [note("old", f"{at} old") for at in range(12)]
    names = ("50%.pth", "a:b,c.pth", "a\nb\r.pth", "%0A::error::x")
    escapes = {
        f"the name {name!r}": workflow_commands([verified(name, warning("infinity", "1 Inf"))])
        for name in names
    }
    golden(
        {
            "no checkpoint": workflow_commands(),
            "one of each verdict": workflow_commands(several, unread),
            "files from the root": workflow_commands(below, root="/src"),
            "ten of each, and all checkpoints before a second finding": workflow_commands(
                [verified("a", *first, *notes), verified("b", error("nan", "b"))]
            ),
        }
        | escapes
    )


def test_hostile_names(verified: Verified, hostile_names: list[str]) -> None:
    for hostile in hostile_names:
        found = verified(hostile, values(error("nan", hostile, hostile)), values=Status.FAILED)
        unread, first, last = workflow_commands([found], [AccessDenied(hostile, hostile)]).split("\n")
        for line in (unread, first):
            matched = _COMMAND.fullmatch(line)
            assert matched is not None
            assert line.isprintable()
            assert undone(matched[2]) == escaped(os.path.normpath(hostile))
        assert undone(first).endswith(f"::{escaped(hostile)}: {escaped(hostile)} [{escaped(hostile)}]")
        assert last == "::error title=ckpttool verify::1 checkpoint: 1 invalid; 1 not read"


def undone(text: str) -> str:
    """Return a text as GitHub reads it: the escapes undone, that of the escape sign last."""
    for escape, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(escape, character)
    return text


def test_endless_names_are_cut(verified: Verified, endless: str) -> None:
    found = verified(endless, values(error("nan", endless, endless)), values=Status.FAILED)
    assert len(workflow_commands([found], [AccessDenied(endless, endless)])) < 200_000

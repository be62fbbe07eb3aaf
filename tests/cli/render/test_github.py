"""GitHub's annotations: the commands, and that nothing out of a file becomes one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial

import pytest

from ckpttool import AccessDenied, Finding, Status, Verification
from ckpttool.core.report import error, note, warning
from tests.support.rendering import escaped, report_of

Verified = Callable[..., Verification]
workflow_commands = partial(report_of, "github")
_COMMAND = re.compile(r"::(error|warning|notice) (?:file=([^:,\r\n]*),)?title=([^:,\r\n]*)::([^\r\n]*)")


def values(finding: Finding) -> Finding:
    return finding._replace(check="values")


def test_no_checkpoint() -> None:
    assert workflow_commands() == "::notice title=ckpttool verify::0 checkpoints"


def test_one_of_each_verdict(several: list[Verification]) -> None:
    unread = [AccessDenied("run/locked.pth", "permission denied")]
    assert workflow_commands(several, unread).split("\n") == [
        "::error file=run/locked.pth,title=access-denied::run/locked.pth: permission denied",
        "::error file=run/nan.pth,title=nan::run/nan.pth: 3 NaN in 20 values [fc.weight]",
        "::error file=run/evil.pth,title=unsafe-import::run/evil.pth: it names os.system [data.pkl]",
        "::error file=run/idle.pth,title=not-predicted::run/idle.pth: no --model was given",
        "::warning file=run/nan.pth,title=infinity::run/nan.pth: 1 Inf in 2 values [fc.bias]",
        "::error title=ckpttool verify::5 checkpoints: 2 valid, 1 invalid, 1 unsafe, 1 not run; 1 not read",
    ]


def test_files_are_named_from_the_root(verified: Verified) -> None:
    found = [
        verified("/src/run/m.pth", error("nan", "1 NaN")),
        verified("/data/m.pth", error("nan", "1 NaN")),
    ]
    assert workflow_commands(found, root="/src").split("\n")[:2] == [
        "::error file=run/m.pth,title=nan::/src/run/m.pth: 1 NaN",
        "::error file=/data/m.pth,title=nan::/data/m.pth: 1 NaN",
    ]


def test_ten_of_each_and_every_checkpoint_before_a_second_finding(verified: Verified) -> None:
    first = [error("nan", f"{at} NaN") for at in range(20)]
    notes = [note("old", f"{at} old") for at in range(12)]
    lines = workflow_commands([verified("a", *first, *notes), verified("b", error("nan", "b"))]).split("\n")
    assert lines == [
        "::error file=a,title=nan::a: 0 NaN",
        "::error file=b,title=nan::b: b",
        *(f"::error file=a,title=nan::a: {at} NaN" for at in range(1, 9)),
        *(f"::notice file=a,title=old::a: {at} old" for at in range(9)),
        "::notice title=ckpttool verify::2 checkpoints: 2 valid; 14 more findings in the log",
    ]


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("50%.pth", "50%25.pth", "50%25.pth"),
        ("a:b,c.pth", "a%3Ab%2Cc.pth", "a:b,c.pth"),
        ("a\nb\r.pth", "a\\nb\\r.pth", "a\\nb\\r.pth"),
        ("%0A::error::x", "%250A%3A%3Aerror%3A%3Ax", "%250A::error::x"),
    ],
)
def test_escapes(verified: Verified, name: str, file: str, message: str) -> None:
    first, _ = workflow_commands([verified(name, warning("infinity", "1 Inf"))]).split("\n")
    assert first == f"::warning file={file},title=infinity::{message}: 1 Inf"


def test_hostile_names(verified: Verified, hostile: str) -> None:
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

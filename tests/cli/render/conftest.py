"""Verdicts to draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpttool import Check, Finding, Safety, Status, Verification
from ckpttool.core.report import error, warning

Verified = Callable[..., Verification]
DETAILS = {
    "structure": "1 file, 2 tensors",
    "checksum": "14 records",
    "values": "8 tensors",
    "safety": "loading it runs no code",
    "load": "not requested",
    "predict": "not requested",
}


def of(check: str, finding: Finding, **more: Any) -> Finding:
    """Return a finding as the check that found it leaves it."""
    return finding._replace(check=check, **more)


@pytest.fixture
def verified() -> Verified:
    """Return what makes a verdict: a path, findings, and the status of checks that did not pass."""

    def make(path: str, *findings: Finding, **more: Any) -> Verification:
        safety = more.pop("safety_verdict", Safety.SAFE)
        wanted = {"structure": Status.PASSED, "values": Status.PASSED, "safety": Status.PASSED} | more
        checks = tuple(Check(name, status, DETAILS[name]) for name, status in wanted.items())
        return Verification(path, "pytorch", "zip", safety, checks, findings, 3953)

    return make


@pytest.fixture
def several(verified: Verified) -> list[Verification]:
    """Return one of each verdict."""
    nan = of("values", error("nan", "3 NaN in 20 values", "fc.weight"))
    infinite = of("values", warning("infinity", "1 Inf in 2 values", "fc.bias"))
    unsafe = of("safety", error("unsafe-import", "it names os.system", "data.pkl"))
    undone = of("predict", error("not-predicted", "no --model was given"))
    ignored = of("values", error("nan", "1 NaN in 2 values", "head.bias"), ignored="a mask")
    return [
        verified("run/good.pth"),
        verified("run/nan.pth", nan, infinite, values=Status.FAILED),
        verified("run/evil.pth", unsafe, safety=Status.FAILED, safety_verdict=Safety.UNSAFE),
        verified("run/idle.pth", undone, load=Status.SKIPPED, predict=Status.SKIPPED),
        verified("run/known.pth", ignored),
    ]


HOSTILE = {
    "newline": "a\nb\r\n::error::c",
    "terminal": "\x1b[31mred\x1b[0m\x07\x9b",
    "bidi": "abc\u202edef\u2066\u200b",
    "xml": "]]><failure/>&amp;<!-- \x00\x0b\ufffe\uffff",
    "surrogate": "\ud800x\udcff",
    "markdown": "a|b`c`<b>*d*_e_[f](g)![h](i)\\|~j~ #1 @k www.l.de http://m.n :o: &lt;",
    "command": "%0A::error,x:y=z",
    "blank": " ",
}
"""Names that files may hold."""


@pytest.fixture
def hostile_names() -> list[str]:
    """Return names that mean harm."""
    return [*HOSTILE.values()]


@pytest.fixture
def endless() -> str:
    """Return a name of a million characters, none of which is printable."""
    return "\u202e" * 1_000_000

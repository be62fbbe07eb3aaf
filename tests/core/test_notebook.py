"""Results in notebooks: tables of escaped text."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.core.notebook import html_table
from ckpttool.runs.pruning.planning import PrunePlan

EVIL = "<script>alert(1)</script>"
SHOWN = "&lt;script&gt;alert(1)&lt;"
SAVED = "<script>"
"""A file's name has no slash."""


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def test_a_table_is_escaped_and_short() -> None:
    rows = ((number, f"<b>{number}\x1b[2J\udcff") for number in range(1000))
    shown = html_table("a & b", ("n", "name"), rows, 1000)
    assert shown.startswith("<p>a &amp; b</p><table><tr><th>n</th><th>name</th></tr><tr><td>0</td>")
    assert "<td>&lt;b&gt;39\\x1b[2J\\udcff</td></tr></table><p>… and 960 more</p>" in shown
    assert (next(rows)[0], shown.isprintable()) == (40, True)


def test_a_long_cell_is_cut_and_an_empty_table_is_its_caption() -> None:
    shown = html_table("x", ("a", "b"), [("y" * 5000, None)], 1)
    assert shown.count("y") == 199
    assert shown.endswith("…</td><td></td></tr></table>")
    assert html_table("x", ("a",), [], 0) == "<p>x</p>"


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of two checkpoints with hostile names of a directory, tensors and values."""
    monkeypatch.chdir(tmp_path)
    run = Path(SAVED)
    run.mkdir()
    for epoch in (1, 2):
        state = {EVIL: torch.tensor([1.0, epoch])}
        torch.save({"epoch": epoch, "model": state, "note": f"{EVIL}{epoch}"}, run / f"m_{epoch}.pth")
    return run


def test_every_result_escapes_hostile_names(evil: Path) -> None:
    first, second = evil / "m_1.pth", evil / "m_2.pth"
    with ckpttool.open_checkpoint(first) as checkpoint:
        tensors = checkpoint._repr_html_()
    pruned = ckpttool.prune(evil, keep_last=1, dry_run=True)
    results = {
        "checkpoint": tensors,
        "verification": ckpttool.verify(first)._repr_html_(),
        "difference": ckpttool.diff(first, second)._repr_html_(),
        "listing": ckpttool.list_checkpoints(evil)._repr_html_(),
        "pruned": pruned._repr_html_(),
        "plan": PrunePlan(pruned.plan)._repr_html_(),
    }
    for name, shown in results.items():
        assert "<script" not in shown and "&lt;script&gt;" in shown, name
        assert shown.count("<table>") == shown.count("</table>") == 1, name
    assert f"<td>model.{SHOWN}/script&gt;</td>" in results["difference"]
    assert f"<tr><td>model.{SHOWN}/script&gt;</td><td>float32</td><td>2</td><td>weights</td></tr>" in tensors


def test_a_difference_has_a_row_for_each_kind(evil: Path, tmp_path: Path) -> None:
    torch.save({"model": {EVIL: torch.tensor([1.0, 3.0]), "more": torch.ones(2, 3)}}, tmp_path / "b.pth")
    torch.save({"model": {EVIL: torch.tensor([1.0, 1.0]), "less": torch.ones(4)}}, tmp_path / "a.pth")
    shown = ckpttool.diff(tmp_path / "a.pth", tmp_path / "b.pth", rename=False)._repr_html_()
    name = f"model.{SHOWN}/script&gt;"
    assert f"<td>values changed</td><td>{name}</td><td>float32 2</td><td>float32 2</td><td>2</td>" in shown
    assert "<td>only in A</td><td>model.less</td><td>float32 4</td><td></td>" in shown
    assert "<td>only in B</td><td>model.more</td><td></td><td>float32 2×3</td>" in shown
    shown = ckpttool.diff(evil / "m_1.pth", evil / "m_2.pth")._repr_html_()
    assert f"<td>value</td><td>note</td><td>&#x27;{SHOWN}" in shown


def test_a_plan_says_what_goes_and_why(evil: Path) -> None:
    shown = ckpttool.prune(evil, keep_last=1, dry_run=True)._repr_html_()
    assert shown.startswith("<p>&lt;Pruned 1 to remove, ")
    assert "m_1.pth</td><td>remove</td><td></td>" in shown
    assert "m_2.pth</td><td>keep</td><td>" in shown


def test_a_failed_verdict_names_its_finding(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    shutil.copy(files / "pytorch" / "guide.pth", path)
    verdict = ckpttool.verify(path)
    assert repr(verdict) == f"<Verification {path}: valid, safe>"
    assert verdict.failure is None
    torch.save({"w": torch.tensor([1.0, float("nan")])}, path)
    verdict = ckpttool.verify(path)
    assert repr(verdict) == f"<Verification {path}: invalid, safe (nan)>"
    assert "<p>1 finding</p><table><tr><th>finding</th>" in verdict._repr_html_()
    path.write_bytes(path.read_bytes()[:-40])
    assert repr(ckpttool.verify(path)).endswith(": invalid, unknown (truncated)>")
    torch.save({"w": torch.ones(2), "evil": Runs()}, path)
    assert repr(ckpttool.verify(path)).endswith(": valid, unsafe (unsafe-import)>")

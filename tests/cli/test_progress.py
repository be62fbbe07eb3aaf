"""Progress: one line for a person at a terminal, once a command takes long."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest

from ckpttool.cli import progress
from ckpttool.formats.discovery import discover
from ckpttool.ops.manifest_seal import verify_and_seal
from ckpttool.ops.verify import verify
from tests.support.commands import Terminal, run_here

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def series(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(files / "series", "series"))


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command take long."""
    monkeypatch.setattr(progress, "PATIENCE", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def shown_by(*arguments: object) -> str:
    """Return what a command shows on stderr, a terminal, without what moves the cursor."""
    with contextlib.redirect_stderr(Terminal()) as stream:
        assert run_here(*arguments) == 0
    return _CONTROLS.sub("", stream.getvalue())


def test_verify_shows_one_bar_for_all(series: Path) -> None:
    shown = shown_by("verify", series)
    assert re.search(r"\b1 of 10 .* series/model_epoch_1\.pth", shown)
    assert re.search(r"\b10 of 10 ━+ ([\d.]+)/\1 kB .* series/model_epoch_10\.pth", shown)


def test_the_bar_of_manifests_ends_full(series: Path) -> None:
    shown = shown_by("verify", series / "model_epoch_1.pth", "--write-manifest")
    done, total = re.findall(r"([\d.]+)/([\d.]+) kB", shown)[-1]
    size = (series / "model_epoch_1.pth").stat().st_size
    assert done == total == f"{3 * size / 1000:.1f}"


def test_list_counts(series: Path) -> None:
    shown = shown_by("list", series)
    assert re.search(r"series: \d+ looked at", shown)


def test_statistics_have_a_bar(series: Path) -> None:
    shown = shown_by("inspect", series / "model_epoch_1.pth", "--stats")
    assert "reading values" in shown


def test_nothing_is_drawn_before_it_takes_long(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", float("inf"))
    assert shown_by("verify", series) == ""


def test_nothing_is_drawn_on_a_dumb_terminal(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert shown_by("verify", series) == ""


def test_names_are_no_markup_and_move_no_cursor(series: Path) -> None:
    (series / "model_epoch_1.pth").rename(series / "[red]{x}\x1b[2J.pth")
    shown = shown_by("verify", series)
    assert "[red]{x}\\x1b[2J.pth" in shown


def test_a_manifest_is_counted_when_it_is_written_and_when_it_is_compared(series: Path) -> None:
    path = series / "model_epoch_1.pth"
    (unit,) = discover(path)
    size = path.stat().st_size

    def bytes_told() -> int:
        told: list[int] = []
        verify(unit, advance=told.append)
        return sum(told)

    read = bytes_told()
    sealed: list[int] = []
    verify_and_seal(unit, advance=sealed.append)
    (unit,) = discover(path)
    assert sum(sealed) > read + size
    assert bytes_told() == read + size

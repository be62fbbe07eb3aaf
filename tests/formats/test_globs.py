"""Globs as people give them: with slashes, from the root on, from where they stand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.formats.discovery import Globs, last_name
from tests.support.opening import paths_in


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, in which runs/exp and runs/final lie."""
    for name in ("runs/exp", "runs/final"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _matched(glob: str, root: str, *names: str) -> list[str]:
    globs = Globs([glob], root)
    return [name for name in names if globs.matching(os.path.join(root, name))]


def test_all_that_means_a_directory(tree: Path) -> None:
    spellings = [
        *("final", "final/", "./final", "./final//", "f*", "**/final", "runs/final", "./runs/final/"),
        *("runs//final", "{0}/runs/final", "{0}/runs/fi*", "{0}/*/final", "other/../runs/final"),
    ]
    for glob in spellings:
        for root in ["runs", "./runs", "{0}/runs", "runs/exp/.."]:
            assert _matched(glob.format(tree), root.format(tree), "final", "exp") == ["final"], glob


def test_what_means_something_else(tree: Path) -> None:
    cases = ["", "/", ".", "./", "/final", "runs", "exp/final", "*/final", "{0}/final", "\0/x"]
    for glob in cases:
        globs = Globs([glob.format(tree)], "runs")
        assert globs.matching("runs/final") == [], glob
        assert globs.unmatched("--exclude") == [f"--exclude {glob.format(tree)!r} matched nothing"], glob


def test_a_path_that_leads_into_the_directory_means_no_other_of_that_name(tree: Path) -> None:
    assert _matched("runs/final", "runs", "final", "exp/final", "runs/final") == ["final", "runs/final"]
    assert _matched("final", "runs", "final", "exp/final") == ["final", "exp/final"]
    assert _matched("final/*.pt", "runs", "final/a.pt", "a.pt", "exp/final/a.pt") == ["final/a.pt"]


def test_a_symlink_to_the_directory(tree: Path) -> None:
    (tree / "link").symlink_to("runs")
    assert _matched("link/final", "runs", "final") == ["final"]
    assert _matched(f"{tree}/runs/final", "link", "final") == ["final"]


def test_from_inside_the_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "runs" / "exp")
    assert _matched("../final", "..", "final", "exp") == ["final"]
    assert _matched("../final", str(tree / "runs"), "final", "exp") == ["final"]
    assert _matched("./a/b", "..", "exp/a/b", "final/a/b") == ["exp/a/b"]


def test_what_lies_in_what_is_passed_over_counts_as_matched() -> None:
    globs = Globs(["final", "final/*.pt", "fi*/a", "exp/b", "z"], "runs")
    assert not globs.excludes("runs/a")
    assert globs.excludes("runs/final")
    assert globs.unmatched("--exclude") == [
        "--exclude 'exp/b' matched nothing",
        "--exclude 'z' matched nothing",
    ]


def test_of_several_that_match_none_is_told() -> None:
    globs = Globs(["a*", "*.pt", "a.pt"], "runs")
    assert globs.matching("runs/a.pt") == ["a*", "*.pt", "a.pt"]
    assert globs.unmatched("--series") == []


@pytest.mark.parametrize(("glob", "name"), [("a_*.pt", "a_*.pt"), ("./runs/a_*/", "a_*")])
def test_the_last_name(glob: str, name: str) -> None:
    assert last_name(glob) == name


def test_a_walk_passes_it_over(tree: Path) -> None:
    for glob in ["final/", "runs/final", "./final"]:
        for name in ("exp", "final"):
            (tree / "runs" / name / "a.pt").write_bytes(b"")
        assert paths_in("runs", exclude=[glob]) == [Path("runs/exp/a.pt")], glob

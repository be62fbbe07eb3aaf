"""How much work is done at once, and where a child imports from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ckpttool
from ckpttool.storage.children import child_sys_path

ROOT = str(Path(ckpttool.__file__).parents[1])


def test_a_child_imports_from_where_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/somewhere/installed", "/elsewhere"])
    assert child_sys_path() == ["/somewhere/installed", "/elsewhere", ROOT]


@pytest.mark.parametrize("place", ["", ".", "relative", None])
def test_a_child_imports_nothing_from_where_the_user_stands(
    place: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.getcwd() if place is None else place, "/installed"])
    assert child_sys_path() == ["/installed", ROOT]


def test_who_stands_beside_the_package_imports_it_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [ROOT, "/installed"])
    assert child_sys_path() == [ROOT, "/installed", ROOT]


def test_a_child_can_be_started_from_a_directory_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/installed"])
    assert child_sys_path() == ["/installed", ROOT]

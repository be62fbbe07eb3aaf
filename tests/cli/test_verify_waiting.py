"""``ckpttool verify`` of what another command has half moved: it is whole elsewhere, or on its way out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.changes import begin_removal
from tests.support.moments import before_verifying

WAITS = "a command was interrupted here; the next command that changes this directory recovers it"


@pytest.fixture
def whole(files: Path, tmp_path: Path) -> Path:
    """Return a directory with a sharded set and a file."""
    place = tmp_path / "run"
    place.mkdir()
    for path in (files / "safetensors" / "sharded").glob("model*safetensors*"):
        shutil.copy(path, place)
    shutil.copy(files / "pytorch" / "guide.pth", place / "guide.pth")
    return place


def begun(directory: Path) -> str:
    """Let a prune begin to remove the sharded set, and stop; return its journal's path."""
    return begin_removal(directory, *(name for name in os.listdir(directory) if name.startswith("model")))


def test_it_is_left_out(run: Callable, whole: Path) -> None:
    status, before, _ = run("verify", whole)
    assert (status, "2 checkpoints: 2 valid" in before) == (0, True)
    journal = begun(whole)
    status, out, err = run("verify", whole)
    assert (status, err) == (0, f"ckpttool: warning: {whole}: {WAITS} ({journal})\n")
    assert "guide.pth" in out and "model" not in out


def test_a_file_that_is_named_is_verified_all_the_same(run: Callable, whole: Path) -> None:
    begun(whole)
    status, out, err = run("verify", whole / "guide.pth")
    assert (status, err) == (0, "")
    assert out.startswith("✓ valid")


def test_where_nothing_else_is_there(run: Callable, whole: Path) -> None:
    (whole / "guide.pth").unlink()
    (whole / "README.md").write_text("A model.")
    journal = begun(whole)
    for name in os.listdir(whole):
        if name.endswith(".json"):  # so that it is no checkpoint as a whole
            (whole / name).unlink()
    status, out, err = run("verify", whole)
    assert (status, out) == (2, "")
    told = "no complete checkpoint in it: a command was interrupted, or is still running"
    assert err == f"ckpttool: warning: {whole}: {WAITS} ({journal})\nckpttool: error: {whole}: {told}\n"


def test_a_directory_that_is_the_checkpoint(run: Callable, whole: Path) -> None:
    (whole / "guide.pth").unlink()
    journal = begun(whole)
    status, out, err = run("verify", whole)
    assert (status, err) == (1, f"ckpttool: warning: {whole}: {WAITS} ({journal})\n")
    assert out.startswith("✗ INVALID")


def test_one_that_begins_meanwhile(run: Callable, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_verifying(monkeypatch, lambda unit: len(unit.members) > 1 and begun(whole))
    status, out, err = run("verify", whole)
    told, waits = err.splitlines()
    assert (status, "guide.pth" in out, "model" in out) == (0, True, False)
    assert WAITS in waits and told.endswith("removed or renamed in the meantime; not verified")


def test_what_is_renamed_meanwhile_is_verified_by_its_new_name(
    run: Callable, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename_first(unit: Any) -> None:
        if unit.path.endswith("guide.pth"):
            os.rename(unit.path, whole / "renamed.pth")

    before_verifying(monkeypatch, rename_first)
    status, out, err = run("verify", whole)
    assert (status, err.count("\n"), "guide.pth: removed or renamed in the meantime" in err) == (0, 1, True)
    assert f"valid    {whole}/renamed.pth" in out and "2 checkpoints: 2 valid" in out


def test_where_all_goes_meanwhile_nothing_is_well(
    run: Callable, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "run" / "1.pth")

    def rename_first(unit: Any) -> None:
        number = int(Path(unit.path).stem)
        os.rename(unit.path, tmp_path / "run" / f"{number + 1}.pth")

    before_verifying(monkeypatch, rename_first)
    status, out, err = run("verify", tmp_path / "run")
    assert (status, out) == (2, "")
    assert err.endswith(
        "run: all checkpoints in it were removed or renamed in the meantime; nothing was verified\n"
    )


def test_one_that_ends_meanwhile(run: Callable, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was half there when it was found is verified as it is now."""
    index = next(whole.glob("*.index.json"))
    others = whole.parent / index.name
    index.rename(others)

    before_verifying(monkeypatch, lambda unit: others.exists() and others.rename(index))
    status, out, err = run("verify", whole)
    assert (status, err) == (0, "")
    assert "INVALID" not in out


def test_what_is_damaged_stays_so(run: Callable, whole: Path) -> None:
    shard = next(whole.glob("model-*.safetensors"))
    os.truncate(shard, 20)
    status, out, err = run("verify", whole)
    assert (status, err) == (1, "")
    assert "INVALID" in out

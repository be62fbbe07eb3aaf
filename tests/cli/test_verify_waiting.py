"""``ckpttool verify`` of what another command has half moved: it is whole elsewhere, or on its way out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.ops import verify as verifying
from ckpttool.series.changing.journal import Journal, Removal, begin_journal, journal_bytes
from ckpttool.series.changing.state_dir import state_dir_of
from ckpttool.series.files import contents

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
    names = tuple(sorted(name for name in os.listdir(directory) if name.startswith("model")))
    removal = Removal(str(directory / "model"), names, contents(str(directory), names))
    stage = Path(
        begin_journal(
            str(directory), state_dir_of(str(directory)), journal_bytes(Journal((removal,))), "removed"
        )
    )
    (stage / "0").mkdir()
    (directory / names[0]).rename(stage / "0" / names[0])
    return str(stage / "journal.json")


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
    assert out.startswith("valid")


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
    assert out.startswith("INVALID")


def test_one_that_begins_meanwhile(run: Callable, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verifying.verify

    def prune_first(unit, **options):
        if len(unit.members) > 1:
            begun(whole)
        return real(unit, **options)

    monkeypatch.setattr(verifying, "verify", prune_first)
    status, out, err = run("verify", whole)
    told, waits = err.splitlines()
    assert (status, "guide.pth" in out, "model" in out) == (0, True, False)
    assert WAITS in waits and told.endswith("removed or renamed in the meantime; not verified")


def test_what_is_renamed_meanwhile_is_verified_by_its_new_name(
    run: Callable, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verifying.verify

    def rename_first(unit, **options):
        if unit.path.endswith("guide.pth"):
            os.rename(unit.path, whole / "renamed.pth")
        return real(unit, **options)

    monkeypatch.setattr(verifying, "verify", rename_first)
    status, out, err = run("verify", whole)
    assert (status, err.count("\n"), "guide.pth: removed or renamed in the meantime" in err) == (0, 1, True)
    assert f"valid    {whole}/renamed.pth" in out and "2 checkpoints: 2 valid" in out


def test_where_all_goes_meanwhile_nothing_is_well(
    run: Callable, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "run" / "1.pth")
    real = verifying.verify

    def rename_first(unit, **options):
        number = int(Path(unit.path).stem)
        os.rename(unit.path, tmp_path / "run" / f"{number + 1}.pth")
        return real(unit, **options)

    monkeypatch.setattr(verifying, "verify", rename_first)
    status, out, err = run("verify", tmp_path / "run")
    assert (status, out) == (2, "")
    assert err.endswith(
        "run: everything in it was removed or renamed in the meantime; nothing was verified\n"
    )


def test_one_that_ends_meanwhile(run: Callable, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was half there when it was found is verified as it is now."""
    index = next(whole.glob("*.index.json"))
    real, others = verifying.verify, whole.parent / index.name
    index.rename(others)

    def come_first(unit, **options):
        if others.exists():
            others.rename(index)
        return real(unit, **options)

    monkeypatch.setattr(verifying, "verify", come_first)
    status, out, err = run("verify", whole)
    assert (status, err) == (0, "")
    assert "INVALID" not in out


def test_what_is_damaged_stays_so(run: Callable, whole: Path) -> None:
    shard = next(whole.glob("model-*.safetensors"))
    os.truncate(shard, 20)
    status, out, err = run("verify", whole)
    assert (status, err) == (1, "")
    assert "INVALID" in out

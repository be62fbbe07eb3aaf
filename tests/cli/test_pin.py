"""``ckpttool pin`` and ``unpin``: stdout, stderr and exit status together."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.support.commands import Run, refusals, transcript
from tests.support.golden import Golden
from tests.support.moments import refuse_opening

NAME = "run/model_epoch_3.pth"


def test_pin_and_unpin(run: Run, series: Path, golden: Golden) -> None:
    commands = ("pin", "pin", "pin --json", "unpin", "unpin", "pin -q")
    golden(transcript(run, (0, "pin --list"), *((0, f"{one} {NAME}") for one in commands)))
    assert "pinned" in run("list", series, "--json").out


OLD = '# of the paper\npinned = ["model_epoch_2.pth", "model_epoch_3.pth"]  # figure 2\n'


def test_a_list_of_the_old_name_is_read_and_goes_on_being_written(run, series: Path) -> None:
    old, new = series / ".ckpttool.toml", series / ".ckpttool-pins.toml"
    old.write_text(OLD)
    assert run("pin", NAME).out == f"{NAME} is already pinned\n"
    assert (old.read_text(), new.exists()) == (OLD, False)
    assert run("pin", "run/model_epoch_1.pth").status == 0
    assert old.read_text() == OLD.replace('3.pth"]', '3.pth", "model_epoch_1.pth"]')
    assert run("unpin", "run/model_epoch_1.pth").status == 0
    assert (old.read_text(), new.exists()) == (OLD, False)
    assert run("pin", "-l").out == f"run/model_epoch_2.pth\n{NAME}\n"
    assert run("prune", series, "--keep", 1, "-q").status == 0
    assert sorted(os.listdir(series))[1:] == ["model_epoch_10.pth", "model_epoch_2.pth", "model_epoch_3.pth"]
    assert run("rename", series, "-t", "m-e{epoch}", "-q").status == 0
    assert old.read_text() == OLD.replace("model_epoch_2", "m-e2").replace("model_epoch_3", "m-e3")


def test_lists_of_both_names_pin(run, series: Path) -> None:
    old, new = series / ".ckpttool.toml", series / ".ckpttool-pins.toml"
    old.write_text('pinned = ["model_epoch_2.pth"]\n')
    new.write_text('pinned = ["model_epoch_3.pth"]\n')
    assert run("pin", "run/model_epoch_1.pth").status == 0
    assert old.read_text() == 'pinned = ["model_epoch_2.pth"]\n'
    assert new.read_text() == 'pinned = ["model_epoch_3.pth", "model_epoch_1.pth"]\n'
    assert run("prune", series, "--keep", 1, "-q").status == 0
    assert len(list(series.glob("*.pth"))) == 4
    assert run("unpin", "run/model_epoch_2.pth").status == 0
    assert (old.exists(), new.exists()) == (False, True)


def test_json(run, series: Path) -> None:
    document = {"schema": "ckpttool.pin/1", "pinned": [NAME], "missing": [], "changed": [NAME]}
    assert json.loads(run("pin", NAME, "--json").out) == document
    assert json.loads(run("pin", NAME, "--json").out) == document | {"changed": []}
    assert json.loads(run("pin", "--list", "--json").out) == document | {"changed": []}
    assert json.loads(run("unpin", NAME, "--json").out) == document | {"pinned": []}


def test_what_is_pinned(run, series: Path) -> None:
    assert run("pin", "--list") == (0, "", "")
    os.rename(series / "model_epoch_2.pth", series / "model\n_epoch_2.pth")
    run("pin", NAME, "run/model\n_epoch_2.pth")
    assert run("pin", "--list", "-0", "run").out == f"{NAME}\0run/model\n_epoch_2.pth\0"
    (series / "model_epoch_3.pth").unlink()
    status, out, err = run("pin", "-l")
    assert (status, out) == (1, f"{NAME}\nrun/model\n_epoch_2.pth\n")
    assert (
        err
        == f"ckpttool: warning: {NAME}: it is pinned, but doesn't exist (ckpttool unpin removes the pin)\n"
    )


def test_a_glob_in_a_list_is_told_to_be_none(run, series: Path) -> None:
    (series / ".ckpttool-pins.toml").write_text('pinned = ["model_epoch_[12].pth"]\n')
    why = "doesn't exist: pins are names, not globs (ckpttool unpin removes the pin)"
    glob = "run/model_epoch_[12].pth"
    assert run("pin", "-l").err == f"ckpttool: warning: {glob}: it is pinned, but {why}\n"
    answer = run("prune", series, "--keep", "1")
    assert (answer.status, len(list(series.glob("*.pth")))) == (1, 10)
    assert f"pinned is model_epoch_[12].pth, which {why}" in answer.err
    assert run("unpin", glob).status == 0
    assert run("prune", series, "--keep", "1").status == 0


def test_entries_that_pin_nothing_are_no_pins(run, series: Path) -> None:
    Path(".ckpttool-pins.toml").write_text(f'pinned = ["{NAME}", "run", ""]\n')
    status, out, err = run("pin", "-l")
    assert (status, out) == (1, f"{NAME}\n")
    holds = "which is not a checkpoint: contains 10 checkpoints, but isn't one itself"
    assert err == (
        f"ckpttool: warning: .ckpttool-pins.toml: pinned has 'run', {holds}\n"
        "ckpttool: warning: .ckpttool-pins.toml: pinned has '', which is not a name\n"
    )
    document = json.loads(run("pin", "-l", "--json").out)
    assert document["pinned"] == [NAME]
    assert document["void"] == [
        {"file": ".ckpttool-pins.toml", "name": "run", "why": holds},
        {"file": ".ckpttool-pins.toml", "name": "", "why": "which is not a name"},
    ]


def test_what_can_not_be_read_is_told(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pin", NAME)
    Path("other").mkdir()
    Path("other/.ckpttool-pins.toml").write_text("pinned = 3\n")
    status, out, err = run("pin", "-l")
    assert (status, out) == (2, f"{NAME}\n")
    assert err.startswith("ckpttool: error: other/.ckpttool-pins.toml: the pins can't be read: ")
    real = os.scandir

    def refuse(path: str | int) -> object:
        if isinstance(path, str) and os.path.basename(path) == "other":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    Path("other/.ckpttool-pins.toml").unlink()
    assert run("pin", "-l") == (2, f"{NAME}\n", "ckpttool: error: other: permission denied\n")


def test_what_is_refused(run: Run, series: Path, golden: Golden) -> None:
    lines = (
        "pin",
        "unpin",
        "pin run/none.pth",
        "unpin run/none.pth",
        "pin run",
        "pin -l none",
        f"pin -0 {NAME}",
    )
    golden(refusals(run, *lines))


def test_a_directory_that_may_not_be_written(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_opening(monkeypatch, ".ckpttool.lock", OSError(errno.EROFS, "Read-only file system"))
    answer = run("pin", NAME)
    assert answer == (2, "", "ckpttool: error: run: read-only file system; no pin was changed\n")

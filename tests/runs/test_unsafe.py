"""Unsafe checkpoints among others: never resumed from unasked, always told, and as intact as any other."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import AccessDenied, latest

UNSAFE = f"unsafe: loading it would import {os.name}.mkdir"


class Payload:
    """Makes a directory beside the checkpoints when it is loaded."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.place,)


class Config:
    """A class of the user's own."""


def save(path: Path, epoch: int, **more: object) -> None:
    path.write_bytes(pickle.dumps({"epoch": epoch, "loss": 1.0 / epoch, **more}))
    os.utime(path, (1_700_000_000 + epoch,) * 2)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in which the two newest of four are unsafe."""
    monkeypatch.chdir(tmp_path)
    place = Path("runs")
    place.mkdir()
    for epoch in (1, 2):
        save(place / f"epoch_{epoch}.pkl", epoch)
    for epoch in (3, 4):
        save(place / f"epoch_{epoch}.pkl", epoch, note=Payload("runs/ran"))
    return place


@pytest.fixture(autouse=True)
def _nothing_ran(tmp_path: Path):
    yield
    assert not list(tmp_path.rglob("ran"))


def test_the_payload_runs_where_it_is_loaded(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    save(place / "m.pkl", 1, note=Payload(str(place / "mark")))
    load = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", load, str(place / "m.pkl")], check=True)
    assert (place / "mark").is_dir()


def test_it_is_passed_over_and_told(run, runs: Path) -> None:
    told = f"ckpttool: warning: runs/epoch_4.pkl: skipped: {UNSAFE} (and 1 more)\n"
    assert run("latest", runs) == (0, "runs/epoch_2.pkl\n", told)
    status, out, err = run("latest", runs, "--json")
    document = json.loads(out)
    assert (status, document["path"], document["safety"], err) == (0, "runs/epoch_2.pkl", "safe", told)
    assert document["passed_over"] == [{"path": f"runs/epoch_{n}.pkl", "why": UNSAFE} for n in (4, 3)]
    assert run("latest", runs, "-q") == (0, "", "")


@pytest.mark.parametrize(
    "more",
    [
        ("--best", "loss", "--mode", "min"),
        ("--wait", "1"),
        ("--verify", "full"),
        ("-r",),
    ],
)
def test_whatever_is_asked_for(run, runs: Path, more: tuple[str, ...]) -> None:
    directory = runs.parent / "." if more == ("-r",) else runs
    status, out, err = run("latest", directory, *more)
    assert (status, out) == (0, "runs/epoch_2.pkl\n")
    assert err.startswith(f"ckpttool: warning: runs/epoch_4.pkl: skipped: {UNSAFE}")
    status, out, err = run("latest", directory, *more, "--allow-unsafe")
    assert (status, out) == (0, "runs/epoch_4.pkl\n")
    assert f"ckpttool: warning: runs/epoch_4.pkl: {UNSAFE}\n" in err


def test_before_a_step_where_all_are_unsafe(run, runs: Path) -> None:
    for path in runs.iterdir():
        path.unlink()
    save(runs / "step_7.pkl", 1, step=7, note=Payload("runs/ran"))
    assert run("latest", runs, "--before", 7).status == 1  # there is none before it
    status, out, err = run("latest", runs, "--before", 8)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_where_nothing_else_is_intact_nobody_is_to_begin_anew(run, runs: Path) -> None:
    (runs / "epoch_2.pkl").write_bytes(b"\x80\x04")
    (runs / "epoch_1.pkl").unlink()
    error = (
        f"ckpttool: error: runs: no checkpoint is safe to resume from: runs/epoch_4.pkl: {UNSAFE}; "
        "and 1 more (--allow-unsafe accepts it)\n"
    )
    for more in ((), ("--json",), ("-q",)):
        assert run("latest", runs, *more) == (2, "", error)
    with pytest.raises(AccessDenied, match="no checkpoint is safe to resume from"):
        latest(runs)
    found = latest(runs, allow_unsafe=True)
    assert found.path == "runs/epoch_4.pkl"
    assert f"runs/epoch_4.pkl: {UNSAFE}" in found.warnings


def test_a_class_of_the_users_is_ordinary(run, runs: Path) -> None:
    save(runs / "epoch_5.pkl", 5, config=Config())
    assert run("latest", runs) == (0, "runs/epoch_5.pkl\n", "")
    assert json.loads(run("latest", runs, "--json").out)["safety"] == "unknown"
    row = json.loads(run("list", runs, "--json").out)["checkpoints"][-1]
    assert (row["state"], row["safety"], row["danger"]) == ("readable", "unknown", None)


def test_list_says_so(run, runs: Path) -> None:
    status, out, err = run("list", runs)
    states = [re.search("readable|unsafe", line) for line in out.splitlines()]
    assert [state and state[0] for state in states] == ["readable", "readable", "unsafe", "unsafe"]
    assert (status, out.count(UNSAFE.partition(": ")[2])) == (1, 2)
    assert err == "".join(f"ckpttool: warning: runs/epoch_{n}.pkl: {UNSAFE}\n" for n in (3, 4))
    rows = json.loads(run("list", runs, "--json", "--verify", "full").out)["checkpoints"]
    assert [(row["state"], row["safety"]) for row in rows] == [("intact", "safe")] * 2 + [
        ("unsafe", "unsafe")
    ] * 2
    assert (rows[3]["fault"], rows[3]["danger"]) == (None, UNSAFE.partition(": ")[2])
    assert "2 readable, 2 unsafe" in run("list", runs, "--grouped").out


def test_damage_hides_no_danger(run, files: Path, runs: Path) -> None:
    (runs / "epoch_4.pkl").write_bytes((files / "hostile" / "call_then_truncated.pkl").read_bytes())
    row = json.loads(run("list", runs, "--json").out)["checkpoints"][-1]
    assert (row["state"], row["safety"], row["complete"]) == ("unsafe", "unsafe", False)
    assert row["fault"].startswith("incomplete: ")


def test_prune_counts_it_as_intact_and_keeps_what_latest_goes_by(run, runs: Path) -> None:
    unsafe, safe = ((runs / f"epoch_{n}.pkl").stat().st_size for n in (3, 1))
    status, out, err = run("prune", runs, "--keep", 1)
    assert (status, err) == (0, "")
    assert [line.split(None, 2) for line in out.splitlines()[1:5]] == [
        ["keep", "epoch_4.pkl", "newest, last 1, unsafe"],
        ["keep", "epoch_2.pkl", "newest that isn't unsafe"],
        ["remove", "epoch_3.pkl", f"{unsafe} B, unsafe"],
        ["remove", "epoch_1.pkl", f"{safe} B"],
    ]
    assert sorted(os.listdir(runs)) == ["epoch_2.pkl", "epoch_4.pkl"]
    assert run("latest", runs).out == "runs/epoch_2.pkl\n"


def test_the_plan_in_json(run, runs: Path) -> None:
    (group,) = json.loads(run("prune", runs, "--keep", 1, "-n", "--json").out)["groups"]
    told = {one["path"]: one["safety"] for one in [*group["keep"], *group["remove"]]}
    assert told == {f"runs/epoch_{n}.pkl": "safe" if n < 3 else "unsafe" for n in (1, 2, 3, 4)}


@pytest.mark.framework
def test_with_pytorch(run, runs: Path) -> None:
    import torch

    for epoch in (8, 9):
        note = Payload(str(runs / "mark")) if epoch == 9 else None
        content = {"epoch": epoch, "model_state_dict": {"w": torch.ones(2)}, "note": note}
        torch.save(content, runs / f"model_epoch_{epoch}.pth")
    assert run("latest", runs).out == "runs/model_epoch_8.pth\n"
    assert run("latest", runs, "--allow-unsafe").out == "runs/model_epoch_9.pth\n"
    assert not (runs / "mark").exists()
    torch.load(runs / "model_epoch_9.pth", weights_only=False)
    assert (runs / "mark").is_dir()

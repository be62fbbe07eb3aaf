"""A writer is waited for: when, how long, and what the answer is. Time passes in the test alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from ckpttool import latest
from tests.support.clock import START, Clock
from tests.support.commands import run_here
from tests.support.moments import before_call
from tests.support.runs import make_run

LONG_AGO = START - 7200
POLL, MOMENT, MOMENT_BETWEEN = 0.25, 1.0, 2.0
"""Seconds between two looks, and those in which a file, or a directory, has to stay as it is."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def run(series: Path) -> Path:
    """Return a directory of epochs 1 to 9, all written long ago."""
    shutil.move(series / "model_epoch_10.pth", series.parent / "new.pth")
    for path in series.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))
    return series


@pytest.fixture
def new(run: Path) -> bytes:
    """Return the bytes of epoch 10."""
    return (run.parent / "new.pth").read_bytes()


def write(clock: Clock, path: Path, content: bytes) -> Callable[[], None]:
    """Return what writes a file, at the time that it is then."""

    def step() -> None:
        path.write_bytes(content)
        clock.stamp(path)

    return step


def asked(run: Path, clock: Clock, seconds: float = 60, **more: Any):
    said: list[str] = []
    return latest(run, wait=seconds, tell=said.append, **more), said


def test_nothing_is_waited_for_where_nobody_writes(run: Path, clock: Clock, tmp_path: Path) -> None:
    found, said = asked(run, clock)
    assert (found.path, said, clock.now) == (str(run / "model_epoch_9.pth"), [], 0)
    (tmp_path / "empty").mkdir()
    for first in ("empty", "missing"):
        found, said = asked(tmp_path / first, clock, missing_ok=True)
        assert (found.path, said, clock.now) == (None, [], 0)


def test_what_grows_is_waited_for_and_is_the_answer(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new[:100])()
    for second in range(1, 10):
        clock.at(second, write(clock, path, new[: 100 * second + 100]))
    clock.at(10, write(clock, path, new))
    found, said = asked(run, clock)
    assert found.path == str(path)
    assert said[0].startswith(f"waiting up to 60 s for {path}: incomplete: ")
    assert 10 < clock.now <= 10 + MOMENT + 2 * POLL
    assert found.waited == clock.now
    assert (found.waited_for, found.passed_over) == ((str(path),), ())


def test_while_it_grows_only_that_is_looked_at(run: Path, clock: Clock, new: bytes, monkeypatch) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new[:100])()
    for second in range(1, 30):
        clock.at(second, write(clock, path, new[: 10 * second]))
    clock.at(30, write(clock, path, new))
    looks: list[float] = []
    before_call(monkeypatch, run / "model_epoch_3.pth", lambda: looks.append(clock.now))
    assert asked(run, clock)[0].path == str(path)
    assert len(looks) <= 3


def test_the_answer_is_read_in_full_once_and_after_it_was_waited_for(
    run: Path, clock: Clock, new: bytes
) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new[:100])()
    clock.at(5, write(clock, path, new))
    read: list[tuple[str, float]] = []

    def progress(label: str, nbytes: int | None) -> AbstractContextManager[Callable[[int], None]]:
        if nbytes is not None:
            read.append((label, clock.now))
        return nullcontext(lambda done: None)

    assert asked(run, clock, progress=progress)[0].path == str(path)
    ((name, when),) = read
    assert (name, when > 5) == (path.name, True)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_part_of_a_file_is_ever_the_answer(tmp_path: Path, step: int) -> None:
    run = make_run(tmp_path, 9, 10)
    path = run / "model_epoch_10.pth"
    new = path.read_bytes()
    for cut in (*range(0, len(new), step), len(new) - 1):
        path.write_bytes(new[:cut])
        assert latest(run).path == str(run / "model_epoch_9.pth"), cut
    path.write_bytes(new)
    assert latest(run).path == str(path)


def test_when_the_time_is_up_the_newest_intact_one_is_the_answer(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new[:900])()
    found, said = asked(run, clock, 5)
    assert (found.path, clock.now, len(said)) == (str(run / "model_epoch_9.pth"), 5, 1)
    assert [one.path for one in found.passed_over] == [str(path)]


def test_what_has_not_changed_for_long_is_not_waited_for(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"
    path.write_bytes(new[:900])
    os.utime(path, (START - 601, START - 601))
    found, said = asked(run, clock)
    assert (found.path, said, clock.now) == (str(run / "model_epoch_9.pth"), [], MOMENT)
    assert [one.path for one in found.passed_over] == [str(path)]


def test_a_server_s_clock_that_is_behind_hides_no_writer(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"

    def grown(size: int) -> Callable[[], None]:
        def step() -> None:
            path.write_bytes(new[:size])
            os.utime(path, (clock.time() - 3600, clock.time() - 3600))

        return step

    grown(900)()
    for second in range(1, 6):
        clock.at(second - 0.5, grown(900 + second))
    clock.at(6, grown(len(new)))
    found, said = asked(run, clock)
    assert found.path == str(path)
    assert said[0].startswith("waiting up to 60 s ") and said[0].endswith(", and is changing")
    assert 6 + MOMENT <= clock.now <= 6 + MOMENT + 3 * POLL


def test_what_is_older_than_the_answer_is_not_waited_for(run: Path, clock: Clock) -> None:
    write(clock, run / "model_epoch_3.pth", b"")()
    found, said = asked(run, clock)
    assert (found.path, said, clock.now) == (str(run / "model_epoch_9.pth"), [], 0)


def test_a_temporary_file_becomes_the_answer(run: Path, clock: Clock, new: bytes) -> None:
    temporary, path = run / "model_epoch_10.pth.tmp", run / "model_epoch_10.pth"
    write(clock, temporary, b"")()
    clock.at(3, write(clock, temporary, new))
    clock.at(4, lambda: temporary.rename(path))
    found, said = asked(run, clock)
    assert found.path == str(path)
    assert clock.now <= 4 + MOMENT + 2 * POLL
    assert str(temporary) in said[0]


def test_a_temporary_file_of_something_else_is_none(run: Path, clock: Clock) -> None:
    write(clock, run / "losses.csv.tmp", b"1,2")()
    assert asked(run, clock)[1] == []
    write(clock, run / "model_epoch_10.pth.tmp", b"")()
    assert asked(run, clock, exclude=["*_10.pth"])[1] == []


def test_one_that_was_changed_a_moment_ago_is_looked_at_once_more(
    run: Path, clock: Clock, new: bytes
) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new)()
    found, said = asked(run, clock)
    assert (found.path, said) == (str(path), [f"waiting up to 60 s for {path}: it changed a moment ago"])
    assert MOMENT <= clock.now <= MOMENT + POLL


def test_one_that_never_rests_is_not_the_answer(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new)()
    for number in range(1, 40):
        clock.at(number * 0.25, write(clock, path, new))
    found, _ = asked(run, clock, 5)
    assert found.path == str(run / "model_epoch_9.pth")
    assert [one.message for one in found.passed_over] == ["being written: it changed while waiting for it"]


def test_a_clock_that_is_behind_the_files_does_not_wait_for_ever(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"
    path.write_bytes(new)
    os.utime(path, (START + 300, START + 300))
    found, _ = asked(run, clock)
    assert found.path == str(path)
    assert clock.now <= MOMENT + POLL


def test_the_best_may_be_the_one_that_is_being_written(run: Path, clock: Clock, new: bytes) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new[:900])()
    clock.at(2, write(clock, path, new))
    assert asked(run, clock, best="loss", mode="min")[0].path == str(path)


def test_a_step_that_is_not_wanted_is_not_waited_for(trainer: Path, clock: Clock) -> None:
    for path in trainer.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    write(clock, trainer / "checkpoint-10" / "model.safetensors", b"")()
    found, said = asked(trainer, clock, before=10)
    assert (found.path, said) == (str(trainer / "checkpoint-8"), [])
    assert asked(trainer, clock, 1)[1] != []


def fresh(clock: Clock, trainer: Path, age: float) -> Path:
    """Let a trainer's files have been written in its own order, the newest checkpoint an ``age`` ago."""
    order = ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")
    for path in sorted(path for path in trainer.rglob("*") if path.is_file()):
        late = order.index(path.name) * 0.01
        when = (clock.time() - age if path.parent.name == "checkpoint-10" else LONG_AGO) + late
        os.utime(path, (when, when))
    return trainer / "checkpoint-10"


def test_a_trainers_directory_is_waited_for_until_its_state_is_there(trainer: Path, clock: Clock) -> None:
    newest = fresh(clock, trainer, 5)
    state = (newest / "trainer_state.json").read_bytes()
    (newest / "trainer_state.json").unlink()
    assert latest(trainer).path == str(trainer / "checkpoint-8")
    clock.at(7, write(clock, newest / "trainer_state.json", state))
    found, said = asked(trainer, clock)
    assert found.path == str(newest)
    assert "trainer_state.json" in said[0]
    assert clock.now <= 7 + MOMENT_BETWEEN + 2 * POLL


def test_a_writers_file_in_a_directory_tells_that_it_is_being_written(trainer: Path, clock: Clock) -> None:
    newest = fresh(clock, trainer, 5)
    write(clock, newest / "optimizer.pt.tmp", b"")()
    found = latest(trainer)
    assert found.path == str(trainer / "checkpoint-8")
    assert found.passed_over[0].message == "being written: it contains optimizer.pt.tmp"
    os.utime(newest / "optimizer.pt.tmp", (LONG_AGO, LONG_AGO))
    assert latest(trainer).path == str(newest)


def test_the_command_says_what_it_waited_for(
    run: Path, clock: Clock, new: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "model_epoch_10.pth"
    write(clock, path, new[:900])()
    clock.at(2, write(clock, path, new))
    assert run_here("latest", run, "--wait", "1m", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["waited_for"] == [str(path)]
    assert json.loads(out)["path"] == str(path)
    lines = err.splitlines()
    assert lines[0].startswith(f"ckpttool: waiting up to 60 s for {path}: incomplete: ")
    assert lines[-1] == f"ckpttool: waited {clock.now:.1f} s for {path}"
    clock.now = 0
    write(clock, run / "model_epoch_11.pth", b"")()
    assert run_here("latest", run, "--wait", "3", "-q") == 0
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_ends_the_wait(run: Path, new: bytes, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (run / "model_epoch_10.pth").write_bytes(new[:900])
    monkeypatch.setattr(time, "sleep", interrupt)
    assert run_here("latest", run, "--wait", "60") == 130
    assert capsys.readouterr().out == ""

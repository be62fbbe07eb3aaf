"""What ``watch`` does as checkpoints land, are damaged, renamed and pruned, and as it is ended."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import prune, verify
from ckpttool.cli.watch import _ending_by_signals
from ckpttool.core.errors import AccessDenied
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import Progress
from ckpttool.runs.retention.request import PruneRequest
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.watch_steps import copy_step, prune_step, rename_step
from ckpttool.runs.watching import (
    RETRY_SECONDS,
    DirectoryWatch,
    Judgement,
    Step,
    StopRequested,
    WatchEvent,
    WatchRequest,
)
from ckpttool.transaction import operations
from ckpttool.transaction.journal import Move
from tests.support.commands import TIMEOUT, Run, refusals, transcript
from tests.support.configs import trusted_config
from tests.support.golden import Golden
from tests.support.runs import flip_value, trainer

SERIES = Path(__file__).parents[2] / "fixtures" / "files" / "series"


def name(epoch: int) -> str:
    return f"model_epoch_{epoch}.pth"


def land(run: Path, epoch: int, nbytes: int | None = None) -> Path:
    """Write a checkpoint, or its first bytes."""
    path = run / name(epoch)
    path.write_bytes((SERIES / name(epoch)).read_bytes()[:nbytes])
    return path


class Clock:
    """A time that passes only if it is told to."""

    def __init__(self) -> None:
        self.passed = 0.0

    def time(self) -> float:
        import time

        return time.time() + self.passed

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float, /) -> None:
        self.passed += seconds


class Watched:
    """A directory that is watched in this process: what it says, and which checkpoints it verifies."""

    def __init__(self, run: Path, ends: Callable[[], bool] = lambda: False, **steps: Step) -> None:
        self.events: list[WatchEvent] = []
        self.verified: Counter[str] = Counter()
        self.clock = Clock()

        def judge(entry: Entry, progress: Progress) -> Judgement:
            self.verified[entry.name] += 1
            found = verify(entry.unit)
            return found, None if found.passes() else found.findings[0].message

        request = WatchRequest(directory=str(run), verify=judge, steps=steps)
        self.watch = DirectoryWatch(request, self.events.append, is_ending=ends, clock=self.clock)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.__exit__()

    def look(self, times: int = 1, seconds: float = 10) -> list[str]:
        """Look so often, and return what is said."""
        self.events.clear()
        for _ in range(times):
            self.clock.passed += seconds
            self.watch.look()
        return [f"{os.path.basename(one.path)} {one.status}" for one in self.events]


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def pruned_by(*, trash: bool = False, **rules: Any) -> Step:
    return prune_step(
        lambda root: PruneRequest(directory=root, policy=Policy(**rules), depth="quick"),
        lambda request: (),
        trash=trash,
    )


def keep_last(count: int) -> Step:
    return pruned_by(keep_last=count)


# When a checkpoint has landed -----------------------------------------------------------------------


def test_one_that_grows_is_verified_once_it_is_whole_and_stands_still(run_directory: Path) -> None:
    watched = Watched(run_directory)
    for nbytes in (10, 1000, 4000):
        land(run_directory, 1, nbytes)
        assert watched.look() == []
    assert watched.look(3) == []
    land(run_directory, 1)
    assert watched.look() == []
    assert watched.look(5) == [f"{name(1)} valid"]
    assert watched.verified == {name(1): 1}
    assert not watched.watch.has_problems


def test_one_that_nobody_finishes_is_told_after_ten_minutes(run_directory: Path) -> None:
    land(run_directory, 1, 1000)
    watched = Watched(run_directory)
    assert watched.look(20) == []
    assert watched.look(45) == [f"{name(1)} failed"]
    assert watched.watch.has_problems
    land(run_directory, 1)
    assert watched.look(2) == [f"{name(1)} valid"]
    assert not watched.watch.has_problems


def test_one_under_a_temporary_name_is_left_alone(run_directory: Path) -> None:
    path = land(run_directory, 1)
    path.rename(run_directory / f"{name(1)}.tmp")
    watched = Watched(run_directory)
    assert watched.look(5) == []
    (run_directory / f"{name(1)}.tmp").rename(path)
    assert watched.look(3) == [f"{name(1)} valid"]


def test_the_last_look_says_what_was_not_verified(run_directory: Path) -> None:
    land(run_directory, 1)
    watched = Watched(run_directory)
    watched.watch.look()
    land(run_directory, 2)
    watched.watch.look(is_last=True)
    assert [(one.path.rpartition("/")[2], one.reason) for one in watched.events] == [
        (name(2), "not verified: it is still being written"),
        (name(1), None),
    ]


def test_a_new_watch_reads_only_what_has_changed(run_directory: Path) -> None:
    for epoch in (1, 2):
        land(run_directory, epoch)
    flip_value(land(run_directory, 3))
    with Watched(run_directory) as watched:
        assert sorted(watched.look(2)) == [f"{name(1)} valid", f"{name(2)} valid", f"{name(3)} failed"]
    land(run_directory, 2)
    with Watched(run_directory) as again:
        assert sorted(again.look(2)) == [f"{name(2)} valid", f"{name(3)} failed"]
    assert again.verified == {name(2): 1, name(3): 1}
    (run_directory / ".ckpttool-watch.json").write_text('{"asked": 1}')
    with Watched(run_directory) as third:
        third.look(2)
    assert sum(third.verified.values()) == 3


# What follows ---------------------------------------------------------------------------------------


def test_valid_ones_are_renamed_copied_and_pruned(run_directory: Path, tmp_path: Path) -> None:
    for epoch in range(1, 4):
        land(run_directory, epoch)
    (run_directory / "latest").write_text(name(3))
    steps = {
        "rename": rename_step("e{epoch:04d}"),
        "copy": copy_step(str(tmp_path / "backup")),
        "prune": keep_last(1),
    }
    with Watched(run_directory, **steps) as watched:
        assert [one.split()[1] for one in watched.look(2)] == [
            *["valid"] * 3,
            *["renamed"] * 3,
            *["copied"] * 3,
            *["removed"] * 2,
        ]
        assert watched.look(5) == []  # their new names are no new checkpoints
        assert sum(watched.verified.values()) == 3
        land(run_directory, 4)
        assert [one.split()[1] for one in watched.look(3)] == ["valid", "renamed", "copied"]
    assert sorted(path.name for path in (tmp_path / "backup").iterdir()) == [
        f"e000{epoch}.pth" for epoch in range(1, 5)
    ]
    # latest names e0003.pth, which stays
    assert sorted(path.name for path in run_directory.glob("*.pth")) == ["e0003.pth", "e0004.pth"]


def test_the_last_good_one_stays_whatever_is_damaged_and_however_prune_verifies(run_directory: Path) -> None:
    with Watched(run_directory, prune=keep_last(1)) as watched:
        land(run_directory, 1)
        assert watched.look(2) == [f"{name(1)} valid"]
        flip_value(land(run_directory, 2))
        assert watched.look(2) == [f"{name(2)} failed"]
        flip_value(land(run_directory, 3))
        assert watched.look(2) == [f"{name(3)} failed"]
        assert sorted(path.name for path in run_directory.glob("*.pth")) == [name(1), name(2), name(3)]
        land(run_directory, 4)
        assert watched.look(2) == [f"{name(4)} valid", *(f"{name(epoch)} removed" for epoch in (3, 2, 1))]
        assert watched.watch.has_problems


def test_damage_that_was_seen_is_not_forgotten(run_directory: Path) -> None:
    flip_value(land(run_directory, 1))
    with Watched(run_directory) as watched:
        watched.look(2)
        (run_directory / name(1)).unlink()
        assert watched.look(2) == []
        assert watched.watch.has_problems


def test_a_step_that_fails_is_told_once_and_keeps_what_follows_from_being_done(
    run_directory: Path, tmp_path: Path
) -> None:
    for epoch in (1, 2):
        land(run_directory, epoch)
    backup = tmp_path / "backup"
    backup.write_text("no directory")
    with Watched(run_directory, copy=copy_step(str(backup)), prune=keep_last(1)) as watched:
        assert watched.look(2).count(f"{name(1)} failed") == 1
        assert watched.look(RETRY_SECONDS // 5) == []
        assert len(list(run_directory.glob("*.pth"))) == 2
        backup.unlink()
        assert watched.look(12, seconds=RETRY_SECONDS / 12) == [
            f"{name(1)} copied",
            f"{name(2)} copied",
            f"{name(1)} removed",
        ]
        assert not watched.watch.has_problems


def test_a_destination_that_leads_elsewhere_by_now_is_not_copied_to(
    run_directory: Path, tmp_path: Path
) -> None:
    backup, away, other = (tmp_path / name for name in ("backup", "away", "other"))
    backup.mkdir()
    other.mkdir()
    with Watched(run_directory, copy=copy_step(str(backup))) as watched:
        land(run_directory, 1)
        assert watched.look(2) == [f"{name(1)} valid", f"{name(1)} copied"]
        backup.rename(away)
        backup.symlink_to(other)
        land(run_directory, 2)
        assert watched.look(2) == [f"{name(2)} valid", "backup failed"]
        assert f"it points to {other} now" in str(watched.events[-1].reason)
        assert not any(other.iterdir())
        backup.unlink()
        away.rename(backup)
        assert watched.look(12, seconds=RETRY_SECONDS / 12) == [f"{name(2)} copied"]


def test_a_destination_that_is_a_link_from_the_start_is_copied_to(
    run_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "backup").symlink_to(tmp_path / "disk")
    land(run_directory, 1)
    with Watched(run_directory, copy=copy_step(str(tmp_path / "backup" / "runs"))) as watched:
        assert watched.look(2) == [f"{name(1)} valid", f"{name(1)} copied"]
    assert [path.name for path in (tmp_path / "disk" / "runs").iterdir()] == [name(1)]


def test_one_that_can_not_be_renamed_is_passed(run_directory: Path, tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        land(run_directory, epoch)
    shutil.copy2(run_directory / name(1), run_directory / "run-e0001.pth")
    steps = {
        "rename": rename_step("run-e{epoch:04d}"),
        "copy": copy_step(str(tmp_path / "backup")),
        "prune": keep_last(2),
    }
    with Watched(run_directory, **steps) as watched:
        said = watched.look(2)
        assert [one for one in said if one.endswith("failed")] == [f"{name(1)} failed"]
        assert {one for one in said if one.endswith("renamed")} == {
            f"{name(epoch)} renamed" for epoch in (2, 3)
        }
        assert "already exists" in next(one.reason for one in watched.events if one.reason)
        assert sorted(path.name for path in run_directory.glob("run-*")) == ["run-e0002.pth", "run-e0003.pth"]
        assert len(list((tmp_path / "backup").glob("*.pth"))) == 4


def test_one_that_can_not_be_renamed_names_others_by_their_new_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "kept-3").mkdir(parents=True)
    trainer(run, (1, 2, 3))
    with Watched(run, rename=rename_step("kept-{step}")) as watched:
        said = watched.look(2)
        assert [one for one in said if one.endswith("failed")] == ["checkpoint-3 failed"]
    states = {path.parent.name: json.loads(path.read_text()) for path in run.glob("*/trainer_state.json")}
    assert {name: state["best_model_checkpoint"] for name, state in states.items()} == dict.fromkeys(
        ("kept-1", "kept-2", "checkpoint-3"), "run/kept-2"
    )


def test_a_disk_that_fails_at_one_keeps_all_their_names(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's copy would have its new name, and pointers that are changed once this one is renamed."""
    for epoch in (1, 2, 3):
        land(run_directory, epoch)
    real = operations.Stage._do

    def do(stage: operations.Stage, one: Move) -> None:
        if one.source.path == name(2):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(stage, one)

    steps = {"rename": rename_step("e{epoch:04d}"), "copy": copy_step(str(tmp_path / "backup"))}
    with Watched(run_directory, **steps) as watched:
        with monkeypatch.context() as patch:
            patch.setattr(operations.Stage, "_do", do)
            said = watched.look(2)
        assert [one for one in said if one.endswith(("failed", "renamed"))] == [f"{name(2)} failed"]
        said = watched.look(12, seconds=RETRY_SECONDS / 12)
        assert said == [
            *(f"{name(epoch)} renamed" for epoch in (1, 2, 3)),
            *(f"e000{epoch}.pth copied" for epoch in (1, 2, 3)),
        ]
        assert not watched.watch.has_problems


def test_one_that_can_not_be_copied_stays_and_the_others_are_pruned(
    run_directory: Path, tmp_path: Path
) -> None:
    for epoch in range(1, 6):
        land(run_directory, epoch)
    backup = tmp_path / "backup"
    backup.mkdir()
    (backup / name(2)).write_bytes(b"another")
    with Watched(run_directory, copy=copy_step(str(backup)), prune=keep_last(2)) as watched:
        assert [one for one in watched.look(2) if one.endswith("failed")] == [f"{name(2)} failed"]
        assert sorted(path.name for path in run_directory.glob("*.pth")) == [name(2), name(4), name(5)]
        assert watched.look(RETRY_SECONDS // 5) == []
        assert watched.watch.has_problems
        (backup / name(2)).unlink()
        assert watched.look(12, seconds=RETRY_SECONDS / 12) == [f"{name(2)} copied", f"{name(2)} removed"]
        assert not watched.watch.has_problems


def test_nothing_is_slimmed_before_all_of_it_is_verified(run_directory: Path) -> None:
    for epoch in (1, 2, 3):
        land(run_directory, epoch)
    with Watched(run_directory, prune=pruned_by(full=1)) as watched:
        assert watched.look() == []
        os.utime(land(run_directory, 1), (1_700_000_000,) * 2)  # written again between two looks
        before = {path: path.read_bytes() for path in run_directory.glob("*.pth")}
        assert watched.look() == [f"{name(2)} valid", f"{name(3)} valid"]
        assert {path: path.read_bytes() for path in run_directory.glob("*.pth")} == before
        assert watched.look() == [f"{name(1)} valid", f"{name(2)} slimmed", f"{name(1)} slimmed"]
        words = [(one.words, one.nbytes) for one in watched.events if one.status == "slimmed"]
        assert words == [("slimmed to its weights", None)] * 2


def test_a_directory_that_vanishes_is_told_once_and_watched_again(run_directory: Path) -> None:
    land(run_directory, 1)
    with Watched(run_directory) as watched:
        watched.look(2)
        away = run_directory.rename(run_directory.with_name("away"))
        assert watched.look(5) == ["runs failed"]
        assert watched.watch.has_problems
        run_directory.mkdir()
        land(run_directory, 2)
        assert watched.look(2) == [f"{name(2)} valid"]
        assert not watched.watch.has_problems
        with pytest.raises(AccessDenied, match="another ckpttool is watching it: pid"):
            Watched(run_directory)  # the new directory is locked, too
    assert not (away / ".ckpttool-watch.lock").exists()
    assert not (run_directory / ".ckpttool-watch.lock").exists()


def test_the_end_comes_between_two_checkpoints(run_directory: Path) -> None:
    for epoch in (1, 2):
        land(run_directory, epoch)
    with Watched(run_directory, lambda: bool(watched.events)) as watched:
        watched.look()
        with pytest.raises(StopRequested):
            watched.watch.look()
    assert [one.status for one in watched.events] == ["valid"]
    with Watched(run_directory) as again:
        assert again.look(2) == [f"{name(2)} valid"]


def test_prune_by_hand_works_beside_it(run: Run, run_directory: Path) -> None:
    for epoch in (1, 2):
        land(run_directory, epoch)
    with Watched(run_directory) as watched:
        watched.look(2)
        assert run("prune", run_directory, "--keep", 1, "--yes").status == 0
        assert watched.look(2) == []


# Whatever comes -------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["whole", "part", "damaged", "gone"]), st.integers(1, 6)), max_size=12
)


@settings(max_examples=settings.default.max_examples // 8)
@given(actions=ACTIONS, count=st.integers(1, 3))
def test_each_is_verified_once_and_nothing_goes_that_prune_would_keep(
    actions: list[tuple[str, int]], count: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "runs"
        root.mkdir()
        landed: Counter[str] = Counter()
        with Watched(root, prune=keep_last(count)) as watched:
            for action, epoch in actions:
                path = root / name(epoch)
                if action == "gone":
                    path.unlink(missing_ok=True)
                else:
                    land(root, epoch, 900 if action == "part" else None)
                    landed[path.name] += action != "part"
                if action == "damaged":
                    flip_value(path)
                watched.look()
                kept = prune_would_keep(root, count)
                watched.look()
                assert kept <= {one.name for one in root.glob("*.pth")}
        assert watched.verified == +landed


def prune_would_keep(root: Path, count: int) -> set[str]:
    planned = prune(root, keep_last=count, dry_run=True)
    return {one.name for one in root.glob("*.pth")} - {one.name for one in planned.plan.removals}


# The command ----------------------------------------------------------------------------------------


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass between two looks."""
    monkeypatch.setattr(select, "select", lambda *_: ([], [], []))


@pytest.mark.usefixtures("home", "no_wait")
def test_a_directory_alone_is_only_verified(
    run: Run, tmp_path: Path, run_directory: Path, golden: Golden
) -> None:
    Path("ckpttool.toml").write_text("[retention]\nkeep-last = 1\n")
    for epoch in (1, 2):
        land(run_directory, epoch)
    flip_value(land(run_directory, 3))
    golden(timeless(transcript(run, (1, "watch runs --once"), (1, "watch runs --once -q"))))
    (run_directory / name(3)).unlink()
    golden(timeless(transcript(run, (0, "watch runs --once"))))


def timeless(text: str) -> str:
    """Return what was said, without when."""
    return re.sub(r"^\d\d:\d\d:\d\d", "TIME", text, flags=re.MULTILINE)


CONFIG = """
[naming]
template = "e{epoch:04d}"

[retention]
keep-last = 1
trash = true

[watch]
paths = ["runs"]
copy-to = "backup"
interval = "1min"
"""


@pytest.mark.usefixtures("home", "no_wait")
def test_a_configuration_says_what_follows(run: Run, run_directory: Path, golden: Golden) -> None:
    trusted_config(CONFIG)
    for epoch in (1, 2):
        land(run_directory, epoch)
    golden(timeless(transcript(run, (0, "watch --once"))))
    assert run("undo", "runs").status == 0
    assert sorted(path.name for path in run_directory.glob("*.pth")) == ["e0001.pth", "e0002.pth"]


@pytest.mark.usefixtures("home", "no_wait")
def test_a_line_of_json_for_each_event(run: Run, run_directory: Path, golden: Golden) -> None:
    land(run_directory, 1)
    land(run_directory, 2, 1000)
    answer = run("watch", "runs", "--once", "--json")
    events = [json.loads(line) for line in answer.out.splitlines()]
    assert (answer.status, [one.pop("time")[:2] for one in events]) == (1, ["20", "20"])
    golden("\n".join(json.dumps(one, indent=1) for one in events))


@pytest.mark.usefixtures("home", "no_wait")
def test_what_is_refused(run: Run, run_directory: Path, golden: Golden) -> None:
    path = land(run_directory, 1)
    places = ("nowhere --once", f"{path} --once", "s3://bucket/runs --once", "runs --interval 0s")
    golden(refusals(run, *(f"watch {place}" for place in places)))
    said = {}
    for table in (
        'steps = ["prune"]',
        'steps = "verify"',
        'steps = ["verify", "copy"]',
        'steps = ["verify", "prune"]',
        'steps = ["verify", "rename"]',
        'copy-to = "backup"\n[retention]\nfull = 1',
        'interval = "0s"',
        'interval = "soon"',
        "interval = 10",
        'directories = ["runs"]',
    ):
        trusted_config(f"[watch]\n{table}\n")
        said[repr(table)] = refusals(run, "watch --once").splitlines()[1]
    golden(said)


@pytest.mark.usefixtures("home", "no_wait")
def test_a_rule_that_matches_nothing_keeps_all(run: Run, run_directory: Path) -> None:
    rule = '[retention]\nkeep-last = 1\n[[retention.rule]]\npath = "runs/final/**"\nkeep-last = 9\n'
    Path("ckpttool.toml").write_text(f'{rule}[watch]\npaths = ["runs"]\n')
    for epoch in (1, 2):
        land(run_directory, epoch)
    answer = run("watch", "--once")
    assert "no series matches 'runs/final/**'; nothing was removed" in answer.err
    assert (answer.status, len(list(run_directory.glob("*.pth")))) == (1, 2)


# Signals, and others --------------------------------------------------------------------------------


@pytest.fixture
def watcher(run_directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a watch that has verified its first checkpoint."""
    land(run_directory, 1)
    command = [sys.executable, "-m", "ckpttool", "watch", "runs", "--interval", "1s"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=run_directory.parent, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(f"{name(1)}  valid, safe, 4.1 kB\n")
        yield process
        with suppress(ProcessLookupError):
            process.kill()


def test_a_second_watch_is_refused_and_a_signal_ends_the_first(
    run: Run, run_directory: Path, watcher: subprocess.Popen[str]
) -> None:
    refused = run("watch", run_directory, "--once")
    assert refused.status == 2
    assert f"another ckpttool is watching it: pid {watcher.pid} on " in refused.err
    watcher.send_signal(signal.SIGTERM)
    out, err = watcher.communicate(timeout=TIMEOUT)
    assert (watcher.returncode, out, err.splitlines()[1:]) == (0, "", ["ended: 1 valid"])
    assert not (run_directory / ".ckpttool-watch.lock").exists()


def test_a_lock_that_a_kill_left_is_in_nobodys_way(
    run: Run, run_directory: Path, watcher: subprocess.Popen[str], no_wait: None
) -> None:
    watcher.kill()
    watcher.wait()
    assert (run_directory / ".ckpttool-watch.lock").exists()
    assert run("watch", run_directory, "--once").status == 0
    assert not (run_directory / ".ckpttool-watch.lock").exists()


def test_nothing_is_written_into_another_file_under_the_name_of_the_lock(
    run_directory: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.link(precious, run_directory / ".ckpttool-watch.lock")
    with Watched(run_directory).watch:
        assert precious.read_text() == "precious"
    assert precious.read_text() == "precious"


def test_a_second_signal_is_no_longer_ours() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _ending_by_signals() as (wait, is_ending):
        assert (wait(0), is_ending()) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (wait(TIMEOUT), is_ending()) == (False, True)
        assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk_is_told_once(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.support.faults import fill_disk

    land(run_directory, 1)
    has_room = False
    with Watched(run_directory, copy=copy_step(str(tmp_path / "backup"))) as watched:
        watched.look()
        fill_disk(monkeypatch, lambda: has_room)
        assert watched.look() == [f"{name(1)} valid", f"{name(1)} failed"]
        assert "no space left" in str(watched.events[-1].reason).lower()
        assert watched.look(30) == []
        has_room = True
        assert watched.look(10) == [f"{name(1)} copied"]

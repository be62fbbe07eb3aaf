"""Many checkpoints are looked at by several processes, and found as one process finds them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool import CheckpointError, list_checkpoints, prune
from ckpttool.formats.interface import Unit
from ckpttool.runs import look_workers
from tests.support.directories import survey
from tests.support.faults import ends_all_threads
from tests.support.limits import lower_limits
from tests.support.moments import before_call, refuse_opening
from tests.support.runs import make_run


@pytest.fixture
def tree(files: Path, tmp_path: Path) -> Path:
    """Return a directory of sound, damaged, truncated and foreign checkpoints of several formats."""
    root = tmp_path / "runs"
    for copy, epochs in enumerate(((1, 2, 3), (5, 6, 7, 8), (1, 2, 3, 4))):
        make_run(root / f"run{copy}", *epochs)
    shutil.copytree(files / "safetensors" / "trainer", root / "trainer")
    shutil.copytree(files / "tensorflow" / "manager", root / "tensorflow")
    cut = root / "run1" / "model_epoch_7.pth"
    cut.write_bytes(cut.read_bytes()[:-400])
    (root / "run2" / "model_epoch_3.pth").write_bytes(b"no checkpoint")
    return root


@pytest.fixture
def alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what one process finds."""
    found = list_checkpoints(tree).document()
    assert len(found["checkpoints"]) > 20
    return found


@pytest.fixture
def small(alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few checkpoints be worth children, of which this machine can run two."""
    lower_limits(monkeypatch, units_worth_a_child=4, units_at_once=3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)


class Started(threading.Event):
    """Is set once a child was started.

    Attributes:
        children: All of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.children: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return the children, as they are started."""
    started = Started()

    class Known(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.children.append(self)
            started.set()

    monkeypatch.setattr(subprocess, "Popen", Known)
    return started


def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no child be started."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_children_find_what_one_process_finds(
    tree: Path, alone: dict[str, Any], small: None, started: Started
) -> None:
    assert list_checkpoints(tree).document() == alone
    assert started.children


def test_a_child_that_is_killed_is_no_loss(
    tree: Path, alone: dict[str, Any], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = []

    class Doomed(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.kill()
            killed.append(self)

    monkeypatch.setattr(subprocess, "Popen", Doomed)
    assert list_checkpoints(tree).document() == alone
    assert killed


def test_a_child_that_cannot_be_started_is_no_loss(
    tree: Path, alone: dict[str, Any], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_child(monkeypatch)
    assert list_checkpoints(tree).document() == alone


def test_what_vanishes_meanwhile_is_not_there(
    tree: Path, alone: dict[str, Any], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_child(monkeypatch)
    path = tree / "run0" / "model_epoch_1.pth"
    before_call(monkeypatch, path, lambda: path.unlink(missing_ok=True))
    listing = list_checkpoints(tree)
    rows = [row for row in alone["checkpoints"] if row["path"] != str(path)]
    assert [row["path"] for row in listing.document()["checkpoints"]] == [row["path"] for row in rows]
    assert not any(problem.path == str(path) for problem in listing.problems)


def test_an_interrupt_ends_the_children(
    tree: Path, small: None, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    def interrupt() -> None:
        if started.wait(0.5):  # until another thread has started one
            raise KeyboardInterrupt

    for path in tree.glob("run*/*.pth"):  # each of which this process may be the one to look at
        before_call(monkeypatch, path, interrupt)
    with pytest.raises(KeyboardInterrupt):
        list_checkpoints(tree)
    assert started.children and all(child.poll() is not None for child in started.children)


def test_an_interrupt_while_more_is_found_ends_all_threads(tree: Path, small: None) -> None:
    entries = survey(tree).entries

    def found() -> Iterator[tuple[Unit, bool]]:
        yield from ((entry.unit, False) for entry in entries)
        raise KeyboardInterrupt

    with ends_all_threads():
        look_workers.look_at_all(found())


def test_a_directory_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        list_checkpoints(tmp_path / "none")


def test_errors_come_in_the_order_of_the_walk(
    tree: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    refused = [tree / "run0" / "model_epoch_2.pth", tree / "run1", tree / "run2" / "model_epoch_1.pth"]
    for path in refused:
        refuse_opening(monkeypatch, path, closed)
    listing = list_checkpoints(tree)
    faulty = {row["path"] for row in alone["checkpoints"] if row["fault"] is not None}
    assert [problem.path for problem in listing.problems if problem.path not in faulty] == [
        *map(str, refused)
    ]
    kept = [Path(row["path"]) for row in alone["checkpoints"]]
    assert [Path(row.entry.path) for row in listing.checkpoints] == [
        path for path in kept if path not in refused and path.parent not in refused
    ]


def test_what_is_replaced_while_it_is_opened_does_not_go(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tree / "run0"
    path, other = run / "model_epoch_1.pth", tree / "other"
    shutil.copy2(path, other)
    opened: list[Path] = []
    with monkeypatch.context() as patch:
        before_call(patch, path, lambda: opened.append(path))
        prune(run, keep_last=1, depth="quick", dry_run=True)
    last = len(opened)

    def replace() -> None:
        opened.append(path)
        if len(opened) == 2 * last:
            other.replace(path)

    before_call(monkeypatch, path, replace)
    pruned = prune(run, keep_last=1, depth="quick")
    assert [*pruned.failed] == [str(path)]
    assert path.exists() and not (run / "model_epoch_2.pth").exists()


def test_a_graph_is_not_digested_to_list_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of a graph takes its time, and nothing of it is listed."""
    shutil.copytree(files / "savedmodel" / "plain", tmp_path / "run" / "model")
    describe = "ckpttool.formats.savedmodel.reader.describe_computation"
    monkeypatch.setattr(describe, lambda graph: pytest.fail("digested"))
    (row,) = list_checkpoints(tmp_path / "run").document()["checkpoints"]
    assert (row["format"], row["fault"]) == ("savedmodel", None)

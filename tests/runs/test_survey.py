"""Many checkpoints are looked at by several processes, and found as one process finds them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool import AccessDenied, CheckpointError
from ckpttool.formats import discovery
from ckpttool.formats.interface import Probe, Unit
from ckpttool.formats.savedmodel.graph import MetaGraph
from ckpttool.io import children
from ckpttool.runs.members import look as looks
from ckpttool.runs.surveying import look_workers
from tests.support.directories import Survey, survey
from tests.support.faults import ends_all_threads
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
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_workers, "WORTH_UNITS", 4)
    monkeypatch.setattr(look_workers, "_BATCH", 3)
    monkeypatch.setattr(look_workers, "default_jobs", lambda: 3)


@pytest.fixture
def alone(tree: Path) -> Survey:
    """Return what one process finds."""
    found = survey(tree)
    assert len(found.entries) > 20
    return found


def same(one: Survey, other: Survey) -> bool:
    return repr(one) == repr(other) and [entry.unit.path for entry in one.entries] == [
        entry.unit.path for entry in other.entries
    ]


def test_children_find_what_one_process_finds(tree: Path, alone: Survey, small: None) -> None:
    found = survey(tree)
    assert same(found, alone)
    assert [entry.contents for entry in found.entries] == [entry.contents for entry in alone.entries]
    assert [entry.fields for entry in found.entries] == [entry.fields for entry in alone.entries]
    assert {type(entry.unit.format) for entry in found.entries} == {
        type(entry.unit.format) for entry in alone.entries
    }


def test_a_child_that_is_killed_is_no_loss(
    tree: Path, alone: Survey, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, killed = children.Child.ask, []

    def killing(self: children.Child, order: object) -> object:
        killed.append(self._process.pid)
        self._process.kill()
        return ask(self, order)

    monkeypatch.setattr(children.Child, "ask", killing)
    assert same(survey(tree), alone)


def test_a_child_that_cannot_be_started_is_no_loss(
    tree: Path, alone: Survey, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(children.subprocess, "Popen", refuse)
    assert same(survey(tree), alone)


def test_what_vanishes_meanwhile_is_not_there(
    tree: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanishing(found: object) -> list[look_workers.Entry | None]:
        (tree / "run0" / "model_epoch_1.pth").unlink(missing_ok=True)
        return look(found)

    look = look_workers._look_at_batch
    monkeypatch.setattr(look_workers, "_look_at_batch", vanishing)
    monkeypatch.setattr(children.subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    paths = [entry.path for entry in survey(tree).entries]
    assert not any(path.endswith("run0/model_epoch_1.pth") for path in paths)


def test_an_interrupt_ends_the_children(tree: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Found(children.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupted(found: object) -> list[look_workers.Entry | None]:
        raise KeyboardInterrupt

    def lost(self: children.Child, batch: object) -> None:
        raise children.Lost("a child that would be quicker than what is interrupted")

    monkeypatch.setattr(children.subprocess, "Popen", Found)
    monkeypatch.setattr(children.Child, "ask", lost)
    monkeypatch.setattr(look_workers, "_look_at_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        survey(tree)
    assert all(child.poll() is not None for child in started)


def test_an_interrupt_while_more_is_found_ends_all_threads(tree: Path, small: None) -> None:
    entries = survey(tree).entries

    def found() -> Iterator[tuple[Unit, bool]]:
        yield from ((entry.unit, False) for entry in entries)
        raise KeyboardInterrupt

    with ends_all_threads():
        look_workers.look_at_all(found())


def test_a_directory_that_cannot_be_read_is_told(tmp_path: Path, small: None) -> None:
    with pytest.raises(CheckpointError):
        survey(tmp_path / "none")


def test_errors_come_in_the_order_of_the_walk(
    tree: Path, alone: Survey, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [tree / "run0" / "model_epoch_2.pth", tree / "run1", tree / "run2" / "model_epoch_1.pth"]
    look_for = look_workers.look_for

    def refusing(look: object) -> object:
        def looked(path: str) -> object:
            if Path(path) in refused:
                raise AccessDenied(path, "nobody may look at it")
            return look(path)  # type: ignore[operator]

        return looked

    monkeypatch.setattr(look_workers, "default_jobs", lambda: 1)
    monkeypatch.setattr(discovery, "Probe", refusing(Probe))
    monkeypatch.setattr(look_workers, "look_for", refusing(look_for))
    found = survey(tree)
    assert [error.path for error in found.errors] == [str(path) for path in refused]
    gone = {str(refused[0]), str(refused[2])}
    assert {entry.path for entry in found.entries} == {
        entry.path for entry in alone.entries if entry.path not in gone and entry.directory != str(refused[1])
    }


def test_what_is_replaced_after_it_was_found_is_noticed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree / "run0" / "model_epoch_1.pth"
    before = path.stat().st_ino
    unit_of = looks.unit_of

    def replacing(probe: Probe) -> object:
        other = path.with_suffix(".new")
        shutil.copyfile(path, other)
        other.replace(path)
        return unit_of(probe)

    monkeypatch.setattr(looks, "unit_of", replacing)
    _, entry, _ = looks.look_for(str(path))
    assert entry is not None
    assert [file.inode for file in entry.contents.files] == [before] != [path.stat().st_ino]


def test_a_graph_is_not_digested_to_list_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of a graph takes its time, and nothing of it is listed."""
    shutil.copytree(files / "savedmodel" / "plain", tmp_path / "run" / "model")
    monkeypatch.setattr(MetaGraph, "computes", lambda self: pytest.fail("digested"))
    (one,) = survey(tmp_path / "run").entries
    assert (one.format, one.fault) == ("savedmodel", None)

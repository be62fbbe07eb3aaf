"""Pruning a Fluid root: Paddle's own loader still works after, and at every moment of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpttool import AccessDenied, Policy, PruneRequest, UsageError, list_checkpoints, prune, undo
from tests.support.changes import directory_of, held_by_another, journals_of, observed, state_place

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync", "write")
KEEP_2 = Policy(keep_last=2)
SERIALS = [f"checkpoint_{number}" for number in range(5)]


def paddles_choice(root: Path) -> int:
    """Return the serial that Paddle 0.15 would load, by its own rule: a strange name raises."""
    found = -1
    for name in os.listdir(root):
        _, number = name.split("_")
        if (root / name / "__model__" / "_SUCCESS").is_file():
            found = max(found, int(number))
    return found


@pytest.fixture
def root(files: Path, tmp_path: Path) -> Path:
    """Return a Fluid root of five serials."""
    return Path(shutil.copytree(files / "fluid" / "root", tmp_path / "around" / "run"))


def serials(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_prune_keeps_the_newest_serials(root: Path) -> None:
    done = prune(PruneRequest(directory=str(root), policy=KEEP_2))
    assert serials(root) == SERIALS[3:]
    assert paddles_choice(root) == 4
    assert os.listdir(root.parent) == ["run"]
    assert done.freed_bytes > 0


def test_epochs_and_steps_of_every_trainer_are_told(run, root: Path) -> None:
    answer = run("inspect", "--json", root)
    assert answer.status == 0
    assert (
        '"trainers": {"0": {"epoch_id": 4, "step_id": 40}, "1": {"epoch_id": 4, "step_id": 41}}' in answer.out
    )
    assert f"showing the newest of 5 checkpoints: {root / 'checkpoint_4'}" in answer.err


def test_latest_passes_over_a_serial_without_its_marker(run, root: Path) -> None:
    (root / "checkpoint_4" / "__model__" / "_SUCCESS").unlink()
    answer = run("latest", root)
    assert (answer.status, answer.out) == (0, f"{root / 'checkpoint_3'}\n")
    assert paddles_choice(root) == 3


def test_an_unmarked_serial_does_not_count(root: Path) -> None:
    (root / "checkpoint_4" / "__model__" / "_SUCCESS").unlink()
    prune(PruneRequest(directory=str(root), policy=KEEP_2))
    assert serials(root) == SERIALS[2:]
    assert paddles_choice(root) == 3


def test_nothing_of_ours_lies_in_a_root_for_a_moment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every single change to the disk, Paddle could start."""
    seen: list[int] = []
    for name in CHANGES:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, observed(real, lambda: seen.append(paddles_choice(root))))
    with held_by_another(root):
        assert paddles_choice(root) == 4
    prune(PruneRequest(directory=str(root), policy=KEEP_2))
    assert len(seen) > 50
    assert set(seen) == {4}


@pytest.fixture
def small(files: Path, tmp_path: Path) -> Path:
    """Return a Fluid root of the three last serials, to be copied by hard links."""
    ignored = shutil.ignore_patterns(*SERIALS[:2])
    return Path(shutil.copytree(files / "fluid" / "root", tmp_path / "small", ignore=ignored))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_kill_at_any_point_loses_nothing(small: Path, tmp_path: Path, fault, step: int) -> None:
    """Whatever call is the last, Paddle could start, and the next prune settles."""
    for number in range(1, 1000, step):
        root = Path(shutil.copytree(small, tmp_path / str(number) / "run", copy_function=os.link))
        fault.at(number, SystemExit())
        try:
            prune(root, keep_last=1)
        except SystemExit:
            pass
        else:
            fault.none()
            assert number > 50
            return
        fault.none()
        assert paddles_choice(root) == 4
        assert SERIALS[4] in serials(root)
        prune(root, keep_last=1)
        assert serials(root) == SERIALS[4:], number
        assert [name for name in os.listdir(root.parent) if "lock" not in name] == ["run"], number
        shutil.rmtree(root.parent)
    pytest.fail("no end")


@pytest.mark.parametrize("called", ["run", "./run", "link", "run/."])
@pytest.mark.parametrize("step", [11, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_kill_on_the_way_to_the_trash_is_settled_however_the_root_is_called(
    small: Path, fault, monkeypatch: pytest.MonkeyPatch, called: str, step: int
) -> None:
    """A stage beside the root says nothing of how somebody called that."""
    monkeypatch.chdir(small.parent)
    root = small.rename("run").absolute()
    Path("link").symlink_to("run")
    for number in range(2 + len(called) % 5, 100, step):
        fault.at(number, SystemExit())
        try:
            prune(called, keep_last=1, trash=True)
        except SystemExit:
            fault.none()
        else:
            fault.none()
            assert number > 20
            return
        shown = {os.path.basename(row.entry.path) for row in list_checkpoints(called).checkpoints}
        put_away = {path.name for path in root.parent.glob(".ckpttool-trash@run/*/0/checkpoint_*")}
        assert sorted([*shown, *put_away]) == SERIALS[2:], number
        settled = prune(called, keep_last=9)
        assert (settled.problems, journals_of(called)) == ((), []), number
        put_away = {path.name for path in root.parent.glob(".ckpttool-trash@run/*/0/checkpoint_*")}
        assert sorted([*serials(root), *put_away]) == SERIALS[2:], number
        undo(called)
        assert serials(root) == SERIALS[2:]
    pytest.fail("no end")


def interrupted(root: Path, fault) -> str:
    """Kill a prune in the middle; return the journal that it left."""
    fault.at(40, SystemExit())
    with pytest.raises(SystemExit):
        prune(PruneRequest(directory=str(root), policy=KEEP_2))
    fault.none()
    (journal,) = journals_of(root)
    return journal


def test_a_journal_beside_the_root_is_told_and_belongs_to_it_alone(run, root: Path, fault) -> None:
    other = Path(shutil.copytree(root, root.parent / "other"))
    journal = interrupted(root, fault)
    assert directory_of(journal) == str(root)
    assert journals_of(other) == journals_of(root.parent) == []
    answer = run("list", root)
    assert (
        f"{root}: a command was interrupted here; the next command that changes this directory recovers it "
        f"({journal})" in answer.err
    )
    prune(PruneRequest(directory=str(other), policy=KEEP_2))
    assert os.path.exists(journal)


def test_a_recursive_prune_settles_it(root: Path, fault) -> None:
    interrupted(root, fault)
    prune(PruneRequest(directory=str(root.parent), policy=KEEP_2, recursive=True))
    assert serials(root) == SERIALS[3:]
    assert os.listdir(root.parent) == ["run"]


def test_relative_and_linked_roots_have_the_same_home(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(root)
    homes = {state_place(root), state_place(tmp_path / "link")}
    monkeypatch.chdir(root)
    assert homes == {state_place(".")} == {(str(root.parent), "@run")}
    prune(PruneRequest(directory=".", policy=KEEP_2))
    assert serials(root) == SERIALS[3:]
    assert os.listdir(root.parent) == ["run"]


def test_other_directories_keep_their_own(tmp_path: Path) -> None:
    for name in ("checkpoint_1", "trainer_0"):
        (tmp_path / name).mkdir()
    assert state_place(tmp_path) == (str(tmp_path), "")


def test_where_beside_the_root_nothing_may_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *arguments: object, **keywords: object) -> int:
        if str(path).startswith(".ckpttool"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **keywords)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDenied, match="denied"):
        prune(PruneRequest(directory=str(root), policy=KEEP_2))
    assert serials(root) == SERIALS


def test_the_oldest_generation_has_no_counters_and_is_a_series(files: Path, tmp_path: Path) -> None:
    """Serials that were copied within a second, with variables alone in them."""
    place = tmp_path / "run"
    source = files / "fluid" / "generation-a" / "checkpoint_3"
    for number in range(5):
        shutil.copytree(source, place / f"checkpoint_{number}")
    done = prune(PruneRequest(directory=str(place), policy=KEEP_2))
    assert (serials(place), done.problems) == (SERIALS[3:], ())


def test_what_manifests_add_is_freed_and_not_listed(run, root: Path) -> None:
    before = run("list", root, "--json").out
    assert run("verify", "--write-manifest", root).status == 0
    assert run("list", root, "--json").out == before
    nbytes = sum(path.stat().st_size for path in (root / "checkpoint_0").rglob("*") if path.is_file())
    told = prune(root, keep_last=4)
    assert told.freed_bytes == nbytes


@pytest.mark.parametrize("part", ["__model__", "__lookup_table__"])
def test_the_parts_of_a_serial_are_never_pruned(root: Path, part: str) -> None:
    serial = root / "checkpoint_4"
    for number in (3, 4):
        (serial / part).mkdir(exist_ok=True)
        shutil.copyfile(serial / "__model__" / "fc_0.w_0", serial / part / f"weights_{number}")
    with pytest.raises(UsageError, match=f"is part of the checkpoint .*{serial.name}"):
        prune(serial / part, keep_last=1)

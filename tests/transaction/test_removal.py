"""Removal under faults: whatever fails, what was to stay is there byte for byte, and nothing is half."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpttool import (
    AccessDenied,
    CheckpointError,
    DamagedCheckpoint,
    Policy,
    PruneRequest,
    latest,
    list_checkpoints,
    prune,
    undo,
)
from ckpttool.core.name_patterns import PINS
from ckpttool.storage.directories import RETRIES
from ckpttool.transaction import lock
from tests.support.changes import held_by_another
from tests.support.faults import dies_at, disk_steps, fill_disk, path_at
from tests.support.limits import lower_limits

KEEP = 2
JOURNAL, LOCK = "journal.json", ".ckpttool.lock"


def _prune(directory: Path, keep: int = KEEP, **options: Any):
    return prune(directory, keep_last=keep, depth="quick", **options)


def _digests(directory: Path) -> dict[str, str]:
    """Return a digest of every file of a tree, but for what is ours."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.relative_to(directory).parts[0].startswith(".ckpttool")
    }


def _names(directory: Path) -> list[str]:
    return [one.entry.name for one in list_checkpoints(directory).checkpoints]


def _leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".ckpttool")]


def _kept(directory: Path) -> dict[str, str]:
    """Return digests of what a prune keeps, from a dry run."""
    members = {
        name
        for one in _prune(directory, dry_run=True).plan.groups
        for kept in one.keep
        for name in kept.entry.unit.members
    }
    digests = _digests(directory)
    return {path: digest for path, digest in digests.items() if path.split(os.sep)[0] in members}


# Each kind of unit ----------------------------------------------------------------------------------


def test_files(series: Path) -> None:
    kept = _kept(series)
    result = _prune(series)
    assert _digests(series) == kept
    assert _names(series) == ["model_epoch_9.pth", "model_epoch_10.pth"]
    assert (len(result.plan.removals), result.problems, _leftovers(series)) == (8, (), [])


def test_directories(trainer: Path) -> None:
    kept = _kept(trainer)
    result = _prune(trainer)
    assert _digests(trainer) == kept
    assert _names(trainer) == ["checkpoint-4", "checkpoint-8", "checkpoint-10"]
    assert (result.problems, _leftovers(trainer)) == ((), [])


def test_sharded_sets_go_index_first(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = []
    real = os.rename

    def rename(source: str, target: str, **where: int) -> None:
        renamed.append(source)
        real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    kept = _kept(sharded)
    result = _prune(sharded)
    assert _digests(sharded) == kept
    assert [entry.name for entry in result.plan.removals] == [
        f"epoch_{epoch}.safetensors.index.json" for epoch in (2, 1)
    ]
    firsts = [name for name in renamed if "index" in name]
    assert firsts == [renamed[0], renamed[5]]
    assert _leftovers(sharded) == []


@pytest.mark.parametrize("trash", [False, True])
def test_an_index_that_names_itself_goes_once(sharded: Path, trash: bool) -> None:
    index = sharded / "epoch_1.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["more"] = index.name
    index.write_text(json.dumps(told))
    os.utime(index, (0, 0))  # it is older than the intact ones
    before = _digests(sharded)
    policy = Policy(keep_last=2, incomplete="remove")
    result = prune(PruneRequest(directory=str(sharded), policy=policy), trash=trash)
    assert [entry.name for entry in result.plan.removals] == [
        f"epoch_{epoch}.safetensors.index.json" for epoch in (2, 1)
    ]
    assert (result.problems, list(sharded.glob("epoch_[12]*"))) == ((), [])
    if trash:
        restored = undo(str(sharded))
        assert (len(restored.restored), restored.problems, _digests(sharded)) == (2, (), before)


def test_what_is_freed_is_what_the_disk_gets_back(series: Path) -> None:
    os.link(series / "model_epoch_1.pth", series.parent / "another_name")
    planned = _prune(series, dry_run=True)
    done = _prune(series)
    sizes = sum(entry.nbytes for entry in planned.plan.removals)
    assert done.freed_bytes == planned.freed_bytes == sizes - (series.parent / "another_name").stat().st_size


def test_two_names_of_one_file_in_the_series(series: Path) -> None:
    (series / "model_epoch_2.pth").unlink()
    os.link(series / "model_epoch_1.pth", series / "model_epoch_2.pth")
    planned = _prune(series, dry_run=True)
    assert _prune(series).freed_bytes == planned.freed_bytes


def test_all_lies_in_the_stage_durably_before_anything_is_unlinked(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inodes = {path.stat().st_ino for path in series.glob("*.pth")}
    steps = disk_steps(monkeypatch)
    _prune(series)
    calls = {
        call: [at for at, one in enumerate(steps) if one == (call, one.inode) and one.inode in inodes]
        for call in ("rename", "unlink")
    }
    assert len(calls["rename"]) == len(calls["unlink"]) == 8
    between = steps[calls["rename"][-1] : calls["unlink"][0]]
    assert ("fsync", series.stat().st_ino) in between


# Killed and failing ---------------------------------------------------------------------------------

KINDS = ("short", "trainer", "sharded")
EVERY = pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.thorough)])
"""From one call to the next of those at which a prune is disturbed."""


@EVERY
def test_killed_at_any_instruction(step: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for at, kind in enumerate(KINDS):
        source: Path = request.getfixturevalue(kind)
        all_names, kept, before = set(_names(source)), _kept(source), _digests(source)
        number, is_killed = 1 + at % step, True
        while is_killed:
            directory = Path(shutil.copytree(source, tmp_path / f"{kind} {number}" / "run"))
            is_killed = dies_at(number, partial(_prune, directory))
            _check_after_a_kill(directory, all_names, kept, before)
            shutil.rmtree(directory)
            number += step
        assert number > 15


def _check_after_a_kill(
    directory: Path, all_names: set[str], kept: dict[str, str], before: dict[str, str]
) -> None:
    now = _digests(directory)
    assert kept.items() <= now.items() <= before.items()
    listing = list_checkpoints(directory)
    assert {one.entry.name for one in listing.checkpoints} <= all_names
    assert not listing.problems  # no half of a checkpoint is taken for one
    found = latest(directory)
    assert found.entry is not None and not found.passed_over
    assert _digests(directory) == now  # whoever only reads changes nothing
    assert bool(listing.journals) == any(
        os.path.exists(directory / name / JOURNAL) for name in _leftovers(directory)
    )
    result = _prune(directory)
    assert not result.problems
    assert _digests(directory) == kept
    assert _leftovers(directory) == []


@EVERY
def test_a_call_that_fails_loses_nothing(step: int, request, tmp_path: Path, fault) -> None:
    for at, kind in enumerate(KINDS):
        source: Path = request.getfixturevalue(kind)
        kept, before = _kept(source), _digests(source)
        number, was_hit = 1 + 7 * at % step, True
        while was_hit:
            code = (errno.ENOSPC, errno.EACCES)[number % 2]
            directory = Path(shutil.copytree(source, tmp_path / f"{kind} {number}" / "run"))
            fault.at(number, OSError(code, os.strerror(code)))
            try:
                result = _prune(directory)
            except CheckpointError as error:
                assert "\n" not in str(error)
            else:
                assert (number > fault.made) or result.problems or _digests(directory) == kept
            was_hit = fault.made >= number
            fault.none()
            now = _digests(directory)
            assert kept.items() <= now.items() <= before.items()
            assert not list_checkpoints(directory).problems
            assert not _prune(directory).problems
            assert (_digests(directory), _leftovers(directory)) == (kept, [])
            shutil.rmtree(directory)
            number += step
        assert number > 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("needed", [1, 3, 8, 9])
def test_a_full_disk_gets_room_from_what_goes(
    series: Path, monkeypatch: pytest.MonkeyPatch, code: int, needed: int
) -> None:
    """Nothing can be created until ``needed`` checkpoints are gone."""
    kept, opens, makes = _kept(series), os.open, os.mkdir

    def is_full() -> bool:
        return len(list(series.glob("*.pth"))) > 10 - needed

    def refuse(real, is_new, path, *arguments, **where):
        if is_new(*arguments) and is_full():
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **where)

    monkeypatch.setattr(os, "open", partial(refuse, opens, lambda flags, *_: bool(flags & os.O_CREAT)))
    monkeypatch.setattr(os, "mkdir", partial(refuse, makes, lambda *_: True))
    result = _prune(series)
    assert (result.problems, len(result.plan.removals), _digests(series)) == ((), 8, kept)
    assert result.freed_bytes == sum(entry.nbytes for entry in result.plan.removals)
    assert _leftovers(series) == []


def test_a_full_disk_takes_only_what_is_unchanged(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    path = series / "model_epoch_3.pth"
    result = _prune(series, confirm=_meanwhile(lambda: path.write_bytes(b"new")))
    assert path.read_bytes() == b"new"
    assert (len(result.plan.removals), list(result.failed)) == (7, [str(path)])


@pytest.mark.parametrize("kind", ["trainer", "sharded"])
def test_a_full_disk_gets_room_from_directories(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written until a file of the first that goes is gone."""
    directory: Path = request.getfixturevalue(kind)
    kept, before = _kept(directory), _digests(directory)
    written = fill_disk(monkeypatch, has_room=lambda: _digests(directory) != before)
    result = _prune(directory)
    assert (result.problems, _digests(directory), len(written)) == ((), kept, 2)
    assert result.freed_bytes == sum(entry.nbytes for entry in result.plan.removals)
    assert _leftovers(directory) == []


def test_a_directory_that_changed_stays_on_a_full_disk(
    trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    first = _prune(trainer, dry_run=True).plan.removals[0].path
    result = _prune(trainer, confirm=_meanwhile(lambda: Path(first, "notes.txt").write_text("mine")))
    assert list(result.failed) == [first]
    assert Path(first, "notes.txt").read_text() == "mine"
    assert all(not Path(entry.path).exists() for entry in result.plan.removals if entry.path != first)


@EVERY
def test_an_interrupt_leaves_nothing_half_done(step: int, short: Path, tmp_path: Path, fault) -> None:
    kept, before = _kept(short), _digests(short)
    number, was_hit = 5 % step, True
    while was_hit:
        number += 1
        directory = Path(shutil.copytree(short, tmp_path / f"{number}" / "run"))
        fault.at(number, KeyboardInterrupt())
        try:
            _prune(directory)
        except KeyboardInterrupt:
            assert kept.items() <= _digests(directory).items() <= before.items()
        was_hit = fault.made >= number
        fault.none()
        assert len(_leftovers(directory)) <= 1
        _prune(directory)
        assert (_digests(directory), _leftovers(directory)) == (kept, [])
        shutil.rmtree(directory)
        number += step - 1


@pytest.mark.parametrize(("call", "code"), [("unlink", errno.EBUSY), ("rmdir", errno.ENOTEMPTY)])
def test_what_is_busy_is_tried_again(
    series: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    real, failures = getattr(os, call), []

    def busy(name: str, **where: int) -> None:
        if len(failures) < RETRIES - 1 and not name.startswith("/"):
            failures.append(name)
            raise OSError(code, os.strerror(code))
        real(name, **where)

    monkeypatch.setattr(os, call, busy)
    assert not _prune(series).problems
    assert len(failures) == RETRIES - 1
    assert _leftovers(series) == []


def test_what_stays_busy_is_told_and_settled_later(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is open on NFS comes back as .nfs… when it is unlinked."""
    kept, real = _kept(trainer), os.unlink

    def silly_rename(name: str, *, dir_fd: int | None = None) -> None:
        if name == "optimizer.pt":
            os.rename(name, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            real(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", silly_rename)
        result = _prune(trainer)
    (stage,) = _leftovers(trainer)
    rest = f"partly removed: directory not empty; the rest is in {trainer / stage / '0'}"
    assert [one.message for one in result.problems] == [rest, rest]
    assert not any(
        "not removed" in why for one in result.plan.groups for kept in one.keep for why in kept.reasons
    )
    assert _digests(trainer) == kept
    for path in trainer.rglob(".nfs0001"):
        path.unlink()  # its reader has closed it
    assert not _prune(trainer).problems
    assert (_digests(trainer), _leftovers(trainer)) == (kept, [])


def test_what_can_not_be_unlinked_altogether_stays_whole(
    trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = _digests(trainer), os.access
    inner = trainer / "checkpoint-2" / "sub"
    inner.mkdir()
    inode = inner.stat().st_ino

    def refuse(path: str, mode: int, *, dir_fd: int, **told: bool) -> bool:
        return os.fstat(dir_fd).st_ino != inode and real(path, mode, dir_fd=dir_fd, **told)

    monkeypatch.setattr(os, "access", refuse)
    monkeypatch.setattr(os, "supports_effective_ids", {*os.supports_effective_ids, refuse})
    [problem] = _prune(trainer).problems
    assert problem.message == "not removed: checkpoint-2/sub can't be changed by this user"
    assert {path: digest for path, digest in before.items() if path.startswith("checkpoint-2")}.items() <= (
        _digests(trainer).items()
    )
    assert _leftovers(trainer) == []


@pytest.mark.parametrize("number", [0, 1])
def test_what_fails_on_the_way_is_put_back_or_told(
    trainer: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of what nothing is gone yet, all is back; the rest of another is where the message says."""
    before, real, calls = _digests(trainer), os.unlink, []

    def fail(name: str, *, dir_fd: int | None = None) -> None:
        if name != "journal.json" and len(calls) == number:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        calls.append(name)
        real(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        result = _prune(trainer)
    kept = [kept.entry.name for one in result.plan.groups for kept in one.keep]
    assert sorted(kept) == sorted(_names(trainer))
    if number == 0:
        assert {problem.message for problem in result.problems} == {"not removed: operation not permitted"}
        assert (_digests(trainer), _leftovers(trainer)) == (before, [])
    else:
        partly, *whole = [problem.message for problem in result.problems]
        place = partly.removeprefix("partly removed: operation not permitted; the rest is in ")
        assert os.path.isdir(os.path.join(place, next(iter(set(os.listdir(place))))))
        assert set(whole) <= {"not removed: operation not permitted"}


# Others at work meanwhile ---------------------------------------------------------------------------


def _meanwhile(action: Callable[[], object]) -> Callable[[object], bool]:
    """Return a confirmation that does something between the plan and the removal."""

    def confirm(planned: object) -> bool:
        action()
        return True

    return confirm


def test_a_file_that_changed_since_the_plan_stays(series: Path) -> None:
    path = series / "model_epoch_3.pth"
    result = _prune(series, confirm=_meanwhile(lambda: path.write_bytes(b"new")))
    assert path.read_bytes() == b"new"
    assert [(one.path, one.message) for one in result.problems] == [
        (str(path), "not removed: it has changed since the plan was made")
    ]
    assert len(_digests(series)) == 3


@pytest.mark.parametrize("trash", [False, True])
def test_what_is_named_only_after_the_plan_stays(series: Path, trash: bool) -> None:
    def name() -> None:
        (series / PINS).write_text('pinned = ["model_epoch_1.pth"]')
        (series / "best.pth").symlink_to("model_epoch_2.pth")
        (series / "latest").write_text("model_epoch_3.pth\n")

    result = _prune(series, confirm=_meanwhile(name), trash=trash)
    assert {os.path.basename(one.path): one.message.partition(": ")[2] for one in result.problems} == {
        "model_epoch_1.pth": "protected since the plan was made: pinned",
        "model_epoch_2.pth": "protected since the plan was made: symlink best.pth",
        "model_epoch_3.pth": "protected since the plan was made: latest",
    }
    assert {f"model_epoch_{epoch}.pth" for epoch in (1, 2, 3)} < {*_digests(series)}


def test_a_pointer_that_is_unreadable_only_after_the_plan_keeps_its_series(series: Path) -> None:
    before = _digests(series)
    _prune(series, confirm=_meanwhile(lambda: (series / PINS).write_text("pinned = 3")))
    assert before.items() <= _digests(series).items()


def test_a_file_that_was_added_to_a_directory_keeps_it(trainer: Path) -> None:
    path = trainer / "checkpoint-2" / "notes.txt"
    _prune(trainer, confirm=_meanwhile(lambda: path.write_text("precious")))
    assert path.read_text() == "precious"
    assert (trainer / "checkpoint-2" / "model.safetensors").exists()


def test_a_file_that_comes_between_check_and_rename_goes_back(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(source: str, target: str, **where: int) -> None:
        if source == "model_epoch_3.pth" and (series / source).read_bytes() != b"new":
            (series / "fresh").write_bytes(b"new")
            real(series / "fresh", series / source)
        real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    result = _prune(series)
    assert (series / "model_epoch_3.pth").read_bytes() == b"new"
    assert len(result.problems) == 1
    assert _leftovers(series) == []


def test_one_that_comes_so_and_finds_its_place_taken_is_told_where_it_lies(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(source: str, target: str, **where: int) -> None:
        is_first = source == "model_epoch_3.pth" and (series / source).read_bytes() != b"new"
        if is_first:
            (series / source).write_bytes(b"new")
        real(source, target, **where)
        if is_first:
            (series / source).write_bytes(b"newer")

    monkeypatch.setattr(os, "rename", rename)
    result = _prune(series)
    assert (series / "model_epoch_3.pth").read_bytes() == b"newer"
    (stage,) = (series / name for name in _leftovers(series))
    (aside,) = stage.rglob("model_epoch_3.pth")
    assert aside.read_bytes() == b"new"
    assert any(str(aside.parent) in problem.message for problem in result.problems)


def test_a_directory_that_becomes_a_symlink_is_not_followed(trainer: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"

    def swap() -> None:
        os.rename(trainer / "checkpoint-2", outside)
        (trainer / "checkpoint-2").symlink_to(outside)

    before = _digests(trainer / "checkpoint-2")
    result = _prune(trainer, confirm=_meanwhile(swap))
    assert _digests(outside) == before
    assert len(result.problems) == 1


def test_what_has_gone_already_is_no_error(series: Path) -> None:
    result = _prune(series, confirm=_meanwhile((series / "model_epoch_3.pth").unlink))
    assert result.problems == ()
    assert len(_digests(series)) == KEEP


def test_a_survivor_that_vanished_keeps_the_series(series: Path) -> None:
    result = _prune(series, confirm=_meanwhile((series / "model_epoch_9.pth").unlink))
    assert len(_digests(series)) == 9
    assert len(result.problems) == 8
    assert "model_epoch_9.pth, which is kept, has changed" in result.problems[0].message


def test_one_prune_at_a_time(series: Path) -> None:
    with (
        held_by_another(series),
        pytest.raises(AccessDenied, match="another ckpttool is changing this directory"),
    ):
        _prune(series)
    assert len(_digests(series)) == 10
    assert not (series / LOCK).exists()
    assert not _prune(series).problems


def test_a_lock_of_one_that_was_killed_is_free(series: Path) -> None:
    (series / LOCK).write_text("")
    assert not _prune(series).problems
    assert _leftovers(series) == []


def test_locks_that_a_kill_left_below_go_unless_they_are_held(series: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(series, series / name)
        (series / name / LOCK).write_text("")
    request = PruneRequest(directory=str(series), policy=Policy(keep_last=20), recursive=True)
    prune(request, dry_run=True)
    assert (series / "a" / LOCK).exists()  # nothing on disk is changed
    with held_by_another(series / "b"):
        assert not prune(request).problems
        assert [name for name in ("a", "b") if (series / name / LOCK).exists()] == ["b"]
    (series / "b" / LOCK).write_text("")
    prune(request)
    assert not list(series.rglob(LOCK))


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever held it is done, and removes it: what was opened before has no name any more."""
    real, removed = lock._lock, []

    def remove_first(path: str, descriptor: int) -> None:
        if not removed:
            removed.append(path)
            os.unlink(path)
        real(path, descriptor)

    monkeypatch.setattr(lock, "_lock", remove_first)
    with (
        held_by_another(series),
        pytest.raises(AccessDenied, match="another ckpttool is changing this directory"),
        held_by_another(series),
    ):
        pass


def test_a_file_system_without_locks(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(_prune(series).plan.removals) == 8


def test_a_lock_can_be_locked_by_whoever_reads_it(series: Path) -> None:
    mask = os.umask(0o077)
    try:
        with held_by_another(series):
            assert (series / LOCK).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_what_is_no_lock_of_ours_is_made_readable_to_nobody(series: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("")
    secret.chmod(0o600)
    (series / LOCK).hardlink_to(secret)
    with held_by_another(series):
        assert secret.stat().st_mode & 0o777 == 0o600


def _unwritable(monkeypatch: pytest.MonkeyPatch, path: Path, *, readable: bool) -> None:
    """Let a file be another user's; root could open it all the same."""
    real = os.open

    def refuse(name: str, flags: int, *arguments: int, **where: int) -> int:
        if name == path.name and (flags & os.O_RDWR or not readable):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(name, flags, *arguments, **where)

    monkeypatch.setattr(os, "open", refuse)


def test_a_lock_that_another_user_left_is_used(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (series / LOCK).write_text("")
    _unwritable(monkeypatch, series / LOCK, readable=True)
    assert not _prune(series).problems
    assert _leftovers(series) == []


def test_a_lock_that_another_user_holds(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_by_another(series):
        _unwritable(monkeypatch, series / LOCK, readable=True)
        with pytest.raises(AccessDenied, match="another ckpttool is changing this directory"):
            _prune(series)
    assert len(_digests(series)) == 10


def test_a_lock_that_can_not_be_opened_is_named(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (series / LOCK).write_text("")
    _unwritable(monkeypatch, series / LOCK, readable=False)
    told = r"the lock .ckpttool.lock belongs to another user, \w+, .*remove it .*nothing was removed"
    with pytest.raises(AccessDenied, match=told):
        _prune(series)
    assert len(_digests(series)) == 10


def test_a_directory_around_that_can_not_be_listed(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refuse(path: str | int) -> object:
        if path_at(path) == str(series.parent):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = _prune(series)
    (problem,) = result.problems
    assert not result.plan.removals
    assert problem.message == (
        f"left alone: {series.parent}: permission denied; it may name any checkpoint "
        f"(--exclude {series.parent.name} ignores it)"
    )
    assert len(_prune(series, exclude=[series.parent.name]).plan.removals) == 8


def test_a_directory_that_can_not_be_written(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *arguments: int, **where: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *arguments, **where)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDenied, match="read-only file system; nothing was removed"):
        _prune(series)
    assert _prune(series, keep=10).problems == ()  # where nothing is to go, nothing need be written
    assert len(_digests(series)) == 10


# What an interrupted prune left ---------------------------------------------------------------------


def _interrupted(directory: Path) -> Path:
    """Let a prune be killed once all is set aside; return its stage."""
    assert dies_at(1, lambda: _prune(directory), ["unlink"])
    (directory / LOCK).unlink()
    (stage,) = directory.glob(".ckpttool-*")
    return stage


def test_it_is_finished(series: Path) -> None:
    stage = _interrupted(series)
    result = _prune(series)
    assert (len(result.finished), result.put_back, stage.exists()) == (8, (), False)


def test_it_is_undone_where_the_survivors_have_gone(series: Path) -> None:
    before = _digests(series)
    _interrupted(series)
    for epoch in (9, 10):
        (series / f"model_epoch_{epoch}.pth").unlink()
    result = _prune(series, keep=8)
    assert (result.finished, len(result.put_back)) == ((), 8)
    assert (
        _digests(series).items()
        == {path: digest for path, digest in before.items() if path[12:] not in ("9.pth", "10.pth")}.items()
    )


def test_what_was_written_in_its_place_meanwhile_stays(series: Path) -> None:
    _interrupted(series)
    shutil.copy(series / "model_epoch_10.pth", series / "model_epoch_1.pth")
    (series / "model_epoch_9.pth").unlink()
    result = _prune(series, keep=8)
    assert (series / "model_epoch_1.pth").read_bytes() == (series / "model_epoch_10.pth").read_bytes()
    assert "another file now has this name" in result.problems[0].message
    assert len(list(series.glob(".ckpttool-*"))) == 1  # the old one isn't lost either


def test_a_journal_that_leads_out_is_refused(series: Path) -> None:
    victim = series.parent / "victim"
    victim.write_text("precious")
    stage = _interrupted(series)
    document = json.loads((stage / JOURNAL).read_text())
    document["operations"][0][2] = "directory/../victim"
    (stage / JOURNAL).write_text(json.dumps(document))
    before = _digests(series.parent)
    with pytest.raises(DamagedCheckpoint, match="points outside the directory"):
        _prune(series)
    assert len(list_checkpoints(series).journals) == 1
    assert _digests(series.parent) == before


def test_a_file_that_no_journal_tells_of_is_not_ours(series: Path) -> None:
    stage = _interrupted(series)
    (stage / "0" / "notes.txt").write_text("precious")
    result = _prune(series)
    assert (stage / "0" / "notes.txt").read_text() == "precious"
    assert len(result.problems) == 1


def test_a_stage_without_a_journal_that_holds_something(series: Path) -> None:
    stage = series / ".ckpttool-0123abcd"
    stage.mkdir()
    (stage / "notes.txt").write_text("precious")
    with pytest.raises(DamagedCheckpoint, match="files not listed in the journal"):
        _prune(series)
    assert len(_digests(series)) == 10


def test_a_journal_below_is_settled_by_a_recursive_prune(series: Path) -> None:
    stage = _interrupted(series)
    result = prune(series.parent, keep_last=KEEP, recursive=True)
    assert (len(result.finished), stage.exists()) == (8, False)


def test_every_directory_has_a_journal_of_its_own(series: Path, tmp_path: Path) -> None:
    shutil.copytree(series, tmp_path / "run2")
    request = PruneRequest(directory=str(tmp_path), policy=Policy(keep_last=KEEP), recursive=True)
    result = prune(request)
    assert len(result.plan.removals) == 16
    assert len(list(tmp_path.rglob("*"))) == 2 + 2 * KEEP


def test_many_are_unlinked_by_two_threads(series: Path, monkeypatch: pytest.MonkeyPatch, fault) -> None:
    lower_limits(monkeypatch, files_for_two_threads=2)
    (series / "model_epoch_2.pth").unlink()
    os.link(series / "model_epoch_1.pth", series / "model_epoch_2.pth")
    kept, planned = _kept(series), _prune(series, dry_run=True)
    fault.at(22, KeyboardInterrupt())  # one of the threads
    with pytest.raises(KeyboardInterrupt):
        _prune(series)
    fault.none()
    assert _digests(series) == kept  # an interrupted one is settled at once
    assert (len(planned.plan.removals), _leftovers(series)) == (8, [])


def test_two_threads_free_what_one_would(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (series / "model_epoch_2.pth").unlink()
    os.link(series / "model_epoch_1.pth", series / "model_epoch_2.pth")
    kept, planned = _kept(series), _prune(series, dry_run=True)
    lower_limits(monkeypatch, files_for_two_threads=2)
    done = _prune(series)
    assert (done.freed_bytes, done.problems) == (planned.freed_bytes, ())
    assert (_digests(series), _leftovers(series)) == (kept, [])

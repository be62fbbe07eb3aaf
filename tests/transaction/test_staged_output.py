"""Targets that appear whole or not at all: killed at any call, refused by any call, raced by others."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import resource
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, CheckpointError, NotFound, Tensor, UsageError
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import Contiguous
from ckpttool.storage.directories import OpenDirectory
from ckpttool.storage.source import Source
from ckpttool.transaction import operations, staged_output
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.faults import disk_steps, ends_all_threads, in_child, is_killed_at
from tests.support.thorough import sampled
from tests.support.writing import byte_tensor

State = dict[str, tuple[str, bytes | str, int]]
Content = dict[str, bytes]

LARGE = random.Random(1).randbytes(200_000)
"""Of a tensor that other threads copy."""


def clear(directory: str) -> list[str]:
    """Clear a directory of what kills left."""
    with OpenDirectory(directory) as opened:
        return staged_output.recover_areas(opened)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory in which nothing but targets lie."""
    inner = tmp_path / "place"
    inner.mkdir()
    return inner


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Tensor]:
    """Return a tensor that lies in a file in one piece."""
    path = tmp_path / "source"
    path.write_bytes(LARGE)
    with Source(path) as source:
        values = Contiguous(source, 0, len(LARGE))
        yield Tensor(("large",), BY_NAME["uint8"], (len(LARGE),), values=values)


def state(directory: Path) -> State:
    """Return all that lies in a directory: what each is, its content, and its mode."""
    found: State = {}
    for path in sorted(directory.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path), 0)
        elif path.is_dir():
            found[name] = ("directory", b"", mode)
        else:
            found[name] = ("file", path.read_bytes(), mode)
    return found


def litter(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".ckpttool-")]


# What is written where something stands ---------------------------------------------------------------


class Job:
    """A target that is written: over what, and as what."""

    def __init__(self, shape: Any, old: Content, new: Content, replaces: list[str] | None) -> None:
        self.shape, self.old, self.new, self.replaces = shape, old, new, replaces

    def lay_out(self, directory: Path) -> None:
        """Write what stands there before, and what only lies beside."""
        for name, data in {**self.old, "beside": b"untouched", "ckpt-2.index": b"another's"}.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)

    def run(self, directory: Path, large: Tensor) -> None:
        """Write the new."""
        with StagedOutput(directory / "ckpt", self.shape, replaces=self.replaces, jobs=2) as target:
            for name, data in self.new.items():
                file = target.create(name)
                file.write(data)
                file.put(large)
            target.settle()
            target.commit()

    def outcomes(self, tmp_path: Path, large: Tensor) -> tuple[State, State]:
        """Return what may stand there in the end: the old, or the new."""
        states = []
        for name in ("before", "after"):
            directory = tmp_path / name
            directory.mkdir()
            self.lay_out(directory)
            if name == "after":
                self.run(directory, large)
            states.append(state(directory))
        assert states[0] != states[1]
        return states[0], states[1]


INDEX, FIRST, SECOND = ".index", ".data-00000-of-00002", ".data-00001-of-00002"
JOBS = {
    "a new file": Job("file", {}, {"": b"new"}, None),
    "a file over a file": Job("file", {"ckpt": b"old"}, {"": b"new"}, ["ckpt"]),
    "a file over a directory": Job("file", {"ckpt/a": b"old"}, {"": b"new"}, ["ckpt"]),
    "a new directory": Job("directory", {}, {"a": b"1", "b/c": b"2"}, None),
    "a directory over a directory": Job(
        "directory", {"ckpt/a": b"old", "ckpt/z": b"old"}, {"a": b"1", "b/c": b"2"}, ["ckpt"]
    ),
    "a directory over a file": Job("directory", {"ckpt": b"old"}, {"a": b"1"}, ["ckpt"]),
    "a new prefix": Job("prefix", {}, {INDEX: b"i", FIRST: b"1", SECOND: b"2"}, None),
    "a prefix over a prefix": Job(
        "prefix",
        {"ckpt.index": b"old", "ckpt.data-00000-of-00001": b"old", "ckpt.data-00001-of-00002": b"old"},
        {INDEX: b"i", FIRST: b"1", SECOND: b"2"},
        ["ckpt.index", "ckpt.data-00000-of-00001", "ckpt.data-00001-of-00002"],
    ),
}
_HARDEST = [
    *("a prefix over a prefix", "a file over a file", "a new prefix", "a new file"),
    *(
        "a directory over a directory",
        "a file over a directory",
        "a directory over a file",
        "a new directory",
    ),
]
"""What is interrupted in all its calls; `make test` does so in the first of each four."""
every_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())


@every_job
def test_what_was_written_stands_there_and_nothing_else(job: Job, place: Path, large: Tensor) -> None:
    job.lay_out(place)
    job.run(place, large)
    names = {f"ckpt/{name}" if job.shape == "directory" else f"ckpt{name}" for name in job.new}
    files = {name: data for name, (kind, data, _) in state(place).items() if kind == "file"}
    assert files.keys() == {*names, "beside", "ckpt-2.index"}
    for name, data in job.new.items():
        found = files[f"ckpt/{name}" if job.shape == "directory" else f"ckpt{name}"]
        assert found == data + LARGE
    assert (files["beside"], files["ckpt-2.index"]) == (b"untouched", b"another's")


@every_job
def test_what_is_not_committed_leaves_nothing(job: Job, place: Path, large: Tensor) -> None:
    job.lay_out(place)
    before = state(place)
    with StagedOutput(place / "ckpt", job.shape, replaces=job.replaces) as target:
        target.create(next(iter(job.new))).put(large)
    assert state(place) == before


# Killed -----------------------------------------------------------------------------------------------


CALLS = ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "chmod", "fchmod")
"""Those that change what lies in directories."""


@pytest.mark.parametrize("name", sampled(_HARDEST, 2))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(name: str, tmp_path: Path, large: Tensor) -> None:
    job = JOBS[name]
    old, new = job.outcomes(tmp_path, large)
    ends = []
    for fatal in itertools.count(1):
        directory = tmp_path / f"kill-{fatal}"
        directory.mkdir()
        job.lay_out(directory)
        if not is_killed_at(fatal, lambda: job.run(directory, large), CALLS):  # noqa: B023
            break
        if job.replaces is None or job.shape == "file":
            at_once = {name for name in state(directory) if not name.startswith(".ckpttool-")}
            assert at_once in (old.keys(), new.keys()) or job.shape == "prefix" or "ckpt/a" in job.old
        if job.shape == "prefix" and (directory / "ckpt.index").exists():
            visible = {name: told for name, told in state(directory).items() if name[0] != "."}
            assert visible in (old, new)
        assert clear(str(directory)) == []
        assert state(directory) in (old, new), f"killed at call {fatal}"
        ends.append(state(directory) == new)
    assert ends == sorted(ends)
    assert {*ends} == {False, True}


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_kill_while_a_kill_is_made_good_changes_nothing(step: int, tmp_path: Path, large: Tensor) -> None:
    job = JOBS["a prefix over a prefix"]
    old, new = job.outcomes(tmp_path, large)
    times = found = 0
    for fatal in itertools.count(1):
        directory = tmp_path / f"kill-{fatal}"
        directory.mkdir()
        job.lay_out(directory)
        if not is_killed_at(fatal, lambda: job.run(directory, large), CALLS):  # noqa: B023
            break
        if not [*directory.glob(".ckpttool-*.new/journal.json")]:
            continue
        found += 1
        if found % step:
            continue
        for again in itertools.count(1):
            if not is_killed_at(again, lambda: clear(str(directory)), CALLS):  # noqa: B023
                break
            if (directory / "ckpt.index").exists():
                assert {name: told for name, told in state(directory).items() if name[0] != "."} in (old, new)
            times += 1
        assert state(directory) in (old, new)
    assert times > 20 / step


def test_the_next_run_clears_what_a_kill_left(place: Path) -> None:
    def begin() -> None:
        target = StagedOutput(place / "ckpt")
        target.create().write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(begin) == -signal.SIGKILL
    assert len(litter(place)) == 1
    with StagedOutput(place / "other") as target:
        target.create().write(b"whole")
        target.settle()
        assert len(litter(place)) == 1
        target.commit()
    assert state(place).keys() == {"other"}


def half_moved(place: Path) -> None:
    """Leave what a kill leaves that comes when the old is set aside, and the new not yet there."""
    (place / "ckpt").mkdir()
    (place / "ckpt" / "a").write_bytes(b"old")

    def begin() -> None:
        target = StagedOutput(place / "ckpt", "directory", replaces=["ckpt"])
        target.create("a").write(b"new")
        target.settle()
        real = operations.Stage._do

        def do(stage: operations.Stage, one: Any) -> None:
            if one.source.root == "stage":
                os.kill(os.getpid(), signal.SIGKILL)
            real(stage, one)

        setattr(operations.Stage, "_do", do)  # noqa: B010
        target.commit()

    assert in_child(begin) == -signal.SIGKILL
    assert not (place / "ckpt").exists()


def test_what_was_set_aside_is_put_back(place: Path) -> None:
    half_moved(place)
    clear(str(place))
    assert {name: told[1] for name, told in state(place).items()} == {"ckpt": b"", "ckpt/a": b"old"}


def test_what_came_meanwhile_does_not_give_way_to_what_was_set_aside(place: Path) -> None:
    half_moved(place)
    (place / "ckpt").write_bytes(b"of somebody who trained again")
    clear(str(place))
    assert (place / "ckpt").read_bytes() == b"of somebody who trained again"
    (place / "ckpt").rename(place / "elsewhere")
    clear(str(place))
    assert (place / "ckpt" / "a").read_bytes() == b"old"
    assert litter(place) == []


# Areas that no kill left ------------------------------------------------------------------------------


def mark(path: Path) -> list[int]:
    """Return what version 0.1 noted of a file that comes to its place."""
    return [path.lstat().st_ino, path.lstat().st_mtime_ns]


class Planted:
    """An area beside a target, as version 0.1 left it after a kill, but for what a test changes of it."""

    def __init__(self, place: Path) -> None:
        self.place, self.area = place, place / ".ckpttool-0123456789ab.new"
        (self.area / "content").mkdir(parents=True)
        self.area.chmod(0o700)
        (self.area / "replaced").mkdir()
        (self.area / "content" / "ckpt.b").write_bytes(b"new b")
        (self.area / "replaced" / "ckpt.a").write_bytes(b"old a")
        (place / "ckpt.a").write_bytes(b"new a")
        (place / "beside").write_bytes(b"untouched")
        with OpenDirectory(str(self.area)) as opened:
            staged_output.claim(opened)
        self.plan(
            {
                "ckpt.a": mark(place / "ckpt.a"),
                "ckpt.b": mark(self.area / "content" / "ckpt.b"),
            },
            {"ckpt.a": (self.area / "replaced" / "ckpt.a").lstat().st_ino},
        )

    def plan(self, new: object, old: object) -> None:
        (self.area / "moving").write_text(json.dumps({"new": new, "old": old}))

    def is_left(self, why: str) -> None:
        """Require that whoever stages beside it touches nothing, and says so."""
        before = state(self.place.parent)
        with StagedOutput(self.place / "other") as target:
            (warning,) = target.warnings
        assert warning.startswith(f"{self.area} is left unchanged: ")
        assert why in warning
        assert state(self.place.parent) == before


@pytest.fixture
def planted(place: Path) -> Planted:
    """Return an area that is undone as it is."""
    return Planted(place)


def test_what_is_as_a_kill_leaves_it_is_undone(planted: Planted) -> None:
    with StagedOutput(planted.place / "other") as target:
        assert target.warnings == ()
    assert {name: told[1] for name, told in state(planted.place).items()} == {
        "ckpt.a": b"old a",
        "beside": b"untouched",
    }


def test_where_nothing_new_was_planned_the_old_is_put_back(planted: Planted) -> None:
    (planted.place / "ckpt.a").unlink()
    planted.plan({}, {"ckpt.a": (planted.area / "replaced" / "ckpt.a").lstat().st_ino})
    assert clear(str(planted.place)) == []
    assert (planted.place / "ckpt.a").read_bytes() == b"old a"


def test_what_an_archive_brought_is_left(planted: Planted) -> None:
    (planted.area / "owner").unlink()
    planted.is_left("its host is not recorded")


def test_a_copy_is_left(planted: Planted) -> None:
    shutil.copytree(planted.area, planted.area.with_name("copy"))
    planted.area.rename(planted.place.parent / "away")
    planted.area.with_name("copy").rename(planted.area)
    planted.is_left("it is a copy, or was extracted from an archive")


def test_a_link_in_the_place_of_what_was_set_aside_is_not_followed(planted: Planted) -> None:
    secret = planted.place.parent / "secret"
    secret.mkdir()
    (secret / "id_rsa").write_bytes(b"untouched")
    shutil.rmtree(planted.area / "replaced")
    (planted.area / "replaced").symlink_to(secret)
    planted.is_left("replaced is not a directory")


@pytest.mark.parametrize("name", ["content", "replaced"])
def test_what_is_not_there_undoes_nothing(name: str, planted: Planted) -> None:
    shutil.rmtree(planted.area / name)
    planted.is_left(f"{name} is not a directory")


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "a/b", "a\0b", "/etc", "\u0107", "\ud800"])
@pytest.mark.parametrize("kind", ["new", "old"])
def test_what_is_no_name_is_not_moved(name: str, kind: str, planted: Planted) -> None:
    inode = planted.place.parent.lstat()
    (planted.place.parent / "outside").write_bytes(b"untouched")
    plan = json.loads((planted.area / "moving").read_text())
    plan[kind][name] = [inode.st_ino, inode.st_mtime_ns] if kind == "new" else inode.st_ino
    planted.plan(**plan)
    planted.is_left("not a plan of ckpttool")


@pytest.mark.parametrize(
    "plan",
    [
        *(b"", b"{", b"null", b"[1]", b"{}", b'{"new": {}, "old": []}', b'{"new": {"a": 1}, "old": {}}'),
        *(b'{"new": {}, "old": {"a": "1"}}', b'{"new": {}, "old": {"a": true}}', b"\xff", b"[" * 100_000),
        *(b'{"new": {"a": [1]}, "old": {}}', b'{"new": {"a": [1, 2.5]}, "old": {}}', b'{"a":' * 200_000),
    ],
    ids=lambda plan: plan[:30].decode(errors="replace"),
)
def test_a_strange_plan_moves_nothing(plan: bytes, planted: Planted) -> None:
    (planted.area / "moving").write_bytes(plan)
    planted.is_left("/moving")


@pytest.mark.parametrize("name", ["moving", "owner"])
@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "large"])
def test_what_is_no_file_is_not_read(name: str, kind: str, planted: Planted) -> None:
    path = planted.area / name
    data = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (planted.place.parent / "elsewhere").write_bytes(data)
        path.symlink_to(planted.place.parent / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(data)
        os.truncate(path, 1 << 30)
    before = sorted(os.listdir(planted.area))
    (warning,) = clear(str(planted.place))
    words = {"link": ("a symlink", "too many levels"), "large": ("1,073,741,824 bytes", "is no file of")}
    assert any(one in warning for one in words.get(kind, ("not a regular file", "is no file of ckpttool's")))
    assert sorted(os.listdir(planted.area)) == before
    assert (planted.area / "replaced" / "ckpt.a").read_bytes() == b"old a"


def test_what_was_not_set_aside_is_not_moved(planted: Planted) -> None:
    (planted.area / "replaced" / "more").write_bytes(b"untouched")
    planted.is_left("more: not the file that was set aside")


def test_what_was_set_aside_must_be_what_lies_there(planted: Planted) -> None:
    path = planted.area / "replaced" / "ckpt.a"
    path.with_name("another").write_bytes(b"another's")
    path.with_name("another").rename(path)
    planted.is_left("ckpt.a: not the file that was set aside")


def test_the_new_is_left_when_it_was_written_to_meanwhile(planted: Planted) -> None:
    with (planted.place / "ckpt.a").open("ab") as file:
        file.write(b", and more")
    os.utime(planted.place / "ckpt.a", ns=(1, 1))
    planted.is_left(f"ckpt.a: created or changed meanwhile; the old version is in {planted.area}/replaced")


def test_what_is_another_users_is_left(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    planted.is_left("it belongs to another user")


def test_what_others_could_write_in_is_left(planted: Planted) -> None:
    planted.area.chmod(0o777)
    planted.is_left("others may have written to it")


def test_what_another_host_made_is_left(planted: Planted) -> None:
    owner = json.loads((planted.area / "owner").read_text())
    for boot in ("", "another"):
        (planted.area / "owner").write_text(json.dumps({**owner, "host": "elsewhere", "boot": boot}))
        planted.is_left("it was made on the host 'elsewhere', where a command may still use it")


@pytest.mark.parametrize("same", ["host", "boot"])
def test_what_this_host_made_is_undone(same: str, planted: Planted) -> None:
    """Started again it has its name still, and a container on it has its kernel."""
    owner = json.loads((planted.area / "owner").read_text())
    told = {**owner, "host": "elsewhere", "boot": "another", same: owner[same]}
    (planted.area / "owner").write_text(json.dumps(told))
    assert clear(str(planted.place)) == []
    assert (planted.place / "ckpt.a").read_bytes() == b"old a"


def test_where_there_are_no_locks_nothing_is_cleared(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", never)
    planted.is_left("no locks available")


def test_who_holds_a_directory_is_not_waited_for_for_ever(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_output, "_PATIENCE", 0.05)
    descriptor = os.open(planted.place, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with StagedOutput(planted.place / "other") as target:
        assert target.warnings == (
            f"{planted.place} is locked: leftovers of killed commands are not cleared",
        )
        target.create().write(b"whole")
        target.settle()
        target.commit()
    os.close(descriptor)
    assert (planted.place / "other").read_bytes() == b"whole"
    assert planted.area.exists()


@pytest.mark.parametrize("owner", [None, b""])
def test_an_area_in_which_nothing_lies_goes(owner: bytes | None, place: Path) -> None:
    area = place / ".ckpttool-0123456789ab.new"
    area.mkdir(0o700)
    if owner is not None:
        (area / "owner").write_bytes(owner)
    assert clear(str(place)) == []
    assert state(place) == {}


# What is committed stays ------------------------------------------------------------------------------


def _stage(place: Path) -> StagedOutput:
    """Return a prefix over a prefix that can be committed."""
    for name in ("ckpt.index", "ckpt.data-00000-of-00001"):
        (place / name).write_bytes(b"old")
    target = StagedOutput(place / "ckpt", "prefix", replaces=["ckpt.index", "ckpt.data-00000-of-00001"])
    for name in (".index", ".data-00000-of-00001"):
        target.create(name).write(b"new")
    target.settle()
    return target


def test_a_name_that_can_not_go_undoes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new stands in its place, under a second name in the area, which can't be removed."""
    real = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if path not in ("journal.json", "done.json"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        real(path, **options)

    with _stage(place) as target:
        monkeypatch.setattr(os, "unlink", refused)
        target.commit()
    monkeypatch.undo()
    (warning,) = target.warnings
    assert warning.startswith(f"{place / litter(place)[0]} can't be removed: operation not permitted")
    assert clear(str(place)) == []
    assert {told[1] for told in state(place).values()} == {b"new"}
    assert len(state(place)) == 2


@pytest.mark.parametrize("count", range(5))
def test_a_removal_that_is_cut_off_undoes_nothing(
    count: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where what was committed is gone since, the old does not come back in part."""
    gone: list[str] = []
    real = os.unlink

    def cut_off(path: Any, **options: Any) -> None:
        if "journal.json" in gone and len(gone) - gone.index("journal.json") > count:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path, **options)
        gone.append(path)

    with _stage(place) as target:
        monkeypatch.setattr(os, "unlink", cut_off)
        target.commit()
    monkeypatch.undo()
    assert len(litter(place)) == (count < 5)
    (place / "ckpt.index").unlink()
    assert clear(str(place)) == []
    assert {name: told[1] for name, told in state(place).items()} == {"ckpt.data-00000-of-00001": b"new"}


def test_a_plan_that_can_not_go_undoes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _stage(place) as target:
        monkeypatch.setattr(staged_output, "remove_area", lambda directory, area: None)
        target.commit()
    monkeypatch.undo()
    assert len([*place.glob(".ckpttool-*.new/journal.json")]) == 1
    assert clear(str(place)) == []
    assert {name: told[1] for name, told in state(place).items()} == {
        "ckpt.index": b"new",
        "ckpt.data-00000-of-00001": b"new",
    }


def test_an_interrupt_while_room_is_made_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def interrupted(path: str, *mode: int, **options: Any) -> None:
        if path == "content":
            raise KeyboardInterrupt
        real(path, *mode, **options)

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        StagedOutput(place / "ckpt")
    assert state(place) == {}


@pytest.mark.parametrize("steps", [(), ("settle",), ("settle", "commit")])
def test_an_interrupt_ends_all_threads(steps: tuple[str, ...], place: Path, large: Tensor) -> None:
    with ends_all_threads(), StagedOutput(place / "ckpt") as target:
        sink = target.create()
        sink.put(large)
        sink.settle()
        for step in steps:
            getattr(target, step)()
        raise KeyboardInterrupt


def test_what_only_looks_like_an_area_stays(place: Path) -> None:
    (place / ".ckpttool-0123456789ab").mkdir()
    (place / ".ckpttool-0123456789ab.new").write_bytes(b"a file")
    os.symlink(place.parent, place / ".ckpttool-ba9876543210.new")
    before = state(place)
    clear(str(place))
    assert state(place) == before


# Refused ----------------------------------------------------------------------------------------------

_CALLS = (
    *("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync", "pwrite", "write", "fchmod"),
    *("chmod", "lstat", "fstat", "listdir", "scandir", "close", "copy_file_range"),
)


_NUMBERS = (errno.ENOSPC, errno.EACCES, errno.EIO)


def _is_written(descriptor: int) -> bool:
    """Tell whether closing it could tell that something was not written."""
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


class Faults:
    """Lets one call of the operating system fail, the ``fatal``-th of those that are watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, fatal: int | None) -> None:
        self.count, self.failed = 0, ""
        self._number, self._fatal = number, fatal
        self._lock = threading.Lock()
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.count += 1
                fails = self.count == self._fatal
            if fails and name == "close" and not _is_written(arguments[0]):
                fails = False
            if fails:
                self.failed = name
                if name == "close":  # it is closed all the same
                    real(*arguments, **options)
                raise OSError(self._number, os.strerror(self._number), str(arguments[0]))
            return real(*arguments, **options)

        return call


@pytest.mark.parametrize("name", sampled(_HARDEST[1:] + _HARDEST[:1], 2))
def test_whatever_call_fails_the_old_or_the_new_stands_there(
    name: str, tmp_path: Path, large: Tensor
) -> None:
    job = JOBS[name]
    old, new = job.outcomes(tmp_path, large)
    with pytest.MonkeyPatch.context() as patched:
        (tmp_path / "counted").mkdir()
        job.lay_out(tmp_path / "counted")
        counting = Faults(patched, 0, None)
        job.run(tmp_path / "counted", large)
    failed = set()
    for fatal in range(1, counting.count + 1):
        directory = tmp_path / f"fault-{fatal}"
        directory.mkdir()
        job.lay_out(directory)
        error: Exception | None = None
        with pytest.MonkeyPatch.context() as patched:
            faults = Faults(patched, _NUMBERS[fatal % len(_NUMBERS)], fatal)
            try:
                job.run(directory, large)
            except (OSError, CheckpointError) as failure:
                error = failure
        failed.add(faults.failed)
        clear(str(directory))
        found = state(directory)
        where = f"{faults.failed}, the call number {fatal} of {counting.count}: {error!r}"
        assert found in (old, new), where
        assert error is not None or found == new, where
        if found == new and error is not None:
            assert faults.failed in ("open", "fsync", "close"), where
    assert {"open", "mkdir", "fsync", "pwrite"} <= failed


def test_a_full_disk_leaves_nothing(place: Path, large: Tensor) -> None:
    (place / "ckpt").write_bytes(b"old")
    before = state(place)

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with (
            pytest.raises(OSError, match="too large"),
            StagedOutput(place / "ckpt", replaces=["ckpt"]) as target,
        ):
            target.create().put(large)
            target.settle()

    assert in_child(write) == 0
    assert state(place) == before


def test_a_disk_that_fills_up_in_the_middle_of_a_write(
    place: Path, large: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.pwrite, [150_000]

    def short(descriptor: int, data: Any, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(descriptor, data[: left[0]], offset)
        left[0] -= count
        return count

    def never(*arguments: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(os, "copy_file_range", never, raising=False)
    with (
        pytest.raises(OSError, match="No space left") as caught,
        StagedOutput(place / "ckpt") as target,
    ):
        target.create().put(large)
        target.settle()
    assert caught.value.errno == errno.ENOSPC
    assert state(place) == {}


def test_what_can_not_be_put_back_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "ckpt").write_bytes(b"old")
    real = os.rename

    def refused(source: str, target: str, **places: Any) -> None:
        if source == "ckpt" and Path(os.readlink(f"/proc/self/fd/{places['dst_dir_fd']}")).name == "replaced":
            real(source, target, **places)
        else:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with StagedOutput(place / "ckpt", "directory", replaces=["ckpt"]) as target:
        target.create("a").write(b"new")
        target.settle()
        monkeypatch.setattr(os, "rename", refused)
        monkeypatch.setattr(os, "link", refused)
        aside = target._area.join("replaced") if target._area else ""
        with pytest.raises(AccessDenied, match="not restored: input/output error") as caught:
            target.commit()
    monkeypatch.undo()
    assert not (place / "ckpt").exists()
    assert str(caught.value).endswith(f"; it is in {aside}: move or remove it by hand")
    assert Path(aside, "ckpt").read_bytes() == b"old"
    clear(str(place))
    assert (place / "ckpt").read_bytes() == b"old"
    assert litter(place) == []


def test_a_directory_that_may_not_be_written_to(place: Path) -> None:
    (place / "beside").write_bytes(b"untouched")
    place.chmod(0o555)

    def write() -> None:
        os.chdir(place)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(AccessDenied, match="permission denied"):
            StagedOutput("ckpt")

    assert in_child(write) == 0
    place.chmod(0o755)
    assert state(place).keys() == {"beside"}


def test_there_must_be_a_directory(place: Path) -> None:
    with pytest.raises(NotFound, match="no such file or directory"):
        StagedOutput(place / "nowhere" / "ckpt")
    (place / "file").write_bytes(b"")
    with pytest.raises(AccessDenied, match="not a directory"):
        StagedOutput(place / "file" / "ckpt")


@every_job
def test_all_is_durable_before_it_is_moved_and_the_move_is_too(
    job: Job, place: Path, large: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and directories are synchronised before they are moved, and what they were moved to behind."""
    job.lay_out(place)
    steps, new = disk_steps(monkeypatch), set()
    with StagedOutput(place / "ckpt", job.shape, replaces=job.replaces) as target:
        for name in job.new:
            target.create(name).put(large)
        target.settle()
        for root, _, names in os.walk(target._content.path):
            new |= {os.lstat(os.path.join(root, name)).st_ino for name in names}
            new |= {os.lstat(root).st_ino}
        target.commit()
    synced = {node for name, node in steps if name == "fsync"}
    assert new <= synced
    moves = [
        number for number, (name, node) in enumerate(steps) if name not in ("fsync", "unlink") and node in new
    ]
    assert all(steps.index(("fsync", node)) < moves[0] for node in new)
    assert place.stat().st_ino in {node for name, node in steps[moves[-1] :] if name == "fsync"}


# Others at the same time ------------------------------------------------------------------------------


def test_two_runs_in_one_directory(place: Path) -> None:
    with StagedOutput(place / "one") as one, StagedOutput(place / "two", "directory") as two:
        one.create().write(b"1")
        two.create("a").write(b"2")
        clear(str(place))
        for target in (one, two):
            target.settle()
            target.commit()
    assert {name: told[1] for name, told in state(place).items()} == {"one": b"1", "two": b"", "two/a": b"2"}


@pytest.mark.parametrize("shape", ["file", "directory", "prefix"])
def test_the_second_to_commit_is_refused(place: Path, shape: Any) -> None:
    with StagedOutput(place / "ckpt", shape) as one, StagedOutput(place / "ckpt", shape) as two:
        for number, target in enumerate((one, two)):
            target.create("" if shape == "file" else ".a").write(str(number).encode())
            target.settle()
        one.commit()
        before = state(place / "..")
        with pytest.raises(UsageError, match="was created meanwhile"):
            two.commit()
    assert {told[1] for told in state(place).values()} <= {b"0", b""}
    assert litter(place) == []
    assert before


def test_of_many_at_once_one_wins(place: Path) -> None:
    def write(number: int) -> None:
        with StagedOutput(place / "ckpt") as target:
            target.create().write(str(number).encode() * 1000)
            target.settle()
            target.commit()

    refused = []

    def attempt(number: int) -> None:
        try:
            write(number)
        except (UsageError, FileExistsError):
            refused.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = set(range(8)) - set(refused)
    assert (place / "ckpt").read_bytes() == str(winner).encode() * 1000
    assert litter(place) == []


def test_what_comes_between_the_check_and_the_move_is_not_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = staged_output.move_without_replacing

    def move_too_late(*moved: Any) -> None:
        (place / "ckpt").write_bytes(b"other")
        move(*moved)

    with StagedOutput(place / "ckpt") as target:
        target.create().write(b"new")
        target.settle()
        monkeypatch.setattr(staged_output, "move_without_replacing", move_too_late)
        with pytest.raises(FileExistsError):
            target.commit()
    assert {name: told[1] for name, told in state(place).items()} == {"ckpt": b"other"}


# Links and modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["file", "directory"])
@pytest.mark.parametrize("behind", ["a file", "a directory", "nothing"])
def test_a_link_is_replaced_and_what_it_leads_to_stays(place: Path, behind: str, shape: Any) -> None:
    other = place.parent / "other"
    if behind == "a file":
        other.write_bytes(b"untouched")
    elif behind == "a directory":
        other.mkdir()
        (other / "a").write_bytes(b"untouched")
    (place / "ckpt").symlink_to(other)
    with StagedOutput(place / "ckpt", shape, replaces=["ckpt"]) as target:
        target.create("a" if shape == "directory" else "").write(b"new")
        target.settle()
        target.commit()
    assert not (place / "ckpt").is_symlink()
    assert (place / "ckpt" / "a" if shape == "directory" else place / "ckpt").read_bytes() == b"new"
    assert litter(place) == []
    if behind != "nothing":
        assert (other / "a" if behind == "a directory" else other).read_bytes() == b"untouched"


def test_a_new_target_has_the_modes_of_new_files(place: Path) -> None:
    (place / "file").write_bytes(b"")
    (place / "directory").mkdir()
    with StagedOutput(place / "one") as one, StagedOutput(place / "two", "directory") as two:
        one.create().write(b"1")
        two.create("a").write(b"2")
        for target in (one, two):
            target.settle()
            target.commit()
    modes = {name: told[2] for name, told in state(place).items()}
    assert modes["one"] == modes["two/a"] == modes["file"]
    assert modes["two"] == modes["directory"]


@every_job
def test_what_is_replaced_hands_its_mode_on(job: Job, place: Path, large: Tensor) -> None:
    job.lay_out(place)
    for path in place.iterdir():
        path.chmod(0o750 if path.is_dir() else 0o640)
    before = state(place)
    job.run(place, large)
    after = state(place)
    for name in before.keys() & after.keys():
        if before[name][0] == after[name][0] and "/" not in name:
            assert oct(after[name][2]) == oct(before[name][2]), name


def test_a_relative_target(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with StagedOutput("ckpt/", "directory") as target:
        target.create("a").write(b"1")
        target.settle()
        target.commit()
    assert (place / "ckpt" / "a").read_bytes() == b"1"


def test_names_that_are_no_text(place: Path) -> None:
    name = b"ckpt-\xff\n\xe9"
    target = os.fsdecode(os.fsencode(place) + b"/" + name)
    for _ in range(2):
        replaces = [os.fsdecode(name)] if os.path.exists(target) else None
        with StagedOutput(target, "directory", replaces=replaces) as staged_target:
            staged_target.create("a").write(b"1")
            staged_target.settle()
            staged_target.commit()
    assert os.listdir(os.fsencode(place)) == [name]


def test_what_is_discarded_twice(place: Path) -> None:
    target = StagedOutput(place / "ckpt")
    target.create().put(byte_tensor("small", b"abc"))
    target.discard()
    target.discard()
    assert state(place) == {}

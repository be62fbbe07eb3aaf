"""Targets that appear whole or not at all: killed at any line, refused by any call, raced by others."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ckpttool.checkpoint import Tensor
from ckpttool.dtypes import BY_NAME
from ckpttool.errors import AccessDenied, CheckpointError, NotFound, UsageError
from ckpttool.wire import atomic, sink, staged
from ckpttool.wire.readable import Contiguous, InMemory
from ckpttool.wire.source import Source
from ckpttool.wire.staged import Staged, clear

State = dict[str, tuple[str, bytes | str, int]]
Content = dict[str, bytes]

LARGE = random.Random(1).randbytes(200_000)
"""Of a tensor that other threads copy."""
KILLS = 16
"""How often each job is killed."""
_SEEN = {os.path.realpath(module.__file__ or "") for module in (atomic, sink, staged)}


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


def _at_once(descriptor: int) -> None:
    """Stand in for a synchronisation that takes time: what lies in the system's cache survives a kill."""


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
        with Staged(directory / "ckpt", self.shape, replaces=self.replaces, jobs=2) as target:
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
    with Staged(place / "ckpt", job.shape, replaces=job.replaces) as target:
        target.create(next(iter(job.new))).put(large)
    assert state(place) == before


# Killed -----------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> int:
    """Do something in a child process, which ends without a word; return its status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is told
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Lines:
    """Counts the lines of the code under test that are run, on all threads, and may kill at one of them."""

    def __init__(self, fatal: int | None = None) -> None:
        self.count, self._fatal = 0, fatal
        self._lock = threading.Lock()

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if os.path.realpath(frame.f_code.co_filename) not in _SEEN and not frame.f_code.co_filename.endswith(
            ("shutil.py", "json/__init__.py")
        ):
            return None
        if event == "line":
            with self._lock:
                self.count += 1
                if self.count == self._fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self.trace

    def watch(self, work: Callable[[], object]) -> None:
        os.fsync = _at_once  # in a child process, which ends with this
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            work()
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


def lines_of(job: Job, directory: Path, large: Tensor) -> int:
    """Return how many lines a job runs, which differs by a few from one time to the next."""
    directory.mkdir()
    job.lay_out(directory)
    told, telling = os.pipe()

    def count() -> None:
        lines = Lines()
        lines.watch(lambda: job.run(directory, large))
        os.write(telling, str(lines.count).encode())

    assert in_child(count) == 0
    found = int(os.read(told, 20))
    os.close(told)
    os.close(telling)
    return found


@every_job
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(job: Job, tmp_path: Path, large: Tensor) -> None:
    old, new = job.outcomes(tmp_path, large)
    total = lines_of(job, tmp_path / "counted", large)
    chosen = random.Random(7)
    # Where names are moved one after the other, the moves are what takes luck to hit: they come last.
    moments = [chosen.randrange(1, total) for _ in range(KILLS // 2)]
    moments += [chosen.randrange(max(1, total - 250), total) for _ in range(KILLS // 2)]
    ends = set()
    for number, moment in enumerate(moments):
        directory = tmp_path / f"kill-{number}"
        directory.mkdir()
        job.lay_out(directory)
        status = in_child(lambda: Lines(moment).watch(lambda: job.run(directory, large)))  # noqa: B023
        assert status in (0, -signal.SIGKILL)
        if job.replaces is None or job.shape == "file":
            at_once = {name for name in state(directory) if not name.startswith(".ckpttool-")}
            assert at_once in (old.keys(), new.keys()) or job.shape == "prefix" or "ckpt/a" in job.old
        if job.shape == "prefix" and (directory / "ckpt.index").exists():
            visible = {name: told for name, told in state(directory).items() if name[0] != "."}
            assert visible in (old, new)
        clear(str(directory))
        assert state(directory) in (old, new), f"killed at line {moment} of {total}"
        ends.add(state(directory) == new)
    assert False in ends


def test_a_kill_while_a_kill_is_made_good_changes_nothing(tmp_path: Path, large: Tensor) -> None:
    job = JOBS["a prefix over a prefix"]
    old, new = job.outcomes(tmp_path, large)
    total = lines_of(job, tmp_path / "counted", large)
    chosen = random.Random(3)
    for number in range(KILLS // 2):
        directory = tmp_path / f"kill-{number}"
        directory.mkdir()
        job.lay_out(directory)
        moment = chosen.randrange(max(1, total - 200), total)
        in_child(lambda: Lines(moment).watch(lambda: job.run(directory, large)))  # noqa: B023
        for _ in range(3):
            again = chosen.randrange(1, 60)
            in_child(lambda: Lines(again).watch(lambda: clear(str(directory))))  # noqa: B023
        clear(str(directory))
        assert state(directory) in (old, new)


def test_the_next_run_clears_what_a_kill_left(place: Path) -> None:
    def begin() -> None:
        target = Staged(place / "ckpt")
        target.create().write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(begin) == -signal.SIGKILL
    assert len(litter(place)) == 1
    with Staged(place / "other") as target:
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
        target = Staged(place / "ckpt", "directory", replaces=["ckpt"])
        target.create("a").write(b"new")
        target.settle()
        target._bring = lambda path, to: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
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


@pytest.mark.parametrize("plan", [b"", b"{", b"null", b'{"": [1, 2]}', b'{"../outside": "same"}'])
def test_a_strange_plan_removes_nothing(plan: bytes, place: Path) -> None:
    outside = place.parent / "outside"
    outside.write_bytes(b"untouched")
    status = outside.lstat()
    plan = plan.replace(b'"same"', json.dumps([status.st_dev, status.st_ino]).encode())
    area = place / ".ckpttool-0123456789ab.new"
    (area / "content").mkdir(parents=True)
    (area / "content" / "ckpt").write_bytes(b"new")
    (area / "replaced").mkdir()
    (area / "moving").write_bytes(plan)
    (place / "beside").write_bytes(b"untouched")
    clear(str(place))
    assert (place / "beside").read_bytes() == outside.read_bytes() == b"untouched"


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
            real = getattr(os, name) if name != "fsync" else _at_once
            monkeypatch.setattr(os, name, self._failing(name, real))

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


@every_job
def test_whatever_call_fails_the_old_or_the_new_stands_there(job: Job, tmp_path: Path, large: Tensor) -> None:
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
            Staged(place / "ckpt", replaces=["ckpt"]) as target,
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
        Staged(place / "ckpt") as target,
    ):
        target.create().put(large)
        target.settle()
    assert caught.value.errno == errno.ENOSPC
    assert state(place) == {}


def test_what_can_not_be_put_back_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "ckpt").write_bytes(b"old")
    real = os.rename

    def refused(source: str, target: str) -> None:
        if os.path.basename(os.path.dirname(target)) == "replaced":
            real(source, target)
        else:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Staged(place / "ckpt", "directory", replaces=["ckpt"]) as target:
        target.create("a").write(b"new")
        target.settle()
        monkeypatch.setattr(os, "rename", refused)
        with pytest.raises(OSError, match="Input/output error"):
            target.commit()
    monkeypatch.undo()
    assert not (place / "ckpt").exists()
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
            Staged("ckpt")

    assert in_child(write) == 0
    place.chmod(0o755)
    assert state(place).keys() == {"beside"}


def test_there_must_be_a_directory(place: Path) -> None:
    with pytest.raises(NotFound, match="no such file or directory"):
        Staged(place / "nowhere" / "ckpt")
    (place / "file").write_bytes(b"")
    with pytest.raises(AccessDenied, match="not a directory"):
        Staged(place / "file" / "ckpt")


@every_job
def test_all_is_durable_before_it_is_moved_and_the_move_is_too(
    job: Job, place: Path, large: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and directories are synchronised before they are moved, and what they were moved to behind."""
    job.lay_out(place)
    steps: list[tuple[str, int]] = []
    new: set[int] = set()

    def watched(name: str, node: Callable[..., int]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            steps.append((name, node(*arguments)))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    watched("fsync", lambda descriptor: os.fstat(descriptor).st_ino)
    for name in ("rename", "replace", "link"):
        watched(name, lambda source, target: os.lstat(source).st_ino)
    with Staged(place / "ckpt", job.shape, replaces=job.replaces) as target:
        for name in job.new:
            target.create(name).put(large)
        target.settle()
        for root, _, names in os.walk(target._content):
            new |= {os.lstat(os.path.join(root, name)).st_ino for name in names}
            new |= {os.lstat(root).st_ino}
        target.commit()
    synced = {node for name, node in steps if name == "fsync"}
    assert new <= synced
    moves = [number for number, (name, node) in enumerate(steps) if name != "fsync" and node in new]
    assert all(steps.index(("fsync", node)) < moves[0] for node in new)
    assert place.stat().st_ino in {node for name, node in steps[moves[-1] :] if name == "fsync"}


# Others at the same time ------------------------------------------------------------------------------


def test_two_runs_in_one_directory(place: Path) -> None:
    with Staged(place / "one") as one, Staged(place / "two", "directory") as two:
        one.create().write(b"1")
        two.create("a").write(b"2")
        clear(str(place))
        for target in (one, two):
            target.settle()
            target.commit()
    assert {name: told[1] for name, told in state(place).items()} == {"one": b"1", "two": b"", "two/a": b"2"}


@pytest.mark.parametrize("shape", ["file", "directory", "prefix"])
def test_the_second_to_commit_is_refused(place: Path, shape: Any) -> None:
    with Staged(place / "ckpt", shape) as one, Staged(place / "ckpt", shape) as two:
        for number, target in enumerate((one, two)):
            target.create("" if shape == "file" else ".a").write(str(number).encode())
            target.settle()
        one.commit()
        before = state(place / "..")
        with pytest.raises(UsageError, match="has come to exist meanwhile"):
            two.commit()
    assert {told[1] for told in state(place).values()} <= {b"0", b""}
    assert litter(place) == []
    assert before


def test_of_many_at_once_one_wins(place: Path) -> None:
    def write(number: int) -> None:
        with Staged(place / "ckpt") as target:
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


def test_what_comes_between_the_check_and_the_move_is_not_replaced(place: Path) -> None:
    with Staged(place / "ckpt") as target:
        target.create().write(b"new")
        target.settle()
        target._require_absent = lambda names: (place / "ckpt").write_bytes(b"other")  # type: ignore[method-assign, assignment, return-value]
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
    with Staged(place / "ckpt", shape, replaces=["ckpt"]) as target:
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
    with Staged(place / "one") as one, Staged(place / "two", "directory") as two:
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
    with Staged("ckpt/", "directory") as target:
        target.create("a").write(b"1")
        target.settle()
        target.commit()
    assert (place / "ckpt" / "a").read_bytes() == b"1"


def test_names_that_are_no_text(place: Path) -> None:
    name = b"ckpt-\xff\n\xe9"
    target = os.fsdecode(os.fsencode(place) + b"/" + name)
    for _ in range(2):
        replaces = [os.fsdecode(name)] if os.path.exists(target) else None
        with Staged(target, "directory", replaces=replaces) as staged_target:
            staged_target.create("a").write(b"1")
            staged_target.settle()
            staged_target.commit()
    assert os.listdir(os.fsencode(place)) == [name]


def test_what_is_discarded_twice(place: Path) -> None:
    target = Staged(place / "ckpt")
    target.create().put(Tensor(("small",), BY_NAME["uint8"], (3,), values=InMemory(b"abc")))
    target.discard()
    target.discard()
    assert state(place) == {}

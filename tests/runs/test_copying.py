"""Copies that are interrupted, disturbed or forced: what is there is incomplete, or what it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.formats.discovery import discover
from ckpttool.formats.opening import COPYING
from ckpttool.ops.verify import verify
from ckpttool.runs import copying
from ckpttool.runs.copying import CopyRequest, CopyStatus, plan_copy
from ckpttool.storage import fs, remote
from ckpttool.storage.fs import open_source
from ckpttool.storage.source import Source
from tests.support.memory import MemoryBucket
from tests.support.runs import KINDS, sharded
from tests.support.thorough import sampled


def bytes_of(path: str) -> bytes:
    with open_source(path) as source:
        return source.read(0, source.size)


def whole_checkpoints(directory: str) -> dict[str, dict[str, bytes]]:
    """Return what seems to be valid in a directory: by its name, its files."""
    remote.forget()
    if not fs.isdir(directory):
        return {}
    return {
        os.path.relpath(unit.path, directory): {
            os.path.relpath(path, directory): bytes_of(path) for path in unit.files() if fs.isfile(path)
        }
        for unit in discover(directory)
        if unit.format is not None and verify(unit).is_valid
    }


class Interruption:
    """Interrupts a copy before its k-th file is copied."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        real = copying.copy_file

        def copy_file(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return real(*arguments)

        patch.setattr(copying, "copy_file", copy_file)

    def hits(self, number: int, work: Callable[[], object]) -> bool:
        self.left = number
        try:
            work()
        except KeyboardInterrupt:
            return True
        return False


@pytest.fixture
def interruption(monkeypatch: pytest.MonkeyPatch) -> Interruption:
    return Interruption(monkeypatch)


@pytest.fixture(params=["disk", "store"])
def new_destination(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    if request.param == "disk":
        return lambda number: str(tmp_path / f"copies-{number}")
    bucket: MemoryBucket = request.getfixturevalue("bucket")
    return lambda number: bucket.url(f"copies-{number}")


MOST_INTERRUPTIONS = 4


@pytest.mark.parametrize(
    ("kind", "new_destination"),
    sampled(product(KINDS, ("disk", "store")), 5),
    indirect=["new_destination"],
)
def test_interrupted_copy_is_no_other_checkpoint(
    kind: str, new_destination: Callable[[int], str], interruption: Interruption, tmp_path: Path
) -> None:
    made = tmp_path / "made" / "run"
    made.mkdir(parents=True)
    make, _ = KINDS[kind]
    make(made, range(1, 3))
    source = str(made)
    whole = whole_checkpoints(source)
    assert len(whole) >= 2
    count = sum(len(planned.files) for planned in plan_copy(request(source, "elsewhere")).copies)
    for number in range(1, count + 1, max(1, count // MOST_INTERRUPTIONS)):
        target = new_destination(number)
        assert interruption.hits(number, lambda target=target: ckpttool.copy(source, target))
        for name, files in whole_checkpoints(target).items():
            assert files == whole.get(name), f"{name} at file {number}"
    done = ckpttool.copy(source, target)
    assert {one.status for one in done.checkpoints} <= DONE, [one.why for one in done.checkpoints]
    assert whole_checkpoints(target) == whole
    assert not interruption.hits(count + 1, lambda: ckpttool.copy(source, target))


def test_replaced_set_is_none_until_all_of_it_is_there(
    tmp_path: Path, new_destination: Callable[[int], str], interruption: Interruption
) -> None:
    """A set whose files were copied half over those of another one: its index would fit both."""
    source = tmp_path / "run"
    source.mkdir()
    sharded(source, range(1, 3))
    destination = new_destination(0)
    assert ckpttool.copy(source, destination).is_complete
    before = whole_checkpoints(destination)
    shards = sorted(source.glob("set-1-*.safetensors"))
    for shard in shards:  # other values in the same places
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    after = whole_checkpoints(str(source))
    _, same = sorted(before)
    assert ckpttool.copy(source, destination).checkpoints[0].status is CopyStatus.DIFFERS
    assert whole_checkpoints(destination) == before
    assert interruption.hits(2, lambda: ckpttool.copy(source, destination, force=True))
    assert whole_checkpoints(destination) == {same: before[same]}
    assert ckpttool.copy(source, destination, force=True).is_complete
    assert whole_checkpoints(destination) == after != before


def no_file(note: Path) -> None:
    note.mkdir()


def no_json(note: Path) -> None:
    note.write_text('{"set-1.safetensors.index.json": [')


def no_lists(note: Path) -> None:
    note.write_text('{"set-1": "shards"}')


def too_long(note: Path) -> None:
    note.write_text(" " * (1 << 24) + "{}")


@pytest.mark.parametrize("make", [no_file, no_json, no_lists, too_long])
def test_all_is_incomplete_beside_a_note_that_can_not_be_read(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    sharded(tmp_path, range(1, 3))
    assert len(ckpttool.list_checkpoints(tmp_path).checkpoints) == 2
    make(tmp_path / COPYING)
    listing = ckpttool.list_checkpoints(tmp_path)
    told = ["its copy was interrupted or is still running (resume with ckpttool copy)"]
    assert ([*listing.checkpoints], [problem.message for problem in listing.problems]) == ([], told)


def test_source_that_changes_is_not_copied(
    tmp_path: Path, new_destination: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "run"
    source.mkdir()
    sharded(source, range(1, 3))
    shard = min(source.glob("set-1-*.safetensors"))
    real = copying.copy_file

    def copy_file(path: str, *more: Any) -> Any:
        done = real(path, *more)
        if path == str(shard):
            shard.write_bytes(shard.read_bytes())  # a trainer saves once more, after it was read
        return done

    monkeypatch.setattr(copying, "copy_file", copy_file)
    done = ckpttool.copy(source, new_destination(0))
    assert done.checkpoints[0].status is CopyStatus.FAILED
    assert "it changed while it was copied" in (done.checkpoints[0].why or "")
    (second,) = whole_checkpoints(new_destination(0))
    assert second.startswith("set-2")


def test_file_that_changes_while_it_is_read_does_not_arrive(
    files: Path, tmp_path: Path, new_destination: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pth"
    shutil.copy(files / "pytorch" / "guide.pth", path)
    real = Source.in_blocks

    def in_blocks(source: Source, nbytes: int) -> Iterator[bytes]:
        yield from real(source, nbytes)
        if source.path == str(path):
            os.utime(path, (1, 1))

    monkeypatch.setattr(Source, "in_blocks", in_blocks)
    done = ckpttool.copy(path, new_destination(0))
    assert done.checkpoints[0].why == "it changed while it was copied (run the command again)"
    assert whole_checkpoints(new_destination(0)) == {}


def test_what_else_is_there_is_left(
    files: Path, tmp_path: Path, new_destination: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(files / "torch-dcp" / "two-ranks", source)
    destination = new_destination(0)
    assert ckpttool.copy(source, destination).is_complete
    (source / ".metadata").unlink()
    (source / "more.txt").write_text("mine")
    assert ckpttool.copy(source, destination).checkpoints[0].status is CopyStatus.DIFFERS


DONE = {CopyStatus.COPIED, CopyStatus.PRESENT}


def request(source: str, destination: str) -> CopyRequest:
    return CopyRequest(sources=(source,), destination=destination)


def test_damage_in_a_store_is_seen_before_the_copy_counts(
    files: Path, tmp_path: Path, bucket: MemoryBucket
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    sharded(run, range(1, 3))
    (run / "best").unlink()
    shutil.copytree(files / "torch-dcp" / "two-ranks", run / "step-1")
    for number in (1, 2):
        shutil.copy(files / "series" / f"model_epoch_{number}.pth", run)
    for path in (min(run.glob("set-1-*.safetensors")), run / "model_epoch_1.pth", *run.glob("step-1/__0*")):
        data = bytearray(path.read_bytes())
        at = data.index(b"/data/0") + 80 if path.suffix == ".pth" else len(data) // 2
        data[at : at + 8] = b"\xff" * 8  # NaN, or another CRC
        path.write_bytes(data)
    bucket.upload(run, "run")
    here, there = verify_each(str(run)), ckpttool.copy(bucket.url("run"), tmp_path / "copies")
    assert {os.path.basename(one.path): one.status is CopyStatus.COPIED for one in there.checkpoints} == here
    assert not all(here.values()) and any(here.values())
    whole = {name for name, is_valid in here.items() if is_valid}
    assert {os.path.basename(name) for name in whole_checkpoints(str(tmp_path / "copies"))} == whole
    assert not list((tmp_path / "copies").rglob(".ckpttool*"))


def verify_each(directory: str) -> dict[str, bool]:
    return {os.path.basename(unit.path): verify(unit).is_valid for unit in discover(directory)}


def test_what_a_kill_left_is_cleared(files: Path, tmp_path: Path) -> None:
    source, copies = files / "torch-dcp" / "two-ranks", tmp_path / "copies"
    assert ckpttool.copy(source, copies).is_complete
    stage = copies / "two-ranks" / f".ckpttool-{'a' * 12}.new"
    stage.mkdir(mode=0o700)
    (stage / "owner").touch()
    done = ckpttool.copy(source, copies)
    assert done.checkpoints[0].status is CopyStatus.PRESENT and not done.warnings
    assert not stage.exists()

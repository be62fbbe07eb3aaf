"""``prune --require-copy``: only what another place is proven to have is removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttool import prune
from ckpttool.ops import copy_check
from ckpttool.storage.checksums import Checksum, StoredChecksums
from tests.support.commands import Run
from tests.support.memory import MemoryBucket

NAMES = [f"model_epoch_{number}.pth" for number in range(1, 5)]


@pytest.fixture
def runs(files: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    directory.mkdir()
    for name in NAMES:
        shutil.copy2(files / "series" / name, directory / name)
    return directory


@pytest.fixture(params=["disk", "store"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "copies")
    bucket: MemoryBucket = request.getfixturevalue("bucket")
    return bucket.url("copies")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.pth"))


def test_only_what_was_copied_is_removed(run: Run, runs: Path, location: str) -> None:
    assert run("copy", runs / NAMES[0], runs / NAMES[2], location).status == 0
    answer = run("prune", runs, "--keep", "1", "--yes", "--require-copy", location)
    assert answer.status == 0
    assert f"keep    {NAMES[1]}  no proven copy in {location}\n" in answer.out
    assert names(runs) == [NAMES[1], NAMES[3]]
    run("copy", runs, location)
    assert run("prune", runs, "--keep", "1", "--yes", "--require-copy", location).status == 0
    assert names(runs) == [NAMES[3]]


def test_another_file_of_that_name_is_no_copy(run: Run, runs: Path, location: str) -> None:
    assert run("copy", runs, location).status == 0
    data = bytearray((runs / NAMES[0]).read_bytes())
    data[-1] ^= 1  # in the comment of a zip, which changes no tensor
    (runs / NAMES[0]).write_bytes(data)
    shutil.copy2(runs / NAMES[2], runs / NAMES[1])
    run("prune", runs, "--keep", "1", "--series", "*", "--yes", "--require-copy", location)
    assert {NAMES[0], NAMES[1], NAMES[3]} <= set(names(runs))


def test_a_link_is_no_copy(run: Run, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(runs)
    answer = run("prune", runs, "--keep", "1", "--yes", "--require-copy", tmp_path / "linked")
    assert answer.status == 2 and "not another place" in answer.err
    (tmp_path / "hard").mkdir()
    for name in NAMES:
        (tmp_path / "hard" / name).hardlink_to(runs / name)
    run("prune", runs, "--keep", "1", "--yes", "--require-copy", tmp_path / "hard")
    assert names(runs) == NAMES


def test_manifest_has_to_be_there_too(run: Run, runs: Path, location: str) -> None:
    assert run("copy", runs, location).status == 0
    assert run("verify", "--write-manifest", runs / NAMES[0]).status == 0
    run("prune", runs, "--keep", "1", "--yes", "--require-copy", location)
    assert names(runs) == [NAMES[0], NAMES[3]]


def test_place_that_cannot_be_asked_stops_it(run: Run, runs: Path, bucket: MemoryBucket) -> None:
    answer = run("prune", runs, "--keep", "1", "--yes", "--require-copy", "mem://no-such-bucket/x")
    assert answer.status == 2 and "NoSuchBucket" in answer.err
    assert names(runs) == NAMES


def test_a_copy_that_is_gone_or_changed_after_the_plan_is_none(
    run: Run, runs: Path, location: str, request: pytest.FixtureRequest
) -> None:
    assert run("copy", runs, location).status == 0

    def confirm(planned: object) -> bool:
        if "://" in location:
            bucket: MemoryBucket = request.getfixturevalue("bucket")
            bucket.remove(f"copies/{NAMES[0]}")
            bucket.put(f"copies/{NAMES[1]}", b"something else")
        else:
            (Path(location) / NAMES[0]).unlink()
            (Path(location) / NAMES[1]).write_bytes(b"something else")
        return True

    done = prune(runs, keep_last=1, require_copy=location, confirm=confirm)
    assert names(runs) == [NAMES[0], NAMES[1], NAMES[3]]
    why = f"not removed: its copy in {location} has changed since the plan was made"
    assert [problem.message for problem in done.problems] == [why, why]


def test_a_copy_that_changed_since_an_earlier_command_is_none(
    run: Run, runs: Path, bucket: MemoryBucket
) -> None:
    """What a store said is remembered for a while, and not from one command to the next."""
    location = bucket.url("copies")
    for _ in range(2):
        assert run("copy", runs, location).status == 0
    bucket.remove(f"copies/{NAMES[0]}")
    flipped = bytearray(bucket.get(f"copies/{NAMES[1]}"))
    flipped[100] ^= 1
    bucket.put(f"copies/{NAMES[1]}", bytes(flipped))
    prune(runs, keep_last=1, require_copy=location)
    assert names(runs) == [NAMES[0], NAMES[1], NAMES[3]]


def test_checksums_of_two_stores_must_all_agree(
    monkeypatch: pytest.MonkeyPatch, bucket: MemoryBucket
) -> None:
    bucket.new_tags = True
    urls = [bucket.url(name) for name in ("a", "b")]
    for number, name in enumerate(("a", "b")):
        bucket.put(name, bytes([number]) * 100)
    kept = {url: StoredChecksums((Checksum("crc32c", "0"), Checksum("md5", url[-1]))) for url in urls}
    monkeypatch.setattr(copy_check, "stored_checksums", lambda paths: {path: kept[path] for path in paths})
    assert not copy_check.is_same(*urls)

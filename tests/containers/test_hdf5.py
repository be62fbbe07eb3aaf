"""The child process that reads HDF5, and the pieces in which values come from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpttool import DamagedCheckpoint, open_checkpoint, verify
from ckpttool.containers import hdf5_worker
from ckpttool.containers.hdf5 import Location, slabs, walk
from ckpttool.containers.hdf5_worker import WORKER
from tests.support.memory import MemoryBucket


def test_a_crash_is_a_finding(files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kill the child in place of libhdf5; the next file is read by another child."""
    dying = tmp_path / "dying.py"
    dying.write_text("import os, sys\nsys.stdin.readline()\nos.abort()\n")
    path = files / "hdf5" / "types.h5"
    WORKER.stop()
    monkeypatch.setattr(hdf5_worker, "_CHILD", dying)
    verification = verify(path)
    assert [finding.code for finding in verification.findings] == ["hdf5-crashed"]
    assert not verification.is_valid
    monkeypatch.undo()
    WORKER.stop()
    assert verify(path).is_valid


def test_a_hang_is_a_finding(files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging.py"
    hanging.write_text("import time\ntime.sleep(60)\n")
    WORKER.stop()
    monkeypatch.setattr(hdf5_worker, "_CHILD", hanging)
    monkeypatch.setattr(hdf5_worker, "SILENCE", 0.2)
    path = Path(shutil.copyfile(files / "hdf5" / "types.h5", tmp_path / "types.h5"))
    generation = WORKER.generation
    with pytest.raises(DamagedCheckpoint, match="silent"):
        open_checkpoint(path)
    assert [finding.code for finding in verify(path).findings] == ["hdf5-crashed"]
    assert WORKER.generation == generation + 2  # the one that hung, and the one that replaced it
    monkeypatch.undo()
    WORKER.stop()
    path.write_bytes((files / "hdf5" / "checksummed.h5").read_bytes())  # other bytes have another chance
    assert verify(path).is_valid


def test_another_file_that_comes_to_its_place_is_not_read(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = Path(shutil.copyfile(files / "hdf5" / "types.h5", tmp_path / "types.h5"))
    other = Path(shutil.copyfile(files / "hdf5" / "checksummed.h5", tmp_path / "other.h5"))
    ask = WORKER.ask

    def exchanging(*arguments: Any, **options: Any) -> Any:
        if other.exists():
            other.replace(path)
        return ask(*arguments, **options)

    monkeypatch.setattr(WORKER, "ask", exchanging)
    with pytest.raises(DamagedCheckpoint, match="the file was replaced"):
        open_checkpoint(path)


def test_values_can_be_read_after_another_child_came(files: Path) -> None:
    with open_checkpoint(files / "hdf5" / "checksummed.h5") as checkpoint:
        before = checkpoint["integers"].tobytes()
        WORKER.stop()
        assert checkpoint["integers"].tobytes() == before


def test_slabs_cover_everything_once_in_order() -> None:
    for shape in ((), (5,), (7, 3), (4, 5, 6), (2, 3, 4, 5)):
        for budget in (1, 4, 10, 50, 10_000):
            cells: list[int] = []
            for start, count in slabs(shape, 1, tuple(2 for _ in shape) or None, budget):
                cells += cells_of(shape, start, count)
            total = 1
            for length in shape:
                total *= length
            assert cells == list(range(total)), (shape, budget)


def cells_of(shape: tuple[int, ...], start: tuple[int, ...], count: tuple[int, ...]) -> list[int]:
    cells = [0]
    for length, first, steps in zip(shape, start, count, strict=True):
        cells = [cell * length + at for cell in cells for at in range(first, first + steps)]
    return cells


@pytest.mark.parametrize("nbytes", [9, 22, 30, 48, 2000])
def test_a_cut_file_is_refused_alike_in_a_store(
    bucket: MemoryBucket, files: Path, tmp_path: Path, nbytes: int
) -> None:
    """Behind its end are zeros, and not what the memory held before."""
    cut = tmp_path / "cut.h5"
    cut.write_bytes((files / "keras" / "keras2_weights.h5").read_bytes()[:nbytes])
    bucket.upload(cut, cut.name)
    there, here = verify(bucket.url(cut.name)), verify(cut)
    assert [(one.code, one.message) for one in there.findings] == [
        (one.code, one.message) for one in here.findings
    ]


def test_a_window_of_a_file_is_a_file(files: Path, tmp_path: Path) -> None:
    data = (files / "hdf5" / "types.h5").read_bytes()
    path = tmp_path / "wrapped"
    path.write_bytes(b"x" * 77 + data + b"y" * 33)
    tree = walk(location := Location(str(path), 77, len(data)))
    assert ("big", "f4") in tree.datasets
    location.close()

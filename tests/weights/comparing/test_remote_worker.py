"""Values measured by child processes: the same answers, whatever becomes of the children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool import open_checkpoint
from ckpttool.storage import children as children_module
from ckpttool.weights.comparing import compare, remote_worker, workers
from ckpttool.weights.comparing.compare import (
    EXACT,
    Comparison,
    Outcome,
    Side,
    Tolerance,
    Unreadable,
    compare_all,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="files are replaced otherwise there")


class Child(subprocess.Popen[bytes]):
    """A child that tests can find."""

    made: ClassVar[list[Child]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Child.made.append(self)


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """Let small tensors be worth a child, and require that none is left."""
    monkeypatch.setattr(compare, "WORTH_BYTES", 1)
    monkeypatch.setattr(workers, "_RANGE_ELEMENTS", 1000)
    monkeypatch.setattr("ckpttool.storage.work._BATCH_BYTES", 1)
    monkeypatch.setattr(children_module.subprocess, "Popen", Child)
    Child.made = []
    yield Child.made
    assert all(child.returncode is not None for child in Child.made)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return two files in which everything differs, in types of several kinds."""
    random = np.random.default_rng(3)
    a = {
        "w": random.standard_normal((100, 97)).astype("f4"),
        "n": random.integers(-(2**62), 2**62, 5000),
        "h": random.standard_normal(3000).astype("f2"),
    }
    b = {name: (one + random.integers(1, 9, one.shape)).astype(one.dtype) for name, one in a.items()}
    b["w"][3, 4] = np.nan
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def outcomes(pair: tuple[Path, Path], jobs: int, tolerance: Tolerance = EXACT) -> list[Outcome]:
    with open_checkpoint(pair[0]) as a, open_checkpoint(pair[1]) as b:
        return compare_all([(a[name], b[name]) for name in a], tolerance, jobs=jobs)


@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(rtol=0.1), Tolerance(bitwise=True)])
def test_children_find_what_one_process_finds(
    pair: tuple[Path, Path], children: list[Child], tolerance: Tolerance
) -> None:
    alone = outcomes(pair, 1, tolerance)
    assert children == []
    assert outcomes(pair, 3, tolerance) == alone
    assert len(children) == 2
    assert any(isinstance(one, Comparison) and one.statistics is not None for one in alone)


def test_a_child_that_is_killed_is_no_loss(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = outcomes(pair, 1)
    answer = remote_worker.RemoteWorker._answer

    def killing(self: remote_worker.RemoteWorker, order: Any) -> Any:
        if self._child is not None:
            self._child._process.kill()
        return answer(self, order)

    monkeypatch.setattr(remote_worker.RemoteWorker, "_answer", killing)
    assert outcomes(pair, 3) == alone


def test_a_child_that_cannot_be_started_is_no_loss(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no more processes")

    alone = outcomes(pair, 1)
    monkeypatch.setattr(children_module.subprocess, "Popen", refuse)
    assert outcomes(pair, 3) == alone


@pytest.mark.parametrize("executable", ["", None])
def test_without_a_known_interpreter_there_is_no_child(
    pair: tuple[Path, Path],
    children: list[Child],
    monkeypatch: pytest.MonkeyPatch,
    executable: str | None,
) -> None:
    alone = outcomes(pair, 1)
    monkeypatch.setattr(sys, "executable", executable)
    assert outcomes(pair, 3) == alone
    assert children == []


def test_a_file_that_was_cut_short_is_told(pair: tuple[Path, Path]) -> None:
    with open_checkpoint(pair[0]) as a, open_checkpoint(pair[1]) as b:
        os.truncate(pair[1], 1000)
        found = compare_all([(a[name], b[name]) for name in a], jobs=3)

    assert {one.side for one in found if isinstance(one, Unreadable)} == {Side.B}


def test_a_file_that_was_replaced_is_read_as_it_was(pair: tuple[Path, Path]) -> None:
    before = outcomes(pair, 1)
    with open_checkpoint(pair[0]) as a, open_checkpoint(pair[1]) as b:
        other = pair[1].with_name("other")
        other.write_bytes(pair[0].read_bytes())
        other.replace(pair[1])
        assert compare_all([(a[name], b[name]) for name in a], jobs=3) == before


def test_names_that_are_no_text(pair: tuple[Path, Path], tmp_path: Path) -> None:
    strange = os.fsencode(tmp_path) + b"/b\xff.safetensors"
    os.rename(pair[1], strange)
    renamed = pair[0], Path(os.fsdecode(strange))
    assert outcomes(renamed, 3) == outcomes(renamed, 1)


def test_progress_tells_all(pair: tuple[Path, Path]) -> None:
    done: list[int] = []
    with open_checkpoint(pair[0]) as a, open_checkpoint(pair[1]) as b:
        compare_all([(a[name], b[name]) for name in a], jobs=3, advance=done.append)
        assert sum(done) == sum(one.nbytes for one in (*a.values(), *b.values()))

"""Many checkpoints, verified and listed by an executor: the same answer, and no verdict of a lost worker."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ckpttool import list_checkpoints, verify_all
from ckpttool.integrations.dask import executor_at
from ckpttool.runs import look_workers
from tests.support.clusters import Deadly, Elsewhere, local_cluster
from tests.support.commands import Run
from tests.support.stores import S3Bucket

COUNT = 9


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_cluster() as address:
        yield address


@pytest.fixture
def runs(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with checkpoints of several formats, some of them damaged; it is the working one."""
    directory = tmp_path / "runs"
    for number in range(COUNT):
        run = directory / f"run_{number % 3}"
        run.mkdir(parents=True, exist_ok=True)
        shutil.copy(files / "pytorch" / "guide.pth", run / f"model_epoch_{number}.pth")
    shutil.copytree(files / "safetensors" / "sharded", directory / "sharded")
    (directory / "run_1" / "model_epoch_4.pth").write_bytes(b"PK\3\4 cut short")
    (directory / "run_2" / "torn.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@pytest.mark.parametrize(
    "command",
    [("verify",), ("verify", "--quick"), ("list",), ("list", "--verify", "full")],
    ids=" ".join,
)
def test_a_cluster_answers_as_one_process_does(
    run: Run, cluster: str, runs: Path, command: tuple[str, ...]
) -> None:
    alone = run(*command, "--json", runs)
    spread = run(*command, "--json", runs, "--executor", cluster)
    assert spread == alone
    assert (alone.status, len(json.loads(alone.out)["checkpoints"])) == (1, COUNT + 2)


def test_a_cluster_writes_manifests(run: Run, cluster: str, runs: Path) -> None:
    status, out, _ = run("verify", runs / "run_0", "--write-manifest", "--executor", cluster)
    assert status == 0
    assert f"wrote: {runs}/run_0/model_epoch_3.pth.sha256, " in out
    status, out, _ = run("verify", runs / "run_0", "--executor", cluster)
    assert (status, out.count("manifest ok")) == (0, COUNT // 3)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_any_executor_will_do(runs: Path, kind: str) -> None:
    alone, listed = verify_all(runs), list_checkpoints(runs, depth="full")
    with executor_of(kind) as executor:
        spread = verify_all(runs, executor=executor)
        assert spread == alone
        assert list_checkpoints(runs, depth="full", executor=executor).to_dict() == listed.to_dict()
    assert (len(spread.checkpoints), spread.ok, spread.to_dict()["passed"]) == (COUNT + 2, False, False)


def executor_of(kind: str) -> Executor:
    return ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, get_context("fork"))


class Interrupted(Executor):
    """Interrupts the first task of a function, and begins no other; tasks of others are done at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.futures: list[Future[Any]] = []

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._name not in repr(function):
            future.set_result(function(*arguments, **options))
            return future
        if not self.futures:
            future.set_exception(KeyboardInterrupt())
        self.futures.append(future)
        return future


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("_look_as_worker", list_checkpoints),
        ("_read_as_worker", partial(list_checkpoints, depth="full")),
        ("_RemoteTask.run", verify_all),
    ],
)
def test_an_interrupt_cancels_what_has_not_begun(
    name: str, act: Callable[..., object], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_workers, "_SHARED_BATCH", 1)
    executor = Interrupted(name)
    with pytest.raises(KeyboardInterrupt) as caught:
        act(runs, executor=executor)
    assert caught.tb is not None  # it keeps what would be cancelled otherwise as nobody has it any more
    assert [future.cancelled() for future in executor.futures[1:]] == [True] * (len(executor.futures) - 1)
    assert len(executor.futures) > 1


def test_a_lost_worker_is_an_error_of_its_checkpoint(cluster: str, runs: Path) -> None:
    word = "model_epoch_3.pth"
    with executor_at(cluster) as executor:
        verdicts = verify_all(runs / "run_0", executor=Deadly(executor, word))
    lost = [error for error in verdicts.errors if word in error.path]
    assert [error.path for error in lost] == [str(runs / "run_0" / word)]
    assert "the worker failed: KilledWorker" in lost[0].reason
    assert len(verdicts.checkpoints) + len(verdicts.errors) == COUNT // 3
    assert not verdicts.ok and not verdicts.passes(strict=False)


def test_a_pool_that_breaks_answers_for_nothing_any_more(runs: Path) -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        pool.submit(os.getpid).result()
        pool.submit(os._exit, 1).exception()
        verdicts = verify_all(runs / "run_0", executor=pool)
        listing = list_checkpoints(runs / "run_0", executor=pool)
    assert (len(verdicts.checkpoints), len(verdicts.errors)) == (0, COUNT // 3)
    assert all("the worker failed: BrokenProcessPool" in error.reason for error in verdicts.errors)
    assert (len(listing.checkpoints), len(listing.problems)) == (0, COUNT // 3)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "model_epoch_3.pth not found on the worker"), (b"PK", "file sizes differ on the worker")],
    ids=["none", "another"],
)
def test_what_a_worker_does_not_see_is_no_answer(runs: Path, content: bytes | None, why: str) -> None:
    path = runs / "run_0" / "model_epoch_3.pth"
    executor = Elsewhere(path, content)
    verdicts = verify_all(path, executor=executor)
    assert verdicts.checkpoints == ()
    assert [str(error).startswith(f"{path}: {why}") for error in verdicts.errors] == [True]
    for depth in ("quick", "full"):
        listing = list_checkpoints(runs / "run_0", depth=depth, executor=executor)
        assert [(one.path, why in one.message) for one in listing.problems] == [(str(path), True)]
        assert len(listing.checkpoints) == COUNT // 3 - 1


def test_an_executor_reads_from_a_store(s3: S3Bucket, files: Path) -> None:
    for number in range(3):
        s3.upload(files / "pytorch" / "guide.pth", f"runs/model_epoch_{number}.pth")
    alone, listed = verify_all(s3.url("runs")), list_checkpoints(s3.url("runs"), depth="full")
    with ThreadPoolExecutor(2) as executor:
        assert verify_all(s3.url("runs"), executor=executor) == alone
        spread = list_checkpoints(s3.url("runs"), depth="full", executor=executor)
    assert (spread.to_dict(), alone.ok) == (listed.to_dict(), True)


@pytest.mark.parametrize("address", ["dask://", "dask://host", "http://host:1", "dask://host:port"])
def test_an_address_that_is_none(run: Run, runs: Path, address: str) -> None:
    status, out, err = run("verify", runs, "--executor", address)
    assert (status, out) == (2, "")
    assert err == (
        f"ckpttool: error: --executor: not a scheduler address: {address!r} (such as dask://10.0.0.1:8786)\n"
    )


def test_a_prediction_is_made_here(run: Run, runs: Path, cluster: str) -> None:
    status, _, err = run("verify", runs, "--predict", "--executor", cluster)
    assert (status, "can't be combined with --predict or a configuration" in err) == (2, True)

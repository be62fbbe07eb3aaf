"""Named pipes, devices and directories where files are expected: an error in a line, and nobody waits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Run, refusals
from tests.support.golden import Golden
from tests.support.thorough import sampled

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Let a test that waits for a pipe's other end fail instead of the whole suite stand still."""

    def interrupt(*_: object) -> None:
        raise TimeoutError("it waits for the other end of a pipe")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def runs(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of three epochs, and make a pipe beside it."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for epoch in (1, 2, 3):
        shutil.copy(files / "series" / f"model_epoch_{epoch}.pth", "runs")
    os.mkfifo("pipe")
    os.mkfifo("pipe.svg")
    return Path("runs")


MODEL = "runs/model_epoch_1.pth"
WRITTEN = (
    ("verify", MODEL, "--junit", "pipe"),
    ("verify", MODEL, "--sarif", "pipe"),
    ("verify", MODEL, "--summary", "pipe"),
    ("list", "runs", "--plot", "pipe.svg"),
    ("diff", MODEL, "runs/model_epoch_2.pth", "--plot", "pipe.svg"),
)
READ = (
    ("inspect", "pipe"),
    ("verify", "pipe"),
    ("diff", MODEL, "runs/model_epoch_2.pth", "--map", "pipe"),
    ("convert", MODEL, "made.safetensors", "--map", "pipe"),
    ("latest", "runs", "--metrics", "pipe"),
    ("list", "runs", "--metrics", "pipe"),
    ("prune", "runs", "--keep", 1, "--metrics", "pipe"),
    ("verify", MODEL, "--config", "pipe"),
    ("prune", "--config", "pipe"),
    ("rename", "--config", "pipe"),
    ("list", "--config", "pipe"),
)
PREDICTION = tuple(
    ("verify", MODEL, "--predict", "--model", "m.py:N", option, "pipe")
    for option in ("--expect", "--input", "--labels", "--record")
)


def test_a_pipe_to_be_written(run: Run, runs: Path) -> None:
    for command in WRITTEN:
        status, _, err = run(*command)
        assert (status, err) == (2, f"ckpttool: error: {command[-1]}: no process reads from this pipe\n"), (
            command
        )
        reader = os.open(command[-1], os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert run(*command).status in (0, 1), command
            assert os.read(reader, 1 << 16)[:5] in (b"<?xml", b'{"$sc', b"### c")
        finally:
            os.close(reader)


def test_a_pipe_or_a_device_to_be_read(run: Run, runs: Path) -> None:
    for command in READ:
        for what in ("pipe", "/dev/zero"):
            status, out, err = run(*(what if one == "pipe" else one for one in command))
            told = f"ckpttool: error: {what}: not a regular file\n"
            assert (status, out, err) == (2, "", told), command
    assert len(list(runs.iterdir())) == 3
    os.mkfifo("pipe.pth")
    for command in ("inspect", "verify"):
        told = "ckpttool: error: pipe.pth: not a regular file\n"
        assert run(command, "pipe.pth") == (2, "", told)
    Path("alone").mkdir()
    os.mkfifo("alone/pipe.pth")
    assert run("verify", "alone").status == 2


def test_pipes_and_directories_are_told_before_anything_is_read(run: Run, runs: Path, golden: Golden) -> None:
    reports = [f"verify {MODEL} {option} runs" for option in ("--junit", "--sarif", "--summary")]
    golden(refusals(run, *reports, *map(" ".join, PREDICTION)))


NAMES = [
    *("latest", "last_checkpoint", "latest_checkpointed_iteration.txt", "checkpoint"),
    *("best.json", "best.txt", "metrics.csv", "trainer_state.json", ".ckpttool-pins.toml"),
    *("SHA256SUMS", "model_epoch_1.pth.sha256", "model_epoch_1.pth.digests.json"),
    *("model_epoch_4.pth", "model.pt", "model.safetensors", "model.safetensors.index.json"),
    *("optimizer.pt", "x.pkl", "x.h5", "x.keras", "x.npz", "x.index", "x.meta"),
    *("x.data-00000-of-00001", "saved_model.pb", "keras_metadata.pb", "__model__"),
    *(".metadata", "__0_0.distcp", "config.json", "training_args.bin"),
    *("events.out.tfevents.1.a", "model_epoch_1.pth.tmp", "mp_rank_00_model_states.pt"),
]
COMMANDS = (
    *("verify runs", "list runs", "latest runs", "inspect runs", "prune runs --keep 1 -n"),
    *("rename runs {stem}-{epoch} -n", f"pin {MODEL}", "undo runs"),
)


def test_pipes_beside_checkpoints(run: Run, runs: Path) -> None:
    for name in NAMES:
        os.mkfifo(runs / name)
    for command in COMMANDS:
        assert run(*command.split()).status in (0, 1, 2), command
    assert sorted(path.name for path in runs.iterdir() if path.is_fifo()) == sorted(NAMES)


@pytest.mark.parametrize("name", sampled(NAMES, 11))
def test_each_pipe_alone(run: Run, runs: Path, name: str) -> None:
    os.mkfifo(runs / name)
    assert run("latest", runs).status in (0, 1, 2)
    assert run("list", runs).status in (0, 1)
    assert run("prune", runs, "--keep", 1, "--dry-run").status in (0, 1, 2)


def test_pipes_in_place_of_ckpttools_own_files(run: Run, runs: Path) -> None:
    assert run("prune", runs, "--keep", 2, "--trash").status == 0
    own = [path for path in runs.rglob("*") if path.is_file() and "ckpttool" in str(path)]
    assert own
    for path in own:
        path.unlink()
        os.mkfifo(path)
    for command in (("undo", runs), ("prune", runs, "--keep", 1), ("prune", runs, "--empty-trash")):
        assert run(*command).status in (0, 1, 2)

"""Named pipes, devices and directories where files are expected: an error in a line, and nobody waits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("command", WRITTEN, ids=" ".join)
def test_a_pipe_that_nobody_reads(run, runs: Path, command: tuple[str, ...]) -> None:
    status, _, err = run(*command)
    assert (status, err) == (2, f"ckpttool: error: {command[-1]}: a pipe that nobody reads\n")


@pytest.mark.parametrize("command", WRITTEN, ids=" ".join)
def test_a_pipe_that_is_read(run, runs: Path, command: tuple[str, ...]) -> None:
    reader = os.open(command[-1], os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(*command).status in (0, 1)
        assert os.read(reader, 1 << 16)[:5] in (b"<?xml", b'{"$sc', b"### c")
    finally:
        os.close(reader)


@pytest.mark.parametrize("option", ["--junit", "--sarif", "--summary"])
def test_a_directory_is_told_before_anything_is_read(run, runs: Path, option: str) -> None:
    status, out, err = run("verify", MODEL, option, runs)
    assert (status, out, err) == (2, "", f"ckpttool: error: {option} runs: it is a directory\n")


@pytest.mark.parametrize("command", READ, ids=lambda command: " ".join(map(str, command)))
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_a_pipe_or_a_device_to_be_read(run, runs: Path, command: tuple[object, ...], what: str) -> None:
    status, out, err = run(*(what if one == "pipe" else one for one in command))
    assert (status, out, err) == (2, "", f"ckpttool: error: {what}: not a regular file\n")
    assert len(list(runs.iterdir())) == 3


@pytest.mark.parametrize("command", PREDICTION, ids=" ".join)
def test_a_pipe_for_a_prediction(run, runs: Path, command: tuple[str, ...]) -> None:
    status, out, err = run(*command)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "pipe: " in err


NAMES = [
    "latest",
    "last_checkpoint",
    "latest_checkpointed_iteration.txt",
    "checkpoint",
    "best.json",
    "best.txt",
    "metrics.csv",
    "trainer_state.json",
    ".ckpttool-pins.toml",
    "SHA256SUMS",
    "model_epoch_1.pth.sha256",
    "model_epoch_1.pth.digests.json",
    "model_epoch_4.pth",
    "model.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "optimizer.pt",
    "x.pkl",
    "x.h5",
    "x.keras",
    "x.npz",
    "x.index",
    "x.meta",
    "x.data-00000-of-00001",
    "saved_model.pb",
    "keras_metadata.pb",
    "__model__",
    ".metadata",
    "__0_0.distcp",
    "config.json",
    "training_args.bin",
    "events.out.tfevents.1.a",
    "model_epoch_1.pth.tmp",
    "mp_rank_00_model_states.pt",
]


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "runs"),
        ("list", "runs"),
        ("latest", "runs"),
        ("inspect", "runs"),
        ("prune", "runs", "--keep", 1, "-n"),
        ("rename", "runs", "{stem}-{epoch}", "-n"),
        ("pin", MODEL),
        ("undo", "runs"),
    ],
    ids=lambda command: command[0],
)
def test_pipes_beside_checkpoints(run, runs: Path, command: tuple[object, ...]) -> None:
    for name in NAMES:
        os.mkfifo(runs / name)
    assert run(*command).status in (0, 1, 2)
    assert sorted(path.name for path in runs.iterdir() if path.is_fifo()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_pipe_alone(run, runs: Path, name: str) -> None:
    os.mkfifo(runs / name)
    assert run("latest", runs).status in (0, 1, 2)
    assert run("list", runs).status in (0, 1)
    assert run("prune", runs, "--keep", 1, "--dry-run").status in (0, 1, 2)


def test_pipes_in_place_of_ckpttools_own_files(run, runs: Path) -> None:
    assert run("prune", runs, "--keep", 2, "--trash").status == 0
    own = [path for path in runs.rglob("*") if path.is_file() and "ckpttool" in str(path)]
    assert own
    for path in own:
        path.unlink()
        os.mkfifo(path)
    for command in (("undo", runs), ("prune", runs, "--keep", 1), ("prune", runs, "--empty-trash")):
        assert run(*command).status in (0, 1, 2)

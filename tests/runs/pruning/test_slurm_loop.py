"""The batch jobs of docs/how-to/slurm.md under kills: each resumes right, with the losses of one long job."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.runs.pruning.slurm_jobs import KEEP, Queue, blocks, fault, forking

pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(sys.platform == "win32", reason="the page's script is for a shell"),
]

SEED, JOBS = 7, 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    with forking(tmp_path_factory.mktemp("server"), "lightning.pytorch.callbacks") as address:
        yield address


def queue(tmp_path: Path, name: str, server: str) -> Queue:
    (tmp_path / name).mkdir()
    return Queue(tmp_path / name, server)


def test_killed_jobs_go_on_as_one_long_job_would(tmp_path: Path, server: str) -> None:
    whole = queue(tmp_path, "whole", server)
    done = whole.job()
    assert (done.status, done.resumed, done.was_requeued) == (0, None, False), done.said
    killed = queue(tmp_path, "killed", server)
    random = Random(SEED)
    faults = [fault(random) for _ in range(JOBS)]
    assert {one.split(":")[0] for one in faults} == {"save", "all", "step", "signal"}
    for one in [*faults, ""]:
        expected = killed.newest()
        job = killed.job(one)
        assert job.resumed == expected, f"{one}: {job.said}"
        assert job.was_requeued == (one != "" and not one.startswith("all")), f"{one}: {job.said}"
        if not one.startswith("all"):
            assert_thinned_out(killed)
    assert killed.losses() == whole.losses()
    assert all(len(losses) == 1 for losses in killed.losses().values())
    assert killed.pinned() == whole.pinned() != []
    assert {path.name for path in killed.saved()} == {path.name for path in whole.saved()}


LIGHTNING = """
import argparse, os, signal, sys
sys.modules["tensorflow"] = None  # which Lightning's logger would import, for seconds
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

options = argparse.ArgumentParser()
options.add_argument("--dir")
options.add_argument("--seed")
options.add_argument("--resume")
given = options.parse_args()
is_told_to_end, EPOCHS = False, 4


def end_soon(*_):
    global is_told_to_end
    is_told_to_end = True


signal.signal(signal.SIGUSR1, end_soon)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        with open("batches.log", "a") as log:
            print(self.current_epoch, index, file=log)
        return self.fc(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.log("val_loss", float(self.current_epoch))  # that of epoch 0 is the best

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


torch.set_num_threads(1)
model = Net()
batches = held_back = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=1)
"""


def test_lightning_ends_in_time_and_goes_on_within_its_epoch(tmp_path: Path, server: str) -> None:
    (tmp_path / "lightning").mkdir()
    jobs = Queue(tmp_path / "lightning", server, LIGHTNING)
    for ending, is_requeued in (("signal:5", True), ("step:60", True), ("", False)):
        expected = jobs.newest()
        job = jobs.job(ending)
        assert (job.status, job.resumed, job.was_requeued) == (0, expected, is_requeued), job.said
        assert "Traceback" not in job.said, job.said
    seen = [
        tuple(map(int, line.split())) for line in (jobs.directory / "batches.log").read_text().splitlines()
    ]
    assert set(seen) == {(epoch, batch) for epoch in range(4) for batch in range(32)}
    assert len(seen) - len(set(seen)) < 32  # what the kill cost
    assert jobs.pinned() == ["epoch=0-step=32.ckpt"]
    assert "epoch=3-step=128.ckpt" in {path.name for path in jobs.saved()}
    assert len(jobs.saved()) == KEEP + 1


def assert_thinned_out(queue: Queue) -> None:
    """Only what the policy keeps is there, and at most one that was cut short: the newest by its name."""
    intact = queue.intact()
    assert {path.name for path in intact} == queue.kept()
    cut = [path for path in queue.saved() if path not in intact]
    assert cut in ([], [queue.saved()[-1]])


def test_a_directory_that_nobody_can_tell_of_is_not_begun_anew(tmp_path: Path, server: str) -> None:
    asked = queue(tmp_path, "asked", server)
    refusing = asked.directory / "bin" / "ckpttool"
    refusing.write_text("#!/bin/sh\nexit 2\n")
    job = asked.job()
    assert (job.status, job.was_requeued) == (2, False)
    assert not (asked.run / "losses.csv").exists()


def test_the_shell_understands_the_page_and_so_does_python() -> None:
    for language, text in blocks():
        if language == "sh":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)
        else:
            ast.parse(text)

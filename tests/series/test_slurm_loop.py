"""The batch jobs of docs/slurm.md under kills: each resumes right, with the losses of one long job."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.series.slurm_jobs import Queue, blocks, fault, forking

pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(sys.platform == "win32", reason="the page's script is for a shell"),
]

SEED, JOBS = 7, 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    with forking(tmp_path_factory.mktemp("server")) as address:
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

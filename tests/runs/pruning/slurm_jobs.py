"""The batch jobs of docs/how-to/slurm.md, run here: its own script, its own training, and faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ckpttool.containers.toml import parse_toml
from tests.runs.pruning.fork_server import client

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "slurm.md"
RUN = "runs/seed-0"
HOUR = 3600
KEEP = 3

PRUNING = 'ckpttool prune "$run"'

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_REQUEUE = '#!/bin/sh\necho "$@" >> scontrol.log\n'


def blocks(page: Path = PAGE) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page."""
    return _BLOCK.findall(page.read_text("utf-8"))


@dataclass(frozen=True)
class Job:
    """How one job ended: its status, what it said, and what it had resumed from."""

    status: int
    said: str
    resumed: str | None
    was_requeued: bool


class Queue:
    """A directory with the page's script and training, and a Slurm that only notes what it is told."""

    def __init__(self, directory: Path, address: str, prelude: str | None = None) -> None:
        """Make it.

        Args:
            directory: Where jobs are run.
            address: Of the server that they run on.
            prelude: What comes before Lightning's training, and makes that the one that is run.
        """
        self.directory = directory
        self.run = directory / RUN
        script, *others = [text for language, text in blocks() if language == "sh"]
        trainings = [text for language, text in blocks() if language == "python"]
        training = next(text for text in trainings if text.startswith("# train.py\n"))
        if prelude is not None:
            (pruning,) = [text.strip() for text in others if text.startswith(PRUNING)]
            script = re.sub(rf"^{re.escape(PRUNING)}.*$", pruning, script, flags=re.MULTILINE)
            training = prelude + next(text for text in trainings if "lightning" in text)
        (directory / "job.sh").write_text(script)
        (directory / "train.py").write_text(training)
        programs = directory / "bin"
        programs.mkdir()
        told = {name: client(name, address) for name in ("python", "ckpttool")} | {"scontrol": _REQUEUE}
        for name, text in told.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def job(self, fault: str = "") -> Job:
        """Run one job, an hour after the last one ended."""
        self._let_time_pass()
        log = self.directory / "scontrol.log"
        log.unlink(missing_ok=True)
        environment = {
            "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_JOB_ID": "4711",
            "DIE": fault,
            "CKPTTOOL_DEBUG": "1",
        }
        done = subprocess.run(
            ["bash", "-c", "JOB=$$ exec bash -x job.sh"],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        started = re.search(r"^\+ python train\.py .*$", done.stderr, re.MULTILINE)
        resumed = re.search(r"--resume (\S+)", started[0]) if started else None
        requeued = log.exists() and log.read_text() == "requeue 4711\n"
        return Job(done.returncode, done.stderr, resumed[1] if resumed else None, requeued)

    def _let_time_pass(self) -> None:
        for path in self.run.glob("*") if self.run.exists() else ():
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns - HOUR * 10**9, status.st_mtime_ns - HOUR * 10**9))

    def saved(self) -> list[Path]:
        """Return all checkpoints, whole or not."""
        return sorted(path for path in self.run.glob("*") if path.suffix in (".pt", ".ckpt"))

    def intact(self) -> dict[Path, dict[str, Any]]:
        """Return the checkpoints that torch loads, by their paths in the order of their steps."""
        import torch

        found = {}
        for path in self.saved():
            try:
                found[path] = torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, OSError, ValueError):  # cut short
                continue
        return dict(sorted(found.items(), key=lambda pair: pair[1].get("step", pair[1].get("global_step"))))

    def newest(self) -> str | None:
        """Return the newest checkpoint that torch loads, as the job would write it."""
        paths = list(self.intact())
        return str(paths[-1].relative_to(self.directory)) if paths else None

    def pinned(self) -> list[str]:
        """Return what is pinned."""
        pins = self.run / ".ckpttool-pins.toml"
        return list(parse_toml(pins.read_text())["pinned"]) if pins.exists() else []

    def kept(self) -> set[str]:
        """Return what the policy of the page keeps of what is intact."""
        intact = self.intact()
        best = min(intact, key=lambda path: (intact[path]["val_loss"], -intact[path]["step"]), default=None)
        return {path.name for path in (*list(intact)[-KEEP:], *([best] if best else []))} | {*self.pinned()}

    def losses(self) -> dict[int, set[str]]:
        """Return the losses of each step, digit by digit as every job that made it wrote them."""
        found: dict[int, set[str]] = {}
        for line in (self.run / "losses.csv").read_text().splitlines():
            step, loss = line.split(",")
            found.setdefault(int(step), set()).add(loss)
        return found


@contextmanager
def forking(directory: Path, *modules: str) -> Iterator[str]:
    """Start the server that jobs run in, with some modules imported; yield its address."""
    address = str(directory / "socket")
    command = [sys.executable, "-m", "tests.runs.pruning.fork_server", address, *modules]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield address
        finally:
            server.kill()


def fault(random: Random, most: int = 12) -> str:
    """Return a fault of a training: a save cut short, a kill, the kill of the whole job, or a signal."""
    kind = random.choice(("save", "save", "all", "step", "signal"))
    if kind in ("step", "signal"):
        return f"{kind}:{random.randint(1, most)}"
    return f"{kind}:{random.randint(1, 3)}:{random.choice((0, random.random(), 1))}"

"""Whole processes, measured in turn: one round runs every command once, so that all see the same machine."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LAUNCHER = Path(__file__).with_name("launch.py")
# Set in containers: without bytecode every start compiles what it imports; unbuffered, a line is a write.
_SLOWING = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to be measured.

    Attributes:
        name: What rows call it.
        arguments: The program, looked up on PATH, and its arguments.
        prepare: Called before each run, outside the time.
        variables: What it has in its environment besides.
    """

    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[], None] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class Run(NamedTuple):
    """What one run took: processor and wall time in milliseconds, the peak of memory in bytes."""

    processor: float
    wall: float
    resident: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """The runs of a command; ``failure`` says why there are none."""

    name: str
    runs: tuple[Run, ...] = ()
    failure: str | None = None

    @property
    def processor(self) -> float:
        """Return the median of the processor times, in milliseconds."""
        return statistics.median(run.processor for run in self.runs)

    @property
    def wall(self) -> float:
        """Return the median of the wall times, in milliseconds."""
        return statistics.median(run.wall for run in self.runs)

    @property
    def resident(self) -> int:
        """Return the highest peak of resident memory, in bytes."""
        return max(run.resident for run in self.runs)


class Ratio(NamedTuple):
    """How the processor times of two commands relate, round by round: the median, the least and the most."""

    median: float
    least: float
    most: float


def ratio_of(ours: Measurement, peer: Measurement) -> Ratio:
    """Compare two commands that took turns."""
    ratios = [one.processor / other.processor for one, other in zip(ours.runs, peer.runs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


class CommandFailed(Exception):
    """A command is not there, or did not end with 0."""


def measure_in_turn(commands: Sequence[Command], rounds: int) -> dict[str, Measurement]:
    """Return a measurement for each command, by name.

    A first round is not counted: it fills the page cache and shows what can't run.
    """
    failures = {command.name: _failure(command) for command in commands}
    able = [command for command in commands if failures[command.name] is None]
    runs: dict[str, list[Run]] = {command.name: [] for command in commands}
    for _ in range(rounds):
        for command in able:
            runs[command.name].append(_run(command))
    return {name: Measurement(name, tuple(runs[name]), failures[name]) for name in runs}


def environment() -> dict[str, str]:
    """Return the environment without what makes Python slower than it is for everybody else."""
    return {name: value for name, value in os.environ.items() if name not in _SLOWING}


def _failure(command: Command) -> str | None:
    try:
        _run(command)
    except CommandFailed as failure:
        return str(failure)
    return None


def _run(command: Command) -> Run:
    """Run a command once.

    Raises:
        CommandFailed: It is not there, or its exit status is not 0.
    """
    if shutil.which(command.arguments[0]) is None:
        raise CommandFailed(f"no {Path(command.arguments[0]).name} here")
    if command.prepare is not None:
        command.prepare()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result, tempfile.TemporaryFile("w+") as errors:
        launch = [sys.executable, "-I", "-S", str(_LAUNCHER), result.name, *command.arguments]
        subprocess.run(
            launch,
            env={**environment(), **command.variables},
            cwd=tempfile.gettempdir(),  # python -m and -c would import the package of the working directory
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            check=True,
        )
        status, processor, wall, resident = json.load(result)
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if status != 0:
        raise CommandFailed(f"exit {status}: {said[-1] if said else 'no message'}")
    return Run(processor * 1000, wall * 1000, resident)

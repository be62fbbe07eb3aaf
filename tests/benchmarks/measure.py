"""Whole processes, timed in turn: one round runs every command once, so that all see the same machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("launch.py")
# Set in containers: without bytecode every start compiles what it imports; unbuffered, a line is a write.
_SLOWING = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to be timed.

    Attributes:
        name: What rows call it.
        arguments: The program, looked up on PATH, and its arguments.
        prepare: Called before each run, outside the time.
    """

    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The best of several runs; ``failure`` says why there is none.

    Attributes:
        milliseconds: Wall time of the whole process, each run.
        resident: The highest peak of resident memory, in bytes.
    """

    name: str
    milliseconds: tuple[float, ...] = ()
    resident: int = 0
    failure: str | None = None

    @property
    def best(self) -> float:
        """Return the shortest time, in milliseconds."""
        return min(self.milliseconds)


@dataclass(frozen=True, slots=True)
class _Run:
    milliseconds: float
    resident: int


class CommandFailed(Exception):
    """A command is not there, or did not end with 0."""


def measure_in_turn(commands: Sequence[Command], rounds: int) -> dict[str, Measurement]:
    """Return a measurement for each command, by name.

    A first round is not counted: it fills the page cache and shows what can't run.
    """
    failures = {command.name: _failure(command) for command in commands}
    able = [command for command in commands if failures[command.name] is None]
    runs: dict[str, list[_Run]] = {command.name: [] for command in commands}
    for _ in range(rounds):
        for command in able:
            runs[command.name].append(_run(command))
    return {name: _measurement(name, runs[name], failures[name]) for name in runs}


def environment() -> dict[str, str]:
    """Return the environment without what makes Python slower than it is for everybody else."""
    return {name: value for name, value in os.environ.items() if name not in _SLOWING}


def _measurement(name: str, runs: list[_Run], failure: str | None) -> Measurement:
    milliseconds = tuple(run.milliseconds for run in runs)
    return Measurement(name, milliseconds, max((run.resident for run in runs), default=0), failure)


def _failure(command: Command) -> str | None:
    try:
        _run(command)
    except CommandFailed as failure:
        return str(failure)
    return None


def _run(command: Command) -> _Run:
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
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            check=True,
        )
        status, seconds, resident = json.load(result)
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if status != 0:
        raise CommandFailed(f"exit {status}: {said[-1] if said else 'no message'}")
    return _Run(seconds * 1000, resident)

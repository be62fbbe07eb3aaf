"""What is claimed of commands, and what it is measured on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.measure import Command

PYTHON = sys.executable
CKPTTOOL = str(Path(sys.executable).with_name("ckpttool"))
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    """How much data is made; ``mebibytes`` is the size of the one large file.

    Attributes:
        sparse_gibibytes: Size of the file of zeros; None leaves it out.
        times: How many times the large file is repeated in the largest; None leaves it out.
        small_tensors: How many tensors make many.
        series: How many checkpoints the directories hold; each twice the one before.
    """

    mebibytes: int
    sparse_gibibytes: int | None
    times: int | None
    small_tensors: int
    series: tuple[int, ...]


FULL = Scale(mebibytes=1024, sparse_gibibytes=10, times=4, small_tensors=10_000, series=(250, 500, 1000))
QUICK = Scale(mebibytes=64, sparse_gibibytes=None, times=None, small_tensors=1000, series=(25, 50, 100))


@dataclass(frozen=True, slots=True)
class Claim:
    """What is said of a command, and the bars that it has to stay below; one of None is no bar.

    Attributes:
        job: What it does, in the reader's words.
        ours: Name of the command.
        peer: Name of the command that it is compared with.
        ratio: Most of our processor time, as a part of the peer's.
        resident: Most resident memory, in MB.
    """

    job: str
    ours: str
    peer: str | None = None
    ratio: float | None = None
    resident: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Commands that take turns, and the claims on them; ``skipped`` says why nothing is run."""

    commands: tuple[Command, ...]
    claims: tuple[Claim, ...]
    skipped: str | None = None


MakeGroup = Callable[[Path, Scale], Group]


def own_command(name: str, *arguments: str | Path) -> Command:
    """Return a command line of ckpttool."""
    return Command(name, (CKPTTOOL, *map(str, arguments)))


def peer_command(name: str, script: str, path: Path) -> Command:
    """Return what runs a script on a path."""
    return Command(name, (PYTHON, "-c", script, str(path)))


def size_of(mebibytes: int) -> str:
    """Return a size as the table shows it."""
    return f"{mebibytes} MiB" if mebibytes % 1024 else f"{mebibytes // 1024} GiB"


def lacking_room(folder: Path, disk: int, memory: int) -> str | None:
    """Return what the machine has too little of, or None; sizes in bytes."""
    free = shutil.disk_usage(folder).free
    if free < disk:
        return f"{free / GIB:.1f} GiB of disk are free, {disk / GIB:.0f} are needed"
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if installed < memory:
        return f"{installed / GIB:.1f} GiB of memory, {memory / GIB:.0f} are needed to keep the file cached"
    return None

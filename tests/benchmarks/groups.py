"""What is measured together: the data, the commands that take turns on it, and what is claimed of them."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.benchmarks import data, peers
from tests.benchmarks.measure import Command

PYTHON = sys.executable
CKPTTOOL = str(Path(sys.executable).with_name("ckpttool"))
_GIB = 1 << 30
_KEPT = 10
_TORCH_LIST, _TORCH_FINITE = "torch.load(mmap=True), list", "torch.load, isfinite"


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
        ratio: Most of our time, as a part of the peer's.
        count: How many checkpoints the command treats.
        each: Most time for one of them, in milliseconds.
        resident: Most resident memory, in MB.
    """

    job: str
    ours: str
    peer: str | None = None
    ratio: float | None = None
    count: int = 1
    each: float | None = None
    resident: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Commands that take turns, and the claims on them; ``skipped`` says why nothing is run."""

    commands: tuple[Command, ...]
    claims: tuple[Claim, ...]
    skipped: str | None = None


MakeGroup = Callable[[Path, Scale], Group]


def groups(scale: Scale) -> list[MakeGroup]:
    """Return what makes each group in a folder of its own, in the order of the table."""
    large = [] if scale.times is None else [large_file]
    return [one_file, *large, many_tensors, directory, start]


def one_file(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` and ``verify`` on one file of the size of a usual model."""
    path, size = folder / "model.pth", _size(scale.mebibytes)
    data.write_zip(path, scale.mebibytes)
    commands = [
        _ours(f"inspect {size}", "inspect", "--json", path),
        _peer(_TORCH_LIST, peers.LIST_TORCH, path),
        _ours("verify", "verify", path),
        _peer(_TORCH_FINITE, peers.VERIFY_TORCH, path),
        Command("sha256sum", ("sha256sum", str(path))),
    ]
    job = f"a zip of {size}, {data.TENSORS} tensors"
    inspect = Claim(f"inspect {job}", f"inspect {size}", _TORCH_LIST, ratio=0.1, resident=60)
    verify = (
        Claim(f"verify {job}", "verify", _TORCH_FINITE, ratio=0.25, resident=150),
        Claim(f"verify {job}", "verify", "sha256sum", ratio=0.2),
    )
    sparse, safetensors = _sparse_file(folder, scale), _safetensors_file(folder, scale)
    commands += [*sparse.commands, *safetensors.commands]
    return Group(tuple(commands), (inspect, *sparse.claims, *safetensors.claims, *verify))


def _sparse_file(folder: Path, scale: Scale) -> Group:
    """Show that the size of a file doesn't count, only the number of its tensors."""
    if scale.sparse_gibibytes is None:
        return Group((), ())
    path, size = folder / "sparse.pth", f"{scale.sparse_gibibytes} GiB"
    data.write_sparse(path, scale.sparse_gibibytes)
    job = f"inspect a zip of {size}, {data.TENSORS} tensors"
    peer = f"inspect {_size(scale.mebibytes)}"
    commands = (_ours(f"inspect {size}", "inspect", "--json", path),)
    return Group(commands, (Claim(job, f"inspect {size}", peer, ratio=1.3, resident=60),))


def _safetensors_file(folder: Path, scale: Scale) -> Group:
    path = folder / "model.safetensors"
    data.write_safetensors(path, scale.mebibytes)
    ours = _ours("inspect safetensors", "inspect", "--json", path)
    peer = _peer("safe_open, list", peers.LIST_SAFETENSORS, path)
    return Group((ours, peer), (Claim(f"{ours.name} of {_size(scale.mebibytes)}", ours.name, peer.name),))


def large_file(folder: Path, scale: Scale) -> Group:
    """Measure ``verify`` where the start no longer counts, against reading alone."""
    times = scale.times or 1
    nbytes = (scale.mebibytes << 20) * times
    job = f"verify a zip of {_size(scale.mebibytes * times)}, {data.TENSORS * times:,} tensors"
    claim = Claim(job, "verify", "cat > /dev/null", ratio=4, resident=150)
    lacking = _lacking(folder, disk=nbytes + 2 * _GIB, memory=2 * nbytes)
    if lacking is not None:
        return Group((), (claim,), lacking)
    part, path = folder / "part.pth", folder / "large.pth"
    data.write_zip(part, scale.mebibytes)
    data.write_repeated(path, part, times)
    part.unlink()
    cat = Command("cat > /dev/null", ("sh", "-c", 'cat "$0" > /dev/null', str(path)))
    return Group((_ours("verify", "verify", path), cat), (claim,))


def many_tensors(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` where the names count, not the bytes."""
    path = folder / "many.pth"
    data.write_many_tensors(path, scale.small_tensors)
    commands = (_ours("inspect", "inspect", "--json", path), _peer(_TORCH_LIST, peers.LIST_TORCH, path))
    job = f"inspect a zip of {scale.small_tensors:,} small tensors"
    return Group(commands, (Claim(job, "inspect", _TORCH_LIST, ratio=0.5),))


def directory(folder: Path, scale: Scale) -> Group:
    """Measure ``list`` and ``prune`` on the directory of a training run."""
    paths = {count: folder / f"run-{count}" for count in scale.series}
    for count, path in paths.items():
        data.write_series(path, count)
    most, copy = scale.series[-1], folder / "copy"
    prune = _ours("prune", "prune", copy, "--keep", str(_KEPT), "--yes")
    commands = (
        *(_ours(f"list {count:,}", "list", path) for count, path in paths.items()),
        _peer("torch.load of each", peers.LIST_DIRECTORY, paths[most]),
        Command(prune.name, prune.arguments, prepare=partial(data.copy_series, paths[most], copy)),
    )
    job = f"{most:,} checkpoints"
    claims = (
        Claim(f"list {job}", f"list {most:,}", "torch.load of each", count=most, each=5),
        *_linear(scale.series),
        Claim(f"prune {job} to {_KEPT}", "prune", count=most),
    )
    return Group(commands, claims)


def _linear(series: tuple[int, ...]) -> list[Claim]:
    """Claim that twice the checkpoints take twice the time; the first step is still mostly the start."""
    claims = []
    for fewer, more in itertools.pairwise(series):
        limit = 2.2 if more == series[-1] else None
        claims.append(
            Claim(f"list {more:,} instead of {fewer:,}", f"list {more:,}", f"list {fewer:,}", limit)
        )
    return claims


def start(folder: Path, scale: Scale) -> Group:
    """Measure what every command costs before it does anything."""
    commands = (_ours("--help", "--help"), Command("python -c pass", (PYTHON, "-c", "pass")))
    return Group(commands, (Claim("ckpttool --help", "--help", "python -c pass", ratio=18),))


def _ours(name: str, *arguments: str | Path) -> Command:
    return Command(name, (CKPTTOOL, *map(str, arguments)))


def _peer(name: str, script: str, path: Path) -> Command:
    return Command(name, (PYTHON, "-c", script, str(path)))


def _size(mebibytes: int) -> str:
    return f"{mebibytes} MiB" if mebibytes % 1024 else f"{mebibytes // 1024} GiB"


def _lacking(folder: Path, disk: int, memory: int) -> str | None:
    """Return what the machine has too little of, or None; sizes in bytes."""
    free = shutil.disk_usage(folder).free
    if free < disk:
        return f"{free / _GIB:.1f} GiB of disk are free, {disk / _GIB:.0f} are needed"
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if installed < memory:
        return f"{installed / _GIB:.1f} GiB of memory, {memory / _GIB:.0f} are needed to keep the file cached"
    return None

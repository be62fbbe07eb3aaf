"""``diff`` against ``cmp`` where nothing differs, and against loading both where everything does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.benchmarks import data
from tests.benchmarks.claims import (
    CKPTTOOL,
    GIB,
    PYTHON,
    Claim,
    Group,
    MakeGroup,
    Scale,
    lacking_room,
    own_command,
    size_of,
)
from tests.benchmarks.measure import Command

_RESIDENT = 200
_LARGEST_CHANGE = """
import sys, torch
a, b = (torch.load(path) for path in sys.argv[1:])
print(max((a[name] - b[name]).abs().max().item() for name in a))
"""
_ALL_CHANGED = 'if "$0" diff "$@" > /dev/null; then exit 9; else test $? = 1; fi'
"""What differs ends with 1, which is no failure here; what is told to be equal is one."""


def diff(folder: Path, scale: Scale) -> Group:
    """Measure ``diff`` on files of the size of a usual model."""
    a, equal, changed = (folder / f"{name}.pth" for name in ("a", "equal", "changed"))
    other, size = folder / "a.safetensors", size_of(scale.mebibytes)
    data.write_zip(a, scale.mebibytes)
    data.write_safetensors(other, scale.mebibytes)
    _copy(a, equal)
    _write_changed(a, changed)
    torch = "torch.load both, max |Δ|"
    commands = (
        own_command("diff, equal", "diff", a, equal),
        Command("cmp", ("cmp", str(a), str(equal))),
        own_command("diff, two formats", "diff", a, other),
        Command("diff, all changed", ("sh", "-c", _ALL_CHANGED, CKPTTOOL, str(a), str(changed))),
        Command(torch, (PYTHON, "-c", _LARGEST_CHANGE, str(a), str(changed))),
    )
    job = f"diff of {size} each, {data.TENSORS} tensors"
    claims = (
        Claim(f"{job}, equal", "diff, equal", "cmp", ratio=1.05, resident=_RESIDENT),
        Claim(f"{job}, a zip against safetensors", "diff, two formats", "cmp", ratio=1, resident=_RESIDENT),
        Claim(f"{job}, all changed", "diff, all changed", torch, ratio=0.2, resident=_RESIDENT),
    )
    return Group(commands, claims)


def large_diff(folder: Path, scale: Scale) -> Group:
    """Measure ``diff`` where the start no longer counts."""
    if scale.times is None:
        return Group((), ())
    times = scale.times
    nbytes = (scale.mebibytes << 20) * times
    job = f"diff of {size_of(scale.mebibytes * times)} each, {data.TENSORS * times:,} tensors, equal"
    claim = Claim(job, "diff", "cmp", ratio=0.7, resident=_RESIDENT)
    lacking = lacking_room(folder, disk=2 * nbytes + 2 * GIB, memory=3 * nbytes)
    if lacking is not None:
        return Group((), (claim,), lacking)
    part, a, b = (folder / f"{name}.pth" for name in ("part", "a", "b"))
    data.write_zip(part, scale.mebibytes)
    data.write_repeated(a, part, times)
    part.unlink()
    _copy(a, b)
    return Group((own_command("diff", "diff", a, b), Command("cmp", ("cmp", str(a), str(b)))), (claim,))


GROUPS: tuple[MakeGroup, ...] = (diff, large_diff)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    _flush(target)


def _write_changed(source: Path, target: Path) -> None:
    """Write the same tensors after a step of training: each element moved a little."""
    import torch

    torch.manual_seed(21)
    moved = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in torch.load(source).items()}
    torch.save(moved, target)
    _flush(target)


def _flush(path: Path) -> None:
    """Write the file out now, not while something is being timed."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())

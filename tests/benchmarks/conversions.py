"""``convert`` and ``merge`` against copying the same bytes, and against loading and saving them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tests.benchmarks import data
from tests.benchmarks.claims import (
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
from tests.benchmarks.frameworks import TENSORFLOW, write
from tests.benchmarks.measure import Command

_RESIDENT = 250
_SHARDS = 8
_COPY = 'cp "$0" "$1" && sync "$1"'
_CONCATENATE = 'out=$0; cat "$@" > "$out" && sync "$out"'
_AVERAGED = 4
_LOAD = """
import sys, torch
for path in sys.argv[1:]:
    torch.load(path)
"""
_AVERAGE = """
import sys, torch
*paths, out = sys.argv[1:]
total = torch.load(paths[0])
for path in paths[1:]:
    for name, tensor in torch.load(path).items():
        total[name] += tensor
torch.save({name: tensor / len(paths) for name, tensor in total.items()}, out)
"""
_SAVE = """
import sys, torch
from safetensors.torch import save_file
save_file(torch.load(sys.argv[1]), sys.argv[2])
"""


def convert(folder: Path, scale: Scale) -> Group:
    """Measure ``convert`` between formats; each writes a new file, and makes it durable."""
    zip_, other = folder / "a.pth", folder / "b.safetensors"
    prefix, out = folder / "ckpt", folder / "out"
    data.write_zip(zip_, scale.mebibytes)
    data.write_safetensors(other, scale.mebibytes)
    write(TENSORFLOW, prefix, scale.mebibytes)
    saved = folder / "out.safetensors"
    anew = partial(_clear, (out, folder / "out.pth", saved))
    copy, load = "cp, sync", "torch.load, save_file"
    commands = (
        _own("to safetensors", anew, zip_, saved),
        _shell(copy, anew, _COPY, zip_, out),
        Command(load, (PYTHON, "-c", _SAVE, str(zip_), str(saved)), anew),
        _own("to PyTorch", anew, other, folder / "out.pth"),
        _own("from TensorFlow", anew, prefix, saved),
    )
    job = f"of {size_of(scale.mebibytes)}, {data.TENSORS} tensors"
    claims = (
        Claim(f"convert a zip to safetensors {job}", "to safetensors", copy, ratio=2, resident=_RESIDENT),
        Claim(f"convert a zip to safetensors {job}", "to safetensors", load, ratio=0.28),
        Claim(f"convert safetensors to a zip {job}", "to PyTorch", copy, ratio=2.2, resident=_RESIDENT),
        Claim(
            f"convert TensorFlow to safetensors {job}", "from TensorFlow", copy, ratio=2.2, resident=_RESIDENT
        ),
    )
    return Group(commands, claims)


def merge(folder: Path, scale: Scale) -> Group:
    """Measure ``merge`` of shards into one file."""
    sharded, out = folder / "sharded", folder / "out.safetensors"
    data.write_shards(sharded, scale.mebibytes, _SHARDS)
    shards = sorted(sharded.glob("*.safetensors"))
    anew = partial(_clear, (out,))
    name = "cat shards, sync"
    ours = own_command("merge", "merge", sharded, out)
    commands = (Command(ours.name, ours.arguments, anew), _shell(name, anew, _CONCATENATE, out, *shards))
    job = f"merge {_SHARDS} shards of safetensors, {size_of(scale.mebibytes)}"
    return Group(commands, (Claim(job, "merge", name, ratio=1.6, resident=_RESIDENT),))


def average(folder: Path, scale: Scale) -> Group:
    """Measure ``average`` of four files against reading them, and against averaging them with PyTorch."""
    sources, out = [folder / f"{number}.pth" for number in range(_AVERAGED)], folder / "out.pth"
    for path in sources:
        data.write_zip(path, scale.mebibytes // _AVERAGED)
    anew = partial(_clear, (out,))
    ours = own_command("average", "average", *sources, out)
    read, averaged = "torch.load each", "torch.load, average, torch.save"
    commands = (
        Command(ours.name, ours.arguments, anew),
        Command(read, (PYTHON, "-c", _LOAD, *map(str, sources))),
        Command(averaged, (PYTHON, "-c", _AVERAGE, *map(str, sources), str(out)), anew),
    )
    job = f"average {_AVERAGED} zips, {size_of(scale.mebibytes)} in all"
    claims = (
        Claim(job, "average", read, ratio=0.65, resident=_RESIDENT),
        Claim(job, "average", averaged, ratio=0.35),
    )
    return Group(commands, claims)


def salvage(folder: Path, scale: Scale) -> Group:
    """Measure ``salvage`` of a zip without its end against copying the bytes that are left."""
    whole, cut, out = folder / "whole.pth", folder / "cut.pth", folder / "out.pth"
    data.write_zip(whole, scale.mebibytes)
    shutil.copy(whole, cut)
    os.truncate(cut, cut.stat().st_size - 30)  # no tensor is lost, and nothing says where they lie
    anew = partial(_clear, (out,))
    ours = own_command("salvage", "salvage", cut, out)
    copy = "cp, sync"
    commands = (Command(ours.name, ours.arguments, anew), _shell(copy, anew, _COPY, cut, out))
    job = f"salvage a zip of {size_of(scale.mebibytes)} without its end"
    return Group(commands, (Claim(job, "salvage", copy, ratio=4.5, resident=_RESIDENT),))


def large_convert(folder: Path, scale: Scale) -> Group:
    """Show that memory doesn't grow with the bytes."""
    if scale.times is None:
        return Group((), ())
    times = scale.times + 2
    nbytes = (scale.mebibytes << 20) * times
    size = size_of(scale.mebibytes * times)
    job = f"convert a zip to safetensors of {size}, {data.TENSORS * times:,} tensors"
    claim = Claim(job, "convert", "cp, sync", resident=_RESIDENT)
    lacking = lacking_room(folder, disk=2 * nbytes + 2 * GIB, memory=nbytes)
    if lacking is not None:
        return Group((), (claim,), lacking)
    part, whole, out = folder / "part.pth", folder / "whole.pth", folder / "out.safetensors"
    data.write_zip(part, scale.mebibytes)
    data.write_repeated(whole, part, times)
    part.unlink()
    anew = partial(_clear, (out,))
    return Group((_own("convert", anew, whole, out), _shell("cp, sync", anew, _COPY, whole, out)), (claim,))


GROUPS: tuple[MakeGroup, ...] = (convert, merge, average, salvage, large_convert)


def _own(name: str, prepare: partial[None], source: Path, target: Path) -> Command:
    return Command(name, own_command(name, "convert", source, target).arguments, prepare)


def _shell(name: str, prepare: partial[None], script: str, *paths: Path) -> Command:
    return Command(name, ("sh", "-c", script, *map(str, paths)), prepare)


def _clear(paths: Iterable[Path]) -> None:
    """Remove what an earlier run wrote, and let the disk come to rest."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    os.sync()

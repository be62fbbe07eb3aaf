"""What is measured together: the data, the commands that take turns on it, and what is claimed of them."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

from tests.benchmarks import (
    conversions,
    data,
    deletions,
    differences,
    frameworks,
    peers,
    predictions,
    retention,
)
from tests.benchmarks.claims import (
    GIB,
    PYTHON,
    Claim,
    Group,
    MakeGroup,
    Scale,
    lacking_room,
    own_command,
    peer_command,
    size_of,
)
from tests.benchmarks.measure import Command

_KEPT = 10
_TORCH_LIST, _TORCH_FINITE = "torch.load(mmap=True), list", "torch.load, isfinite"


def groups(scale: Scale) -> list[MakeGroup]:
    """Return what makes each group in a folder of its own, in the order of the table."""
    large = [] if scale.times is None else [large_file]
    compared = differences.GROUPS if scale.times is not None else differences.GROUPS[:1]
    converted = conversions.GROUPS if scale.times is not None else conversions.GROUPS[:3]
    predicted = predictions.GROUPS if scale.times is not None else predictions.GROUPS[:1]
    return [
        one_file,
        *large,
        many_tensors,
        *frameworks.GROUPS,
        *compared,
        *converted,
        *predicted,
        directory,
        *retention.GROUPS,
        *deletions.GROUPS,
        start,
    ]


def one_file(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` and ``verify`` on one file of the size of a usual model."""
    path, size = folder / "model.pth", size_of(scale.mebibytes)
    data.write_zip(path, scale.mebibytes)
    commands = [
        own_command(f"inspect {size}", "inspect", "--json", path),
        peer_command(_TORCH_LIST, peers.LIST_TORCH, path),
        own_command("verify", "verify", path),
        peer_command(_TORCH_FINITE, peers.VERIFY_TORCH, path),
        Command("sha256sum", ("sha256sum", str(path))),
    ]
    job = f"a zip of {size}, {data.TENSORS} tensors"
    inspect = Claim(f"inspect {job}", f"inspect {size}", _TORCH_LIST, ratio=0.1, resident=60)
    verify = (
        Claim(f"verify {job}", "verify", _TORCH_FINITE, ratio=0.17, resident=150),
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
    peer = f"inspect {size_of(scale.mebibytes)}"
    commands = (own_command(f"inspect {size}", "inspect", "--json", path),)
    return Group(commands, (Claim(job, f"inspect {size}", peer, ratio=1.3, resident=60),))


def _safetensors_file(folder: Path, scale: Scale) -> Group:
    path = folder / "model.safetensors"
    data.write_safetensors(path, scale.mebibytes)
    ours = own_command("inspect safetensors", "inspect", "--json", path)
    peer = peer_command("safe_open, list", peers.LIST_SAFETENSORS, path)
    return Group((ours, peer), (Claim(f"{ours.name} of {size_of(scale.mebibytes)}", ours.name, peer.name),))


def large_file(folder: Path, scale: Scale) -> Group:
    """Measure ``verify`` where the start no longer counts, against reading alone."""
    times = scale.times or 1
    nbytes = (scale.mebibytes << 20) * times
    job = f"verify a zip of {size_of(scale.mebibytes * times)}, {data.TENSORS * times:,} tensors"
    claim = Claim(job, "verify", "cat > /dev/null", ratio=5.5, resident=150)
    lacking = lacking_room(folder, disk=nbytes + 2 * GIB, memory=2 * nbytes)
    if lacking is not None:
        return Group((), (claim,), lacking)
    part, path = folder / "part.pth", folder / "large.pth"
    data.write_zip(part, scale.mebibytes)
    data.write_repeated(path, part, times)
    part.unlink()
    cat = Command("cat > /dev/null", ("sh", "-c", 'cat "$0" > /dev/null', str(path)))
    return Group((own_command("verify", "verify", path), cat), (claim,))


def many_tensors(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` where the names count, not the bytes."""
    path = folder / "many.pth"
    data.write_many_tensors(path, scale.small_tensors)
    commands = (
        own_command("inspect", "inspect", "--json", path),
        peer_command(_TORCH_LIST, peers.LIST_TORCH, path),
    )
    job = f"inspect a zip of {scale.small_tensors:,} small tensors"
    return Group(commands, (Claim(job, "inspect", _TORCH_LIST, ratio=0.37),))


def directory(folder: Path, scale: Scale) -> Group:
    """Measure ``list`` and ``prune`` on the directory of a training run."""
    paths = {count: folder / f"run-{count}" for count in scale.series}
    for count, path in paths.items():
        data.write_series(path, count)
    most, copy = scale.series[-1], folder / "copy"
    prune = own_command("prune", "prune", copy, "--keep", str(_KEPT), "--yes")
    commands = (
        *(own_command(f"list {count:,}", "list", path) for count, path in paths.items()),
        peer_command("torch.load of each", peers.LIST_DIRECTORY, paths[most]),
        Command(prune.name, prune.arguments, prepare=partial(data.copy_series, paths[most], copy)),
    )
    job = f"{most:,} checkpoints"
    claims = (
        Claim(f"list {job}", f"list {most:,}", "torch.load of each", ratio=0.95),
        *_linear(scale.series),
        Claim(f"prune {job} to {_KEPT}", "prune"),
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
    commands = (own_command("--help", "--help"), Command("python -c pass", (PYTHON, "-c", "pass")))
    return Group(commands, (Claim("ckpttool --help", "--help", "python -c pass", ratio=5),))

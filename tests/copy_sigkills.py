"""SIGKILL at random moments of copies into a store and out of it, by hand, over the multi-file formats.

Usage: ``python -m tests.copy_sigkills [KILLS [SEED]]``, in the project's directory. After each kill, nothing
that seems to be whole at the destination may differ from the source; then the next copy runs to its end, and
must have sent nothing that had arrived. It ends with status 1 as soon as that isn't so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from ckpttool.formats.discovery import Walk, discover
from ckpttool.ops.verify import verify
from ckpttool.storage import fs, remote
from tests.support.commands import Answer, run_redirected
from tests.support.runs import KINDS
from tests.support.stores import Bucket, S3Bucket, client_of, environment, serve_apart

NUMBERS = range(1, 4)
STORED_KINDS = ("PyTorch", "safetensors, sharded", "TensorFlow", "Paddle", "Trainer", "DCP", "Fluid")
AT_ANY_TIME = 0.2
"""How many of the kills don't wait until the copy has begun to write."""
LARGE = 40 << 20
"""Bytes of one more file, which is sent in parts."""


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a directory; what staging left is none of them."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part.startswith(".ckpttool") for part in path.parts)
    }


def run(*arguments: str) -> Answer:
    """Run a command to its end, in this process: only what is killed needs one of its own."""
    remote.forget()
    return run_redirected(*arguments)


def started(*arguments: str) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "ckpttool", *arguments], stdout=null, stderr=null)


def whole(directory: str) -> set[str]:
    """Return what seems to be valid at a place, relative to it, be it a set that is alone there."""
    remote.forget()
    if not fs.isdir(directory):
        return set()
    units = discover(directory, Walk(enters_root=True))
    return {os.path.relpath(unit.path, directory) for unit in units if unit.format and verify(unit).is_valid}


def wrong(source: str, target: str, expected: set[str], had_arrived: int) -> Iterator[str]:
    """Yield what is wrong after a kill, and after the next copy."""
    if more := whole(target) - expected:
        yield f"there seem to be {sorted(more)}, which the source doesn't have"
    compared = run("copy", "-n", "--json", source, target)
    for one in json.loads(compared.out)["checkpoints"]:
        if one["status"] not in ("copied", "present"):
            yield f"{one['path']} is {one['status']}: {one['reason']}"
    done = run("copy", "--json", source, target)
    if done.status:
        yield f"the next copy ends with {done.status}: {done.err}"
        return
    rows = json.loads(done.out)["checkpoints"]
    if sum(one["sent_bytes"] for one in rows) > sum(one["bytes"] for one in rows) - had_arrived:
        yield f"{had_arrived:,} bytes had arrived, and some of them were sent again"
    if (found := whole(target)) != expected:
        yield f"in the end there are {sorted(found)}, and not {sorted(expected)}"


def has_begun(bucket: Bucket, place: str) -> bool:
    """Tell whether anything was written to a place, be it a note or a stage."""
    if place.startswith("s3://"):
        prefix = place.removeprefix(f"s3://{bucket.name}/")
        return bool(bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix).get("Contents"))
    return os.path.isdir(place) and bool(os.listdir(place))


def nbytes_arrived(bucket: Bucket, place: str) -> int:
    """Return the bytes of whole files at a place."""
    if place.startswith("s3://"):
        prefix = place.removeprefix(f"s3://{bucket.name}/")
        sizes = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix).get("Contents", ())
        return sum(one["Size"] for one in sizes if ".ckpttool" not in one["Key"])
    return sum(map(len, contents(Path(place)).values())) if os.path.isdir(place) else 0


def main(kills: int, seed: int) -> int:
    """Kill so many copies; print what was seen."""
    with serve_apart() as endpoint, tempfile.TemporaryDirectory() as temporary:
        os.environ.update(environment(endpoint))
        bucket, random, seen = S3Bucket(client_of(endpoint)), Random(seed), Counter[str]()
        sources = list(prepared(Path(temporary), bucket))
        for number in range(kills):
            kind, source, expected, seconds, is_remote = sources[number % len(sources)]
            target = str(Path(temporary) / "out" / str(number)) if is_remote else bucket.url(f"out/{number}")
            process = started("copy", source, target)
            if random.random() < AT_ANY_TIME:
                time.sleep(random.uniform(0, 1) * seconds)
            else:
                while process.poll() is None and not has_begun(bucket, target):
                    time.sleep(0.005)
                time.sleep(random.uniform(0, 0.5) * seconds)
            process.kill()
            is_amid = process.wait() < 0 and has_begun(bucket, target)
            arrived = nbytes_arrived(bucket, target)
            told = next(wrong(source, target, expected, arrived), None)
            if told is not None:
                print(f"kill {number} ({kind}, {source}): {told}")
                return 1
            seen[f"{kind}, {'out of a store' if is_remote else 'into a store'}"] += 1
            seen["in the midst of it"] += is_amid
            shutil.rmtree(Path(temporary) / "out", ignore_errors=True)
    print(f"{kills} kills, seed {seed}; nothing was lost:")
    for name, count in sorted(seen.items()):
        print(f"{count:5}  {name}")
    return 0


def prepared(directory: Path, bucket: Bucket) -> Iterator[tuple[str, str, set[str], float, bool]]:
    """Yield directories of each kind, here and in the bucket, what is whole in them, and a copy's seconds."""
    for number, kind in enumerate(STORED_KINDS):
        make, _ = KINDS[kind]
        source = directory / str(number) / "run"
        source.mkdir(parents=True)
        make(source, NUMBERS)
        write_large(source / "large.npy")
        expected = whole(str(source))
        begun = time.monotonic()
        stored = bucket.url(f"in/{number}")
        status = started("copy", str(source), stored).wait()
        seconds = time.monotonic() - begun
        if status or whole(stored) != expected or not expected:
            sys.exit(f"{kind}: the copy ends with {status}: {sorted(whole(stored))}")
        yield kind, str(source), expected, seconds, False
        yield kind, stored, expected, seconds, True


def write_large(path: Path) -> None:
    import numpy as np

    np.save(path, np.arange(LARGE // 4, dtype="f4"))


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [100, 0][len(given) :])))

"""SIGKILL at random moments of prune and undo in a store, by hand, over the multi-file formats.

Usage: ``python -m tests.store_sigkills [KILLS [SEED]]``, in the project's directory. The store is a server in
this process, which outlives the commands. After each kill nothing that stays may have changed, a half that is
left may not be listed, and the next prune settles all; it ends with status 1 as soon as that isn't so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.support.commands import run_redirected
from tests.support.runs import KINDS
from tests.support.stores import S3Bucket, client_of, environment, serve

NUMBERS = range(1, 9)
OWN = ".ckpttool-"
PRUNE = ("prune", "--yes", "--series", "*", "--keep", "3")
COMMANDS: dict[str, tuple[str, ...]] = {
    "prune": PRUNE,
    "prune --trash": (*PRUNE, "--trash"),
    "undo": ("undo",),
    "undo of a version": ("undo",),
}
AT_ANY_TIME = 0.1
"""How many of the kills don't wait until the command has begun to change something."""

Objects = dict[str, bytes]


def objects(bucket: S3Bucket) -> Objects:
    """Return what lies in a bucket, as the server has it in its memory."""
    from moto.backends import get_backend

    keys = get_backend("s3")["123456789012"]["aws"].buckets[bucket.name].keys
    found: dict[str, Any] = {key: keys[key] for key in list(keys)}
    return {key: one.value for key, one in found.items() if one is not None and hasattr(one, "etag")}


def of_others(found: Objects) -> Objects:
    """Return what isn't ours."""
    return {key: data for key, data in found.items() if OWN not in key}


@dataclass(frozen=True)
class Way:
    """A command on a kind of directory: what lies there, what is listed of that, and what is left."""

    name: str
    command: str
    made: Objects
    listed: Sequence[tuple[str, int, int]]
    left: Objects
    seconds: float
    changing: float


def new_run(client: Any, made: Objects, command: str) -> S3Bucket:
    """Return a bucket with a run; for an undo, one that was pruned."""
    bucket = S3Bucket(client)
    if command == "undo of a version":
        bucket.keep_versions()
    for key, data in made.items():
        bucket.put(key, data)
    if command.startswith("undo"):
        _require_success(bucket, "prune" if command == "undo of a version" else "prune --trash")
    return bucket


def _arguments(bucket: S3Bucket, command: str) -> Sequence[str]:
    name, *more = COMMANDS[command]
    return name, bucket.url("runs"), *more


def _require_success(bucket: S3Bucket, command: str) -> None:
    done = run_redirected(*_arguments(bucket, command))
    if done.status:
        sys.exit(f"{command}: status {done.status}: {done.err}")


def _started(bucket: S3Bucket, command: str) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    arguments = [sys.executable, "-m", "ckpttool", *_arguments(bucket, command)]
    return subprocess.Popen(arguments, stdout=null, stderr=null)


def _until(process: subprocess.Popen[bytes], has_come: Callable[[], bool]) -> float:
    while process.poll() is None and not has_come():
        time.sleep(0.002)
    return time.monotonic()


def ways(client: Any, directory: Path) -> list[Way]:
    """Return all commands on all kinds, with how long each takes."""
    found = []
    for number, (kind, (make, _)) in enumerate(KINDS.items()):
        run = directory / str(number) / "runs"
        run.mkdir(parents=True)
        make(run, NUMBERS)
        files = {file.relative_to(run.parent).as_posix(): file for file in run.rglob("*")}
        made = {
            name: file.read_bytes()
            for name, file in files.items()
            if file.is_file() and not file.is_symlink()
        }
        listed = tuple(_listed(new_run(client, made, "prune")))
        for command in COMMANDS:
            bucket = new_run(client, made, command)
            before = objects(bucket).keys()
            begun = time.monotonic()
            process = _started(bucket, command)
            start = _until(process, lambda bucket=bucket, before=before: objects(bucket).keys() != before)
            if process.wait():
                sys.exit(f"{kind}: {command} ends with {process.returncode}")
            end = time.monotonic()
            left = of_others(objects(bucket))
            found.append(Way(f"{kind}: {command}", command, made, listed, left, end - begun, end - start))
    return found


def _listed(bucket: S3Bucket) -> Iterator[tuple[str, int, int]]:
    """Yield what is listed as sound, with how much of it there is."""
    done = run_redirected("list", bucket.url("runs"), "--json", "--series", "*")
    for one in json.loads(done.out)["checkpoints"]:
        if one["fault"] is None:
            yield one["path"].removeprefix(bucket.url()), one["files"], one["bytes"]


def killed(way: Way, client: Any, random: Random, seen: Counter[str]) -> str | None:
    """Kill a command at a random moment; return what is wrong after the next one, or None."""
    bucket = new_run(client, way.made, way.command)
    before = objects(bucket)
    process = _started(bucket, way.command)
    if random.random() < AT_ANY_TIME:
        time.sleep(random.uniform(0, way.seconds))
    else:
        _until(process, lambda: objects(bucket).keys() != before.keys())
        time.sleep(random.uniform(0, way.changing))
    process.kill()
    process.wait()
    now = objects(bucket)
    seen[way.name] += 1
    seen["in the midst of it"] += now.keys() != before.keys() and of_others(now) != way.left
    return wrong(way, bucket, now)


def wrong(way: Way, bucket: S3Bucket, now: Objects) -> str | None:
    """Return what is wrong after a kill, and after the next command; None if nothing is."""
    kept = {key: data for key, data in way.left.items() if not key.endswith("/checkpoint")}
    if way.command.startswith("prune") and (lost := [key for key in kept if now.get(key) != kept[key]]):
        return f"lost: {lost}"
    if halves := {*_listed(bucket)} - {*way.listed}:
        return f"listed as sound: {halves}"
    if way.command.startswith("undo"):
        _require_success(bucket, way.command)
    else:
        done = run_redirected(*_arguments(bucket, "prune"))
        if done.status:
            return f"the next prune ends with {done.status}: {done.err}"
    after = objects(bucket)
    expected = of_others(way.made) if way.command.startswith("undo") else way.left
    if of_others(after) != expected:
        return f"differs: {sorted({*of_others(after).items()} ^ {*expected.items()})[:4]!r:.300}"
    if journals := [key for key in after if "/.ckpttool-prune-" in key]:
        return f"left: {journals}"
    return None


def main(kills: int, seed: int) -> int:
    """Kill so many commands; print what was seen."""
    random = Random(seed)
    seen: Counter[str] = Counter()
    with serve() as endpoint, tempfile.TemporaryDirectory() as temporary:
        os.environ.update(environment(endpoint))
        client = client_of(endpoint)
        all_ways = ways(client, Path(temporary))
        for number in range(kills):
            way = all_ways[number % len(all_ways)]
            problem = killed(way, client, random, seen)
            if problem is not None:
                print(f"kill {number} ({way.name}): {problem}")
                return 1
    print(f"{kills} kills, seed {seed}; nothing was lost:")
    for name, count in sorted(seen.items()):
        print(f"{count:5}  {name}")
    return 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [300, 0][len(given) :])))

"""Mutate the fixtures, verify them, ask the commands, and report what no mutation may bring about.

``python -m tests.security.fuzz --seconds 3600 --seed 1``: reported are tracebacks, hangs, memory over the
bar, and pickles that are called safe though CPython's own unpickler calls what is not known from honest
ones. The mutation of a number is the same for the same seed; ``--only NUMBER`` judges that one alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np

from ckpttool import CheckpointError, Safety, UsageError, Verification, verify
from tests.security.mutations import mutated
from tests.support.commands import run_redirected

FIXTURES = Path(__file__).parents[2] / "fixtures" / "files"
PASSED_OVER = {"hostile", "series", "metrics", "hdf5-hostile", "keras-unsafe", "lfs", "twins"}
LARGEST = 300_000
SECONDS_OF_ONE, MIB_OF_ONE, MIB_OF_ADDRESSES = 3, 300, 4096
SECONDS_OF_WAITING = 20
"""After so long a mutation is given up; the bar is one of work, since others use the machine, too."""
SHARES = {"pytorch": 4, "pickle": 4, "pytorch-legacy": 2, "paddle": 2, "torch-dcp": 2, "keras": 2, "numpy": 2}
"""How much more often than others a room's files are changed: those that code can hide in."""
BATCH = 2_000
UNREADABLE = (BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, ValueError, zlib.error)


@dataclass(frozen=True)
class Seedling:
    """A fixture: the file that is changed, and the checkpoint that it is a part of."""

    file: Path
    checkpoint: Path


@dataclass
class Found:
    """What is reported: how often each kind of failure came, and the mutation that brought it first."""

    mutations: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, failure: str, example: str) -> None:
        self.failures[failure] += 1
        self.first.setdefault(failure, example)


def seedlings() -> list[Seedling]:
    """Return every small file of the fixtures that is a checkpoint or a part of one."""
    found = []
    for room in sorted(FIXTURES.iterdir()):
        if not room.is_dir() or room.name in PASSED_OVER:
            continue
        for entry in sorted(room.iterdir()):
            if entry.name.endswith(".expected.json"):
                continue
            files = (
                [entry] if entry.is_file() else sorted(path for path in entry.rglob("*") if path.is_file())
            )
            found += [Seedling(path, entry) for path in files if 0 < path.stat().st_size <= LARGEST]
    return found


def pickles_of(path: Path) -> list[bytes]:
    """Return the pickles of a file, an archive's among them, whatever their checksums."""
    found: list[bytes] = []
    with contextlib.suppress(*UNREADABLE):
        if not is_zipfile(path):
            data = path.read_bytes()
            return [data] if data[:1] == b"\x80" else []
    with contextlib.suppress(*UNREADABLE), ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as record:
                record._expected_crc = None  # type: ignore[attr-defined]
                data = record.read()
            if info.filename.endswith(".pkl"):
                found.append(data)
    return found


# What CPython would call --------------------------------------------------------------------------------


class Inert:
    """What an import or a call gives: it takes everything and does nothing but say that it was called."""

    def __init__(self, name: str, calls: set[str]) -> None:
        self.name, self.calls = name, calls
        self.__dict__["__new__"] = lambda cls, *args, **kwargs: cls(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Inert:
        self.calls.add(self.name)
        self.calls.update(arg.name for arg in args if isinstance(arg, Inert) and not arg.name.endswith("()"))
        if self.name in LOOKUPS and len(args) == 2 and isinstance(args[0], Inert):
            return Inert(f"{args[0].name}.{args[1]}", self.calls)
        return Inert(f"{self.name.removesuffix('()')}()", self.calls)

    def __setstate__(self, state: object) -> None:
        self.calls.add(self.name.removesuffix("()"))

    def append(self, item: object) -> None:
        pass

    extend = update = add = append

    def __setitem__(self, key: object, value: object) -> None:
        pass


LOOKUPS = ("__builtin__ getattr", "builtins getattr")
"""What gives what it finds a name that no opcode has: an enumeration's member, a class within another."""


class Witness(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """CPython's unpickler in Python, which imports nothing and notes what would be called."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self.calls: set[str] = set()
        self.imports: set[str] = set()

    def find_class(self, module: str, name: str) -> Inert:
        self.imports.add(f"{module} {name}")
        return Inert(f"{module} {name}", self.calls)

    def persistent_load(self, pid: object) -> Inert:
        return Inert("storage()", self.calls)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("an extension code")


def witnessed(data: bytes) -> Witness:
    """Return what saw a pickle being loaded until it ended or broke off."""
    witness = Witness(data)
    with contextlib.suppress(Exception):  # whatever a broken pickle raises: what it called before counts
        witness.load()
    return witness


def calls_of(data: bytes) -> set[str]:
    """Return the names that loading a pickle would call, or hand to a call."""
    return witnessed(data).calls


def calls_in(path: Path) -> set[str]:
    return {name for data in pickles_of(path) for name in calls_of(data)}


# One mutation -------------------------------------------------------------------------------------------


OF_ITS_CODE = "__torch__"
"""Begins the names that TorchScript looks up in the archive's own code, and nowhere else."""


class Fuzzer:
    """Makes and judges mutations by their numbers."""

    def __init__(self, seed: int, work: Path) -> None:
        self.seed, self.work = seed, work
        self.seedlings = seedlings()
        self.rooms: dict[str, list[Seedling]] = {}
        for one in self.seedlings:
            self.rooms.setdefault(one.checkpoint.parent.name, []).append(one)
        self.shares = [SHARES.get(room, 1) for room in self.rooms]
        self.pickles = [data for one in self.seedlings for data in pickles_of(one.file)]
        generators = (np.random.default_rng(0), np.random.RandomState(0))
        honest = (*self.pickles, *map(pickle.dumps, generators))
        seen = list(map(witnessed, honest))
        self.honest = {name for one in seen for name in one.imports | one.calls}

    def write(self, number: int) -> tuple[Seedling, Path, Path]:
        """Write a mutation; return its seed, the changed file, and the checkpoint."""
        random = Random(f"{self.seed}:{number}")
        (room,) = random.choices(list(self.rooms), self.shares)
        seed = random.choice(self.rooms[room])
        place = self.work / "mutation"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        target = place / seed.checkpoint.name
        if seed.checkpoint.is_dir():
            shutil.copytree(seed.checkpoint, target)
        else:
            shutil.copyfile(seed.checkpoint, target)
        file = target / seed.file.relative_to(seed.checkpoint) if target.is_dir() else target
        file.write_bytes(mutated(seed.file.read_bytes(), random, self.pickles, seed.file.name))
        return seed, file, target

    def judge(self, number: int) -> Iterator[str]:
        """Yield what a mutation brings about and should not.

        All of them are verified through the library; each 64th is given to the commands as well.
        """
        _, file, target = self.write(number)
        out = self.work / "converted.safetensors"
        commands: tuple[tuple[object, ...], ...] = (
            ("verify", "--json", target),
            ("inspect", "--json", target),
            ("diff", "--json", target, target),
            ("convert", "--force", "--json", target, out),
        )
        found: list[Verification] = []
        yield from attempt("ckpttool.verify", lambda: found.append(verify(target)))
        for command in commands if number % 64 == 0 else ():
            yield from attempt(str(command[0]), partial(run_redirected, *command))
        if found and found[0].safety is Safety.SAFE:
            for unknown in sorted(calls_in(file) - self.honest):
                if found[0].format != "torchscript" or not unknown.startswith(OF_ITS_CODE):
                    yield f"called safe, and CPython calls {unknown!r}"


def attempt(name: str, action: Callable[[], object]) -> Iterator[str]:
    """Do something; yield where it failed within itself, and that it took too much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        action()
    except TooLong:
        raise
    except (CheckpointError, UsageError):
        pass
    except BaseException as error:  # noqa: BLE001 (the fuzzer reports whatever comes out)
        yield f"{name}: {_where(error)}"
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 > MIB_OF_ONE:
        yield f"{name}: memory grew by more than {MIB_OF_ONE} MiB"


def _where(error: BaseException) -> str:
    """Name an error and the innermost line of ckpttool that raised it."""
    place, trace = "", error.__traceback__
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if "ckpttool" in name and "tests" not in name:
            place = f"{Path(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {place}"


# Many mutations -----------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A mutation took longer than the bar; no handler of the program may swallow it."""


def _too_long(signum: int, frame: object) -> None:
    raise TooLong


def fuzz(seed: int, *, count: int, seconds: float | None, work: Path, start: int = 0) -> Found:
    """Judge mutations in forked workers, until `count` or `seconds` are reached."""
    fuzzer, found = Fuzzer(seed, work), Found()
    number, deadline = start, math.inf if seconds is None else time.monotonic() + seconds
    while number < start + count and time.monotonic() < deadline:
        until = min(number + BATCH, start + count)
        number = _batch(fuzzer, number, until, deadline, found)
    return found


def _batch(fuzzer: Fuzzer, begin: int, end: int, deadline: float, found: Found) -> int:
    """Let a worker judge mutations; return the number of the first that it did not come to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _work(fuzzer, begin, end, deadline, writing)
        except BaseException:  # noqa: BLE001 (a forked worker must never go on as its parent)
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    at = begin
    with os.fdopen(reading) as answers:
        for line in answers:
            number, failures = json.loads(line)
            at = number + 1
            found.mutations += 1
            for failure in failures:
                found.add(failure, f"--seed {fuzzer.seed} --only {number}")
    _, status = os.waitpid(child, 0)
    if status:
        found.mutations += 1
        found.add(f"the worker died: {status}", f"--seed {fuzzer.seed} --only {at}")
        at += 1
    return at


def _work(fuzzer: Fuzzer, begin: int, end: int, deadline: float, writing: int) -> None:
    """Judge mutations in a process of bounded memory, and end."""
    gc.freeze()  # what was made before the fork stays shared
    limit = MIB_OF_ADDRESSES << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _too_long)
    os.environ["CKPTTOOL_DEBUG"] = "1"
    with os.fdopen(writing, "w", buffering=1) as answers:
        for number in range(begin, end):
            if time.monotonic() >= deadline:
                break
            failures: list[str] = []
            signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_WAITING)
            started = time.process_time()
            try:
                failures += fuzzer.judge(number)
                if time.process_time() - started > SECONDS_OF_ONE:
                    failures.append(f"more than {SECONDS_OF_ONE} s of work")
            except TooLong:
                failures.append(f"more than {SECONDS_OF_WAITING} s")
            except MemoryError:
                failures.append(f"more than {MIB_OF_ADDRESSES} MiB of addresses")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(json.dumps([number, failures]) + "\n")
    os._exit(0)


def report(found: Found, seconds: float) -> str:
    """Return what was found, most frequent first."""
    lines = [f"{found.mutations:,} mutations in {seconds:.0f} s, {sum(found.failures.values()):,} failures"]
    lines += [
        f"{count:6} {failure}  ({found.first[failure]})" for failure, count in found.failures.most_common()
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Fuzz, print a report, and fail where anything was found."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="stop after so many mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first mutation")
    parser.add_argument("--only", type=int, help="write and judge one mutation")
    parser.add_argument("--work", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        work = options.work or Path(directory)
        if options.only is not None:
            return _one(Fuzzer(options.seed, work), options.only)
        if options.seconds is None and options.count == sys.maxsize:
            options.seconds = 60.0
        begun = time.monotonic()
        found = fuzz(
            options.seed, count=options.count, seconds=options.seconds, work=work, start=options.start
        )
        print(report(found, time.monotonic() - begun))
        return int(bool(found.failures))


def _one(fuzzer: Fuzzer, number: int) -> int:
    seed, file, _ = fuzzer.write(number)
    print(f"{seed.file} -> {file}")
    failures: list[Any] = list(fuzzer.judge(number))
    print("\n".join(failures) or "nothing found")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

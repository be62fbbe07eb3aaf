"""Every command that changes a directory, on every kind of checkpoint, interrupted at every call.

Usage: ``python -m tests.kill_matrix [NAME …]`` plays all ways whose names contain one of these, at every
call, and prints how many there were. With ``--few``, which ``tests/test_kill_matrix.py`` calls, some thirty
ways are killed once, and a call fails in every other one.

A way is a command on a run, or on targets. It is killed, or a call fails: once, for want of room, of a right
or of a working disk, or from then on, as on a disk that is mounted read-only meanwhile. Then the next command
runs. Every checkpoint has to be whole in one place by then, what points at one has to name one that is there,
and nothing of ckpttool's own is left but the trash.

It forks for each, which only a program without threads may do; so it is a program of its own.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import pkgutil
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zlib import crc32

from tests.support.faults import hit_call, in_child, kill, wait_for_no_disk
from tests.support.outcomes import Change, Tree, change, dangling, stages, trashed, wrong
from tests.support.renamings import content
from tests.support.runs import FILES, KINDS, swapped

Command = tuple[str, ...]
Check = Callable[[Path], Iterator[str]]

NUMBERS = range(1, 5)
LASTING = "EROFS"
"""Every call fails from then on."""
FAULTS = ("kill", "ENOSPC", "EACCES", "EIO", LASTING)
NEVER_IMPORTED = ("predict", "testing")
"""Rooms of the package that import frameworks, or pytest."""


# What is interrupted --------------------------------------------------------------------------------

QUICK = ("--min-age", "0", "--yes", "--series", "*", "--verify", "quick")
PRUNE: Command = ("prune", "run", *QUICK, "--keep", "1")
TRASH: Command = (*PRUNE, "--trash")
EMPTY: Command = ("prune", "run", "--empty-trash", "--yes")
UNDO: Command = ("undo", "run")
SLIM: Command = ("prune", "run", *QUICK, "--full", "1")
COPY: Command = ("copy", "run", "backup")
WATCH: Command = ("watch", "run", "--config", "watch.toml", "--once")
SETTLE: Command = ("prune", "run", *QUICK, "--keep", "1000")


@dataclass(frozen=True)
class Way:
    """A command that is interrupted.

    Attributes:
        make: Makes what it works on, in a directory ``run``.
        commands: What is run to its end before.
        interrupted: The command, in the directory above.
        settle: What is run afterwards.
        is_all_or_nothing: Whether all of it has to be done, or nothing; else each checkpoint is for itself.
        slims: Whether checkpoints lose their training state, which may lie in the trash.
        copies: Whether what is removed has to be in ``backup``.
        is_copied: Whether all of it has to be in ``backup``.
    """

    make: Callable[[Path], None]
    interrupted: Command
    commands: Sequence[Command] = ()
    settle: Sequence[Command] = (SETTLE,)
    is_all_or_nothing: bool = False
    slims: bool = False
    copies: bool = False
    is_copied: bool = False


def ways() -> dict[str, Way]:
    """Return all ways, by what they do and to what."""
    found: dict[str, Way] = {}
    for kind, (make, field) in KINDS.items():
        made = partial(make, numbers=NUMBERS)
        found[f"prune: {kind}"] = Way(made, PRUNE)
        found[f"trash: {kind}"] = Way(made, TRASH)
        found[f"empty the trash: {kind}"] = Way(made, EMPTY, [TRASH], [EMPTY, SETTLE])
        found[f"undo the trash: {kind}"] = Way(made, UNDO, [TRASH])
        if field is not None:
            rename = ("rename", "run", "--yes", "--template", f"kept-{{{field}}}")
            found[f"rename: {kind}"] = Way(made, rename)
            found[f"undo the renaming: {kind}"] = Way(made, UNDO, [rename])
    exchange = ("rename", "run", "--yes", "--template", "model_{epoch}")
    found["exchange names: PyTorch"] = Way(swapped, exchange, is_all_or_nothing=True)
    found["undo the exchange: PyTorch"] = Way(swapped, UNDO, [exchange], is_all_or_nothing=True)
    return found | slimmings() | watches() | copies() | outputs() | notes() | texts()


def keras_files(run: Path) -> None:
    """One Keras model for each epoch, with its optimizer."""
    for number in NUMBERS:
        shutil.copy2(FILES / "keras" / "adam.weights.h5", run / f"model-{number}.weights.h5")


def step_directories(run: Path) -> None:
    """A directory for each save, with a file of weights and one of the optimizer."""
    for number in NUMBERS:
        place = run / f"step_{number}"
        place.mkdir()
        shutil.copy2(FILES / "safetensors" / "metadata.safetensors", place / "model.safetensors")
        shutil.copy2(FILES / "safetensors" / "trainer" / "checkpoint-4" / "optimizer.pt", place / "optim.pt")


def slimmings() -> dict[str, Way]:
    """Return what takes the training state out of files, and of directories that have files with it."""
    found = {
        "slim: Keras": Way(keras_files, SLIM, slims=True),
        "slim: step directories": Way(step_directories, SLIM, slims=True),
    }
    for kind in ("PyTorch", "Trainer"):
        made, trash = partial(KINDS[kind][0], numbers=NUMBERS), (*SLIM, "--trash")
        found[f"slim: {kind}"] = Way(made, SLIM, slims=True)
        found[f"slim into the trash: {kind}"] = Way(made, trash, slims=True)
        found[f"undo the slimming: {kind}"] = Way(made, UNDO, [trash], slims=True)
        mixed = (*SLIM, "--keep", "2", "--trash")
        found[f"slim and prune: {kind}"] = Way(made, mixed, slims=True)
    return found


CONFIG = """
[naming]
template = "kept-{{{field}}}"
[retention]
keep-last = 1
series = ["*"]
[watch]
copy-to = "backup"
"""


LIKE_OTHERS = ("generation_config.json", "rng_state.pth", "scheduler.pt", "training_args.bin")
"""Files of the Trainer's that are read, copied and moved by the same calls as its others."""


def watches() -> dict[str, Way]:
    """Return a pass of a watch that renames, copies and prunes."""

    def made(kind: str, run: Path) -> None:
        make, field = KINDS[kind]
        make(run, NUMBERS[:3])  # one goes, the best stays, and the newest
        for name in LIKE_OTHERS:
            for path in run.glob(f"*/{name}"):
                path.unlink()
        (run.parent / "watch.toml").write_text(CONFIG.format(field=field))

    return {
        f"watch: {kind}": Way(partial(made, kind), WATCH, settle=[WATCH, WATCH, SETTLE], copies=True)
        for kind in ("PyTorch", "Trainer")
    }


def copies() -> dict[str, Way]:
    """Return copies to a directory."""
    found = {}
    for kind, count in {"PyTorch": 3, "TensorFlow": 3, "Trainer": 2, "Fluid": 2}.items():
        made = partial(KINDS[kind][0], numbers=NUMBERS[:count])  # of each file a copy does the same
        found[f"copy: {kind}"] = Way(made, COPY, settle=[COPY], is_copied=True)
    found["copy: step directories"] = Way(step_directories, COPY, settle=[COPY], is_copied=True)
    return found


def texts() -> dict[str, Way]:
    """Return what writes one text about checkpoints."""
    found = {}
    for command in (
        ("card", "run/model_epoch_1.pth", "-o", "run/card.md"),
        ("report", "run", "-o", "run/report.html"),
    ):
        again = (*command, "--force") if command[0] == "card" else command
        found[f"{command[0]}: PyTorch"] = Way(
            partial(KINDS["PyTorch"][0], numbers=NUMBERS), command, settle=[again]
        )
    return found


TARGETS = {
    "file": ("out.pth", "pytorch"),
    "safetensors": ("out.safetensors", "safetensors"),
    "zip of arrays": ("out.npz", "numpy"),
    "directory": ("out", "torch-dcp"),
    "SavedModel": ("out", "savedmodel"),
    "serial": ("out", "fluid"),
    "prefix": ("out", "tensorflow"),
    "HDF5": ("out.hdf5", "hdf5"),
    "shards": ("out", "safetensors"),
}
CLEAR: Command = ("convert", "run/other.safetensors", "run/settled.pth")


def outputs() -> dict[str, Way]:
    """Return conversions and merges onto targets of every shape, new and existing ones."""
    found = {}
    for name, (target, kind) in TARGETS.items():
        end = ("--shard-size", "1KB") if name == "shards" else ()
        new = ("convert", "run/source.safetensors", f"run/{target}", "--to", kind, *end)
        old = ("convert", "run/other.safetensors", f"run/{target}", "--to", kind, *end)
        over = (*new, "--force")
        found[f"convert to a new target: {name}"] = Way(sources, new, settle=[CLEAR], is_all_or_nothing=True)
        found[f"convert onto a target: {name}"] = Way(sources, over, [old], [CLEAR], is_all_or_nothing=True)
    old = ("convert", "run/other.safetensors", "run/out", "--to", "torch-dcp")
    for name, kind in {"directory": "torch-dcp", "prefix": "tensorflow", "file": "pytorch"}.items():
        merge = ("merge", "run/parts", "run/merged", "--to", kind)
        found[f"merge to a new target: {name}"] = Way(sources, merge, settle=[CLEAR], is_all_or_nothing=True)
        old = ("convert", "run/other.safetensors", "run/merged", "--to", kind)
        found[f"merge onto a target: {name}"] = Way(
            sources, (*merge, "--force"), [old], [CLEAR], is_all_or_nothing=True
        )
    return found


def sources(run: Path) -> None:
    """What is converted, and merged."""
    shutil.copy2(FILES / "safetensors" / "metadata.safetensors", run / "source.safetensors")
    shutil.copy2(
        FILES / "safetensors" / "sharded" / "model-00001-of-00004.safetensors", run / "other.safetensors"
    )
    shutil.copytree(FILES / "safetensors" / "sharded", run / "parts")


NOTED = {
    "PyTorch": "model_epoch_1.pth",
    "safetensors, sharded": "set-1.safetensors.index.json",
    "TensorFlow": "ckpt-1",
    "SavedModel": "model-1",
    "DCP": "model-1",
    "Trainer": "checkpoint-1",
    "Fluid": "checkpoint_1",
    "Accelerate": "checkpoint_1",
    "Keras, sharded": "net-1.weights.json",
}
"""One checkpoint of each kind that is pinned, or gets a manifest."""


def notes() -> dict[str, Way]:
    """Return what writes manifests, and pins."""
    found = {}
    for kind, name in NOTED.items():
        made = partial(KINDS[kind][0], numbers=NUMBERS)
        path = f"run/{name}"
        write = Way(
            made,
            ("verify", path, "--write-manifest"),
            settle=[("verify", path, "--write-manifest", "--force")],
        )
        pin = Way(made, ("pin", path), settle=[("pin", path), SETTLE])
        unpin = Way(made, ("unpin", path), [("pin", path)], [("unpin", path), SETTLE])
        for told, way in {"write a manifest": write, "pin": pin, "unpin": unpin}.items():
            found[f"{told}: {kind}"] = replace(way, is_all_or_nothing=True)
    return found


# How it is interrupted ------------------------------------------------------------------------------


class Stage:
    """A directory in which ways are played."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.said = place / "said"
        self.counted = place / "counted"

    def run(self, above: Path, command: Command) -> int:
        """Run a command in this process, and return its exit status; ``said`` has what it printed."""
        from ckpttool.cli import run

        os.chdir(above)
        with self.said.open("w") as said, redirect_stdout(said), redirect_stderr(said):
            return run(list(command))

    def require_run(self, above: Path, command: Command) -> None:
        """Run a command that must succeed."""
        status = self.run(above, command)
        assert status == 0, f"{' '.join(command)} ends with {status}: {self.said.read_text()}"

    def interrupt(self, above: Path, command: Command, fault: str, number: int) -> str | None:
        """Run a command that is interrupted before its call of a number; return what is wrong, or None."""

        def interrupted() -> None:
            made = hit_call(number, fault_of(fault), lasts=fault == LASTING)
            status = self.run(above, command)
            self.counted.write_text(f"{status} {made()}")

        ended = in_child(interrupted)
        if fault == "kill":
            return None if ended == -signal.SIGKILL else f"it ends with {ended}"
        if ended or "internal error" in self.said.read_text():
            return f"it ends with {ended}: {self.said.read_text()}"
        return None

    def calls(self, above: Path, command: Command) -> int:
        """Run a command to its end; return how many calls there are in it."""

        def whole() -> None:
            made = hit_call(-1, kill)
            status = self.run(above, command)
            self.counted.write_text(f"{status} {made()}")

        assert in_child(whole) == 0
        status, made = map(int, self.counted.read_text().split())
        assert status == 0, f"{' '.join(command)} ends with {status}: {self.said.read_text()}"
        return made

    def play(self, name: str, way: Way, faults: Sequence[str] | None = None) -> int:
        """Play a way with every fault at all its calls, or with some at one call each; return how often."""
        shutil.rmtree(self.place / "way", ignore_errors=True)
        made = self.place / "way" / "made"
        (made / "run").mkdir(parents=True)
        way.make(made / "run")
        before, after = self.prepared(way, made, "before"), self.prepared(way, made, "after")
        calls = self.calls(after, way.interrupted)
        assert calls > 1, name
        changed = change(name, way.interrupted, made / "run", before / "run", after / "run")
        checks = (
            (way.slims, half_slim),
            (way.copies, half_copied),
            (way.is_copied, all_copied),
            (way.is_all_or_nothing, half_done),
        )
        check = partial(next((one for asked, one in checks if asked), wrong), changed)
        played = 0
        for fault in faults or FAULTS:
            one = crc32(f"{name} {fault}".encode()) % calls + 1
            for number in [one] if faults else range(1, calls + 1):
                self.once(way, made, fault, number, check)
                played += 1
        return played

    def once(
        self, way: Way, made: Path, fault: str, number: int, check: Callable[[Path], Iterator[str]]
    ) -> None:
        above = self.prepared(way, made, "interrupted")
        problem = self.interrupt(above, way.interrupted, fault, number)
        assert problem is None, f"{fault} at call {number}: {problem}"
        said = self.said.read_text()
        problems = []
        for command in way.settle:
            status = self.run(above, command)
            said += f"\nthen\n{self.said.read_text()}"
            problems += [f"{command[0]} ends with {status}"] if status else []
        problems += check(above / "run")
        # What was copied and then removed is copied no more: what it left there stays, if the user was told.
        left = (one for one in litter(above) if not (way.copies and f"{one} can't be removed" in said))
        problems += [f"{one} was left behind" for one in left]
        if problems:
            there = "\n".join(sorted(str(path.relative_to(above)) for path in above.rglob("*")))
            raise AssertionError(f"{fault} at call {number}: {problems}\n{said}\n{there}")

    def prepared(self, way: Way, made: Path, name: str) -> Path:
        """Return a copy of what a way works on, in which all was run that is run before."""
        there = self.place / "way" / name
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(made, there, symlinks=True)
        for command in way.commands:
            self.require_run(there, command)
        return there


def fault_of(name: str) -> Callable[[], object]:
    """Return what happens at a call."""
    if name == "kill":
        return kill
    code = getattr(errno, name)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def half_done(changed: Change, run: Path) -> Iterator[str]:
    """Yield what is wrong where all was to be done, or nothing."""
    before, after = map(timeless, changed.places[1:3])
    now = timeless({name: digest for name, digest in content(run).items() if "settled" not in name})
    if now not in (before, after):
        names = [sorted(dict(now.items() ^ tree.items())) for tree in (before, after)]
        yield f"not what was there (but for {names[0]}), nor what was to be (but for {names[1]})"


def half_slim(changed: Change, run: Path) -> Iterator[str]:
    """Yield which checkpoints are neither whole nor slim, or lost a byte that was to go to the trash."""
    now, (before, after) = content(run), changed.places[1:3]
    names = {name.split("/")[0] for name in before | after | now}
    for name in sorted(names):
        states = [{k: v for k, v in tree.items() if k.split("/")[0] == name} for tree in (now, before, after)]
        if states[0] not in states[1:]:
            yield f"{name} is neither what it was nor what it was to be: {sorted(states[0])}"
    if changed.places[3] or changed.places[4]:
        whole = {*changed.places[0].values()}
        there = {*now.values(), *trashed(run).values()}
        yield from (f"{digest} is lost" for digest in whole - there)
    yield from (f"{name} leads nowhere" for name in dangling(run))
    yield from (f"{name} was left behind" for name in stages(run))


def half_copied(changed: Change, run: Path) -> Iterator[str]:
    """Yield what is wrong in a run, and which of its bytes are neither there nor in the copy."""
    yield from wrong(changed, run)
    there = {*content(run).values(), *content(run.parent / "backup").values()}
    checkpoints = {
        name: digest for name, digest in changed.places[0].items() if re.search(r"\d.*(?<!\.json)$", name)
    }
    yield from (f"{name} is lost" for name, digest in checkpoints.items() if digest not in there)


def all_copied(changed: Change, run: Path) -> Iterator[str]:
    """Yield which file of a checkpoint isn't in the copy, or another one is."""
    there = content(run.parent / "backup")
    for name, digest in changed.places[0].items():
        if re.search(r"\d", name) and there.pop(name, None) != digest:
            yield f"{name} isn't copied"
    yield from (f"{name} is in the copy alone" for name in there)


def timeless(tree: Tree) -> Tree:
    """Return a tree without what files hold that say when they were written."""
    return {name: "" if name.endswith("/_SUCCESS") else digest for name, digest in tree.items()}


def litter(above: Path) -> list[str]:
    """Return what is ckpttool's own, but for the trash, pins, and the record of a watch."""
    names = (str(path.relative_to(above)) for path in above.rglob(".ckpttool*"))
    return [name for name in names if not re.search(r"trash|\.toml|watch\.json", name)]


# The program ----------------------------------------------------------------------------------------


def prepare() -> None:
    """Import all that commands do, once for all children; let nobody wait."""
    import ckpttool

    for module in pkgutil.walk_packages(ckpttool.__path__, "ckpttool."):
        is_program = module.name.endswith("__main__")
        if module.name.split(".")[1] not in NEVER_IMPORTED and not is_program:
            importlib.import_module(module.name)
    from ckpttool.storage import directories

    directories.RETRY_SECONDS = 0
    select.select = lambda *_: ([], [], [])  # a watch looks twice
    strftime = time.strftime
    time.strftime = lambda text, *_: strftime(text, time.gmtime(0))  # a page says when it was made
    wait_for_no_disk()
    gc.disable()  # to look for garbage copies the pages that a child shares


def few() -> list[str]:
    """Return the names of some ways, among which each command and each layout is."""
    chosen: list[str] = []
    seen: set[str] = set()
    for most_seen in (0, 1):
        for name in ways():
            parts = set(name.split(": "))
            if len(parts & seen) <= most_seen:
                chosen.append(name)
                seen |= parts
    return chosen


def few_faults(number: int) -> list[str]:
    """Return how one of ``few`` is interrupted: all are killed, and a call fails in every other one."""
    return ["kill"] if number % 2 else ["kill", FAULTS[1 + number // 2 % (len(FAULTS) - 1)]]


def main(names: Sequence[str]) -> int:
    """Play all ways whose names contain one of some at every call, or few of them; return the exit status."""
    status = 0
    is_brief = list(names) == ["--few"]
    known = ways()
    with tempfile.TemporaryDirectory() as place:
        theatre = Stage(Path(place))
        for number, name in enumerate(few() if is_brief else known):
            if is_brief or not names or any(one in name for one in names):
                faults = few_faults(number) if is_brief else None
                try:
                    print(f"{theatre.play(name, known[name], faults):6}  {name}", flush=True)
                except AssertionError as failure:
                    print(f"{name}: {failure}", flush=True)
                    status = 1
        os.chdir("/")
    return status


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))

"""SIGKILL at random moments of prune, rename and undo, by hand, over the multi-file formats.

Usage: ``python -m tests.sigkills [KILLS [SEED]]``, in the project's directory. After each kill the next
command runs, a prune that keeps everything; it ends with status 1 as soon as a checkpoint is then not whole
in exactly one place, or something points at what is not there.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.series.renamings import content

FILES = Path(__file__).parents[1] / "fixtures" / "files"
NUMBERS = range(1, 9)
KEPT = 3
POINTERS = {"checkpoint": r'paths?: "(.*)"', ".ckpttool.toml": r'"(.*)"', "latest": r"(.+)"}
"""Files that name checkpoints, and how."""
AT_ANY_TIME = 0.2
"""How many of the kills don't wait until the command has begun to change something."""

Tree = dict[str, str]


# What is in the directory ---------------------------------------------------------------------------


def sharded(run: Path, source: str = "safetensors/sharded", stem: str = "model") -> None:
    """Shards behind an index that names them, and a symlink to one set's index."""
    for number in NUMBERS:
        for file in (FILES / source).iterdir():
            name = file.name.replace(stem, f"set-{number}")
            if file.name.endswith(".index.json"):
                told = file.read_text().replace(f'"{stem}-', f'"set-{number}-')
                (run / name).write_text(told)
            elif file.name.startswith(stem):
                shutil.copy2(file, run / name)
    (index,) = run.glob("set-2.*.index.json")
    (run / "best").symlink_to(index.name)


def sharded_bin(run: Path) -> None:
    """The same as pickles, as transformers wrote them before."""
    sharded(run, "pytorch/pytorch-sharded", "pytorch_model")


def prefixes(run: Path) -> None:
    """A tf.train.CheckpointManager's own directory, with its state file."""
    shutil.copytree(FILES / "tensorflow" / "manager", run, dirs_exist_ok=True)


def sharded_keras(run: Path) -> None:
    """Weights that Keras cut into shards."""
    for number in NUMBERS:
        for file in (FILES / "keras" / "sharded").iterdir():
            target = run / file.name.replace("model", f"net-{number}")
            if file.suffix == ".json":
                target.write_text(file.read_text().replace("model_0", f"net-{number}_0"))
            else:
                shutil.copy2(file, target)


def paddle(run: Path) -> None:
    """Paddle's static models: a program, its parameters and its optimizer."""
    for number in NUMBERS:
        for file in (FILES / "paddle").glob("static.pd*"):
            if file.suffix != ".json":
                shutil.copy2(file, run / f"net-{number}{file.suffix}")


def old_prefixes(run: Path) -> None:
    """What TensorFlow 1 wrote in shards, with its state file."""
    for number in NUMBERS:
        for file in (FILES / "tensorflow" / "v1-sharded").glob("model.ckpt-7*"):
            shutil.copy2(file, run / file.name.replace("ckpt-7", f"ckpt-{number}"))
    named = [f'"model.ckpt-{number}-?????-of-00003"\n' for number in NUMBERS]
    lines = [f"all_model_checkpoint_paths: {one}" for one in named]
    (run / "checkpoint").write_text("".join([f"model_checkpoint_path: {named[-1]}", *lines]))


def accelerate(run: Path) -> None:
    """What Accelerate saved where it names checkpoints itself."""
    for number in NUMBERS:
        place = run / f"checkpoint_{number}"
        place.mkdir()
        shutil.copy2(FILES / "safetensors" / "metadata.safetensors", place / "model.safetensors")
        shutil.copy2(FILES / "pytorch" / "bare_state_dict.pth", place / "optimizer.bin")
        (place / "random_states_0.pkl").write_bytes(pickle.dumps({"step": number}))


def directories(source: str, name: str) -> Callable[[Path], None]:
    """Checkpoints that are directories, a symlink to one, and a pinned one."""

    def make(run: Path) -> None:
        for number in NUMBERS:
            shutil.copytree(FILES / source, run / name.format(number))
        (run / "best").symlink_to(name.format(2))
        (run / ".ckpttool.toml").write_text(f'pinned = ["{name.format(3)}"]\n')

    return make


def trainer(run: Path) -> None:
    """A transformers Trainer's run, of which each state names the best."""
    for number in NUMBERS:
        place = run / f"checkpoint-{number}"
        shutil.copytree(FILES / "safetensors" / "trainer" / "checkpoint-4", place)
        state = json.loads((place / "trainer_state.json").read_text())
        state |= {"global_step": number, "best_model_checkpoint": "run/checkpoint-2"}
        (place / "trainer_state.json").write_text(json.dumps(state))


def deepspeed(run: Path) -> None:
    """A DeepSpeed run's steps, and the file that names the latest."""
    for number in NUMBERS:
        shutil.copytree(FILES / "deepspeed" / "zero-2" / "global_step2", run / f"global_step{number}")
    (run / "latest").write_text(f"global_step{NUMBERS[-1]}")


def serials(run: Path) -> None:
    """A Fluid root."""
    shutil.copytree(FILES / "fluid" / "root", run, dirs_exist_ok=True)


KINDS: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "safetensors, sharded": (sharded, "number"),
    "PyTorch, sharded": (sharded_bin, "number"),
    "TensorFlow": (prefixes, "number"),
    "TensorFlow 1": (old_prefixes, "number"),
    "Keras, sharded": (sharded_keras, "number"),
    "Paddle": (paddle, "number"),
    "SavedModel": (directories("savedmodel/module", "model-{}"), "number"),
    "DCP": (directories("torch-dcp/two-ranks", "model-{}"), "number"),
    "DCP in safetensors": (directories("torch-dcp/in-safetensors", "model-{}"), "number"),
    "Accelerate": (accelerate, None),
    "Trainer": (trainer, "step"),
    "DeepSpeed": (deepspeed, None),
    "Fluid": (serials, None),
}
"""What makes a directory, and the field that tells its checkpoints apart under new names.

Paddle and Accelerate find theirs by names alone, which are not changed; DeepSpeed's copies all say one step.
"""

PRUNE = ("prune", "--min-age", "0", "--yes", "--series", "*", "--keep")
COMMANDS = {
    "prune": (*PRUNE, str(KEPT)),
    "prune --trash": (*PRUNE, str(KEPT), "--trash"),
    "rename": ("rename", "--yes", "--template"),
    "undo": ("undo",),
}
UNDONE = ("prune --trash", "rename")
NEXT = (*PRUNE, "1000")


def ckpttool(run: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in the directory above."""
    return subprocess.run(
        _command(run, arguments), cwd=run.parent, capture_output=True, text=True, check=False
    )


def _command(run: Path, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ckpttool", arguments[0], run.name, *arguments[1:]]


# What comes of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A command on a kind of directory: what is there before, and after when nobody kills it.

    Attributes:
        places: What lies there as it was made, before and after, and in the trash before and after.
        going: The checkpoints that it removes for good.
        seconds, changing: How long it takes, and how long of that it changes something.
    """

    name: str
    arguments: Sequence[str]
    before: Path
    places: Sequence[Tree]
    going: frozenset[int]
    seconds: float
    changing: float


def ways(directory: Path) -> Iterator[Way]:
    """Yield all commands on all kinds, with how long each takes."""
    for number, (kind, (make, field)) in enumerate(KINDS.items()):
        made = directory / str(number) / "made" / "run"
        made.mkdir(parents=True)
        make(made)
        commands = {**COMMANDS, "rename": (*COMMANDS["rename"], f"kept-{{{field}}}")}
        for command in commands:
            for prepared in UNDONE if command == "undo" else (None,):
                if field is None and "rename" in (command, prepared):
                    continue
                told = f"{command} {prepared}" if prepared else command
                before = _copied(made, directory / str(number) / told)
                if prepared is not None:
                    _require_success(ckpttool(before, commands[prepared]))
                yield _way(f"{kind}: {told}", commands[command], before, made)


def _require_success(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        sys.exit(f"{' '.join(done.args)}: status {done.returncode}: {done.stderr}")


def _way(name: str, arguments: Sequence[str], before: Path, made: Path) -> Way:
    after = _copied(before, before.parent.parent / "after")
    begun = time.monotonic()
    process = _started(after, arguments)
    start = _until(process, lambda: bool(stages(after)))
    changing = _until(process, lambda: not stages(after)) - start
    if process.wait():
        _require_success(ckpttool(_copied(before, after.parent), arguments))
    seconds = time.monotonic() - begun
    if content(after) == content(before):
        sys.exit(f"{name}: it changes nothing, so that no kill can do harm")
    places = [content(made), content(before), content(after), trashed(before), trashed(after)]
    left = {*_units(content(after)), *_units(trashed(after))}
    return Way(name, arguments, before, places, frozenset(_units(content(before))) - left, seconds, changing)


def _started(run: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(_command(run, arguments), cwd=run.parent, stdout=null, stderr=null)


def _copied(run: Path, place: Path) -> Path:
    """Return a copy of a run with all that is beside it, in a directory of its own."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run.parent, place, symlinks=True)
    return place / "run"


def _until(process: subprocess.Popen[bytes], has_come: Callable[[], bool]) -> float:
    """Return when something has come, or a command has ended."""
    while process.poll() is None and not has_come():
        time.sleep(0.0005)
    return time.monotonic()


def stages(run: Path) -> list[str]:
    """Return the names of the directories in which commands are at work."""
    names = [name for place in (run, run.parent) for name in os.listdir(place)]
    return [name for name in names if re.match(r"\.ckpttool-[0-9a-f]{8}", name)]


def trashed(run: Path) -> Tree:
    """Return what lies in the trash, by the names that it had."""
    found: Tree = {}
    for trash in (*run.glob(".ckpttool-trash*"), *run.parent.glob(".ckpttool-trash*")):
        for place in trash.glob("*/[0-9]*"):
            found |= content(place)
    return found


def _units(tree: Tree) -> dict[int, Tree]:
    """Return the files of each checkpoint, by its number."""
    units: dict[int, Tree] = defaultdict(dict)
    for name, digest in tree.items():
        number = re.search(r"\d+", name.split("/")[0])
        if number is not None:
            units[int(number[0])][name] = digest
    return units


def _beside(tree: Tree) -> Tree:
    """Return what belongs to no checkpoint: what points at some."""
    return {name: digest for name, digest in tree.items() if not re.search(r"\d", name.split("/")[0])}


def killed(way: Way, place: Path, random: Random, seen: Counter[str]) -> str | None:
    """Kill a command at a random moment; return what is wrong after the next one, or None."""
    run = _copied(way.before, place)
    process = _started(run, way.arguments)
    if random.random() < AT_ANY_TIME:
        time.sleep(random.uniform(0, way.seconds))
    else:
        _until(process, lambda: bool(stages(run)))
        time.sleep(random.uniform(0, way.changing))
    process.kill()
    process.wait()
    done = ckpttool(run, NEXT)
    seen[way.name] += 1
    seen["in the midst of it"] += "interrupted" in done.stderr
    if done.returncode:
        return f"the next command ends with {done.returncode}: {done.stderr}"
    return next(wrong(way, run), None)


def wrong(way: Way, run: Path) -> Iterator[str]:
    """Yield what is wrong in a directory once the next command has run."""
    now = content(run)
    here, away = _units(now), _units(trashed(run))
    known: dict[int, list[Tree]] = defaultdict(list)
    for place in way.places:
        for number, files in _units(place).items():
            known[number].append(files)
    for number, trees in known.items():
        found = [tree[number] for tree in (here, away) if number in tree]
        if not found and number not in way.going:
            yield f"checkpoint {number} is gone"
        elif len(found) > 1:
            yield f"checkpoint {number} is in two places: {found}"
        elif found and found[0] not in trees:
            yield f"checkpoint {number} is not whole, or has other bytes: {sorted(found[0])}"
    before, after = _beside(way.places[1]), _beside(way.places[2])
    for name in before.keys() | after.keys():
        if _beside(now).get(name) not in (before.get(name), after.get(name)):
            yield f"{name} says neither what it said nor what it was to say"
    yield from (f"{name} leads nowhere" for name in dangling(run))
    yield from (f"{name} was left behind" for name in stages(run))


def dangling(run: Path) -> Iterator[str]:
    """Yield what points at a checkpoint that isn't there."""
    for path in run.rglob("*"):
        if path.is_symlink() and not path.exists():
            yield path.name
        elif path.name == "trainer_state.json" and ".ckpttool" not in str(path.relative_to(run)):
            if not (run.parent / json.loads(path.read_text())["best_model_checkpoint"]).is_dir():
                yield str(path)
        elif path.name.endswith(".index.json") and ".ckpttool" not in str(path.relative_to(run)):
            shards = set(json.loads(path.read_text())["weight_map"].values())
            yield from (f"{path.name}: {name}" for name in shards if not (path.parent / name).is_file())
    for name, pattern in POINTERS.items():
        for named in re.findall(pattern, (run / name).read_text()) if (run / name).is_file() else ():
            if not any(any(run.glob(named + ending)) for ending in ("", ".index")):
                yield f"{name}: {named}"


def main(kills: int, seed: int) -> int:
    """Kill so many commands; print what was seen."""
    random = Random(seed)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        all_ways = list(ways(directory))
        for number in range(kills):
            way = all_ways[number % len(all_ways)]
            told = killed(way, directory / "killed", random, seen)
            if told is not None:
                print(f"kill {number} ({way.name}): {told}")
                return 1
    print(f"{kills} kills, seed {seed}; nothing was lost:")
    for name, count in sorted(seen.items()):
        print(f"{count:5}  {name}")
    return 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [500, 0][len(given) :])))

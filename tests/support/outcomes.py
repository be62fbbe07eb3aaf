"""What a command that was interrupted has made of a run: nothing is lost, twice there, or half."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.renamings import content

POINTERS = {"checkpoint": r'paths?: "(.*)"', ".ckpttool-pins.toml": r'"(.*)"', "latest": r"(.+)"}
"""Files that name checkpoints, and how."""

Tree = dict[str, str]


@dataclass(frozen=True)
class Change:
    """A command on a run: what is there before, and after when nobody interrupts it.

    Attributes:
        before: The run, before.
        places: What lies there as it was made, before and after, and in the trash before and after.
        going: The checkpoints that it removes for good.
    """

    name: str
    arguments: Sequence[str]
    before: Path
    places: Sequence[Tree]
    going: frozenset[int]


def change(name: str, arguments: Sequence[str], made: Path, before: Path, after: Path) -> Change:
    """Return what a command changes, from a run as it was made, and before and after the command."""
    places = [content(made), content(before), content(after), trashed(before), trashed(after)]
    there = _units(content(before)).keys() | _units(trashed(before)).keys()
    left = _units(content(after)).keys() | _units(trashed(after)).keys()
    return Change(name, arguments, before, places, frozenset(there - left))


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


def _names_exactly(state: Path, numbers: Collection[int]) -> bool:
    """Tell whether a state file of TensorFlow names the checkpoints of some numbers, and no others."""
    paths = re.findall(r'all_model_checkpoint_paths: "\D*(\d+)', state.read_text())
    return bool(paths) and {int(one) for one in paths} == {*numbers}


def wrong(change: Change, run: Path) -> Iterator[str]:
    """Yield what is wrong in a directory once the next command has run."""
    now = content(run)
    here, away = _units(now), _units(trashed(run))
    known: dict[int, list[Tree]] = defaultdict(list)
    for place in change.places:
        for number, files in _units(place).items():
            known[number].append(files)
    for number, trees in known.items():
        found = [tree[number] for tree in (here, away) if number in tree]
        if not found and number not in change.going:
            yield f"checkpoint {number} is gone"
        elif len(found) > 1:
            yield f"checkpoint {number} is in two places: {found}"
        elif found and found[0] not in trees:
            yield f"checkpoint {number} is not whole, or has other bytes: {sorted(found[0])}"
    before, after = _beside(change.places[1]), _beside(change.places[2])
    for name in before.keys() | after.keys():
        is_known = _beside(now).get(name) in (before.get(name), after.get(name))
        if not (is_known or _names_exactly(run / name, here.keys())):
            yield f"{name} says neither what it said nor what it was to say, nor what is there"
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

"""Moves and removals that are interrupted at a call that changes the disk, and what is to be there then."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpttool import undo
from ckpttool.transaction.journal import Location, Move, OperationList, Rewrite
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.state_dir import state_dir_of
from tests.support.changes import recover
from tests.support.faults import dies_at, hit_call, is_hit_at
from tests.support.transactions import (
    IDENTITY,
    hidden_names,
    make_moves,
    move,
    moves,
    put_in_trash,
    removal_of,
    remove,
)

FLUID = Path(__file__).parents[2] / "fixtures" / "files" / "fluid" / "root" / "checkpoint_4" / "__model__"
Units = list[list[str]]
Tree = dict[str, bytes | str]


# What is moved --------------------------------------------------------------------------------------


def one_file(directory: Path) -> Units:
    """Two checkpoints of one file each, and one that stays."""
    for number in (1, 2, 3):
        (directory / f"model_{number}.pt").write_bytes(b"weights %d" % number)
    return [["model_1.pt"], ["model_2.pt"]]


def prefixes(directory: Path) -> Units:
    """Two TensorFlow checkpoints of two shards each, listed in a state file with timestamps."""
    lines = ['model_checkpoint_path: "ckpt-3"\n']
    for number in (1, 2, 3):
        for end in ("index", "data-00000-of-00002", "data-00001-of-00002"):
            (directory / f"ckpt-{number}.{end}").write_bytes(b"%d %s" % (number, end.encode()))
        lines.append(f'all_model_checkpoint_paths: "ckpt-{number}"\n')
    lines += [f"all_model_checkpoint_timestamps: {number}.5\n" for number in (1, 2, 3)]
    (directory / "checkpoint").write_text("".join(lines))
    ends = ("index", "data-00000-of-00002", "data-00001-of-00002")
    return [[f"ckpt-{number}.{end}" for end in ends] for number in (1, 2)]


def sharded(directory: Path, count: int = 2) -> Units:
    """Sharded sets behind an index that names the shards, with a manifest beside."""
    units = []
    for number in range(1, count + 1):
        names = [f"set{number}.safetensors.index.json", *(f"set{number}-{part}.safetensors" for part in "12")]
        (directory / names[0]).write_text(f'{{"weight_map": {{"a": "{names[1]}", "b": "{names[2]}"}}}}')
        for name in names[1:]:
            (directory / name).write_bytes(name.encode())
        names.append(names[0] + ".sha256")
        (directory / names[-1]).write_text("digest")
        units.append(names)
    return units


def exchanged(directory: Path) -> Units:
    """Three sharded sets, a note that names one of them, and a symlink into another."""
    (directory / "latest").write_text("set1.safetensors.index.json\n")
    (directory / "best").symlink_to("set2-1.safetensors")
    return sharded(directory, 3)


def directories(directory: Path) -> Units:
    """Two checkpoints that are directories, one with a manifest beside, and a symlink that leads to one."""
    for number in (1, 2, 3):
        place = directory / f"checkpoint-{number}" / "rank" / "0"
        place.mkdir(parents=True)
        (place / "state.bin").write_bytes(b"%d" % number)
        (place.parent.parent / "trainer_state.json").write_text(f'{{"best": "checkpoint-{number}"}}\n')
    (directory / "checkpoint-2.sha256").write_text("digest")
    (directory / "best").symlink_to("checkpoint-2")
    return [["checkpoint-1"], ["checkpoint-2", "checkpoint-2.sha256"]]


def serials(directory: Path) -> Units:
    """A Fluid root of three serials, in which nothing else may ever lie."""
    for number in (1, 2, 3):
        place = directory / f"checkpoint_{number}" / "__model__"
        place.mkdir(parents=True)
        for name in ("_SUCCESS", "fc_0.w_0", "fc_0.b_0"):
            shutil.copyfile(FLUID / name, place / name)
    return [["checkpoint_1"], ["checkpoint_2"]]


KINDS = {
    "one_file": one_file,
    "prefixes": prefixes,
    "sharded": sharded,
    "exchanged": exchanged,
    "directories": directories,
    "serials": serials,
}


# How it is moved ------------------------------------------------------------------------------------


def path_of(unit: list[str]) -> str:
    return unit[0].removesuffix(".index")


def to_the_trash(directory: Path, units: Units) -> None:
    removals = [removal_of(directory, *unit, path=directory / path_of(unit)) for unit in units]
    done = put_in_trash(directory, *removals)
    assert done.failed or len(done.done) == len(units)


def remove_all(directory: Path, units: Units) -> None:
    done = remove(
        directory, *(removal_of(directory, *unit, path=directory / path_of(unit)) for unit in units)
    )
    assert done.failed or len(done.done) == len(units)


def renamed(name: str) -> str:
    return (
        name.replace("model_", "epoch_")
        .replace("ckpt-", "step-")
        .replace("set", "run")
        .replace("point-", "p-")
    )


def rename(directory: Path, units: Units) -> None:
    moved, rewrites, relinks = [], [], []
    for unit in units:
        names = [name for name in unit if not name.endswith("index.json")]
        for name in set(unit) - set(names):
            text = (directory / name).read_text()
            rewrites += [(renamed(name), None, renamed(text)), (name, text, None)]
        moved.append(move(directory, {name: renamed(name) for name in names}, directory / path_of(unit)))
        inner = directory / unit[0] / "trainer_state.json"
        if inner.exists():
            text = inner.read_text()
            rewrites.append((f"{renamed(unit[0])}/trainer_state.json", text, renamed(text)))
    if (directory / "checkpoint").exists():
        text = (directory / "checkpoint").read_text()
        new = text.replace('paths: "ckpt-1', 'paths: "step-1').replace('paths: "ckpt-2', 'paths: "step-2')
        rewrites.append(("checkpoint", text, new))
    if (directory / "best").is_symlink():
        relinks.append(("best", "checkpoint-2", renamed("checkpoint-2")))
    make_moves(directory, moves(*moved, rewrites=rewrites, relinks=relinks))


EXCHANGED = {"set1": "set2", "set2": "set1", "set3": "set4"}
"""Two sets exchange their names, through the stage; a third gets another one."""


def exchange(directory: Path, units: Units) -> None:
    ending, directions = ".safetensors.index.json", dict(EXCHANGED)
    shards = ("-1.safetensors", "-2.safetensors", ending + ".sha256")
    ends = dict.fromkeys(directions, shards)
    moved = [
        move(directory, {old + end: new + end for end in ends[old]}, directory / (old + ending))
        for old, new in directions.items()
    ]
    links, to_stage, from_stage = [], [], []
    for number, (old, new) in enumerate(directions.items()):
        for end in ends[old]:
            here, there, aside = (
                Location("directory", old + end),
                Location("directory", new + end),
                Location("stage", f"0/{old}{end}"),
            )
            if old == "set3":
                links.append(Move(number, here, there))
            else:
                to_stage.append(Move(number, here, aside))
                from_stage.insert(0, Move(number, aside, there))
    text = {old: (directory / (old + ending)).read_text() for old in directions}
    said = {new: text[old].replace(f'"{old}-', f'"{new}-') for old, new in directions.items()}
    pointers = [
        Rewrite("set4" + ending, None, said["set4"], like="set3" + ending),
        Rewrite("set1" + ending, text["set1"], said["set1"], like="set1" + ending),
        Rewrite("set2" + ending, text["set2"], said["set2"], like="set2" + ending),
        Rewrite("latest", (directory / "latest").read_text(), "set2.safetensors.index.json\n"),
        Rewrite("set3" + ending, text["set3"], None, like="set4" + ending),
        Rewrite("best", "set2-1.safetensors", "set1-1.safetensors", is_link=True),
    ]
    groups = tuple(one.group for one in moved)
    listed = OperationList("rename", groups, (*links, *to_stage, *from_stage, *pointers), IDENTITY)
    make_moves(directory, listed)


def take_back(directory: Path, units: Units) -> None:
    undo(str(directory))


# What is looked at ----------------------------------------------------------------------------------


def tree(directory: Path) -> Tree:
    """Return all that lies in a directory, but for what is ours."""
    found: Tree = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if not name.startswith(".ckpttool"):
            if path.is_symlink():
                found[name] = "-> " + os.readlink(path)
            elif path.is_file():
                found[name] = path.read_bytes()
    return found


def put_away(directory: Path) -> Tree:
    home = state_dir_of(str(directory))
    return tree(Path(home.path) / (".ckpttool-trash" + home.suffix) / IDENTITY / "0")


def ours(directory: Path) -> list[str]:
    names = [*os.listdir(directory), *(name for name in os.listdir(directory.parent) if name[0] == ".")]
    return [
        name for name in names if name.startswith(".ckpttool") and "trash" not in name and "lock" not in name
    ]


def settled(directory: Path) -> None:
    failed = recover(directory).failed
    assert not failed, failed
    assert not ours(directory), ours(directory)


def whole(directory: Path, units: Units, full: Tree, new: bool) -> Iterator[list[str]]:
    """Yield the units that are whole, by old names or by new, and not hidden."""
    now, hidden = tree(directory), hidden_names(directory)
    for unit in units:
        names = [renamed(name) if new else name for name in unit]
        # What a directory says of others is rewritten once all are where they belong.
        paths = [path for path in full if path.split("/")[0] in names and "trainer_state" not in path]
        if hidden.isdisjoint(names) and all(now.get(path) == full[path] for path in paths):
            yield unit


class Play:
    """One kind of checkpoint, and one thing that is done to it.

    Attributes:
        calls: How many calls that change the disk that makes.
    """

    def __init__(self, place: Path, kind: str, action: str) -> None:
        self.place = place
        self.first = place / "first" / "run"
        self.first.mkdir(parents=True)
        self.units = KINDS[kind](self.first)
        self.original = tree(self.first)
        acts = {"rename": rename, "trash": to_the_trash, "exchange": exchange, "remove": remove_all}
        self.act: Callable[[Path, Units], None] = acts[action.removeprefix("undo-")]
        self.is_rename = "rename" in action
        self.is_exchange = "exchange" in action
        self.is_removal = action == "remove"
        self.is_trash = action == "trash"
        if action.startswith("undo"):
            self.act(self.first, self.units)
            self.act = take_back
        self.before = tree(self.first), put_away(self.first)
        done = self.copy("done")
        with lock_directory(str(done)):
            pass
        with pytest.MonkeyPatch.context() as patch:
            made = hit_call(0, lambda: None, patch=patch.setattr)
            self.act(done, self.units)
            self.calls = made()
        self.after = tree(done), put_away(done)
        assert self.after != self.before
        assert not ours(done)

    def copy(self, name: str) -> Path:
        """Return a copy in which records hold, too: hard links keep inodes and times."""
        there = self.place / name
        shutil.copytree(self.first.parent, there, symlinks=True, copy_function=os.link)
        for path in there.rglob("record.json"):
            told = json.loads(path.read_text())
            path.unlink()
            told["root"] = told["root"] and os.stat(there / "run").st_ino
            path.write_text(json.dumps(told))
        for path in (*there.rglob("checkpoint"), *there.rglob("latest")):
            text = path.read_bytes()
            path.unlink()
            path.write_bytes(text)
        return there / "run"

    def each_unit_is_whole_once(self, directory: Path) -> None:
        """Check that a reader sees no checkpoint twice, and that none is whole nowhere."""
        if self.is_exchange:
            seen = {path.read_bytes() for path in directory.rglob("*") if path.is_file()}
            assert seen.issuperset(
                data for name, data in self.original.items() if "-" in name and name != "best"
            )
            return
        if self.is_removal:
            self.each_unit_is_whole_or_gone(directory)
            return
        new = tree_of_new(self.before[0] | self.after[0])
        old_seen = list(whole(directory, self.units, self.original, new=False))
        new_seen = list(whole(directory, self.units, new, new=True)) if self.is_rename else []
        now, aside, hidden = tree(directory), put_away(directory), hidden_names(directory)
        for unit in self.units:
            seen = (unit in old_seen) + (unit in new_seen)
            is_aside = all(
                aside.get(path) == data for path, data in self.original.items() if path.split("/")[0] in unit
            )
            is_gone = all(name in hidden or not (directory / name).exists() for name in unit)
            paths = [path for path in self.original if path.split("/")[0] in unit]
            somewhere = set(now.values()) | set(aside.values())
            assert is_aside or seen or all(self.original[path] in somewhere for path in paths), unit
            assert seen == 1 or (not self.is_rename and not seen and (is_aside or is_gone)), (
                unit,
                old_seen,
                new_seen,
            )

    def each_unit_is_whole_or_gone(self, directory: Path) -> None:
        """Check that a reader sees no part of a checkpoint, and that all else is as it was."""
        now, seen = tree(directory), list(whole(directory, self.units, self.original, new=False))
        hidden = hidden_names(directory)
        for unit in self.units:
            assert unit in seen or all(name in hidden or not (directory / name).exists() for name in unit)
        assert self.after[0].items() <= now.items() <= self.before[0].items()

    def check(self, directory: Path) -> None:
        self.each_unit_is_whole_once(directory)
        settled(directory)
        if self.is_removal:
            assert not hidden_names(directory)
            self.each_unit_is_whole_or_gone(directory)
            return
        now = tree(directory), put_away(directory)
        if self.is_trash:  # one of two can stay where it was
            state = now[0].get("checkpoint", b"")
            named = {name for name in ("ckpt-1", "ckpt-2") if f'"{name}"'.encode() in state}
            assert named == {name for name in ("ckpt-1", "ckpt-2") if f"{name}.index" in now[0]}
            for unit in self.units:
                paths = [path for path in self.original if path.split("/")[0] in unit]
                assert any(all(there.get(path) == self.original[path] for path in paths) for there in now)
        elif "checkpoint" in self.original or self.is_rename or self.is_exchange:
            assert now in (self.before, self.after), (now[0].keys(), now[1].keys())
        assert (
            now[0].items() | now[1].items() >= self.original.items()
            or self.is_rename
            or self.is_exchange
            or "checkpoint" in now[0]
        )
        undone = undo(str(directory))
        assert not undone.problems, undone.problems
        assert tree(directory) == self.original
        assert not put_away(directory)

    def interrupt(self, how: str, number: int, again: int | None = None) -> None:
        """Interrupt it at a call, and check what is there then.

        Args:
            how: ``kill``, ``interrupt``, or the name of an error.
            number: Of the call.
            again: The call at which what settles it is killed as well.
        """
        directory = self.copy(f"{how}-{number}")
        act = partial(self.act, directory, self.units)
        if how == "kill":
            was_hit = dies_at(number, act)
        elif how == "interrupt":
            was_hit = is_hit_at(number, act, KeyboardInterrupt())
        else:
            code = getattr(errno, how)
            was_hit = is_hit_at(number, act, OSError(code, os.strerror(code)))
        assert was_hit
        if again is not None:
            dies_at(again, partial(recover, directory))
        try:
            self.check(directory)
        except BaseException as failure:
            left = sorted(str(path.relative_to(directory.parent)) for path in directory.parent.rglob("*"))
            raise AssertionError(f"{how} at call {number}, then at {again}: {left}") from failure
        shutil.rmtree(directory.parent)


def tree_of_new(found: Tree) -> Tree:
    return {path: data for path, data in found.items() if renamed(path) == path}

"""Moves that are interrupted at each call that changes the disk, in a program of its own.

It forks for each call, which only a program without threads may do. What is wrong is an AssertionError.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ckpttool import CheckpointError, undo
from ckpttool.io import directories
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import Move, Moves, Relink, Removal, Rewrite
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.move_transaction import ChainedMoves, apply_moves
from ckpttool.transaction.pending_journals import incomplete_names, pending_journals
from ckpttool.transaction.state_dir import state_dir_of
from ckpttool.transaction.trash import put_aside
from tests.support.changes import recover
from tests.support.faults import CHANGES, hit_call, is_killed_at, wait_for_no_disk
from tests.support.transactions import stages_of

IDENTITY = "20260102T030405.000006Z-0123abcd"
Units = list[list[str]]
Tree = dict[str, bytes | str]

directories.RETRY_SECONDS = 0


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
            shutil.copyfile(Path(sys.argv[1]) / "fluid/root/checkpoint_4/__model__" / name, place / name)
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


def to_the_trash(directory: Path, units: Units) -> None:
    removals = [
        Removal(str(directory / unit[0].removesuffix(".index")), tuple(unit), contents(str(directory), unit))
        for unit in units
    ]
    done = put_aside(str(directory), removals, IDENTITY)
    assert done.failed or len(done.removed) == len(units)


def renamed(name: str) -> str:
    return (
        name.replace("model_", "epoch_")
        .replace("ckpt-", "step-")
        .replace("set", "run")
        .replace("point-", "p-")
    )


def rename(directory: Path, units: Units) -> None:
    moves, rewrites, relinks = [], [], []
    for unit in units:
        names = [name for name in unit if not name.endswith("index.json")]
        for name in set(unit) - set(names):
            text = (directory / name).read_text()
            rewrites += [Rewrite(renamed(name), None, renamed(text)), Rewrite(name, text, None)]
        members = tuple((name, renamed(name)) for name in names)
        path = str(directory / unit[0].removesuffix(".index"))
        moves.append(Move(path, members, contents(str(directory), names)))
        inner = directory / unit[0] / "trainer_state.json"
        if inner.exists():
            text = inner.read_text()
            rewrites.append(Rewrite(f"{renamed(unit[0])}/trainer_state.json", text, renamed(text)))
    if (directory / "checkpoint").exists():
        text = (directory / "checkpoint").read_text()
        new = text.replace('paths: "ckpt-1', 'paths: "step-1').replace('paths: "ckpt-2', 'paths: "step-2')
        rewrites.append(Rewrite("checkpoint", text, new))
    if (directory / "best").is_symlink():
        relinks.append(Relink("best", "checkpoint-2", renamed("checkpoint-2")))
    place = str(directory)
    apply_moves(
        place,
        Moves(
            kind="rename",
            identity=IDENTITY,
            moves=tuple(moves),
            rewrites=tuple(rewrites),
            relinks=tuple(relinks),
            source=place,
            target=place,
        ),
    )


WAVES = (
    {"set1": "set1~1", "set2": "set2~1", "set3": "set4"},
    {"set1~1": "set2", "set2~1": "set1"},
)
"""Two sets exchange their names, and go by others in between; a third gets out of their way."""


def exchange(directory: Path, units: Units) -> None:
    with ChainedMoves(str(directory)) as row:
        for names in WAVES:
            if row.make(wave(directory, names), has_more=names is not WAVES[-1]).failed:
                return


def wave(directory: Path, names: dict[str, str]) -> Moves:
    place, ending = str(directory), ".safetensors.index.json"
    moves, rewrites = [], []
    for old, new in names.items():
        text = (directory / (old + ending)).read_text()
        rewrites += [
            Rewrite(new + ending, None, text.replace(f'"{old}-', f'"{new}-')),
            Rewrite(old + ending, text, None),
        ]
        members = [(old + end, new + end) for end in (ending + ".sha256", "-1.safetensors", "-2.safetensors")]
        path = str(directory / (old.partition("~")[0] + ending))
        moves.append(Move(path, tuple(members), contents(place, [old for old, _ in members])))
    noted, leads = (directory / "latest").read_text(), os.readlink(directory / "best")
    named, led = noted.partition(".")[0], leads.rpartition("-")[0]
    rewrites.append(Rewrite("latest", noted, noted.replace(named, names[named])))
    relinks = (Relink("best", leads, leads.replace(led, names[led])),)
    told: dict[str, object] = {"kind": "rename", "identity": IDENTITY, "source": place, "target": place}
    return Moves(moves=tuple(moves), rewrites=tuple(rewrites), relinks=relinks, **told)  # type: ignore[arg-type]


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
    assert not recover(directory).failed
    assert not ours(directory), ours(directory)


def whole(directory: Path, units: Units, full: Tree, new: bool) -> Iterator[list[str]]:
    """Yield the units that are whole, by old names or by new, and not hidden."""
    now, hidden = tree(directory), incomplete_names(str(directory))
    for unit in units:
        names = [renamed(name) if new else name for name in unit]
        # What a directory says of others is rewritten once all are where they belong.
        paths = [path for path in full if path.split("/")[0] in names and "trainer_state" not in path]
        if hidden.isdisjoint(names) and all(now.get(path) == full[path] for path in paths):
            yield unit


class Play:
    """One kind of checkpoint, and one thing that is done to it."""

    def __init__(self, place: Path, kind: str, action: str) -> None:
        self.place = place
        self.first = place / "first" / "run"
        self.first.mkdir(parents=True)
        self.units = KINDS[kind](self.first)
        self.original = tree(self.first)
        acts = {"rename": rename, "trash": to_the_trash, "exchange": exchange}
        self.act: Callable[[Path, Units], None] = acts[action.removeprefix("undo-")]
        self.is_rename = "rename" in action
        self.is_exchange = "exchange" in action
        if action.startswith("undo"):
            self.act(self.first, self.units)
            self.act = take_back
        self.before = tree(self.first), put_away(self.first)
        done = self.copy("done")
        with lock_directory(str(done)):
            pass
        self.act(done, self.units)
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
            seen = set(tree(directory).values())
            assert seen.issuperset(
                data for name, data in self.original.items() if "-" in name and name != "best"
            )
            return
        new = tree_of_new(self.before[0] | self.after[0])
        old_seen = list(whole(directory, self.units, self.original, new=False))
        new_seen = list(whole(directory, self.units, new, new=True)) if self.is_rename else []
        aside = put_away(directory)
        for unit in self.units:
            seen = (unit in old_seen) + (unit in new_seen)
            is_aside = all(
                aside.get(path) == data for path, data in self.original.items() if path.split("/")[0] in unit
            )
            assert seen == 1 or (is_aside and not seen and not self.is_rename), (unit, old_seen, new_seen)

    def check(self, directory: Path, number: int) -> None:
        self.each_unit_is_whole_once(directory)
        settled(directory)
        now = tree(directory), put_away(directory)
        if "checkpoint" in self.original or self.is_rename or self.is_exchange:
            assert now in (self.before, self.after), (now[0].keys(), now[1].keys())
        assert (
            now[0].items() | now[1].items() >= self.original.items()
            or self.is_rename
            or self.is_exchange
            or "checkpoint" in now[0]
        )
        if number % 3 == 0:
            undone = undo(str(directory))
            assert not undone.problems, undone.problems
            assert tree(directory) == self.original
            assert not put_away(directory)


def tree_of_new(found: Tree) -> Tree:
    return {path: data for path, data in found.items() if renamed(path) == path}


def failed(play: Play, directory: Path, number: int, error: BaseException) -> bool:
    real = {name: getattr(os, name) for name in CHANGES}

    def fail() -> None:
        raise error

    made = hit_call(number, fail)
    try:
        play.act(directory, play.units)
    except (CheckpointError, KeyboardInterrupt) as failure:
        assert "\n" not in str(failure)
    finally:
        for name, one in real.items():
            setattr(os, name, one)
    return made() >= number


def main() -> None:
    place, kind, action, how, step = Path(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6])
    play = Play(place, kind, action)
    wait_for_no_disk()
    number, was_hit = 1, True
    while was_hit:
        directory = play.copy(str(number))
        if how == "kill":
            was_hit = is_killed_at(number, partial(play.act, directory, play.units))
        elif how == "interrupt":
            was_hit = failed(play, directory, number, KeyboardInterrupt())
        else:
            code = getattr(errno, how)
            was_hit = failed(play, directory, number, OSError(code, os.strerror(code)))
        try:
            play.check(directory, number)
        except BaseException:
            print(f"at call {number}", pending_journals(str(directory)), stages_of(directory))
            os.system(f"find {directory.parent} | sort")
            raise
        shutil.rmtree(directory.parent)
        number += step
    print(number)


if __name__ == "__main__":
    main()

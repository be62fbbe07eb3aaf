"""What has to follow when checkpoints get other names: pointers, indexes, manifests, pins, symlinks.

Whatever form a path has where it stands, relative or absolute, it keeps; only the name in it is another.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.errors import CheckpointError
from ckpttool.formats import shard_index
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.keras import sharded as keras_sharded
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.ops.manifest import SHARED
from ckpttool.series.changing.moves import Relink, Rewrite
from ckpttool.series.changing.pointing import text_at
from ckpttool.series.changing.stage import Changed
from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.pins import repinned
from ckpttool.series.pointers.readers import PINS, Names, names_in, noted_name
from ckpttool.series.renaming import rewording
from ckpttool.series.renaming.new_paths import Moved, exists

STATE = "trainer_state.json"
_NEVER_ENTERED = frozenset({".git"})


@dataclass(slots=True)
class Following:
    """What follows, by directory of the journal that it goes into, and what can't be read or changed."""

    rewrites: dict[str, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    relinks: dict[str, list[Relink]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return how many texts and links these are; an index or a manifest belongs to what it names."""
        rewrites = (one for found in self.rewrites.values() for one in found)
        kept = sum(1 for one in rewrites if None not in (one.before, one.after))
        return kept + sum(map(len, self.relinks.values()))

    @property
    def homes(self) -> list[str]:
        """Return the directories in which something has to follow."""
        return list(dict.fromkeys((*self.rewrites, *self.relinks)))


@dataclass(frozen=True, slots=True)
class Scene:
    """Where checkpoints and what names them lie.

    Attributes:
        root: The directory that was asked for.
        entries: All checkpoints in it, those that keep their names included.
        links: The symlinks in the tree and beside it, with what they lead to.
    """

    root: str
    entries: tuple[Entry, ...]
    links: Mapping[str, str]

    @property
    def directories(self) -> list[str]:
        """Return the directories in which pointers are looked for."""
        return sorted({self.root, *(entry.directory for entry in self.entries)})


def links_around(root: str) -> dict[str, str]:
    """Return the symlinks in a tree, and those beside it, with what they lead to; none is followed."""
    above = os.path.dirname(os.path.realpath(root))
    beside = (entry.path for entry in names_in(above).values() if entry.is_symlink())
    found = {}
    for path in (*beside, *_links_below(root)):
        try:
            found[path] = os.readlink(path)
        except OSError:  # it has just gone
            continue
    return found


def _links_below(directory: str) -> Iterator[str]:
    for name, entry in sorted(names_in(directory).items()):
        if entry.is_symlink():
            yield entry.path
        elif (
            entry.is_dir(follow_symlinks=False)
            and not name.startswith(OWN_PREFIX)
            and name not in _NEVER_ENTERED
        ):
            yield from _links_below(entry.path)


def following(scene: Scene, moved: Moved) -> Following:
    """Return all that has to follow some new names, as it stands on the disk now.

    What lies in a checkpoint's directory that gets a new name is told with that.
    """
    found = Following()
    members = {(entry.directory, name) for entry in scene.entries for name in entry.unit.members}
    edits: dict[str, dict[str, rewording.Changed]] = defaultdict(dict)
    for entry in scene.entries:
        if entry.contents.directories:
            edits[entry.directory] |= _inside(found, entry, moved)
    for directory in scene.directories:
        names = {name: one for name, one in names_in(directory).items() if (directory, name) not in members}
        _beside(found, directory, names, moved, edits[directory])
    _above(found, scene, moved)
    for entry in scene.entries:
        if entry.name in moved.at(entry.directory) or edits[entry.directory]:
            for name in entry.unit.members:
                _member(found, entry, name, moved, edits[entry.directory])
    for link, target in scene.links.items():
        _link(found, scene, link, target, moved)
    return found


def _above(found: Following, scene: Scene, moved: Moved) -> None:
    """Add what lies beside the root, and names what lies in it."""
    real = os.path.realpath(scene.root)
    above = os.path.dirname(real)
    if above != real:
        _beside(found, above, names_in(above), moved, {})


def _beside(
    found: Following, directory: str, names: Names, moved: Moved, edits: Mapping[str, rewording.Changed]
) -> None:
    """Add what lies beside checkpoints, and names them."""
    new = moved.follower(directory, near=[directory])
    from_anywhere = moved.follower(directory, os.curdir, near=[directory])
    readers: dict[str, Callable[[str], str]] = {
        tf_state.NAME: lambda text: _state_text(text, moved, directory),
        STATE: lambda text: rewording.best_text(text, from_anywhere),
        PINS: lambda text: repinned(text, _relative(moved, directory, text)),
    }
    readers |= dict.fromkeys(SHARED, lambda text: rewording.sums_text(text, moved.follower(directory), edits))
    for name, file in names.items():
        try:
            is_file = file.is_file(follow_symlinks=False)
        except OSError:  # it has just gone
            continue
        if is_file and name in readers:
            if name != tf_state.NAME or _is_state(file.path):
                _reworded(found, directory, name, readers[name])
        elif is_file and noted_name(file) is not None:
            _reworded(found, directory, name, lambda text: rewording.line_text(text, new))


def _state_text(text: str, moved: Moved, directory: str) -> str:
    """Return TensorFlow's state file; the stale path of a run that was moved becomes a name."""

    def new(path: str) -> str | None:
        told = moved.told(path, directory)
        if told is None and not exists(os.path.join(directory, path)):
            return moved.at(directory).get(os.path.basename(path.replace("\\", "/").rstrip("/")))
        return told

    return rewording.state_file_text(text, new)


def _is_state(path: str) -> bool:
    try:
        return tf_state.read_state(path) is not None
    except (OSError, ValueError):
        return True


def _relative(moved: Moved, directory: str, text: str) -> Mapping[str, str]:
    """Return new paths by old ones, as seen from a directory: in it, and in those that a text may name."""
    from ckpttool.wire.tomltext import parse_toml

    told = parse_toml(text).get("pinned", [])
    names = [name for name in told if isinstance(name, str)] if isinstance(told, list) else []
    plain = {os.path.normpath(name) for name in names}
    plain |= {name.removesuffix(INDEX) for name in plain}
    return {name: new for name in plain if (new := moved.told(name, directory)) is not None}


def _reworded(found: Following, directory: str, name: str, reword: Callable[[str], str]) -> Rewrite | None:
    """Add a text that is to say something else; note why one can't be changed."""
    path = os.path.join(directory, name)
    try:
        before = text_at(path)
        after = None if before is None else reword(before)
    except (OSError, ValueError, Changed, CheckpointError) as failure:
        found.faults[path] = getattr(failure, "strerror", None) or str(failure)
        return None
    if before is None or after == before:
        return None
    rewrite = Rewrite(name, before, after)
    found.rewrites[directory].append(rewrite)
    return rewrite


def _inside(found: Following, entry: Entry, moved: Moved) -> dict[str, rewording.Changed]:
    """Add a trainer's state in a checkpoint's directory; return what of it says something else then."""
    directory = entry.directory
    name = os.path.join(entry.name, STATE)
    if not os.path.isfile(os.path.join(directory, name)):
        return {}
    own = moved.at(directory).get(entry.name, entry.name)
    new = moved.follower(os.path.join(directory, entry.name), os.curdir, directory, near=[directory])
    inner = Following()
    told = _reworded(inner, directory, name, lambda text: rewording.best_text(text, new))
    found.faults |= inner.faults
    if told is None:
        return {}
    edits = {name: _edit(told)}
    found.rewrites[directory].append(Rewrite(os.path.join(own, STATE), told.before, told.after))
    _sums_inside(found, entry, own, edits)
    return edits


def _edit(rewrite: Rewrite) -> rewording.Changed:
    before, after = (_data(text) for text in (rewrite.before, rewrite.after))
    return rewording.Changed(
        hashlib.sha256(before).hexdigest(), hashlib.sha256(after).hexdigest(), len(after)
    )


def _data(text: str | None) -> bytes:
    return (text or "").encode("utf-8", "surrogateescape")


def _sums_inside(found: Following, entry: Entry, own: str, edits: Mapping[str, rewording.Changed]) -> None:
    """Add the lists of digests in a checkpoint's directory, of which one file is another now."""
    within = {os.path.relpath(name, entry.name): edit for name, edit in edits.items()}
    inner = Following()
    for shared in SHARED:
        name = os.path.join(entry.name, shared)
        if os.path.isfile(os.path.join(entry.directory, name)):
            told = _reworded(
                inner, entry.directory, name, lambda text: rewording.sums_text(text, lambda _: None, within)
            )
            if told is not None:
                found.rewrites[entry.directory].append(
                    Rewrite(os.path.join(own, shared), told.before, told.after)
                )
    found.faults |= inner.faults


def _member(
    found: Following, entry: Entry, name: str, moved: Moved, edits: Mapping[str, rewording.Changed]
) -> None:
    """Add a manifest or an index, whose text has names in it: it is written anew under its new name."""
    names, new = moved.at(entry.directory), moved.follower(entry.directory)
    readers: dict[str, Callable[[str], str]] = {
        SIDECARS[0]: lambda text: rewording.sums_text(text, new, edits),
        SIDECARS[1]: lambda text: rewording.digests_text(text, new, edits),
        "": lambda text: rewording.index_text(text, names),
    }
    kind = next((ending for ending in SIDECARS if name.endswith(ending)), None)
    if kind is None and not (name == entry.name and is_index(entry)):
        return
    inner = Following()
    told = _reworded(inner, entry.directory, name, readers[kind or ""])
    found.faults |= inner.faults
    if told is None:
        return
    if name in names:
        found.rewrites[entry.directory] += [
            Rewrite(names[name], None, told.after),
            Rewrite(name, told.before, None),
        ]
    else:
        found.rewrites[entry.directory].append(told)


def is_index(entry: Entry) -> bool:
    """Tell whether a checkpoint is a set of shards behind an index, which names them."""
    patterns = (shard_index.INDEX, keras_sharded.INDEX)
    return entry.name in entry.unit.members and any(one.fullmatch(entry.name) for one in patterns)


def _link(found: Following, scene: Scene, link: str, target: str, moved: Moved) -> None:
    """Add a symlink that leads to what gets another name, or into it."""
    around = os.path.dirname(link)
    new = moved.told(target, around or os.curdir)
    if new is None:
        return
    real = os.path.realpath(around or os.curdir)
    home = next((one for one in _outwards(scene, real) if one is not None), None)
    if home is None:
        found.relinks[around or os.curdir].append(Relink(os.path.basename(link), target, new))
        return
    path = os.path.relpath(os.path.join(real, os.path.basename(link)), os.path.realpath(home))
    found.relinks[home].append(Relink(path, target, new))


def _outwards(scene: Scene, real: str) -> Iterator[str | None]:
    """Yield the directory of checkpoints that a real path lies in or below, the nearest first."""
    known = {os.path.realpath(directory): directory for directory in scene.directories}
    while True:
        yield known.get(real)
        above = os.path.dirname(real)
        if above == real:
            return
        real = above


def holders(scene: Scene, names: Iterable[tuple[str, str]], moved: Moved) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints among some, by directory and name, inside which a symlink leads to what moves."""
    wanted = {os.path.join(os.path.realpath(directory), name): (directory, name) for directory, name in names}
    for link, target in scene.links.items():
        around = os.path.dirname(link) or os.curdir
        if moved.told(target, around) is None:
            continue
        place = os.path.realpath(around)
        while place != os.path.dirname(place):
            if place in wanted:
                yield wanted[place]
                break
            place = os.path.dirname(place)

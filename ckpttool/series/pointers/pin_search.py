"""Which lists of pins speak of a directory, and what they protect there: those in it, and those above it.

A list speaks of all that lies below it, whether a directory is named itself or one above it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttool.errors import CheckpointError
from ckpttool.naming import parse_name
from ckpttool.series.members.entry import Entry
from ckpttool.series.paths import shown
from ckpttool.series.pointers.pin_files import KEY, Pin, names_in, pins_in, read
from ckpttool.series.pointers.readers import PINS
from ckpttool.series.surveying.spelling import named

if TYPE_CHECKING:
    from ckpttool.series.members.order import Group
    from ckpttool.series.pointers.meaning import Index
    from ckpttool.series.pointers.protection import Pointed

_WILD = re.compile(r"[*?]|\[.+\]")


def files_for(directory: str) -> list[str]:
    """Return the lists that may pin what lies in a directory, from the nearest on.

    The search ends after the home directory, and where the file system ends.
    """
    real = os.path.realpath(directory)
    own = [os.path.join(directory, PINS)] if os.path.lexists(os.path.join(real, PINS)) else []
    return own + [
        _near(directory, real, above) for above in _above(real) if os.path.lexists(os.path.join(above, PINS))
    ]


def _above(directory: str) -> Iterator[str]:
    home = os.path.realpath(os.path.expanduser("~"))
    parent = os.path.dirname(directory)
    while directory not in (home, parent) and _device(directory) in (_device(parent), None):
        yield parent
        directory, parent = parent, os.path.dirname(parent)


def _device(directory: str) -> int | None:
    try:
        return os.stat(directory).st_dev
    except OSError:  # it is not there, or may not be looked at
        return None


def _near(directory: str, real: str, above: str) -> str:
    """Return a list's path as one would write it beside a directory's."""
    near = os.path.normpath(os.path.join(directory, os.path.relpath(above, real)))
    return os.path.join(near if os.path.realpath(near) == above else above, PINS)


def pins_above(directory: str) -> Iterator[Pin]:
    """Yield the pins of what lies in a directory or below that stand in lists above it.

    Raises:
        CheckpointError: A list can't be read.
    """
    real = os.path.realpath(directory)
    for file in files_for(directory):
        above = os.path.dirname(file)
        if os.path.realpath(above) == real:
            continue
        for one in pins_in(file, read(file)):
            place = os.path.realpath(_place(one))
            if _is_within(place, real) and place != real:
                yield Pin(file, one.name, shown(os.path.join(directory, os.path.relpath(place, real))))


def _place(pinned: Pin) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(pinned.file), pinned.name))


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def fault_of(pinned: Pin) -> str | None:
    """Return why an entry of a list pins nothing, though what it names is there; None where it pins that."""
    if (fault := _misnamed(pinned)) is not None:
        return fault
    try:
        named(_place(pinned))
    except CheckpointError as error:
        return f"which is no checkpoint: {error.found}"
    return None


def _misnamed(pinned: Pin) -> str | None:
    if not pinned.name.strip() or "\0" in pinned.name:
        return "which is no name"
    directory = os.path.realpath(os.path.dirname(pinned.file))
    above, name = os.path.split(_place(pinned))
    place = (
        os.path.join(os.path.realpath(above), name) if name != os.pardir else os.path.realpath(_place(pinned))
    )
    if not _is_within(os.path.normpath(place), directory):
        return "which lies elsewhere: a list speaks of what is below it"
    return None


def absence(pinned: Pin) -> str:
    """Return what to say of a pin of what isn't there."""
    hint = ": pins are names, and no globs" if _WILD.search(pinned.name) else ""
    return f"isn't there{hint} (ckpttool unpin takes that back)"


def follow_pins(pointed: Pointed, root: str, groups: Sequence[Group], index: Index) -> None:
    """Protect what is pinned; where a list can't be understood, leave alone all that it speaks of."""
    reach = _Reach(groups)
    files: dict[str, str] = {}
    for file in _lists(root, reach.directories):
        files.setdefault(os.path.join(os.path.realpath(os.path.dirname(file)), PINS), file)
    for file in files.values():
        try:
            names = names_in(read(file))
        except (CheckpointError, ValueError) as error:
            why = error.found if isinstance(error, CheckpointError) else str(error)
            why = why.removeprefix("the pins can't be read: ")
            _leave(pointed, reach.below(os.path.dirname(file)), file, f"{KEY} can't be read: {why}")
            continue
        for name in names:
            _follow(pointed, Pin(file, name, name), index, reach)


def _lists(root: str, directories: Iterable[str]) -> Iterator[str]:
    """Yield the lists that speak of directories: of those below the root nobody looks above it again."""
    yield from files_for(root)
    seen = {root}
    for directory in sorted(directories):
        if not _is_within(directory, root):
            yield from files_for(directory)
            continue
        while directory not in seen:
            seen.add(directory)
            if os.path.lexists(file := os.path.join(directory, PINS)):
                yield file
            directory = os.path.dirname(directory) or os.curdir


def _follow(pointed: Pointed, pinned: Pin, index: Index, reach: _Reach) -> None:
    directory, place = os.path.dirname(pinned.file), _place(pinned)
    if (fault := _misnamed(pinned)) is not None:
        _leave(pointed, reach.below(directory), pinned.file, f"{KEY} has {pinned.name!r}, {fault}")
    elif (entry := _meant(place, index)) is not None:
        pointed.protect(entry, KEY, pinned.file)
    elif not Pin(pinned.file, pinned.name, place).is_there:
        lost = f"{KEY} is {pinned.name}, which {absence(pinned)}"
        if os.path.isdir(os.path.dirname(place) or os.curdir):
            _leave(pointed, reach.around(place), pinned.file, lost)
        elif _WILD.search(pinned.name):
            _leave(pointed, reach.like(place, directory), pinned.file, lost)
        else:
            _protect_namesakes(pointed, pinned, index, lost)
    else:
        groups = reach.below(place if os.path.isdir(place) else os.path.dirname(place))
        fault = fault_of(pinned) if groups else None
        if fault is not None:
            _leave(pointed, groups, pinned.file, f"{KEY} has {pinned.name!r}, {fault}")


def _protect_namesakes(pointed: Pointed, pinned: Pin, index: Index, lost: str) -> None:
    """Protect what may be the pinned one where its directory was moved, or is gone with all in it."""
    directory, name = os.path.realpath(os.path.dirname(pinned.file)), os.path.basename(pinned.name)
    for place in index.places.get(name, ()):
        if _is_within(place, directory):
            pointed.protect(index.by_place[place], f"perhaps {KEY}: {pinned.name}", pinned.file)
    pointed.warnings.append(f"{shown(pinned.file)}: {lost}; all below it that is called {name} stays")


def _meant(place: str, index: Index) -> Entry | None:
    above, name = os.path.split(place)
    found = index.by_place.get(os.path.join(os.path.realpath(above), name))
    return (
        found
        or index.by_place.get(os.path.realpath(place))
        or (index.at(place) if os.path.exists(place) else None)
    )


def _leave(pointed: Pointed, groups: Iterable[Group], file: str, why: str) -> None:
    for one in groups:
        pointed.skipped[one.key] = f"{shown(file)}: {why}"


class _Reach:
    """Finds the series that a list, or an entry in it, can mean."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.directories = {entry.directory for one in groups for entry in one.entries}
        self._real = {directory: os.path.realpath(directory) for directory in self.directories}

    def below(self, directory: str) -> list[Group]:
        """Return the series in a directory, and below it."""
        real = os.path.realpath(directory)
        return [one for one in self._groups if any(_is_within(place, real) for place in self._places(one))]

    def around(self, path: str) -> list[Group]:
        """Return the series beside a path: those that its name would belong to, or else all."""
        real = os.path.realpath(os.path.dirname(path))
        beside = [one for one in self._groups if real in self._places(one)]
        return _called(beside, path) or beside

    def like(self, path: str, directory: str) -> list[Group]:
        """Return the series below a directory that a name would belong to, or else all there."""
        below = self.below(directory)
        return _called(below, path) or below

    def _places(self, group: Group) -> Collection[str]:
        return {self._real[entry.directory] for entry in group.entries}


def _called(groups: Iterable[Group], path: str) -> list[Group]:
    blank = parse_name(os.path.basename(path)).blank
    return [one for one in groups if any(entry.fields.blank == blank for entry in one.entries)]

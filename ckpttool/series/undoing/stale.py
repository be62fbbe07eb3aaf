"""What was written between a renaming and its undo, and names checkpoints by names that are gone then."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpttool.errors import CheckpointError
from ckpttool.series.paths import shown
from ckpttool.series.pointers.notes import is_note, said, words
from ckpttool.series.pointers.pin_lists import files_for, pins_in, read
from ckpttool.series.pointers.readers import READERS, names_in
from ckpttool.series.reasons import Problem

_SLASHES = re.compile(r"[/\\]+")


class Taken(NamedTuple):
    """A checkpoint that has its old name again, or would: its path, and the one that it had until then."""

    path: str
    was: str


def still_named(taken: Iterable[Taken], turned: Iterable[str], *, above: bool) -> Iterator[Problem]:
    """Yield the pointers and notes that name checkpoints as these were called until now.

    Args:
        taken: What has its old name again.
        turned: The paths of what says again what it said, or would.
        above: Whether notes in the directory above count, too.
    """
    passed = set(map(os.path.abspath, turned))
    by_directory: dict[str, dict[str, Taken]] = defaultdict(dict)
    for one in taken:
        name = os.path.basename(one.was)
        by_directory[os.path.dirname(one.path) or os.curdir][name] = one
    for directory, known in by_directory.items():
        told: dict[str, Taken] = {}
        for path, target in _pointers(directory):
            found = known.get("".join(_parts(target)[-1:]))
            if found is not None:
                told.setdefault(path, found)
        told |= {path: one for path, one in _noted(directory, known) if path not in told}
        if above:
            real = os.path.realpath(directory)
            around = {f"{os.path.basename(real)}/{name}": one for name, one in known.items()}
            told |= dict(_noted(os.path.dirname(real), around))
        moved = {os.path.abspath(one.was): os.path.abspath(one.path) for one in known.values()}
        for path, one in told.items():
            if _afterwards(os.path.abspath(path), moved) not in passed:
                yield Problem(shown(os.path.normpath(path)), _message(one))
        yield from _pinned(directory, moved, passed, known)


def _pinned(
    directory: str, moved: Mapping[str, str], passed: Collection[str], known: Mapping[str, Taken]
) -> Iterator[Problem]:
    """Yield the pins of checkpoints that were set since these got the names that they lose."""
    for file in files_for(directory):
        try:
            pins = list(pins_in(file, read(file)))
        except CheckpointError:  # whoever goes by them says so
            continue
        for pin in pins:
            path = os.path.abspath(pin.path)
            if path in moved and (os.path.abspath(file) not in passed or not os.path.lexists(path)):
                yield Problem(shown(os.path.normpath(file)), _message(known[os.path.basename(path)]))


def _message(one: Taken) -> str:
    old, new = os.path.basename(one.path), os.path.basename(one.was)
    return f"it names {new}, which is called {old} again, and isn't changed: pin that if it is to stay"


def _afterwards(path: str, moved: Mapping[str, str]) -> str:
    """Return the path that a file has once all is taken back."""
    above, name = os.path.split(path)
    return os.path.join(moved.get(above, above), name)


def _pointers(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the files of trainers in a directory, and in those in it, with what they name."""
    inside = [one.path for one in names_in(directory).values() if one.is_dir(follow_symlinks=False)]
    for place in (directory, *inside):
        names = names_in(place)
        for pointers in READERS:
            for pointer in pointers(place, names):
                if pointer.target is not None:
                    yield pointer.holder, pointer.target


def _noted(directory: str, known: Mapping[str, Taken]) -> Iterator[tuple[str, Taken]]:
    for name, file in names_in(directory).items():
        text = said(file) if is_note(name) else None
        if text is not None:
            levels = next(iter(known)).count("/") + 1
            named = (known.get("/".join(_parts(word)[-levels:])) for word in words(text))
            one = next((one for one in named if one is not None), None)
            if one is not None:
                yield file.path, one


def _parts(path: str) -> list[str]:
    return [part for part in _SLASHES.split(path) if part not in ("", os.curdir)]

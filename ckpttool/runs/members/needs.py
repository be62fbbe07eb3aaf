"""What a checkpoint needs that is not its own: files of others that its index, or a symlink in it, names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.formats.discovery import names_indexed_above, sets_in
from ckpttool.formats.interface import Unit, scan
from ckpttool.storage import fs
from ckpttool.storage.snapshot import Snapshot
from ckpttool.transaction.files import Contents

_MOST_LINKS = 40
"""A chain of symlinks that is longer is a circle, as Linux has it."""


def needed_paths(
    unit: Unit, files: Contents, checkpoint: Checkpoint | None, *, all: bool = False
) -> tuple[str, ...]:
    """Return the paths of what a checkpoint needs besides files of its own.

    ``checkpoint`` is None where it can't be opened. With ``all``, its own files count, too: since others may
    lie among them.
    """
    directory = os.path.dirname(unit.path)
    own = {file.path: fs.normpath(os.path.join(directory, file.path)) for file in files.files}
    paths = set(own.values())
    read = () if checkpoint is None else (file.path for file in checkpoint.files)
    foreign = (path for path in read if all or fs.normpath(path) not in paths)
    links = (own[path] for path in sorted(files.symlinks))
    shared = (os.path.join(directory, name) for name in unit.shared)
    return tuple(dict.fromkeys((*shared, *foreign, *links)))


def places_on_the_way(path: str, snapshot: Snapshot) -> Iterator[str]:
    """Yield where a path leads, and each symlink on the way there, all in directories without a symlink."""
    if not fs.place_of(path).has_links:
        yield fs.normpath(path)
        return
    waiting = [part for part in reversed(fs.abspath(path).split(os.sep)) if part]
    reached, links = os.sep, 0
    while waiting:
        part = waiting.pop()
        if part in (os.curdir, os.pardir):
            reached = os.path.dirname(reached) if part == os.pardir else reached
            continue
        current = os.path.join(reached, part)
        try:
            target = snapshot.readlink(current)
        except ValueError:  # a NUL in it
            reached = current
            continue
        except OSError as error:
            # No link, not there, or in a closed directory: what is ours doesn't lie behind it.
            if error.errno == errno.EINVAL or fs.is_absence(error) or snapshot.is_closed(current):
                reached = current
                continue
            raise from_os_error(error, current) from error
        yield current
        links += 1
        if links > _MOST_LINKS:
            return
        if os.path.isabs(target):
            reached = os.sep
        waiting += [part for part in reversed(target.split(os.sep)) if part]
    yield reached


def all_places(paths: Iterable[str], snapshot: Snapshot) -> set[str]:
    """Return all places that paths lead to or over; what lies in one directory is looked up together."""
    places: set[str] = set()
    real: dict[str, str] = {}
    for path in paths:
        above, name = os.path.split(path)
        if above not in real:
            *links, real[above] = places_on_the_way(above or os.curdir, snapshot)
            places.update(links)
        place = os.path.join(real[above], name)
        places.update(places_on_the_way(place, snapshot) if snapshot.islink(place) else (place,))
    return places


def named_above(
    root: str, snapshot: Snapshot, on_error: Callable[[CheckpointError], object]
) -> dict[str, str]:
    """Return the places below a directory that indexes above it name, with the index."""
    named = names_indexed_above(root, on_error)
    return {place: index for path, index in named.items() for place in places_on_the_way(path, snapshot)}


def named_beside(directory: str, real: str, going: Collection[str]) -> dict[str, str]:
    """Return the places that indexes in a directory name now, with the index; without those that go.

    ``real`` is where the directory is, without symlinks on the way there.
    """
    leaving = {os.path.basename(path) for path in going}
    try:
        sets = sets_in(directory, scan(directory))
    except CheckpointError:  # then nothing can be removed there, either
        return {}
    staying = (unit for unit in sets if os.path.basename(unit.path) not in leaving)
    return {os.path.join(real, name): unit.path for unit in staying for name in (*unit.members, *unit.shared)}


def who_needs(real: str, contents: Contents, needed: Mapping[str, str]) -> str | None:
    """Return who needs something of what lies in a directory without symlinks on the way, or None."""
    for path in (*(file.path for file in contents.files), *contents.directories):
        if (who := needed.get(os.path.join(real, path))) is not None:
            return who
    return None

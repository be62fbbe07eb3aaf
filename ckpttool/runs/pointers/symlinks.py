"""Symlinks that lead to checkpoints, in a tree and beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.core.errors import from_os_error
from ckpttool.formats.pointer_kind import NO_CHANGES, Changes, FilePlace, Renamer, TextKind
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.needs import places_on_the_way
from ckpttool.runs.pointers.readers import OnError, is_ours, names_in, pass_over
from ckpttool.runs.pointers.search import Search, SearchedKind, reporting
from ckpttool.runs.pointers.targets import PointerProtections, exists
from ckpttool.storage import fs
from ckpttool.storage.snapshot import Snapshot
from ckpttool.transaction.paths import shown


class Symlink(TextKind, SearchedKind):
    """Symlink; its text is its target."""

    what = "symlinks"
    where = "DIR, the directory above, all below"
    places = FilePlace.NOWHERE

    def names(self, text: str) -> tuple[str, ...]:
        return (text,)

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        return new(text) or text

    def find(self, search: Search, found: PointerProtections) -> None:
        if not fs.place_of(search.root).has_links:
            return
        unread = search.unread(found)
        near = names_in(search.above, search.snapshot, unread).values()
        beside = [entry.path for entry in near if entry.is_symlink()]
        for link in [*beside, *_links_below(search.root, search.snapshot, unread)]:
            with reporting(unread):
                _follow(link, search, found)


SYMLINK = Symlink()


def _follow(link: str, search: Search, found: PointerProtections) -> None:
    try:
        target = search.snapshot.readlink(link)
    except OSError as error:
        raise from_os_error(error, link) from error
    _, *places = places_on_the_way(link, search.snapshot)
    entries = [entry for place in places if (entry := search.index.enclosing(place)) is not None]
    for entry in entries:
        if not _is_part_of(link, entry, search.snapshot):
            found.protect(entry, f"symlink {os.path.basename(link)}", link)
    if not entries and not exists(link, search.snapshot):
        _follow_dangling(link, target, search, found)


def _follow_dangling(link: str, target: str, search: Search, found: PointerProtections) -> None:
    """Protect the target's namesake beside a dangling symlink, or leave alone all series that it can mean."""
    directory, name = os.path.dirname(link), os.path.basename(target)
    namesake = search.index.by_name.get((directory, name))
    if namesake is not None:
        found.protect(namesake, f"symlink {os.path.basename(link)}", link)
        return
    for group in search.series.by_name(directory, name):
        found.leave_alone(group.key, f"{shown(link)}: leads to {target}, which doesn't exist")


def _is_part_of(link: str, entry: Entry, snapshot: Snapshot) -> bool:
    """Return whether a symlink is itself a part of the checkpoint that it leads to."""
    directory = snapshot.realpath(os.path.dirname(link))
    members = [snapshot.realpath(os.path.join(entry.directory, name)) for name in entry.unit.members]
    return any(directory == path or directory.startswith(path + os.sep) for path in members)


def links_near(root: str, snapshot: Snapshot) -> dict[str, str]:
    """Return the targets of symlinks in a tree, and of those beside it, by their paths; none is followed."""
    above = os.path.dirname(snapshot.realpath(root))
    beside = (entry.path for entry in names_in(above, snapshot, pass_over).values() if entry.is_symlink())
    links = {}
    for path in (*beside, *_links_below(root, snapshot, pass_over)):
        try:
            links[path] = snapshot.readlink(path)
        except OSError:  # it has just gone
            continue
    return links


def _links_below(directory: str, snapshot: Snapshot, on_error: OnError) -> Iterator[str]:
    """Yield the symlinks in a tree; none is followed."""
    pending = [directory]
    while pending:
        below = []
        for name, entry in sorted(names_in(pending.pop(), snapshot, on_error).items()):
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False) and not is_ours(name):
                below.append(entry.path)
        pending += reversed(below)

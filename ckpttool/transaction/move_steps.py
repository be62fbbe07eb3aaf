"""The steps of moving one checkpoint: at no moment is it whole in no place, and nothing is ever replaced.

A file gets its new name before it loses the old one; a directory, and a file where there are no hard links,
is renamed. Each step looks first at what is there, so that it can be done again after a kill. Everything
happens below open directories, never through a symlink.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import NamedTuple

from ckpttool.io import fs
from ckpttool.io.directories import link_or_rename, rename, retry_while_busy
from ckpttool.transaction.files import (
    Contents,
    NameTaken,
    StalePlan,
    contents,
    is_same_file,
    opened,
    opened_parent,
    status_at,
    status_of,
)
from ckpttool.transaction.journal import Move, Moves, Successor, old_name
from ckpttool.transaction.mounts import require_unmounted
from ckpttool.transaction.state_dir import require_own_status


class EntryState(Enum):
    """What is found at a name.

    ``KIN`` is what was meant, but changed since: one of its files still is the same one.
    """

    NOTHING = "nothing"
    SAME = "same"
    KIN = "kin"
    OTHER = "other"


class MoveDirs(NamedTuple):
    """Open directories: the one that checkpoints leave, and the one that they come to.

    Attributes:
        source, target: Their descriptors; -1 for a target that is still to be made.
        rewritten: Paths relative to the target whose files may say something else by now.
        was_at: The same files' paths relative to the source.
        is_return: Whether they come back out of the trash.
    """

    source: int
    target: int
    rewritten: frozenset[str] = frozenset()
    was_at: frozenset[str] = frozenset()
    is_return: bool = False

    @property
    def is_one(self) -> bool:
        """Tell whether both are the same directory."""
        return os.path.samestat(os.fstat(self.source), os.fstat(self.target))

    @property
    def leaves_trash(self) -> bool:
        """Tell whether checkpoints come back out of the trash, where nobody saves."""
        return self.is_return and not self.is_one


@contextmanager
def open_move_dirs(directory: str, moves: Moves, *, is_planned: bool = False) -> Iterator[MoveDirs]:
    """Open the directories that checkpoints leave and come to; nothing is followed into a trash."""
    is_within = moves.source == moves.target
    rewritten = frozenset(rewrite.name for rewrite in moves.rewrites if is_within)
    was_at = frozenset(old_name(moves, name) for name in rewritten)
    with _opened_move_dir(directory, moves.source) as source:
        if is_planned and moves.kind == "trash":
            yield MoveDirs(source, -1, rewritten, was_at)
            return
        with _opened_move_dir(directory, moves.target) as target:
            yield MoveDirs(source, target, rewritten, was_at, moves.kind == "restore")


@contextmanager
def _opened_move_dir(directory: str, path: str) -> Iterator[int]:
    """Open a directory itself, or the place of a command in its trash."""
    if path == directory:
        with opened(directory) as place:
            yield place
        return
    trash, identity = os.path.split(path)
    around, name = os.path.split(trash)
    with opened(around or os.curdir) as parent, opened(name, parent) as root, opened(identity, root) as place:
        require_own_status(path, os.fstat(place), fs.stat(directory))
        yield place


def require_movable(dirs: MoveDirs, move: Move) -> None:
    """Require that a checkpoint is as it was, and that nothing is in its way."""
    require_unmounted(dirs.source, (old for old, _ in move.members))
    for old, new in move.members:
        here = _entry_state(dirs.source, old, move, old, dirs.was_at)
        if here is EntryState.NOTHING:
            raise StalePlan("it has vanished, or a part of it,", since_plan=True)
        if here is not EntryState.SAME:
            raise StalePlan("it has changed", since_plan=True)
        if dirs.target >= 0 and _is_taken(dirs, old, new) and not _is_successor(move, dirs.target, new):
            raise NameTaken(new)


# The steps, in the order in which a move takes them and is taken back -----------------------------


def link_new(dirs: MoveDirs, move: Move) -> None:
    """Give a checkpoint its new names, its index last: what has no index yet is taken for no checkpoint."""
    require_unmounted(dirs.source, (old for old, _ in move.members))
    if not dirs.is_return:
        for one in move.added:
            _add(dirs, one)
    for old, new in reversed(move.members):
        there = _state_of_new(dirs, move, old, new)
        if there is EntryState.SAME or _was_saved_over(dirs, move, old, new):
            continue
        gives_way = _is_successor(move, dirs.target, new)
        if there is not EntryState.NOTHING and not gives_way and not _is_variant(dirs, old, new):
            raise NameTaken(new)
        here = _entry_state(dirs.source, old, move, old, dirs.was_at)
        if here is not EntryState.SAME:
            what = "vanished, or a part of it," if here is EntryState.NOTHING else "changed"
            raise StalePlan(f"it has {what}", since_plan=True)
        if gives_way:
            _replace(old, dirs.source, new, dirs.target)
            continue
        is_link = _link_or_rename(dirs, old, new)
        # Only what came is known to be what was checked: another could have come between.
        there = _entry_state(dirs.target, new, move, old, dirs.rewritten)
        if not (there is EntryState.SAME or _was_saved_over(dirs, move, old, new)):
            _undo_link(dirs, old, new, is_link=is_link)
            raise StalePlan("it has changed", since_plan=True)


def _was_saved_over(dirs: MoveDirs, move: Move, old: str, new: str) -> bool:
    """Tell whether what has come back was written to since: it has its name, and keeps it."""
    if not dirs.is_return or _entry_state(dirs.target, new, move, old, dirs.rewritten) is not EntryState.KIN:
        return False
    return status_at(old, dirs.source) is None or is_same_file(old, dirs.source, new, dirs.target)


def _add(dirs: MoveDirs, added: Successor) -> None:
    """Bring what comes under a name of its own to its place, before anything says that name."""
    name = added.file.path
    if _lies_at(added, dirs.source, name):
        return
    if not _lies_at(added, dirs.source, added.waits):
        raise StalePlan("what was to take its place has gone")
    if status_at(name, dirs.source) is not None:
        raise NameTaken(name)
    _link_or_rename(MoveDirs(dirs.source, dirs.source), added.waits, name)


def place_successors(dirs: MoveDirs, move: Move) -> None:
    """Let successors take the old names of a checkpoint that has its new ones; no name is ever free.

    A file that came to an old name since stays there: it is what a trainer saves right after this, too.
    """
    new_names = dict(move.members)
    for one in () if dirs.is_return else move.replacing:
        old = one.file.path
        if _lies_at(one, dirs.source, old):
            continue
        if _was_written_to(dirs.source, move, old):
            raise StalePlan("it has changed", since_plan=True)
        there = status_at(old, dirs.source)
        if there is not None and not is_same_file(old, dirs.source, new_names[old], dirs.target):
            continue
        if not _lies_at(one, dirs.source, one.waits):
            raise StalePlan("what was to take its place has gone")
        _replace(one.waits, dirs.source, old, dirs.source)


def unlink_old(dirs: MoveDirs, move: Move) -> None:
    """Take a checkpoint's old names away, its index first. What has come to stand there since stays.

    A trainer that saves into the same directory truncates files in place: one that was written to since is
    still the same file, and keeps its name. Once successors have taken their names, nothing else is taken
    back; before, all of the checkpoint is. Names in the trash always go.
    """

    def keeps_name(old: str) -> bool:
        return not dirs.leaves_trash and _was_written_to(dirs.source, move, old)

    if not move.replacing and any(keeps_name(old) for old, _ in move.members):
        raise StalePlan("it has changed", since_plan=True)
    for old, new in move.members:
        if not (_may_be_same_name(old, new) or keeps_name(old)):
            _unlink_other_name(dirs.source, old, dirs.target, new)
    if dirs.is_return:
        _remove_added(dirs.target, move)


def relink_old(dirs: MoveDirs, move: Move) -> None:
    """Give a checkpoint its old names again, its index last; what has them still keeps them."""
    for old, new in reversed(move.members):
        back = MoveDirs(dirs.target, dirs.source)
        there = _entry_state(dirs.target, new, move, old, dirs.rewritten)
        if there not in (EntryState.SAME, EntryState.KIN) or (
            _may_be_same_name(old, new) and not _lists_name(dirs.target, new)
        ):
            continue
        if dirs.leaves_trash and there is EntryState.KIN:
            continue
        if is_same_file(old, dirs.source, new, dirs.target) and not _is_variant(dirs, new, old):
            continue
        if is_replaced(dirs, move, old):
            _replace(new, dirs.target, old, dirs.source)
            continue
        if _is_taken(back, new, old):
            raise NameTaken(old)
        _link_or_rename(back, new, old)


def unlink_new(dirs: MoveDirs, move: Move) -> None:
    """Take a checkpoint's new names away, its index first, where it has the old ones.

    What has replaced a successor keeps its names: nothing else has them any more. So does what a trainer
    has written to since it came back.
    """
    if dirs.is_return and not all(_lies_at(one, dirs.target, one.file.path) for one in move.replacing):
        return
    for old, new in move.members:
        if not (_may_be_same_name(old, new) or _was_saved_over(dirs, move, old, new)):
            _unlink_other_name(dirs.target, new, dirs.source, old)
    if not dirs.is_return:
        _remove_added(dirs.source, move)


def _link_or_rename(dirs: MoveDirs, old: str, new: str) -> bool:
    """Give a file a second name, or rename it; tell whether it has both names now."""
    with (
        opened_parent(old, dirs.source) as (here, name),
        opened_parent(new, dirs.target) as (there, other),
    ):
        if _may_be_same_name(old, new):  # a link would take the one for the other
            if _is_taken(dirs, old, new):
                raise NameTaken(other)
            retry_while_busy(partial(rename, name, here, other, there))
            return False
        try:
            return link_or_rename(name, here, other, there, lambda: _is_taken(dirs, old, new), is_strict=True)
        except FileExistsError as error:
            raise NameTaken(other) from error


def _replace(name: str, place: int, target: str, target_place: int) -> None:
    """Rename a file over another one, in one step."""
    with opened_parent(name, place) as (here, own), opened_parent(target, target_place) as (there, other):
        retry_while_busy(partial(os.replace, own, other, src_dir_fd=here, dst_dir_fd=there))


def _lies_at(successor: Successor, place: int, path: str) -> bool:
    """Tell whether a successor lies at a path."""
    status = status_at(path, place)
    return status is not None and successor.file.is_of(status)


def _is_successor(move: Move, place: int, path: str) -> bool:
    """Tell whether the successor of the member with a path lies there."""
    return any(one.file.path == path and _lies_at(one, place, path) for one in move.replacing)


def _remove_added(place: int, move: Move) -> None:
    """Take away what came under names of its own; whatever else has them stays."""
    for one in move.added:
        with suppress(FileNotFoundError), opened_parent(one.file.path, place) as (directory, name):
            status = status_of(name, directory)
            if status is not None and one.file.is_of(status):
                retry_while_busy(partial(os.unlink, name, dir_fd=directory))


def is_replaced(dirs: MoveDirs, move: Move, old: str) -> bool:
    """Tell whether the successor of a member that leaves has its name already."""
    return not dirs.is_return and _is_successor(move, dirs.source, old)


def _undo_link(dirs: MoveDirs, old: str, new: str, *, is_link: bool) -> None:
    if is_link:
        _unlink_other_name(dirs.target, new, dirs.source, old, must_share=False)
    elif not _is_taken(MoveDirs(dirs.target, dirs.source), new, old):
        with (
            opened_parent(old, dirs.source) as (here, name),
            opened_parent(new, dirs.target) as (there, other),
        ):
            retry_while_busy(partial(rename, other, there, name, here))


def _was_written_to(place: int, move: Move, old: str) -> bool:
    """Tell whether the file at an old name of a checkpoint is the one that was noted, with other content."""
    noted = next((file for file in move.contents.files if file.path == old), None)
    status = None if noted is None else status_at(old, place)
    return (
        noted is not None and status is not None and noted.inode == status.st_ino and not noted.is_of(status)
    )


def _unlink_other_name(
    place: int, path: str, other_place: int, other_path: str, *, must_share: bool = True
) -> None:
    """Unlink a name of a file that has another one; whatever else is there stays."""
    if must_share and not is_same_file(path, place, other_path, other_place):
        return
    with suppress(FileNotFoundError), opened_parent(path, place) as (directory, name):  # somebody was faster
        status = status_of(name, directory)
        if status is not None and not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            retry_while_busy(partial(os.unlink, name, dir_fd=directory))


# What is at a name --------------------------------------------------------------------------------


def is_at_source(dirs: MoveDirs, move: Move) -> bool:
    """Tell whether a checkpoint is whole under its old names."""
    return all(
        _entry_state(dirs.source, old, move, old, dirs.was_at) is EntryState.SAME
        and (not _may_be_same_name(old, new) or _lists_name(dirs.source, old))
        for old, new in move.members
    )


def is_at_target(dirs: MoveDirs, move: Move) -> bool:
    """Tell whether a checkpoint is whole under its new names."""
    return all(_state_of_new(dirs, move, old, new) is EntryState.SAME for old, new in move.members)


def has_vanished(dirs: MoveDirs, move: Move) -> bool:
    """Tell whether nothing at all has one of a checkpoint's old names."""
    return all(status_at(old, dirs.source) is None for old, _ in move.members)


def part_names(place: int, move: Move, side: int) -> set[str]:
    """Return the names of a checkpoint in a directory, old or new, that nothing else has.

    Args:
        place: The directory.
        move: What moves.
        side: 0 for its old names, 1 for the new.
    """
    names = {pair[side]: pair[0] for pair in move.members}
    return {
        name for name, old in names.items() if _entry_state(place, name, move, old) is not EntryState.OTHER
    }


def _state_of_new(dirs: MoveDirs, move: Move, old: str, new: str) -> EntryState:
    """Return what is under a new name, which may be but another way to write the old one."""
    if _may_be_same_name(old, new) and not _lists_name(dirs.target, new):
        return EntryState.NOTHING
    return _entry_state(dirs.target, new, move, old, dirs.rewritten)


def _entry_state(
    place: int, name: str, move: Move, member: str, rewritten: frozenset[str] = frozenset()
) -> EntryState:
    """Return what is at a name, where a member of a checkpoint is expected."""
    try:
        here = contents(place, [name])
    except (FileNotFoundError, NotADirectoryError):
        return EntryState.NOTHING
    except OSError as error:
        if error.errno == errno.ELOOP:
            return EntryState.OTHER
        raise
    files, directories = _relative(here, name)
    noted, noted_directories = _relative(move.contents, member)
    for path in {os.path.relpath(one, name) for one in rewritten if _lies_below(one, name)}:
        if path in files and path in noted:  # a pointer in it may say something else by now
            files[path] = noted[path]
    if files == noted and directories == noted_directories:
        return EntryState.SAME
    is_kin = any(path in noted and file[0] == noted[path][0] for path, file in files.items())
    return EntryState.KIN if is_kin or (directories and not noted and not files) else EntryState.OTHER


def _relative(contents: Contents, member: str) -> tuple[dict[str, tuple[int, int, int]], set[str]]:
    """Return what lies at a member, by path below it: inode, size and time of files, and directories."""
    files = {
        os.path.relpath(file.path, member): (file.inode, file.size, file.mtime_ns)
        for file in contents.files
        if _lies_below(file.path, member)
    }
    return files, {
        os.path.relpath(directory, member)
        for directory in contents.directories
        if _lies_below(directory, member)
    }


def _lies_below(path: str, member: str) -> bool:
    return path == member or path.startswith(member + os.sep)


# Names --------------------------------------------------------------------------------------------


def _is_taken(dirs: MoveDirs, old: str, new: str) -> bool:
    """Tell whether something has a name already that isn't but another way to write the old one."""
    with opened_parent(new, dirs.target) as (place, name):
        return status_of(name, place) is not None and not _is_variant(dirs, old, new)


def _is_variant(dirs: MoveDirs, old: str, new: str) -> bool:
    """Tell whether two names are one entry: ``Model.pt`` and ``model.pt`` where case makes no difference.

    Two names of one file, both of which are listed as they are written, are two entries: hard links.
    """
    if not _may_be_same_name(old, new) or not dirs.is_one:
        return False
    return is_same_file(old, dirs.source, new, dirs.target) and not (
        _lists_name(dirs.source, old) and _lists_name(dirs.target, new)
    )


def _may_be_same_name(old: str, new: str) -> bool:
    """Tell whether some file system could take two names for one."""
    return _fold_name(old) == _fold_name(new)


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", name).casefold())


def _lists_name(place: int, path: str) -> bool:
    """Tell whether a directory lists a name just as it is written."""
    with opened_parent(path, place) as (directory, name):
        return name in os.listdir(directory)

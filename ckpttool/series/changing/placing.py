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
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from ckpttool.series.changing.moves import Move, Moves, old_name
from ckpttool.series.changing.owned import require_own_status
from ckpttool.series.changing.stage import Changed, persist, status_of
from ckpttool.series.files import Contents, contents, opened
from ckpttool.series.mounts import require_unmounted

_UNLINKABLE = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""What ``link`` says where there are no hard links, or no more of them."""


class State(Enum):
    """What is found at a name.

    ``KIN`` is what was meant, but changed since: one of its files still is the same one.
    """

    NOTHING = "nothing"
    SAME = "same"
    KIN = "kin"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Ground:
    """Open directories: the one that checkpoints leave, and the one that they come to.

    Attributes:
        source, target: Their descriptors; -1 for a target that is still to be made.
        rewritten: Paths relative to the target whose files may say something else by now.
        was_at: The same files' paths relative to the source.
    """

    source: int
    target: int
    rewritten: frozenset[str] = frozenset()
    was_at: frozenset[str] = frozenset()

    @property
    def is_one(self) -> bool:
        """Tell whether both are the same directory."""
        return os.path.samestat(os.fstat(self.source), os.fstat(self.target))


@contextmanager
def open_move_dirs(directory: str, moves: Moves, *, is_planned: bool = False) -> Iterator[Ground]:
    """Open the directories that checkpoints leave and come to; a trash is opened below its home."""
    is_within = moves.source == moves.target
    rewritten = frozenset(one.name for one in moves.rewrites if is_within)
    was_at = frozenset(old_name(moves, name) for name in rewritten)
    with opened_move_dir(directory, moves.source) as source:
        if is_planned and moves.kind == "trash":
            yield Ground(source, -1, rewritten, was_at)
            return
        with opened_move_dir(directory, moves.target) as target:
            yield Ground(source, target, rewritten, was_at)


@contextmanager
def opened_move_dir(directory: str, place: str) -> Iterator[int]:
    if place == directory:
        with opened(directory) as found:
            yield found
        return
    trash, identity = os.path.split(place)
    around, name = os.path.split(trash)
    with opened(around or os.curdir) as home, opened(name, home) as root, opened(identity, root) as found:
        require_own_status(place, os.fstat(found), os.stat(directory))
        yield found


def check(ground: Ground, move: Move) -> None:
    """Require that a checkpoint is as it was, and that nothing is in its way."""
    require_unmounted(ground.source, (old for old, _ in move.members))
    for old, new in move.members:
        here = _state(ground.source, old, move, old, ground.was_at)
        if here is State.NOTHING:
            raise Changed("it has vanished, or a part of it, since the plan was made")
        if here is not State.SAME:
            raise Changed("it has changed since the plan was made")
        if ground.target >= 0 and _is_taken(ground, old, new):
            raise Changed(f"{os.path.basename(new)} is in the way")


def bring(ground: Ground, move: Move) -> None:
    """Give a checkpoint its new names, its index last."""
    require_unmounted(ground.source, (old for old, _ in move.members))
    for old, new in reversed(move.members):
        there = _arrival(ground, move, old, new)
        if there is State.SAME:
            continue
        if there is not State.NOTHING and not _is_variant(ground, old, new):
            raise Changed(f"{os.path.basename(new)} is in the way")
        here = _state(ground.source, old, move, old, ground.was_at)
        if here is not State.SAME:
            what = "vanished, or a part of it," if here is State.NOTHING else "changed"
            raise Changed(f"it has {what} since the plan was made")
        is_link = _give(ground, old, new)
        # Only what came is known to be what was checked: another could have come between.
        if _state(ground.target, new, move, old, ground.rewritten) is not State.SAME:
            _take_back(ground, old, new, is_link=is_link)
            raise Changed("it has changed since the plan was made")


def leave(ground: Ground, move: Move) -> None:
    """Take a checkpoint's old names away, its index first. What has come to stand there since stays."""
    _drop_all(ground.source, ground.target, move, 0)


def restore(ground: Ground, move: Move) -> None:
    """Give a checkpoint its old names again, its index last; what has them still keeps them."""
    for old, new in reversed(move.members):
        back = Ground(ground.target, ground.source)
        there = _state(ground.target, new, move, old, ground.rewritten)
        if there not in (State.SAME, State.KIN) or (_are_alike(old, new) and not _has(ground.target, new)):
            continue
        if _is_one(ground.source, old, ground.target, new) and not _is_variant(ground, new, old):
            continue
        if _is_taken(back, new, old):
            raise Changed(f"{os.path.basename(old)} is in the way")
        _give(back, new, old)


def withdraw(ground: Ground, move: Move) -> None:
    """Take a checkpoint's new names away, its index first, where it has the old ones."""
    _drop_all(ground.target, ground.source, move, 1)


def is_at_source(ground: Ground, move: Move) -> bool:
    """Tell whether a checkpoint is whole under its old names."""
    return all(
        _state(ground.source, old, move, old, ground.was_at) is State.SAME
        and (not _are_alike(old, new) or _has(ground.source, old))
        for old, new in move.members
    )


def is_at_target(ground: Ground, move: Move) -> bool:
    """Tell whether a checkpoint is whole under its new names."""
    return all(_arrival(ground, move, old, new) is State.SAME for old, new in move.members)


def parts_at(place: int, move: Move, side: int) -> set[str]:
    """Return the names of a checkpoint in a directory, old or new, that nothing else has.

    Args:
        place: The directory.
        move: What moves.
        side: 0 for its old names, 1 for the new.
    """
    names = {pair[side]: pair[0] for pair in move.members}
    return {name for name, old in names.items() if _state(place, name, move, old) is not State.OTHER}


def has_vanished(ground: Ground, move: Move) -> bool:
    """Tell whether nothing at all has one of a checkpoint's old names."""
    for old, _ in move.members:
        with _around(ground.source, old) as (place, name):
            if status_of(name, place) is not None:
                return False
    return True


def _arrival(ground: Ground, move: Move, old: str, new: str) -> State:
    """Return what is under a new name, which may be but another way to write the old one."""
    if _are_alike(old, new) and not _has(ground.target, new):
        return State.NOTHING
    return _state(ground.target, new, move, old, ground.rewritten)


def _state(place: int, name: str, move: Move, member: str, rewritten: frozenset[str] = frozenset()) -> State:
    """Return what is at a name, where a member of a checkpoint is expected."""
    try:
        found = contents(place, [name])
    except (FileNotFoundError, NotADirectoryError):
        return State.NOTHING
    except OSError as error:
        if error.errno == errno.ELOOP:
            return State.OTHER
        raise
    files, directories = _relative(found, name)
    wanted, wanted_directories = _relative(move.contents, member)
    for path in {os.path.relpath(one, name) for one in rewritten if _lies_below(one, name)}:
        if path in files and path in wanted:
            files[path] = wanted[path]
    if files == wanted and directories == wanted_directories:
        return State.SAME
    is_kin = any(path in wanted and one[0] == wanted[path][0] for path, one in files.items())
    return State.KIN if is_kin or (directories and not wanted and not files) else State.OTHER


def _relative(found: Contents, member: str) -> tuple[dict[str, tuple[int, int, int]], set[str]]:
    """Return what lies at a member, by path below it: inode, size and time of files, and directories."""
    files = {
        os.path.relpath(one.path, member): (one.inode, one.size, one.mtime_ns)
        for one in found.files
        if _lies_below(one.path, member)
    }
    return files, {os.path.relpath(one, member) for one in found.directories if _lies_below(one, member)}


def _lies_below(path: str, member: str) -> bool:
    return path == member or path.startswith(member + os.sep)


def _is_taken(ground: Ground, old: str, new: str) -> bool:
    """Tell whether something has a name already that isn't but another way to write the old one."""
    with _around(ground.target, new) as (place, name):
        return status_of(name, place) is not None and not _is_variant(ground, old, new)


def _is_variant(ground: Ground, old: str, new: str) -> bool:
    """Tell whether two names are one entry: ``Model.pt`` and ``model.pt`` where case makes no difference."""
    if not _are_alike(old, new) or not ground.is_one:
        return False
    return _is_one(ground.source, old, ground.target, new) and not (
        _has(ground.source, old) and _has(ground.target, new)
    )


def _are_alike(old: str, new: str) -> bool:
    """Tell whether some file system could take two names for one."""
    return _folded(old) == _folded(new)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", name).casefold())


def _has(place: int, path: str) -> bool:
    """Tell whether a directory lists a name just as it is written."""
    with _around(place, path) as (directory, name):
        return name in os.listdir(directory)


def _is_one(place: int, path: str, other_place: int, other_path: str) -> bool:
    """Tell whether two names are of one file."""
    try:
        with _around(place, path) as (directory, name):
            one = status_of(name, directory)
        with _around(other_place, other_path) as (directory, name):
            two = status_of(name, directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return one is not None and two is not None and os.path.samestat(one, two)


def _give(ground: Ground, old: str, new: str) -> bool:
    """Give a file a second name, or rename it; tell whether it has both names now."""
    with _around(ground.source, old) as (here, name), _around(ground.target, new) as (there, other):
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) and not _are_alike(old, new):
            try:
                os.link(name, other, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
                return True
            except FileExistsError as error:
                raise Changed(f"{other} is in the way") from error
            except OSError as error:
                if error.errno not in _UNLINKABLE:
                    raise
        if _is_taken(ground, old, new):
            raise Changed(f"{other} is in the way")
        persist(partial(os.rename, name, other, src_dir_fd=here, dst_dir_fd=there))
        return False


def _take_back(ground: Ground, old: str, new: str, *, is_link: bool) -> None:
    if is_link:
        _drop(ground.target, new, ground.source, old, must_share=False)
    elif not _is_taken(Ground(ground.target, ground.source), new, old):
        with _around(ground.source, old) as (here, name), _around(ground.target, new) as (there, other):
            persist(partial(os.rename, other, name, src_dir_fd=there, dst_dir_fd=here))


def _drop_all(place: int, other_place: int, move: Move, side: int) -> None:
    """Unlink a checkpoint's old names (``side`` 0), or its new ones (1), where it has the others, too."""
    for pair in move.members:
        name, other = pair[side], pair[1 - side]
        if not _are_alike(name, other):
            _drop(place, name, other_place, other)


def _drop(place: int, path: str, other_place: int, other_path: str, *, must_share: bool = True) -> None:
    """Unlink a name of a file that has another one; whatever else is there stays."""
    if must_share and not _is_one(place, path, other_place, other_path):
        return
    with _missing_is_fine(), _around(place, path) as (directory, name):
        status = status_of(name, directory)
        if status is not None and not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            persist(partial(os.unlink, name, dir_fd=directory))


@contextmanager
def _missing_is_fine() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # somebody else was faster
        return


@contextmanager
def _around(place: int, path: str) -> Iterator[tuple[int, str]]:
    """Open the directory that a path lies in, and yield it with the name in it."""
    above, name = os.path.split(path)
    with opened(above, place) as directory:
        yield directory, name

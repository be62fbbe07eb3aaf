"""What a kill left of a target on its way: what was set aside is put back, unless all of the new had come."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ckpttool.errors import CheckpointError
from ckpttool.wire.area import (
    CONTENT,
    REPLACED,
    LeftAsItIs,
    Plan,
    is_area,
    is_bare,
    mark,
    read_plan,
    remove,
    require_own,
)
from ckpttool.wire.directories import OpenDirectory

try:
    import fcntl
except ImportError:  # no such locks on Windows: what a kill left stays there
    fcntl = None  # type: ignore[assignment]


def undo(directory: OpenDirectory, area: OpenDirectory, moves: Plan) -> None:
    """Take back what of the new came to its place, and put back what was set aside.

    Raises:
        LeftAsItIs: Something there is not as the plan says; nothing was moved.
        OSError: Something can't be moved; what was set aside is in its place, or still in the area.
    """
    for name in (CONTENT, REPLACED):
        if not area.holds_directory(name):
            raise LeftAsItIs(f"{area.join(name)} is no directory")
    with area.open(CONTENT) as content, area.open(REPLACED) as aside:
        _require_as_planned(directory, aside, moves)
        for name in reversed(moves.new):
            status = directory.status(name)
            if status is not None and mark(status) == moves.new[name]:
                if _is_one(directory, content, name):  # it has both names yet
                    directory.unlink(name)
                else:
                    directory.rename(name, content)
        for name in reversed(moves.old):
            if aside.has(name) and not _is_one(aside, directory, name):
                bring(name, aside, directory)
    directory.sync()


def bring(name: str, here: OpenDirectory, there: OpenDirectory) -> None:
    """Rename a file or a directory to another directory, where nothing has its name.

    Raises:
        OSError: Something has, or it can't be renamed.
    """
    if here.holds_directory(name):
        here.rename(name, there)
        return
    try:
        os.link(  # unlike a renaming, it never replaces
            here.at(name),
            there.at(name),
            src_dir_fd=here.descriptor,
            dst_dir_fd=there.descriptor,
            follow_symlinks=False,
        )
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if there.has(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), there.join(name)) from None
        here.rename(name, there)
    else:
        with suppress(OSError):  # it goes with the area
            here.unlink(name)


def clear(directory: OpenDirectory) -> list[str]:
    """Clear a directory of the areas that kills left, and put back what they had set aside.

    Returns:
        Which areas were left as they are, and why. One in which somebody works is none of them.

    Raises:
        OSError: The directory can't be read.
    """
    left = []
    for name in sorted(directory.names()) if fcntl is not None else ():
        try:
            if is_area(directory, name):
                _clear(directory, name)
        except (LeftAsItIs, OSError, CheckpointError) as why:
            if directory.has(name):  # whoever worked in it may have come to his end
                left.append(f"{directory.join(name)} is left as it is: {told(why)}")
    return left


def _clear(directory: OpenDirectory, name: str) -> None:
    """Clear an area in which nobody works; see ``clear``.

    Raises:
        LeftAsItIs, OSError, CheckpointError: It is not cleared, or not to its end.
    """
    _require_this_users(directory.status(name))  # another's can't be opened, perhaps
    with directory.open(name) as area:
        _require_this_users(area.own_status())
        if not _locks(area):
            return
        if not is_bare(area):
            require_own(area)
            moves = read_plan(area)
            if moves is not None and not _is_done(directory, moves):
                undo(directory, area, moves)
            directory.sync()
        remove(directory, area)


def _require_this_users(status: os.stat_result | None) -> None:
    if status is not None and status.st_uid != os.geteuid():
        raise LeftAsItIs("it is another user's")


def _locks(area: OpenDirectory) -> bool:
    """Lock an area; tell whether nobody else had.

    Raises:
        OSError: The file system has no locks.
    """
    assert area.descriptor is not None  # a system with these locks has descriptors of directories
    try:
        fcntl.flock(area.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_done(directory: OpenDirectory, moves: Plan) -> bool:
    """Tell whether all of the new stands in its place."""
    found = {name: directory.status(name) for name in moves.new}
    return bool(found) and all(
        status is not None and mark(status) == moves.new[name] for name, status in found.items()
    )


def _require_as_planned(directory: OpenDirectory, aside: OpenDirectory, moves: Plan) -> None:
    """Require that in an area, and where its names belong, is only what the plan says.

    Raises:
        LeftAsItIs: Something else is.
        OSError: It can't be told.
    """
    for name in aside.names():
        status = aside.status(name)
        if status is None or status.st_ino != moves.old.get(name):
            raise LeftAsItIs(f"{aside.join(name)} is not what was set aside")
    for name in {**moves.new, **moves.old}:
        status = directory.status(name)
        if status is None or status.st_ino == moves.old.get(name):
            continue
        if mark(status) != moves.new.get(name):
            place = directory.join(name)
            raise LeftAsItIs(f"{place} has come to stand there, or was changed; the old is in {aside.path}")


def _is_one(here: OpenDirectory, there: OpenDirectory, name: str) -> bool:
    """Tell whether a name is of one file in two directories."""
    one, other = here.status(name), there.status(name)
    return one is not None and other is not None and os.path.samestat(one, other)


def told(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}" if error.filename else error.strerror.lower()
    return str(error) or type(error).__name__

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
    is_directory,
    mark,
    read_plan,
    remove,
    require_own,
    stands,
)
from ckpttool.wire.atomic import sync_directory

try:
    import fcntl
except ImportError:  # no such locks on Windows: what a kill left stays there
    fcntl = None  # type: ignore[assignment]

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


def undo(directory: str, area: str, moves: Plan) -> None:
    """Take back what of the new came to its place, and put back what was set aside.

    Raises:
        LeftAsItIs: Something there is not as the plan says; nothing was moved.
        OSError: Something can't be moved; what was set aside is in its place, or still in the area.
    """
    content, aside = os.path.join(area, CONTENT), os.path.join(area, REPLACED)
    _require_as_planned(directory, area, moves)
    for name in reversed(moves.new):
        place = os.path.join(directory, name)
        if stands(place) and mark(place) == moves.new[name]:
            if _is_one(place, os.path.join(content, name)):  # it has both names yet
                os.unlink(place)
            else:
                os.rename(place, os.path.join(content, name))
    for name in reversed(moves.old):
        path, place = os.path.join(aside, name), os.path.join(directory, name)
        if stands(path) and not _is_one(path, place):
            bring(path, place)
    sync_directory(directory)


def bring(path: str, to: str) -> None:
    """Rename a file or a directory to where nothing stands.

    Raises:
        OSError: Something stands there, or it can't be renamed.
    """
    if is_directory(path):
        os.rename(path, to)
        return
    try:
        os.link(path, to, follow_symlinks=False)  # unlike a renaming, it never replaces
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if stands(to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to) from None
        os.rename(path, to)
    else:
        with suppress(OSError):  # it goes with the area
            os.unlink(path)


def clear(directory: str) -> list[str]:
    """Clear a directory of the areas that kills left, and put back what they had set aside.

    Returns:
        Which areas were left as they are, and why. One in which somebody works is none of them.

    Raises:
        OSError: The directory can't be read.
    """
    left = []
    for name in sorted(os.listdir(directory)) if fcntl is not None else ():
        area = os.path.join(directory, name)
        try:
            if is_area(area):
                _clear(directory, area)
        except (LeftAsItIs, OSError, CheckpointError) as why:
            if os.path.lexists(area):  # whoever worked in it may have come to his end
                left.append(f"{area} is left as it is: {told(why)}")
    return left


def _clear(directory: str, area: str) -> None:
    """Clear an area in which nobody works; see ``clear``.

    Raises:
        LeftAsItIs, OSError, CheckpointError: It is not cleared, or not to its end.
    """
    if os.lstat(area).st_uid != os.geteuid():
        raise LeftAsItIs("it is another user's")
    descriptor = os.open(area, _DIRECTORY)
    try:
        if not _locks(descriptor):
            return
        if not is_bare(area):
            require_own(area, os.fstat(descriptor))
            moves = read_plan(area)
            if moves is not None and not _is_done(directory, moves):
                undo(directory, area, moves)
            sync_directory(directory)
        remove(area)
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    """Lock an area; tell whether nobody else had.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_done(directory: str, moves: Plan) -> bool:
    """Tell whether all of the new stands in its place."""
    places = {os.path.join(directory, name): one for name, one in moves.new.items()}
    return bool(places) and all(stands(place) and mark(place) == one for place, one in places.items())


def _require_as_planned(directory: str, area: str, moves: Plan) -> None:
    """Require that in an area, and where its names belong, is only what the plan says.

    Raises:
        LeftAsItIs: Something else is.
        OSError: It can't be told.
    """
    content, aside = os.path.join(area, CONTENT), os.path.join(area, REPLACED)
    for path in (content, aside):
        if not stands(path) or not is_directory(path):
            raise LeftAsItIs(f"{path} is no directory")
    for name in os.listdir(aside):
        path = os.path.join(aside, name)
        if os.lstat(path).st_ino != moves.old.get(name):
            raise LeftAsItIs(f"{path} is not what was set aside")
    for name in {**moves.new, **moves.old}:
        place = os.path.join(directory, name)
        if not stands(place) or os.lstat(place).st_ino == moves.old.get(name):
            continue
        if mark(place) != moves.new.get(name):
            raise LeftAsItIs(f"{place} has come to stand there, or was changed; the old is in {aside}")


def _is_one(path: str, other: str) -> bool:
    """Tell whether two names are of one file."""
    return stands(path) and stands(other) and os.path.samestat(os.lstat(path), os.lstat(other))


def told(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}" if error.filename else error.strerror.lower()
    return str(error) or type(error).__name__

"""The directories of a trash: made when something is put there, and gone once nothing is left in them.

Nothing is made or removed through a symlink, and nothing in a trash that another user made.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from ckpttool.transaction.files import opened
from ckpttool.transaction.journal import is_temporary
from ckpttool.transaction.moves import TRASH, Moves
from ckpttool.transaction.ownership import LEFT_AS_IT_IS, require_own, require_own_status
from ckpttool.transaction.state_dir import OWNER, StateDir
from ckpttool.wire.directories import make_directory, sync_descriptor

_ANOTHERS = (
    f"{LEFT_AS_IT_IS}, and nobody else can rename, undo or use a trash here: its owner can take back what "
    "lies in it, or empty it (prune --empty-trash), or root can remove it"
)


def require_own_trash(state_dir: StateDir) -> None:
    """Require that a trash was made by this user, or by the owner of its directory, or isn't there."""
    trash = os.path.join(state_dir.path, TRASH + state_dir.suffix)
    if os.path.lexists(trash):
        require_own(trash, _directory_of_trash(state_dir), _ANOTHERS)


@contextmanager
def open_trash(state_dir: StateDir, around: int) -> Iterator[int]:
    """Open a trash in an open directory, and require that what was opened is ours."""
    name = TRASH + state_dir.suffix
    with opened(name, around) as trash:
        path, owner = os.path.join(state_dir.path, name), os.stat(_directory_of_trash(state_dir))
        require_own_status(path, os.fstat(trash), owner, _ANOTHERS)
        yield trash


def _directory_of_trash(state_dir: StateDir) -> str:
    directory = os.path.join(state_dir.path, state_dir.suffix.removeprefix(OWNER))
    return directory if os.path.isdir(directory) else state_dir.path  # a root may have got another name


def make_room(directory: str, state_dir: StateDir, moves: Moves) -> None:
    """Make the places in the trash that some moves leave or come to, as far as they are not there."""
    require_own_trash(state_dir)
    for side, place in enumerate((moves.source, moves.target)):
        if place != directory:
            numbers = {os.path.dirname(pair[side]) for move in moves.moves for pair in move.members}
            make_place(state_dir, moves.identity, numbers)


def make_trash(state_dir: StateDir) -> None:
    """Make a trash, if it is not there; others can't look inside."""
    require_own_trash(state_dir)
    with opened(state_dir.path) as around:
        if _make_directory(TRASH + state_dir.suffix, around):
            sync_descriptor(around)
        with open_trash(state_dir, around):
            return


def make_place(state_dir: StateDir, identity: str, numbers: Collection[str] = ()) -> None:
    """Make the place of a command in the trash, and numbered directories in it; others can't look inside."""
    require_own_trash(state_dir)
    with opened(state_dir.path) as around:
        is_new = _make_directory(TRASH + state_dir.suffix, around)
        with open_trash(state_dir, around) as root:
            is_new |= _make_directory(identity, root)
            with opened(identity, root) as place:
                made = [_make_directory(number, place) for number in sorted(numbers)]
                if is_new or any(made):
                    for changed in (around, root, place):
                        sync_descriptor(changed)


def _make_directory(name: str, place: int) -> bool:
    """Make a directory if it isn't there; tell whether it wasn't."""
    try:
        os.close(make_directory(name, 0o700, place))
    except FileExistsError:
        return False
    return True


def tidy(state_dir: StateDir, identity: str) -> None:
    """Remove a command's directories and half-written files from the trash, and the trash, where empty.

    What can't be removed stays, and is removed when the trash is emptied.
    """
    trash = TRASH + state_dir.suffix
    with suppress(OSError), opened(state_dir.path) as around:
        with suppress(OSError), opened(trash, around) as root:
            with suppress(OSError), opened(identity, root) as place:
                for name in os.listdir(place):
                    if name.isdecimal():
                        _remove_directory(name, place)
                    elif is_temporary(name):
                        with suppress(OSError):  # it isn't ours to remove
                            os.unlink(name, dir_fd=place)
            _remove_directory(identity, root)
        _remove_directory(trash, around)


def _remove_directory(name: str, place: int) -> None:
    with suppress(OSError):  # it isn't empty, or isn't there
        os.rmdir(name, dir_fd=place)

"""Makes pointers say what goes with a move, and say again what they said; what others wrote stays."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from ckpttool.series.moves import Moves, Relink, Rewrite
from ckpttool.series.stage import Changed
from ckpttool.wire.atomic import OWN_PREFIX, adopt, sync_directory

MAX_TEXT = 1 << 26
"""Bytes; no pointer, state file or index is larger."""

_FOLLOWS_NOTHING = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FOLLOWS_NOTHING
_READ = os.O_RDONLY | _FOLLOWS_NOTHING | getattr(os, "O_NONBLOCK", 0)


def text_at(path: str) -> str | None:
    """Return what a small file says, bytes that are no UTF-8 as surrogates; None where there is none.

    Raises:
        Changed: It is no file, or too large.
        OSError: It can't be read.
    """
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Changed(f"{os.path.basename(path)} is no file")
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise Changed(f"{os.path.basename(path)} is larger than a pointer")
    return data.decode("utf-8", "surrogateescape")


def require_pointers(directory: str, moves: Moves) -> None:
    """Require that all pointers say what they said when the plan was made.

    Raises:
        Changed: One does not.
        OSError: One can't be read.
    """
    inside = _Inside(directory, moves)
    for one in moves.rewrites:
        if text_at(inside.path_of(one.name)) != one.before:
            raise Changed(f"{one.name} has changed since the plan was made")
    for link in moves.relinks:
        if _target(inside.path_of(link.name)) != link.before:
            raise Changed(f"{link.name} has changed since the plan was made")


def point(directory: str, moves: Moves, stage: str, *, is_late: bool = False) -> None:
    """Make pointers say what they are to say; those that do already are left.

    Args:
        directory: The directory that they lie in.
        moves: What they go with.
        stage: A directory for what is written, on the same file system.
        is_late: Whether somebody may have rightly written one since: one that names none of the old names,
            or one of the new, is left as it is.

    Raises:
        Changed: One says something else than it did when the plan was made.
        OSError: One can't be written.
    """
    inside = _Inside(directory, moves)
    for one in _creations_first(moves.rewrites):
        path = inside.path_of(one.name)
        if not (is_late and _is_settled(moves, text_at(path), (one.before, one.after))):
            _say(path, one, stage, inside.path_of(_like(moves.rewrites, one)))
    for link in moves.relinks:
        path = inside.path_of(link.name)
        if not (is_late and _is_settled(moves, _target(path), (link.before, link.after))):
            _lead(path, link, stage)


def is_turned(directory: str, moves: Moves) -> bool:
    """Tell whether no pointer says any more what it said before, and there are some.

    Raises:
        OSError: One can't be read.
    """
    inside = _Inside(directory, moves)
    kept = [one for one in moves.rewrites if one.after is not None]
    texts = ((_text_or_none(inside.path_of(one.name)), one.before) for one in kept)
    links = ((_target(inside.path_of(one.name)), one.before) for one in moves.relinks)
    return moves.is_bound and all(now != before for now, before in (*texts, *links))


def _text_or_none(path: str) -> str | None:
    try:
        return text_at(path)
    except Changed:
        return None


def _is_settled(moves: Moves, text: str | None, known: tuple[str | None, str | None]) -> bool:
    """Tell whether what somebody else has written since fits what has moved."""
    if text is None or text in known or None in known:
        return False
    if moves.source != moves.target:  # what comes back, or goes, may be named or not
        return True
    pairs = [(old, new) for one in moves.moves for old, new in one.members]
    return any(new in text for _, new in pairs) or not any(old in text for old, _ in pairs)


def point_back(directory: str, moves: Moves, stage: str) -> None:
    """Make pointers say what they said; one that somebody else has written meanwhile stays as it is.

    Raises:
        OSError: One can't be written.
    """
    inside = _Inside(directory, moves)
    for link in reversed(moves.relinks):
        path = inside.path_of(link.name)
        if _target(path) == link.after:
            _lead(path, Relink(link.name, link.after, link.before), stage)
    turned = [Rewrite(one.name, one.after, one.before) for one in moves.rewrites]
    for one in _creations_first(turned):
        path = inside.path_of(one.name)
        if _says(path, one.before):
            _say(path, one, stage, inside.path_of(_like(turned, one)))


class _Inside:
    """Where a pointer lies: in a directory that moves, perhaps, and has moved already, or not."""

    def __init__(self, directory: str, moves: Moves) -> None:
        self._directory = directory
        self._old = {new: old for one in moves.moves for old, new in one.members}
        self._is_within = moves.source == moves.target

    def path_of(self, name: str) -> str:
        path = os.path.join(self._directory, name)
        first, _, rest = name.partition(os.sep)
        if rest and self._is_within and first in self._old and not os.path.lexists(path):
            return os.path.join(self._directory, self._old[first], rest)
        return path


def _creations_first(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    """Return rewrites so that an index is new somewhere before it goes elsewhere."""
    return sorted(rewrites, key=lambda one: (one.after is None, one.before is not None))


def _says(path: str, text: str | None) -> bool:
    try:
        return text_at(path) == text
    except Changed:
        return False


def _like(rewrites: Sequence[Rewrite], one: Rewrite) -> str:
    """Return the name of the file that one replaces: its own, or of its neighbour that goes as it comes."""
    if one.before is not None or one not in rewrites:
        return one.name
    at = list(rewrites).index(one)
    near = (rewrites[other] for other in (at + 1, at - 1) if 0 <= other < len(rewrites))
    return next((other.name for other in near if other.after is None), one.name)


def _say(path: str, one: Rewrite, stage: str, like: str) -> None:
    now = text_at(path)
    if now == one.after:
        return
    if now != one.before:
        raise Changed(f"{one.name} has changed since the plan was made")
    if one.after is None:
        os.unlink(path)
    else:
        temporary = _temporary(stage)
        is_part = like != path or os.sep in one.name
        _write(temporary, one.after.encode("utf-8", "surrogateescape"), like, keeps_time=is_part)
        if one.before is None:
            _bring(temporary, path, one.name)
        else:
            os.replace(temporary, path)
    sync_directory(os.path.dirname(path) or os.curdir)


def _temporary(stage: str) -> str:
    return os.path.join(stage, f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp")


def _write(path: str, data: bytes, like: str, *, keeps_time: bool) -> None:
    """Write a new file, with the mode and the owner of the one that it replaces.

    A part of a checkpoint keeps its time, too, which tells when that was saved.
    """
    with open(os.open(path, _CREATE, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        adopt(file.fileno(), like)
        if keeps_time and os.path.lexists(like):
            status = os.lstat(like)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(file.fileno())


def _bring(temporary: str, path: str, name: str) -> None:
    """Give a new file its name, unless there is one of this name."""
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise Changed(f"{name} has come to exist since the plan was made") from error
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def _target(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # it has gone, or is no symlink any more
        return None


def _lead(path: str, link: Relink, stage: str) -> None:
    """Make a symlink lead elsewhere, without a moment in which there is none."""
    now = _target(path)
    if now == link.after:
        return
    if now != link.before:
        raise Changed(f"{link.name} has changed since the plan was made")
    temporary = _temporary(stage)
    os.symlink(link.after, temporary)
    os.replace(temporary, path)
    sync_directory(os.path.dirname(path) or os.curdir)

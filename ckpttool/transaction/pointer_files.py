"""Rewrites pointers as checkpoints move, and restores them; what others wrote stays.

Everything happens below open directories, never through a symlink: what lies behind one is nobody's pointer.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import (
    MAX_BYTES,
    NAME,
    CheckpointState,
    expand_shards,
    parse_state,
    state_in,
    state_text,
)
from ckpttool.storage import fs
from ckpttool.storage.atomic import OWN_PREFIX, adopt_mode
from ckpttool.storage.directories import CREATE, link_or_rename, rename, sync_descriptor
from ckpttool.storage.source import NotRegular, regular_descriptor
from ckpttool.transaction.files import StalePlan, opened, status_of
from ckpttool.transaction.journal import OperationList, Relink, Rewrite

MAX_TEXT = 1 << 26
"""Bytes; no pointer, state file or index is larger."""


def text_at(path: str, place: int | None = None) -> str | None:
    """Return what a small file says, bytes that are no UTF-8 as surrogates; None where there is none.

    Args:
        path: The file.
        place: An open directory that the path starts at.
    """
    try:
        with _opened_text(path, place) as file:
            data = file.read(MAX_TEXT + 1)
    except FileNotFoundError:
        return None
    except NotRegular as error:
        raise StalePlan(f"{os.path.basename(path)} is no file") from error
    if len(data) > MAX_TEXT:
        raise StalePlan(f"{os.path.basename(path)} is larger than a pointer")
    return data.decode("utf-8", "surrogateescape")


def _opened_text(path: str, place: int | None) -> BinaryIO:
    if place is None and not fs.place_of(path).has_links:
        return fs.open_regular(path)
    return open(regular_descriptor(path, follows=False, dir_fd=place), "rb")


def require_pointers(directory: str, listed: OperationList) -> None:
    """Require that all pointers say what they said when the plan was made; nothing has moved yet."""
    with opened(directory) as place:
        for one in listed.pointers:
            name = listed.old_path(one.name)
            now = text_in(name, place) if isinstance(one, Rewrite) else _link_target(name, place)
            if now != one.before:
                raise StalePlan(f"{one.name} has changed", since_plan=True)


def write_pointer(one: Rewrite | Relink, directory: int, stage: int) -> None:
    """Rewrite a pointer in an open directory, unless it has changed since the plan was made."""
    if isinstance(one, Relink):
        _write_link(one, directory, stage)
    else:
        _write_text(one, directory, stage)


def restore_pointer(
    one: Rewrite | Relink, restored: Collection[str], directory: int, stage: int, *, is_all: bool
) -> None:
    """Have a pointer name restored checkpoints again; what others wrote since stays.

    Args:
        one: How it was rewritten.
        restored: Names of the checkpoints that are back.
        directory: The open directory.
        stage: The open stage.
        is_all: Whether these are all that go with the pointer.
    """
    with suppress(StalePlan, ValueError):
        if isinstance(one, Relink):
            if is_all and _link_target(one.name, directory) == one.after:
                _write_link(one.inverse, directory, stage)
            return
        back = restored_pointer(text_in(one.name, directory), one, restored, is_all=is_all)
        if back.after != back.before:
            _write_text(back, directory, stage)


def restored_pointer(now: str | None, one: Rewrite, restored: Collection[str], *, is_all: bool) -> Rewrite:
    """Return the rewrite that names restored checkpoints again.

    Args:
        now: What it says.
        one: How it was rewritten.
        restored: Names of the checkpoints that are back.
        is_all: Whether these are all that it named no more.

    Raises:
        ValueError: It names no checkpoint any more.
    """
    if now == one.after and is_all:
        return one.inverse
    if now is None or now == one.before or one.name != NAME:
        return Rewrite(one.name, now, now)
    return Rewrite(one.name, now, merged_state(now, Rewrite(NAME, one.after, one.before), restored))


@contextmanager
def _opened_around(name: str, directory: int) -> Iterator[tuple[int, str]]:
    """Open the directory that a pointer lies in, and yield it with the pointer's name there."""
    above, base = os.path.split(name)
    with ExitStack() as stack:
        try:
            place = stack.enter_context(opened(above, directory))
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise StalePlan(f"{name} lies behind a symlink, or in what is no directory") from error
            raise
        yield place, base


def text_in(name: str, directory: int) -> str | None:
    """Return what a pointer says; None where there is none."""
    try:
        with _opened_around(name, directory) as (place, base):
            return text_at(base, place)
    except FileNotFoundError:
        return None


def _link_target(name: str, directory: int) -> str | None:
    """Return where a symlink leads; None where there is none."""
    try:
        with _opened_around(name, directory) as (place, base):
            return os.readlink(base, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):  # it has gone, or is no symlink any more
            return None
        raise


def _write_text(one: Rewrite, directory: int, stage: int) -> None:
    """Make a pointer say something else: all of it, or nothing, whenever a kill comes."""
    if text_in(one.name, directory) == one.after:
        return
    _require_text(one, directory)
    with _opened_around(one.name, directory) as (place, name), _keeping_time(place, one.name):
        if one.after is None:
            os.unlink(name, dir_fd=place)
        else:
            temporary, like = temporary_name(), one.name if one.before is not None else one.like or one.name
            descriptor = os.open(temporary, CREATE, 0o666, dir_fd=stage)
            with open(descriptor, "wb") as file, _opened_around(like, directory) as (near, other):
                file.write(one.after.encode("utf-8", "surrogateescape"))
                file.flush()
                adopt_mode(descriptor, other, near)  # the mode and the owner of the file that it replaces
                status = status_of(other, near)
                # A part of a checkpoint keeps its time, too, which tells when that was saved.
                if status is not None and (one.like is not None or os.sep in one.name):
                    os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
                # Its content is on the disk before its name is: else a crash could leave an empty pointer.
                os.fsync(descriptor)
            _require_text(one, directory)  # a disk may take long to sync, and trainers don't wait
            if one.before is None:
                _link_new_file(stage, temporary, place, name)
            else:
                os.replace(temporary, name, src_dir_fd=stage, dst_dir_fd=place)
        sync_descriptor(place)


def _require_text(one: Rewrite, directory: int) -> None:
    """Require that a pointer says what it said when the plan was made."""
    if text_in(one.name, directory) != one.before:
        raise StalePlan(f"{one.name} has changed", since_plan=True)


def _write_link(link: Relink, directory: int, stage: int) -> None:
    """Make a symlink lead elsewhere, without a moment in which there is none."""
    now = _link_target(link.name, directory)
    if now == link.after:
        return
    if now != link.before:
        raise StalePlan(f"{link.name} has changed", since_plan=True)
    temporary = temporary_name()
    with _opened_around(link.name, directory) as (place, name), _keeping_time(place, link.name):
        os.symlink(link.after, temporary, dir_fd=stage)
        rename(temporary, stage, name, place)
        sync_descriptor(place)


def _link_new_file(scratch: int, temporary: str, place: int, name: str) -> None:
    """Give a new file its name, unless there is one of this name."""
    try:
        has_both = link_or_rename(temporary, scratch, name, place, lambda: status_of(name, place) is not None)
    except FileExistsError as error:
        raise StalePlan(f"{name} has come to exist", since_plan=True) from error
    if has_both:
        os.unlink(temporary, dir_fd=scratch)


@contextmanager
def _keeping_time(place: int, name: str) -> Iterator[None]:
    """Let a directory in a checkpoint keep its time, whatever is replaced in it: trainers sort by that."""
    status = os.fstat(place)
    yield
    if os.sep in name:
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))


def temporary_name() -> str:
    """Return a name for a file in a stage that is removed with it."""
    return f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp"


# TensorFlow's state file, as checkpoints that it lists are removed or restored -------------------


def state_rewrite(directory: str, removed: Collection[str]) -> tuple[Rewrite, ...]:
    """Return the rewrite of a directory's state file for a removal; none if it names nothing that goes.

    Args:
        directory: Where it lies, if there is one.
        removed: Names in the directory of the checkpoints that go.

    Raises:
        CheckpointError: It can't be read, or it is a symlink: what that leads to is not rewritten.
    """
    path = os.path.join(directory, NAME)
    try:
        if not stat.S_ISREG(fs.stat(path).st_mode):
            return ()
        with fs.open_regular(path) as file:
            rewrite = state_without(directory, file.read(MAX_BYTES + 1), removed)
    except OSError as error:
        if fs.is_absence(error):
            return ()
        raise from_os_error(error, path) from error
    if rewrite is None:
        return ()
    if fs.islink(path):
        raise AccessDenied(path, "is a symlink, and names a checkpoint that is to go; nothing was removed")
    return (rewrite,)


def state_without(directory: str, data: bytes, removed: Collection[str]) -> Rewrite | None:
    """Return the rewrite of a state file; None if it names nothing that goes, or isn't one.

    Args:
        directory: Where it lies.
        data: What it says.
        removed: Names in the directory of the checkpoints that go.
    """
    if len(data) > MAX_BYTES:
        return None
    text = data.decode("utf-8", "surrogateescape")
    try:
        state = state_in(text)
    except ValueError:
        return None
    if state is None:
        return None
    if not any(_goes(directory, path, removed) for path in state.paths):
        return None
    paths = [_remaining_path(directory, path, removed) for path in state.paths]
    last = next((path for path in reversed(paths) if path), None)
    latest = _remaining_path(directory, state.latest, removed) or last
    kept = [(path, at) for at, path in enumerate(paths) if path is not None]
    # Paths and timestamps stay parallel.
    times = tuple(state.timestamps[at] for _, at in kept) if state.timestamps else ()
    state = state._replace(
        latest=latest or state.latest, paths=tuple(path for path, _ in kept), timestamps=times
    )
    return Rewrite(NAME, text, state_text(state))


def _remaining_path(directory: str, path: str, removed: Collection[str]) -> str | None:
    """Return how a listed checkpoint is to be named from now on; None where it goes, or isn't there.

    The path of a run that was moved is stale, and its base name is taken.
    """
    name = base_name(path)
    if _goes(directory, path, removed):
        return None
    if _is_there(directory, path):
        return path
    return name if name not in removed and _is_there(directory, name) else None


def _goes(directory: str, path: str, removed: Collection[str]) -> bool:
    """Tell whether a listed path is that of a checkpoint that goes."""
    if not any(base_name(name) in removed for name in (path, *expand_shards(path))):
        return False
    full = os.path.join(directory, path)
    parent = fs.realpath(os.path.dirname(full) or os.curdir)
    return parent == fs.realpath(directory) or not _is_there(directory, path)


def _is_there(directory: str, path: str) -> bool:
    """Tell whether a listed checkpoint exists; a path of a machine tells a store's directory nothing."""
    path = os.path.join(directory, path)
    if fs.root_of(directory) and not fs.root_of(path):
        return False
    try:
        return any(map(fs.exists, (expand_shards(path)[0], f"{path}{INDEX}")))
    except ValueError:  # a NUL in it
        return False


def merged_state(now: str, ours: Rewrite, restored: Collection[str]) -> str:
    """Return TensorFlow's state file with the paths that we took out, or changed, back in their places.

    Args:
        now: What it says.
        ours: How what we made it say was to be taken back.
        restored: Names of the checkpoints that are back.
    """
    state, wrote, was = (_parse(text) for text in (now, ours.before, ours.after))
    changed: dict[str, str] = {}
    if len(wrote.paths) == len(was.paths):
        changed = {
            new: old for new, old in zip(wrote.paths, was.paths, strict=True) if base_name(old) in restored
        }
        changed[wrote.latest] = was.latest if base_name(was.latest) in restored else wrote.latest
    paths = [changed.get(path, path) for path in state.paths]
    times = list(state.timestamps)
    for number, path in enumerate(was.paths):
        was_ours = path not in wrote.paths and path not in changed.values()  # else somebody else took it out
        if was_ours and path not in paths and base_name(path) in restored:
            # Behind the nearest of those that came before it, or before the nearest that came after.
            places = {other: at for at, other in enumerate(paths)}
            before = (places[other] + 1 for other in reversed(was.paths[:number]) if other in places)
            after = (places[other] for other in was.paths[number + 1 :] if other in places)
            at = next(itertools.chain(before, after), 0)
            if times:
                times.insert(at, was.timestamps[number] if was.timestamps else times[max(at - 1, 0)])
            paths.insert(at, path)
    is_ours = state.latest == wrote.latest and base_name(was.latest) in restored
    latest = was.latest if is_ours else changed.get(state.latest, state.latest)
    return state_text(state._replace(latest=latest, paths=tuple(paths), timestamps=tuple(times)))


def _parse(text: str | None) -> CheckpointState:
    state = None if text is None else parse_state(text)
    if state is None:
        raise ValueError("it names no checkpoint any more")
    return state


def base_name(path: str) -> str:
    """Return the last name of a path that a state file lists, on whatever system it was written."""
    return os.path.basename(path.replace("\\", "/").rstrip("/"))

"""The hidden directory in which an output is written, and recovery from the one that a kill left.

In it lie

- ``owner``: which directory it is, and on which host it was made. No copy and no archive can say it rightly.
- ``content``: the new, under its final names.
- ``replaced``: the old, as far as it is set aside.
- ``moving``: the plan of what is moved. Without it, all of the old stands in its place, or all of the new.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpttool.errors import CheckpointError
from ckpttool.wire.atomic import OWN_PREFIX, write_in
from ckpttool.wire.directories import HAS_LOCKS, OpenDirectory, link_or_rename, try_lock
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.source import NotRegular, regular_descriptor

CONTENT, REPLACED = "content", "replaced"
_OWNER, _MOVING = "owner", "moving"
_NAME = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.new")
_BOOT = "/proc/sys/kernel/random/boot_id"
_MAX_BYTES = 1 << 24
"""Of a plan, or a note of the owner."""


class UnsafeArea(Exception):
    """An area is not touched any further; the message says why."""


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What is moved, in this order; a name is that of a file or directory beside the area.

    Attributes:
        new: What is brought to its place: its inode, and when it was changed last, in nanoseconds.
        old: What is set aside before: its inode.
    """

    new: dict[str, list[int]]
    old: dict[str, int]


# Making, and removing -------------------------------------------------------------------------------


def new_area_name() -> str:
    """Return a name for an area that no other has."""
    return f"{OWN_PREFIX}{os.urandom(6).hex()}.new"


def is_area_name(name: str) -> bool:
    """Tell whether an area would be called so."""
    return _NAME.fullmatch(name) is not None


def claim(area: OpenDirectory) -> None:
    """Note in an area which directory it is, and where it was made."""
    document = {"inode": area.own_status().st_ino, **_host()}
    descriptor = area.create(_OWNER, 0o600)
    try:
        os.write(descriptor, json.dumps(document).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host() -> dict[str, str]:
    """Return what tells this host from others, and this start of it from earlier ones."""
    boot = ""
    with suppress(OSError), open(_BOOT, encoding="ascii") as file:
        boot = file.read().strip()
    return {"host": os.uname().nodename if hasattr(os, "uname") else "", "boot": boot}


def write_plan(
    directory: OpenDirectory, area: OpenDirectory, new: Sequence[str], old: Sequence[str]
) -> SwapPlan:
    """Note in an area what will be moved; nothing is moved yet."""
    with area.open(CONTENT) as content:
        plan = SwapPlan(
            {name: mark(_existing_status(content, name)) for name in new},
            {name: _existing_status(directory, name).st_ino for name in old},
        )
    document = {
        "new": {_encode_name(name): new_mark for name, new_mark in plan.new.items()},
        "old": {_encode_name(name): inode for name, inode in plan.old.items()},
    }
    area.make(REPLACED).close()
    write_in(area, _MOVING, json.dumps(document).encode())
    return plan


def mark(status: os.stat_result) -> list[int]:
    """Return what stays the same of a file or a directory while it is renamed, and no longer."""
    return [status.st_ino, status.st_mtime_ns]


def _existing_status(directory: OpenDirectory, name: str) -> os.stat_result:
    status = directory.status(name)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory.join(name))
    return status


def move_without_replacing(name: str, here: OpenDirectory, there: OpenDirectory) -> None:
    """Rename a file or a directory to another directory; an OSError if something has its name there."""
    has_both = link_or_rename(
        here.at(name), here.descriptor, there.at(name), there.descriptor, lambda: there.has(name)
    )
    if has_both:
        with suppress(OSError):  # it goes with the area
            here.unlink(name)


def remove_area(directory: OpenDirectory, area: OpenDirectory) -> None:
    """Remove an area with all in it: the plan first, and last what says whose it is."""
    # Once the plan is gone, nothing is moved out of what is half removed; while the owner is noted, the rest
    # can be cleared by the next command.
    for name in sorted(area.names(), key=lambda name: (name == _OWNER, name != _MOVING)):
        area.remove(name)
    directory.remove_held(area, os.path.basename(area.path))


# What a kill left -----------------------------------------------------------------------------------


def recover_areas(directory: OpenDirectory) -> list[str]:
    """Clear a directory of the areas that kills left, and put back what they had set aside.

    Returns which areas were left as they are, and why. One in which somebody works is none of them.
    """
    warnings = []
    for name in sorted(directory.names()) if HAS_LOCKS else ():
        try:
            if is_area_name(name) and directory.holds_directory(name):
                _recover_area(directory, name)
        except (UnsafeArea, OSError, CheckpointError) as why:
            if directory.has(name):  # whoever worked in it may have come to his end
                warnings.append(f"{directory.join(name)} is left as it is: {error_text(why)}")
    return warnings


def _recover_area(directory: OpenDirectory, name: str) -> None:
    """Clear an area in which nobody works: what was set aside is put back, unless all of the new had come."""
    _require_this_users(directory.status(name))  # another's can't be opened, perhaps
    with directory.open(name) as area:
        _require_this_users(area.own_status())
        assert area.descriptor is not None  # a system with these locks has descriptors of directories
        if not try_lock(area.descriptor):
            return  # somebody works in it
        if not _has_no_owner_yet(area):
            _require_own_area(area)
            plan = _read_plan(area)
            # Forwards or back: if all of the new has come, only the old that was set aside is left to remove.
            if plan is not None and not _is_complete(directory, plan):
                undo_swap(directory, area, plan)
            directory.sync()
        remove_area(directory, area)


def _require_this_users(status: os.stat_result | None) -> None:
    if status is not None and status.st_uid != os.geteuid():
        raise UnsafeArea("it is another user's")


def _has_no_owner_yet(area: OpenDirectory) -> bool:
    """Tell whether not a byte lies in an area: whoever made it had not yet said so."""
    names = area.names()
    if not names:
        return True
    owner = area.status(_OWNER)
    return names == [_OWNER] and owner is not None and not stat.S_ISDIR(owner.st_mode) and not owner.st_size


def _require_own_area(area: OpenDirectory) -> None:
    """Require that an area was made by this user, here, and on this host."""
    status = area.own_status()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeArea("others may have written in it")
    match _read_json(area, _OWNER, "owner") if area.has(_OWNER) else None:
        case {"inode": int(inode), "host": str(host), "boot": str(boot)}:
            own = _host()
            if inode != status.st_ino:
                raise UnsafeArea("it is a copy, or comes out of an archive")
            # One kernel's locks hold on all that it runs; another start of this host has ended what it ran.
            if host != own["host"] and (not boot or boot != own["boot"]):
                raise UnsafeArea(f"it was made on the host {host!r}, where somebody may work in it")
        case _:
            raise UnsafeArea("it doesn't say where it was made")


def _read_plan(area: OpenDirectory) -> SwapPlan | None:
    """Return what was to be moved; None if nothing is in between."""

    def is_number(value: object) -> bool:
        return type(value) is int

    def is_mark(value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))

    if not area.has(_MOVING):
        return None
    match _read_json(area, _MOVING, "plan"):
        case {"new": dict(new), "old": dict(old)} if all(map(is_mark, new.values())) and all(
            map(is_number, old.values())
        ):
            return SwapPlan(
                {_decode_name(name): new_mark for name, new_mark in new.items()},
                {_decode_name(name): inode for name, inode in old.items()},
            )
    raise UnsafeArea(f"{area.join(_MOVING)} is no plan")


def _read_json(area: OpenDirectory, name: str, what: str) -> object:
    """Return what a small JSON file in an area holds."""
    path = area.join(name)
    try:
        descriptor = regular_descriptor(area.at(name), follows=False, dir_fd=area.descriptor)
    except NotRegular as error:
        raise UnsafeArea(f"{path} is no file of ckpttool's") from error
    try:
        if os.fstat(descriptor).st_size > _MAX_BYTES:
            raise UnsafeArea(f"{path} is no file of ckpttool's")
        with open(descriptor, "rb", closefd=False) as file:
            return parse_json(path, file.read(_MAX_BYTES), what)
    finally:
        os.close(descriptor)


def _encode_name(name: str) -> str:
    """Return a name as JSON can hold it, though a name need not be text."""
    return os.fsencode(name).decode("latin-1")


def _decode_name(name: str) -> str:
    """Return the name that ``_encode_name`` was given; it names something in a directory."""
    try:
        decoded = os.fsdecode(name.encode("latin-1"))
    except UnicodeError as error:
        raise UnsafeArea(f"{name!r} is no name") from error
    if decoded in ("", os.curdir, os.pardir) or os.sep in decoded or "\0" in decoded:
        raise UnsafeArea(f"{name!r} is no name")
    return decoded


def _is_complete(directory: OpenDirectory, plan: SwapPlan) -> bool:
    """Tell whether all of the new stands in its place."""
    statuses = {name: directory.status(name) for name in plan.new}
    return bool(statuses) and all(
        status is not None and mark(status) == plan.new[name] for name, status in statuses.items()
    )


def undo_swap(directory: OpenDirectory, area: OpenDirectory, plan: SwapPlan) -> None:
    """Take back what of the new came to its place, and put back what was set aside.

    An UnsafeArea says that something there is not as the plan says, and that nothing was moved. After an
    OSError, what was set aside is in its place, or still in the area.
    """
    for name in (CONTENT, REPLACED):
        if not area.holds_directory(name):
            raise UnsafeArea(f"{area.join(name)} is no directory")
    with area.open(CONTENT) as content, area.open(REPLACED) as aside:
        _check_against_plan(directory, aside, plan)
        # The new leaves first, in the reverse order of its coming: the last to come is what makes it whole.
        for name in reversed(plan.new):
            status = directory.status(name)
            if status is not None and mark(status) == plan.new[name]:
                if _is_same_file(directory, content, name):  # it has both names yet
                    directory.unlink(name)
                else:
                    directory.rename(name, content)
        for name in reversed(plan.old):
            if aside.has(name) and not _is_same_file(aside, directory, name):
                move_without_replacing(name, aside, directory)
    directory.sync()


def _check_against_plan(directory: OpenDirectory, aside: OpenDirectory, plan: SwapPlan) -> None:
    """Require that in an area, and where its names belong, is only what the plan says."""
    for name in aside.names():
        status = aside.status(name)
        if status is None or status.st_ino != plan.old.get(name):
            raise UnsafeArea(f"{aside.join(name)} is not what was set aside")
    for name in {**plan.new, **plan.old}:
        status = directory.status(name)
        if status is None or status.st_ino == plan.old.get(name):
            continue
        if mark(status) != plan.new.get(name):
            place = directory.join(name)
            raise UnsafeArea(f"{place} has come to stand there, or was changed; the old is in {aside.path}")


def _is_same_file(here: OpenDirectory, there: OpenDirectory, name: str) -> bool:
    """Tell whether a name is of one file in two directories."""
    status, other = here.status(name), there.status(name)
    return status is not None and other is not None and os.path.samestat(status, other)


def error_text(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}" if error.filename else error.strerror.lower()
    return str(error) or type(error).__name__

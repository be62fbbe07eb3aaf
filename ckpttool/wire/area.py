"""The directory in which a target is on its way: whose it is, and what is moved from and to it.

In it lie

- ``owner``: which directory it is, and on which host it was made. No copy and no archive can say it rightly.
- ``content``: the new, under its final names.
- ``replaced``: the old, as far as it is set aside.
- ``moving``: the plan of what is moved. Without it, all of the old stands in its place, or all of the new.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpttool.wire.atomic import OWN_PREFIX, write_atomically
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.regular import NotRegular, regular_descriptor

CONTENT, REPLACED = "content", "replaced"
_OWNER, _MOVING = "owner", "moving"
_NAME = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.new")
_BOOT = "/proc/sys/kernel/random/boot_id"
_MOST = 1 << 24
"""The most bytes of a plan."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class LeftAsItIs(Exception):
    """An area is not touched any further; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is moved, in this order; a name is that of a file or directory beside the area.

    Attributes:
        new: What is brought to its place: its inode, and when it was changed last, in nanoseconds.
        old: What is set aside before: its inode.
    """

    new: dict[str, list[int]]
    old: dict[str, int]


def new_area(directory: str) -> str:
    """Return the path of an area in a directory that has none of this name."""
    return os.path.join(directory, f"{OWN_PREFIX}{os.urandom(6).hex()}.new")


def is_area(path: str) -> bool:
    """Tell whether a path has the name of an area, and is a directory.

    Raises:
        OSError: It can't be told.
    """
    return _NAME.fullmatch(os.path.basename(path)) is not None and stands(path) and is_directory(path)


def claim(area: str) -> None:
    """Note in an area which directory it is, and where it was made.

    Raises:
        OSError: It can't be written.
    """
    told = {"inode": os.lstat(area).st_ino, **_host()}
    descriptor = os.open(os.path.join(area, _OWNER), _CREATE, 0o600)
    try:
        os.write(descriptor, json.dumps(told).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plan(directory: str, area: str, new: Sequence[str], old: Sequence[str]) -> Plan:
    """Note in an area what will be moved; nothing is moved yet.

    Raises:
        OSError: It can't be written.
    """
    made = Plan(
        {name: mark(os.path.join(area, CONTENT, name)) for name in new},
        {name: os.lstat(os.path.join(directory, name)).st_ino for name in old},
    )
    told = {
        "new": {_encoded(name): one for name, one in made.new.items()},
        "old": {_encoded(name): inode for name, inode in made.old.items()},
    }
    os.mkdir(os.path.join(area, REPLACED))
    write_atomically(os.path.join(area, _MOVING), json.dumps(told).encode())
    return made


def remove(area: str) -> None:
    """Remove an area with all in it: the plan first, and last what says whose it is.

    Raises:
        OSError: Something can't be removed.
    """
    for name in sorted(os.listdir(area), key=lambda name: (name == _OWNER, name != _MOVING)):
        path = os.path.join(area, name)
        if is_directory(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    os.rmdir(area)


def is_bare(area: str) -> bool:
    """Tell whether not a byte lies in an area: whoever made it had not yet said so."""
    names = os.listdir(area)
    owner = os.path.join(area, _OWNER)
    return not names or (names == [_OWNER] and not is_directory(owner) and not os.lstat(owner).st_size)


def require_own(area: str, status: os.stat_result) -> None:
    """Require that an area was made by this user, here, and on this host.

    Raises:
        LeftAsItIs: It was not.
        OSError, CheckpointError: It can't be told.
    """
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LeftAsItIs("others may have written in it")
    owner = os.path.join(area, _OWNER)
    match _read(owner, "owner") if stands(owner) else None:
        case {"inode": int(inode), "host": str(host), "boot": str(boot)}:
            own = _host()
            if inode != status.st_ino:
                raise LeftAsItIs("it is a copy, or comes out of an archive")
            # One kernel's locks hold on all that it runs; another start of this host has ended what it ran.
            if host != own["host"] and (not boot or boot != own["boot"]):
                raise LeftAsItIs(f"it was made on the host {host!r}, where somebody may work in it")
        case _:
            raise LeftAsItIs("it doesn't say where it was made")


def _host() -> dict[str, str]:
    """Return what tells this host from others, and this start of it from earlier ones."""
    boot = ""
    with suppress(OSError), open(_BOOT, encoding="ascii") as file:
        boot = file.read().strip()
    return {"host": os.uname().nodename if hasattr(os, "uname") else "", "boot": boot}


def read_plan(area: str) -> Plan | None:
    """Return what was to be moved; None where nothing is in between.

    Raises:
        LeftAsItIs: It is no plan.
        OSError, CheckpointError: It can't be read.
    """
    path = os.path.join(area, _MOVING)
    if not stands(path):
        return None
    match _read(path, "plan"):
        case {"new": dict(new), "old": dict(old)} if _are(_is_mark, new) and _are(_is_number, old):
            return Plan(
                {_decoded(name): one for name, one in new.items()},
                {_decoded(name): inode for name, inode in old.items()},
            )
    raise LeftAsItIs(f"{path} is no plan")


def _are(what: Callable[[object], bool], values: dict[str, object]) -> bool:
    return all(map(what, values.values()))


def _is_number(value: object) -> bool:
    return type(value) is int


def _is_mark(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _read(path: str, what: str) -> object:
    """Return what a small JSON file in an area holds.

    Raises:
        LeftAsItIs: It is not such a file.
        OSError, CheckpointError: It can't be read.
    """
    try:
        descriptor = regular_descriptor(path, follows=False)
    except NotRegular as error:
        raise LeftAsItIs(f"{path} is no file of ckpttool's") from error
    try:
        if os.fstat(descriptor).st_size > _MOST:
            raise LeftAsItIs(f"{path} is no file of ckpttool's")
        with open(descriptor, "rb", closefd=False) as file:
            return parse_json(path, file.read(_MOST), what)
    finally:
        os.close(descriptor)


def _encoded(name: str) -> str:
    """Return a name as JSON can hold it, though a name need not be text."""
    return os.fsencode(name).decode("latin-1")


def _decoded(name: str) -> str:
    """Return the name that ``_encoded`` was given.

    Raises:
        LeftAsItIs: It is not the name of something in a directory.
    """
    try:
        found = os.fsdecode(name.encode("latin-1"))
    except UnicodeError as error:
        raise LeftAsItIs(f"{name!r} is no name") from error
    if found in ("", os.curdir, os.pardir) or os.sep in found or "\0" in found:
        raise LeftAsItIs(f"{name!r} is no name")
    return found


def mark(path: str) -> list[int]:
    """Return what stays the same of a file or a directory while it is renamed, and no longer."""
    status = os.lstat(path)
    return [status.st_ino, status.st_mtime_ns]


def stands(path: str) -> bool:
    """Tell whether anything has this name; unlike ``os.path.lexists``, it never says no for not knowing.

    Raises:
        OSError: It can't be told.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def is_directory(path: str) -> bool:
    """Tell whether a path is a directory, and no link to one.

    Raises:
        OSError: It can't be told.
    """
    return stat.S_ISDIR(os.lstat(path).st_mode)

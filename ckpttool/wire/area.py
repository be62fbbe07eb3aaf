"""The directory in which a target is on its way: whose it is, and what is moved from and to it.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpttool.wire.atomic import OWN_PREFIX, write_within
from ckpttool.wire.directories import OpenDirectory
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.regular import NotRegular, regular_descriptor

CONTENT, REPLACED = "content", "replaced"
_OWNER, _MOVING = "owner", "moving"
_NAME = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.new")
_BOOT = "/proc/sys/kernel/random/boot_id"
_MOST = 1 << 24
"""The most bytes of a plan."""


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


def new_name() -> str:
    """Return a name for an area that no other has."""
    return f"{OWN_PREFIX}{os.urandom(6).hex()}.new"


def is_area_name(name: str) -> bool:
    """Tell whether an area would be called so."""
    return _NAME.fullmatch(name) is not None


def is_area(directory: OpenDirectory, name: str) -> bool:
    """Tell whether an entry of a directory has the name of an area, and is a directory.

    Raises:
        OSError: It can't be told.
    """
    return is_area_name(name) and directory.holds_directory(name)


def claim(area: OpenDirectory) -> None:
    """Note in an area which directory it is, and where it was made.

    Raises:
        OSError: It can't be written.
    """
    told = {"inode": area.own_status().st_ino, **_host()}
    descriptor = area.create(_OWNER, 0o600)
    try:
        os.write(descriptor, json.dumps(told).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plan(directory: OpenDirectory, area: OpenDirectory, new: Sequence[str], old: Sequence[str]) -> Plan:
    """Note in an area what will be moved; nothing is moved yet.

    Raises:
        OSError: It can't be written.
    """
    with area.open(CONTENT) as content:
        made = Plan(
            {name: mark(_present(content, name)) for name in new},
            {name: _present(directory, name).st_ino for name in old},
        )
    told = {
        "new": {_encoded(name): one for name, one in made.new.items()},
        "old": {_encoded(name): inode for name, inode in made.old.items()},
    }
    area.make(REPLACED).close()
    write_within(area, _MOVING, json.dumps(told).encode())
    return made


def remove(directory: OpenDirectory, area: OpenDirectory) -> None:
    """Remove an area with all in it: the plan first, and last what says whose it is.

    Raises:
        OSError: Something can't be removed.
    """
    for name in sorted(area.names(), key=lambda name: (name == _OWNER, name != _MOVING)):
        area.remove(name)
    directory.remove_held(area, os.path.basename(area.path))


def is_bare(area: OpenDirectory) -> bool:
    """Tell whether not a byte lies in an area: whoever made it had not yet said so."""
    names = area.names()
    if not names:
        return True
    owner = area.status(_OWNER)
    return names == [_OWNER] and owner is not None and not stat.S_ISDIR(owner.st_mode) and not owner.st_size


def require_own(area: OpenDirectory) -> None:
    """Require that an area was made by this user, here, and on this host.

    Raises:
        LeftAsItIs: It was not.
        OSError, CheckpointError: It can't be told.
    """
    status = area.own_status()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LeftAsItIs("others may have written in it")
    match _read(area, _OWNER, "owner") if area.has(_OWNER) else None:
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


def read_plan(area: OpenDirectory) -> Plan | None:
    """Return what was to be moved; None where nothing is in between.

    Raises:
        LeftAsItIs: It is no plan.
        OSError, CheckpointError: It can't be read.
    """
    if not area.has(_MOVING):
        return None
    match _read(area, _MOVING, "plan"):
        case {"new": dict(new), "old": dict(old)} if _are(_is_mark, new) and _are(_is_number, old):
            return Plan(
                {_decoded(name): one for name, one in new.items()},
                {_decoded(name): inode for name, inode in old.items()},
            )
    raise LeftAsItIs(f"{area.join(_MOVING)} is no plan")


def _are(what: Callable[[object], bool], values: dict[str, object]) -> bool:
    return all(map(what, values.values()))


def _is_number(value: object) -> bool:
    return type(value) is int


def _is_mark(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _read(area: OpenDirectory, name: str, what: str) -> object:
    """Return what a small JSON file in an area holds.

    Raises:
        LeftAsItIs: It is not such a file.
        OSError, CheckpointError: It can't be read.
    """
    path = area.join(name)
    try:
        descriptor = regular_descriptor(area.at(name), follows=False, place=area.descriptor)
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


def mark(status: os.stat_result) -> list[int]:
    """Return what stays the same of a file or a directory while it is renamed, and no longer."""
    return [status.st_ino, status.st_mtime_ns]


def _present(place: OpenDirectory, name: str) -> os.stat_result:
    status = place.status(name)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place.join(name))
    return status

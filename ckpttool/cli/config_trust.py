"""Trusted configurations: not writable by other users, and confirmed by the user.

Each trusted configuration has a record in the user's state directory with its path and a digest of its
tables. A copy elsewhere, or a changed file, is not trusted.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.options import Reach

if TYPE_CHECKING:
    from ckpttool.core.options import Option

_SCHEME = re.compile(r"[a-z][a-z0-9+-]+:", re.IGNORECASE)
"""Scheme of a URL or prefix of a tracker, such as ``s3:`` or ``mlflow:``."""
_COUNT = re.compile(r":(?:step|epoch)(?:[+-]\d+)?$")
"""Suffix that selects the counter of a log."""


class TrustDoubt(NamedTuple):
    """Why a configuration is not trusted, as in "the file is ...", and whether the user can confirm it."""

    text: str
    can_be_confirmed: bool = True


# Values that need trust --------------------------------------------------------------


def reach_of(option: Option, value: object, path: str) -> str | None:
    """Return the effect of a key's value that needs trust, None if it needs none; ``path`` is the file."""
    if value is False or option.reach is Reach.HARMLESS:
        return None
    if option.reach is None:
        return "reaches further than this file"
    if option.reach is not Reach.BELOW:
        return str(option.reach.value)
    places = value if isinstance(value, list) else [value]
    out = [one for one in places if not is_below(str(one), os.path.dirname(path))]
    return f"{option.reach.value} ({out[0]})" if out else None


def is_below(text: str, directory: str) -> bool:
    """Return whether a path, relative to a directory, resolves to that directory or below it."""
    if _SCHEME.match(text):
        return False
    root = os.path.join(os.path.realpath(directory), "")
    places = (os.path.realpath(os.path.join(directory, one)) for one in (text, _COUNT.sub("", text)))
    return all(os.path.join(place, "").startswith(root) for place in places)


# Ownership --------------------------------------------------------------------------


def ownership_doubt(status: os.stat_result, *, is_above: bool = False) -> str | None:
    """Return why another user could have written a file or directory, or None.

    Args:
        is_above: Whether it is a parent further up. One with the sticky bit, such as /tmp, is accepted:
            other users can't rename entries there.
    """
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if stat.S_ISLNK(status.st_mode):  # a link's own mode says nothing
        return None
    if is_above and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "every user can write to it"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid, status.st_uid):
        return "other users of its group can write to it"
    return None


def _is_private(group: int, user: int) -> bool:
    """Return whether a group is the private group of a user."""
    import grp
    import pwd

    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:  # nobody has told the system their names
        return False
    return entry.gr_name == name and not set(entry.gr_mem) - {name}


def code_ownership_doubt(reference: str) -> str | None:
    """Return why another user could have written the code that a configuration names, or None.

    Args:
        reference: ``file.py:Name`` or ``package.module:Name``. Installed packages are not checked.
    """
    for path in _code_paths(reference.rpartition(":")[0]):
        try:
            doubt = ownership_doubt(os.lstat(path)) or ownership_doubt(os.stat(path))
        except OSError:  # it is not there, which whoever imports it says better
            continue
        if doubt is not None:
            return f"{path}: {doubt}"
    return None


def _code_paths(module: str) -> list[str]:
    """Return the files of a module and the directories that it imports from."""
    if module.endswith(".py"):
        return [module, os.path.dirname(module), os.path.dirname(os.path.realpath(module))]
    parts = module.split(".")
    packages = [os.path.join(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = [os.path.join(one, "__init__.py") for one in packages] + [f"{one}.py" for one in packages]
    # The current directory is where modules are looked for that are not installed.
    is_here = any(map(os.path.lexists, (packages[0], f"{packages[0]}.py")))
    return [os.curdir, *packages, *files] if is_here else []


def _place_doubt(path: str) -> str | None:
    """Return why another user could replace a file, or None.

    Checked are the parents of a symlink and those of its target.
    """
    for place in dict.fromkeys((_place_of(path), os.path.realpath(path))):
        for directory in _directories_above(place):
            doubt = ownership_doubt(os.stat(directory), is_above=directory != os.path.dirname(place))
            if doubt is not None:
                return f"{directory}: {doubt}"
    return None


def _directories_above(path: str) -> Iterator[str]:
    while (directory := os.path.dirname(path)) != path:
        yield directory
        path = directory


# What its user confirmed ----------------------------------------------------------------------------


def trust_doubt(path: str, tables: Mapping[str, Any]) -> TrustDoubt | None:
    """Return why a configuration is not trusted, or None.

    Args:
        path: Path of the file.
        tables: Its parsed tables.
    """
    try:
        doubt = _place_doubt(path)
    except OSError as failure:
        raise from_os_error(failure, path) from failure
    if doubt is not None:
        return TrustDoubt(f"not safe from others: {doubt}", can_be_confirmed=False)
    confirmed = _confirmed_text(path)
    if confirmed == _record_text(path, tables):
        return None
    return TrustDoubt("not trusted" if confirmed is None else "no longer what was trusted")


def confirm_trust(path: str, tables: Mapping[str, Any]) -> None:
    """Trust a configuration at its present path with its present tables.

    Raises:
        CheckpointError: The record can't be written.
    """
    from ckpttool.storage.atomic import write_atomically

    record = _record_path(path)
    try:
        os.makedirs(os.path.dirname(record), 0o700, exist_ok=True)
        write_atomically(record, _record_text(path, tables), mode=0o600)
    except OSError as failure:
        raise from_os_error(failure, record) from failure


def withdraw_trust(path: str) -> bool:
    """Remove the record of a configuration and return whether there was one."""
    record = _record_path(path)
    try:
        os.unlink(record)
    except FileNotFoundError:
        return False
    except OSError as failure:
        raise from_os_error(failure, record) from failure
    return True


def _confirmed_text(path: str) -> bytes | None:
    from ckpttool.storage import fs

    try:
        with fs.open_regular(_record_path(path)) as file:
            return None if ownership_doubt(os.fstat(file.fileno())) else file.read()
    except (OSError, UsageError):  # the latter without a state directory
        return None


def _record_path(path: str) -> str:
    """Return the path of the record of a configuration, which need not exist."""
    import hashlib

    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # which the specification says to ignore
        state = os.path.expanduser(os.path.join("~", ".local", "state"))
    if not os.path.isabs(state):
        raise UsageError("there is no home directory to remember it in (set XDG_STATE_HOME)")
    name = hashlib.sha256(os.fsencode(_place_of(path))).hexdigest()
    return os.path.join(state, "ckpttool", "trusted", name)


def _record_text(path: str, tables: Mapping[str, Any]) -> bytes:
    import hashlib
    import json

    # Comments, and what a pyproject.toml says to others, may change.
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True, default=repr).encode()).hexdigest()
    return f"{digest}  ".encode() + os.fsencode(_place_of(path)) + b"\n"


def _place_of(path: str) -> str:
    """Return the path of a file with its parents resolved; the file itself may be a symlink."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))

"""Configuration files: discovery, parsing, and trust.

A file that was found rather than named may come from a download. It is read only if no other user could have
written it, and until the user trusts it, its keys can only affect files below it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.options import Reach
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.core.options import Option

NAME, PROJECT = "ckpttool.toml", "pyproject.toml"
TABLES = ("verify", "retention", "naming", "watch")
MAX_BYTES = 1 << 20
"""Limit on the bytes of a configuration, which is written by hand."""
_SETS_VERIFY = re.compile(
    rb"^[ \t]*(?:\[{1,2}[ \t]*verify\b[^\n]*\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*[^\s#\[]|verify[ \t]*[.=])",
    re.MULTILINE,
)
"""The heading ``[verify]`` or ``[[verify.rule]]`` with a key below it, or a dotted key of the table."""


class ConfigDocument(NamedTuple):
    """The tables of a configuration.

    Attributes:
        path: Path of the file, as given or relative to the start of the search.
        prefix: Prefix of table names in the file: ``tool.ckpttool.`` or empty.
        tables: Tables by name, without the prefix.
        is_named: Whether the user named the file, which makes it trusted.
    """

    path: str
    prefix: str
    tables: Mapping[str, Any]
    is_named: bool = False

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table; a missing one is empty."""
        table = self.tables.get(name, {})
        if not isinstance(table, Mapping):
            raise self.wrong(name, f"expected a table, not {table!r:.40}")
        return table

    def trust_doubt(self) -> TrustDoubt | None:
        """Return why the file is not trusted, or None."""
        return None if self.is_named else trust_doubt(self.path, self.tables)

    def require_trust(self, origin: str, why: str) -> None:
        """Raise UsageError if the file isn't trusted; ``why`` is the effect of the value in question."""
        if (doubt := self.trust_doubt()) is not None:
            hint = f"--config {self.path} uses it anyway"
            if doubt.can_be_confirmed:
                hint = f"read it, and run ckpttool config --trust {self.path}, or use --config {self.path}"
            raise UsageError(f"{origin}: {why}, and the file is {doubt.text} ({hint})")

    def origin(self, place: str) -> str:
        """Return the path and heading of a table, or of a rule such as ``verify.rule 1``, for errors."""
        return f"{self.path}[{self.prefix}{place}]"

    def wrong(self, place: str, problem: str) -> UsageError:
        """Return the error for a problem at a place."""
        return UsageError(f"{self.origin(place)}: {problem}")


# Finding --------------------------------------------------------------------------------------------

# The nearest file wins as a whole; configurations aren't merged, so that one file explains a run. The search
# doesn't leave the git repository, the home directory or the file system: a file in /tmp, in a parent that
# others share, or on another mount was probably not written for this project. ``ckpttool.toml`` wins over
# ``pyproject.toml`` in one directory, and a ``pyproject.toml`` without ``[tool.ckpttool]`` is skipped.


def find_config(start: str = os.curdir) -> str | None:
    """Return the configuration in a directory or the nearest one above it, or None.

    The search ends after a directory with ``.git``, after the home directory, and where the file system ends.

    Raises:
        UsageError: A ``pyproject.toml`` on the way can't be read.
    """
    return _find_in(_directories_upwards(os.path.realpath(start)), start)


def find_config_beside(path: str) -> str | None:
    """Return the configuration in a path's directory or the nearest one above it in the same git repository.

    Raises:
        UsageError: A ``pyproject.toml`` on the way can't be read.
    """
    start = _directory_of(path)
    return _find_in(_directories_of_repository(start), start)


def unread_config_beside(path: str) -> str | None:
    """Return the ``ckpttool.toml`` that ``find_config_beside`` finds, if it has a table ``[verify]``."""
    # Only for a note that it isn't read. The user hasn't asked for it, and it may come from a download, so it
    # is searched as text and never parsed: a few bytes of TOML can make a parser take all memory.
    start = _directory_of(path)
    for directory in _directories_of_repository(start):
        own = os.path.join(_as_seen_from(start, directory), NAME)
        if os.path.lexists(own):
            return os.path.normpath(own) if _SETS_VERIFY.search(_first_bytes(own)) else None
    return None


def _find_in(directories: Iterable[str], start: str) -> str | None:
    for directory in directories:
        near = _as_seen_from(start, directory)
        own, shared = (os.path.normpath(os.path.join(near, name)) for name in (NAME, PROJECT))
        if os.path.lexists(own):
            return own
        if os.path.isfile(shared) and _own_table(shared, _parse(shared, _read_bytes(shared, is_named=True))):
            return shared
    return None


def _as_seen_from(start: str, directory: str) -> str:
    # The search goes up real paths, but messages have the path that the user would type, such as
    # ``../ckpttool.toml``. If ``start`` is a link, its ".." is another directory, and the real path is shown.
    near = os.path.normpath(os.path.join(start, os.path.relpath(directory, os.path.realpath(start))))
    return near if os.path.realpath(near) == directory else directory


def _directory_of(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path) or os.curdir


def _directories_of_repository(start: str) -> list[str]:
    """Return a directory and those above it in its git repository; the directory alone outside of one."""
    directories = [*_directories_upwards(os.path.realpath(start))]
    return directories if os.path.lexists(os.path.join(directories[-1], ".git")) else directories[:1]


def _first_bytes(path: str) -> bytes:
    try:
        with fs.open_regular(path) as file:
            return file.read(MAX_BYTES)
    except OSError:
        return b""


def _directories_upwards(directory: str) -> Iterator[str]:
    home = os.path.realpath(os.path.expanduser("~"))
    while True:
        yield directory
        parent = os.path.dirname(directory)
        is_end = directory == home or parent == directory or os.path.lexists(os.path.join(directory, ".git"))
        if is_end or _device(parent) != _device(directory):
            return
        directory = parent


def _device(directory: str) -> int | None:
    try:
        return os.stat(directory).st_dev
    except OSError:  # an unreadable directory; those above it don't count
        return None


# Reading --------------------------------------------------------------------------------------------


def read_document(path: str, *, is_named: bool = False) -> ConfigDocument:
    """Return the tables of a configuration.

    Args:
        path: A ``pyproject.toml``, or a configuration under any other name.
        is_named: Whether the user named it. Otherwise, it is an error if other users could write it.

    Raises:
        UsageError: It has an error, or other users could write it.
        CheckpointError: It can't be read.
    """
    tables = _parse(path, _read_bytes(path, is_named=is_named))
    prefix = ""
    if os.path.basename(path) == PROJECT:
        prefix = "tool.ckpttool."
        own = _own_table(path, tables)
        if own is None:
            raise UsageError(f"{path}: no table [tool.ckpttool]")
        tables = own
    unknown = sorted(tables.keys() - set(TABLES))
    if unknown:
        expected = f"one of {', '.join(f'[{prefix}{name}]' for name in TABLES)}"
        if unknown[0] in ("rule", "rules"):
            expected = f"[[{prefix}retention.rule]] or [[{prefix}verify.rule]]"
        raise UsageError(f"{path}: unknown {prefix}{unknown[0]} (expected {expected})")
    return ConfigDocument(path, prefix, tables, is_named)


def nearest_document(named: str | None = None) -> ConfigDocument | None:
    """Return the tables of a named configuration, or else of the nearest one; None without one."""
    path = named or find_config()
    return None if path is None else read_document(path, is_named=named is not None)


def _own_table(path: str, tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
    tool = tables.get("tool", {})
    own = tool.get("ckpttool") if isinstance(tool, Mapping) else None
    if own is not None and not isinstance(own, Mapping):
        raise UsageError(f"{path}[tool.ckpttool]: expected a table, not {own!r:.40}")
    return own


def _parse(path: str, data: bytes) -> Mapping[str, Any]:
    from ckpttool.containers.toml import parse_toml

    try:
        return parse_toml(data.decode())
    except ValueError as failure:  # also if it isn't UTF-8
        raise UsageError(f"{path} is not valid TOML: {failure}") from failure


def _read_bytes(path: str, *, is_named: bool) -> bytes:
    # The owner is checked on the open file, not by its path, which another user could replace in between. A
    # symlink is checked as well: whoever owns it chooses the target.
    try:
        link = os.lstat(path)
        with fs.open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size > MAX_BYTES:
                raise UsageError(f"{path}: too large for a configuration (limit: {MAX_BYTES:,} bytes)")
            doubt = None if is_named else ownership_doubt(link) or ownership_doubt(status)
            if doubt is not None:
                raise UsageError(f"{path}: {doubt}, so it is not trusted (--config {path} uses it anyway)")
            return file.read(MAX_BYTES)
    except OSError as failure:
        raise from_os_error(failure, path) from failure


# Trust ----------------------------------------------------------------------------------------------

# A configuration can name code to run, trackers to contact and directories to write to, and it is found by
# looking in directories: a cloned repository or an unpacked download may bring one. Two questions decide:
# 1. Could another user have written it? Its owner and mode are checked, and those of each directory above it,
#    since who can write to a directory can replace a file in it. Only ``--config`` overrides that.
# 2. Has this user confirmed it? ``config --trust`` records the digest of its tables under its path. Another
#    path or other tables need a new confirmation; comments may change.
# Without confirmation, keys with effects beyond the files below it are refused, the others apply.


_SCHEME = re.compile(r"[a-z][a-z0-9+-]+:", re.IGNORECASE)
"""Scheme of a URL or prefix of a tracker, such as ``s3:`` or ``mlflow:``."""
_COUNT = re.compile(r":(?:step|epoch)(?:[+-]\d+)?$")
"""Suffix of a log that selects its counter, with an offset: ``log.csv:epoch+1``."""


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
        return "affects more than the files below this one"
    if option.reach is not Reach.BELOW:
        return str(option.reach.value)
    places = value if isinstance(value, list) else [value]
    out = [one for one in places if not is_below(str(one), os.path.dirname(path))]
    return f"{option.reach.value} ({out[0]})" if out else None


def is_below(text: str, directory: str) -> bool:
    """Return whether a path, relative to a directory, resolves to that directory or below it."""
    # Links are followed, since a download may bring one that points elsewhere. ``log.csv:step`` may be a log
    # with a counter, or a file of that name: both must be below. The separator at the end keeps ``runs-old``
    # from being below ``runs``.
    if _SCHEME.match(text):
        return False
    root = os.path.join(os.path.realpath(directory), "")
    places = (os.path.realpath(os.path.join(directory, one)) for one in (text, _COUNT.sub("", text)))
    return all(os.path.join(place, "").startswith(root) for place in places)


# Ownership --------------------------------------------------------------------------


def ownership_doubt(status: os.stat_result, *, is_above: bool = False) -> str | None:
    """Return why another user could have written a file or directory, or None.

    Args:
        is_above: Whether it is an ancestor other than the parent. One with the sticky bit, such as /tmp, is
            accepted: other users can't rename entries there.
    """
    # root may own a file, as it can write any. A group's permission counts, unless the group is the user's
    # private one: systems with those have a umask of 002, so that every file is writable by its group.
    if not hasattr(os, "geteuid"):  # Windows
        return None
    if status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if stat.S_ISLNK(status.st_mode):  # the mode of a link has no meaning
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
    except KeyError:  # no such group or user in the database
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
        except OSError:  # a missing file; the import reports it
            continue
        if doubt is not None:
            return f"{path}: {doubt}"
    return None


def _code_paths(module: str) -> list[str]:
    """Return the files of a module, and the directories that it imports from."""
    if module.endswith(".py"):
        return [module, os.path.dirname(module), os.path.dirname(os.path.realpath(module))]
    parts = module.split(".")
    packages = [os.path.join(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = [os.path.join(one, "__init__.py") for one in packages] + [f"{one}.py" for one in packages]
    # Modules that aren't installed are imported from the current directory.
    is_here = any(map(os.path.lexists, (packages[0], f"{packages[0]}.py")))
    return [os.curdir, *packages, *files] if is_here else []


def _place_doubt(path: str) -> str | None:
    """Return why another user could replace a file or its target, by the directories above them, or None."""
    for place in dict.fromkeys((_place_of(path), os.path.realpath(path))):
        parent, *above = Path(place).parents
        for directory in (parent, *above):
            doubt = ownership_doubt(os.stat(directory), is_above=directory != parent)
            if doubt is not None:
                return f"{directory}: {doubt}"
    return None


# Confirmed by the user ------------------------------------------------------------------------------


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
        return TrustDoubt(f"not protected: {doubt}", can_be_confirmed=False)
    try:
        with fs.open_regular(_record_path(path)) as file:
            confirmed = None if ownership_doubt(os.fstat(file.fileno())) else file.read()
    except (OSError, UsageError):  # the latter without a state directory
        confirmed = None
    if confirmed == _record_text(path, tables):
        return None
    return TrustDoubt("not trusted" if confirmed is None else "no longer trusted, since it changed")


def confirm_trust(path: str, tables: Mapping[str, Any]) -> None:
    """Trust a configuration at its present path with its present tables.

    Raises:
        CheckpointError: The record can't be written.
    """
    from ckpttool.storage.directories import write_atomically

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


def _record_path(path: str) -> str:
    """Return the path of the record of a configuration, which need not exist."""
    import hashlib

    # In the user's state directory, not next to the configuration, where a download could bring a record.
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification says to ignore relative paths
        state = os.path.expanduser(os.path.join("~", ".local", "state"))
    if not os.path.isabs(state):
        raise UsageError("no home directory to record it in (set XDG_STATE_HOME)")
    name = hashlib.sha256(os.fsencode(_place_of(path))).hexdigest()
    return os.path.join(state, "ckpttool", "trusted", name)


def _record_text(path: str, tables: Mapping[str, Any]) -> bytes:
    import hashlib
    import json

    # Of the parsed tables, so that comments, order and other tables of a pyproject.toml may change. ``repr``
    # is for dates and times, which JSON lacks.
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True, default=repr).encode()).hexdigest()
    return f"{digest}  ".encode() + os.fsencode(_place_of(path)) + b"\n"


def _place_of(path: str) -> str:
    """Return the path of a file with its parents resolved; the file itself may be a symlink."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))

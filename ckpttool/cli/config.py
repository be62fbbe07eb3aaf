"""Configuration files: discovery, parsing, and whether they are believed.

A file that was found rather than named may come from a download. It is read only if no other user could have
written it, and until the user trusts it, its keys apply only to files below it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.containers.toml import parse_toml
from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.cli.config_trust import TrustDoubt

NAME, PROJECT = "ckpttool.toml", "pyproject.toml"
TABLES = ("verify", "retention", "naming", "watch")
MAX_BYTES = 1 << 20
"""Of a configuration: people write them by hand."""
_SETS_VERIFY = re.compile(
    rb"^[ \t]*(?:\[{1,2}[ \t]*verify\b[^\n]*\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*[^\s#\[]|verify[ \t]*[.=])",
    re.MULTILINE,
)
"""The heading of ``[verify]`` or of its rule with a key below it, or a key of that table."""


class ConfigDocument(NamedTuple):
    """The tables that belong to ckpttool.

    Attributes:
        path: The file, as the user knows it.
        prefix: What the names of tables begin with in the file.
        is_named: Whether the user named the file, which makes it trusted.
    """

    path: str
    prefix: str
    tables: Mapping[str, Any]
    is_named: bool = False

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table; one that isn't there is empty."""
        table = self.tables.get(name, {})
        if not isinstance(table, Mapping):
            raise self.wrong(name, f"{table!r:.40} (a table)")
        return table

    def trust_doubt(self) -> TrustDoubt | None:
        """Return why the file is not trusted, or None."""
        from ckpttool.cli.config_trust import trust_doubt

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
        """Return the error that says what is wrong at a place."""
        return UsageError(f"{self.origin(place)}: {problem}")


# Finding --------------------------------------------------------------------------------------------


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
    """Return the ``ckpttool.toml`` that ``find_config_beside`` finds, if it says something of ``verify``.

    Nobody asked for it, and a stranger may have written it. It is searched as text, and never parsed: TOML of
    a few bytes can make a parser take all memory.
    """
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
    near = os.path.normpath(os.path.join(start, os.path.relpath(directory, os.path.realpath(start))))
    return near if os.path.realpath(near) == directory else directory  # through a link, ".." is elsewhere


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
    except OSError:  # a directory that may not be looked at: what lies above is none of ours
        return None


# Reading --------------------------------------------------------------------------------------------


def read_document(path: str, *, is_named: bool = False) -> ConfigDocument:
    """Return the tables of a configuration.

    Args:
        path: A ``pyproject.toml``, or a file of our own under any name.
        is_named: Whether the user named it. Otherwise no other user may be able to write it.

    Raises:
        UsageError: It says what it can't, or must not be believed.
        CheckpointError: It can't be read.
    """
    tables = _parse(path, _read_bytes(path, is_named=is_named))
    prefix = ""
    if os.path.basename(path) == PROJECT:
        prefix = "tool.ckpttool."
        own = _own_table(path, tables)
        if own is None:
            raise UsageError(f"{path}: it has no table [tool.ckpttool]")
        tables = own
    unknown = sorted(tables.keys() - set(TABLES))
    if unknown:
        allowed = ", ".join(f"[{prefix}{name}]" for name in TABLES)
        if unknown[0] in ("rule", "rules"):
            allowed = f"a rule is [[{prefix}retention.rule]] or [[{prefix}verify.rule]]"
        else:
            allowed = f"there are {allowed}"
        raise UsageError(f"{path}: unknown {prefix}{unknown[0]} ({allowed})")
    return ConfigDocument(path, prefix, tables, is_named)


def _own_table(path: str, tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
    tool = tables.get("tool", {})
    own = tool.get("ckpttool") if isinstance(tool, Mapping) else None
    if own is not None and not isinstance(own, Mapping):
        raise UsageError(f"{path}[tool.ckpttool]: {own!r:.40} (a table)")
    return own


def _parse(path: str, data: bytes) -> Mapping[str, Any]:
    try:
        return parse_toml(data.decode())
    except ValueError as failure:  # no UTF-8 is one too
        raise UsageError(f"{path} is not valid TOML: {failure}") from failure


def _read_bytes(path: str, *, is_named: bool) -> bytes:
    from ckpttool.cli.config_trust import ownership_doubt

    try:
        link = os.lstat(path)
        with fs.open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size > MAX_BYTES:
                raise UsageError(f"{path}: not a configuration (a file of at most {MAX_BYTES:,} bytes)")
            doubt = None if is_named else ownership_doubt(link) or ownership_doubt(status)
            if doubt is not None:
                raise UsageError(f"{path}: {doubt}, so it is not trusted (--config {path} uses it anyway)")
            return file.read(MAX_BYTES)
    except OSError as failure:
        raise from_os_error(failure, path) from failure

"""The configuration: where it is looked for, when it is believed, and what it may say.

A rule may name Python code that is run, so a file that was merely found is believed only if nobody but this
user and root could have written it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpttool.cli.rules import Rule, Wrong, read_rule, texts, truth
from ckpttool.errors import UsageError, from_os_error
from ckpttool.wire.source import open_regular
from ckpttool.wire.tomltext import parse_toml

NAME, PROJECT = "ckpttool.toml", "pyproject.toml"
TABLES = ("verify", "retention", "naming")
MAX_BYTES = 1 << 20
"""Of a configuration: people write them by hand."""

_VERIFY: Mapping[str, Callable[[object, str], Any]] = {"paths": texts, "exclude": texts, "strict": truth}


@dataclass(frozen=True, slots=True)
class Config:
    """What a configuration says of ``verify``.

    Attributes:
        path: The file, as the user knows it.
        paths: What is looked at where no PATH is given, as seen from the current directory.
        exclude: Globs that are passed over.
        strict: Whether warnings fail.
        rules: In the order of the file; later ones override earlier ones.
        is_named: Whether the user named it: then what it says is his own word.
    """

    path: str
    paths: tuple[str, ...] = (os.curdir,)
    exclude: tuple[str, ...] = ()
    strict: bool = False
    rules: tuple[Rule, ...] = ()
    is_named: bool = False

    @property
    def directory(self) -> str:
        """Return the directory, absolute, that the rules' globs and files are relative to."""
        return os.path.dirname(os.path.abspath(self.path))


class Document(NamedTuple):
    """The tables that belong to ckpttool; ``prefix`` is what their names begin with in the file."""

    path: str
    prefix: str
    tables: Mapping[str, Any]

    def wrong(self, place: str, told: str) -> UsageError:
        """Return the error that says what is wrong at a place."""
        return UsageError(f"{self.path}[{self.prefix}{place}]: {told}")


# Finding --------------------------------------------------------------------------------------------


def find_config(start: str = os.curdir) -> str | None:
    """Return the configuration in a directory or the nearest one above it, or None.

    The search ends after a directory with ``.git``, after the home directory, and where the file system ends.

    Raises:
        UsageError: A ``pyproject.toml`` on the way can't be read.
    """
    here = os.path.realpath(start)
    for directory in _upwards(here):
        near = os.path.normpath(os.path.join(start, os.path.relpath(directory, here)))
        own, shared = (os.path.normpath(os.path.join(near, name)) for name in (NAME, PROJECT))
        if os.path.lexists(own):
            return own
        if os.path.isfile(shared) and _own_table(shared, _parsed(shared, _content(shared, is_named=True))):
            return shared
    return None


def _upwards(directory: str) -> Iterator[str]:
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


def read_config(path: str, *, is_named: bool = False) -> Config:
    """Return what a configuration says.

    Args:
        path: A ``pyproject.toml``, or a file of our own under any name.
        is_named: Whether the user named it. Otherwise it must be safe from other users.

    Raises:
        UsageError: It says what it can't, or must not be believed.
        CheckpointError: It can't be read.
    """
    return replace(_config(read_document(path, is_named=is_named)), is_named=is_named)


def read_document(path: str, *, is_named: bool = False) -> Document:
    """Return the tables of a configuration, of which ``verify`` is one; raises what ``read_config`` does."""
    tables = _parsed(path, _content(path, is_named=is_named))
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
    return Document(path, prefix, tables)


def suggested(key: str, known: Sequence[str]) -> str:
    """Return what somebody may have meant by a key that there is not, or else all that there are."""
    from difflib import get_close_matches

    names = {one.strip("[]").rpartition(".")[2]: one for one in known}
    if found := get_close_matches(key.replace("_", "-").lower(), names, n=1, cutoff=0.8):
        return f"did you mean {names[found[0]]}?"
    return f"there are {', '.join(known)}"


def _own_table(path: str, tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
    tool = tables.get("tool", {})
    own = tool.get("ckpttool") if isinstance(tool, Mapping) else None
    if own is not None and not isinstance(own, Mapping):
        raise UsageError(f"{path}[tool.ckpttool]: {own!r:.40} (a table)")
    return own


def _parsed(path: str, data: bytes) -> Mapping[str, Any]:
    try:
        return parse_toml(data.decode())
    except ValueError as failure:  # no UTF-8 is one too
        raise UsageError(f"{path}: no TOML: {failure}") from failure


def _content(path: str, *, is_named: bool) -> bytes:
    try:
        link = os.lstat(path)
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size > MAX_BYTES:
                raise UsageError(f"{path}: no configuration (a file of at most {MAX_BYTES:,} bytes)")
            doubt = None if is_named else doubted(link) or doubted(status)
            if doubt is not None:
                raise UsageError(
                    f"{path}: {doubt}, so it is not believed (--config {path} uses it all the same)"
                )
            return file.read(MAX_BYTES)
    except OSError as failure:
        raise from_os_error(failure, path) from failure


def doubted(status: os.stat_result) -> str | None:
    """Return why a file could hold what somebody else wrote, or None."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if stat.S_ISLNK(status.st_mode):  # a link's own mode says nothing
        return None
    if status.st_mode & stat.S_IWOTH:
        return "every user may write it"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid, status.st_uid):
        return "other users of its group may write it"
    return None


def _is_private(group: int, user: int) -> bool:
    """Tell whether a group is a user's own, as many systems make one for each."""
    import grp
    import pwd

    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:  # nobody has told the system their names
        return False
    return found.gr_name == name and not set(found.gr_mem) - {name}


def doubted_code(reference: str) -> str | None:
    """Return why code that a configuration names could be what somebody else wrote, and where; or None.

    Args:
        reference: ``file.py:Name`` or ``package.module:Name``. What is installed is not asked.
    """
    for path in _places_of_code(reference.rpartition(":")[0]):
        try:
            doubt = doubted(os.lstat(path)) or doubted(os.stat(path))
        except OSError:  # it is not there, which whoever imports it says better
            continue
        if doubt is not None:
            return f"{path}: {doubt}"
    return None


def _places_of_code(place: str) -> list[str]:
    """Return the files that are run for a reference, and the directories whose others they may import."""
    if place.endswith(".py"):
        return [place, os.path.dirname(place), os.path.dirname(os.path.realpath(place))]
    parts = place.split(".")
    packages = [os.path.join(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = [os.path.join(one, "__init__.py") for one in packages] + [f"{one}.py" for one in packages]
    # The current directory is where modules are looked for that are not installed.
    is_here = any(map(os.path.lexists, (packages[0], f"{packages[0]}.py")))
    return [os.curdir, *packages, *files] if is_here else []


def _config(document: Document) -> Config:
    told = document.tables.get("verify", {})
    if not isinstance(told, Mapping):
        raise document.wrong("verify", f"{told!r:.40} (a table)")
    unknown = sorted(told.keys() - _VERIFY.keys() - {"rule"})
    if unknown:
        there = suggested(unknown[0], [*_VERIFY, f"[[{document.prefix}verify.rule]]"])
        raise document.wrong("verify", f"unknown key {unknown[0]} ({there})")
    try:
        values = {key: _VERIFY[key](told[key], key) for key in _VERIFY if key in told}
    except Wrong as failure:
        raise document.wrong("verify", str(failure)) from failure
    here = os.path.dirname(document.path)
    paths = [os.path.normpath(os.path.join(here, path)) for path in values.pop("paths", (os.curdir,))]
    return Config(document.path, tuple(paths), rules=tuple(_rules(document, told)), **values)


def _rules(document: Document, told: Mapping[str, Any]) -> Iterator[Rule]:
    rules = told.get("rule", [])
    if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
        raise document.wrong("verify.rule", "it is no list of tables (write [[verify.rule]])")
    directory = os.path.dirname(os.path.abspath(document.path))
    for number, rule in enumerate(rules, 1):
        place = f"verify.rule {number}"
        try:
            yield read_rule(rule, directory, f"{document.path}[{document.prefix}{place}]")
        except (Wrong, UsageError) as failure:
            raise document.wrong(place, str(failure)) from failure

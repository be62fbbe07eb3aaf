"""Configuration files: where they are searched for, when they are trusted, and how their values are read.

A rule may name Python code that is run, so a file that was merely found is believed only if nobody but this
user and root could have written it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

from ckpttool.core.amounts import nbytes
from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.options import options_of
from ckpttool.core.suggest import closest
from ckpttool.io import fs
from ckpttool.io.toml import parse_toml

NAME, PROJECT = "ckpttool.toml", "pyproject.toml"
TABLES = ("verify", "retention", "naming", "watch")
MAX_BYTES = 1 << 20
"""Of a configuration: people write them by hand."""
_SETS_VERIFY = re.compile(
    rb"^[ \t]*(?:\[{1,2}[ \t]*verify\b[^\n]*\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*[^\s#\[]|verify[ \t]*[.=])",
    re.MULTILINE,
)
"""The heading of ``[verify]`` or of its rule with a key below it, or a key of that table."""
_UNCLOSED = re.compile(r"\[(?!!?\]?[^\]]*\])")


class ConfigDocument(NamedTuple):
    """The tables that belong to ckpttool; ``prefix`` is what their names begin with in the file."""

    path: str
    prefix: str
    tables: Mapping[str, Any]

    def wrong(self, place: str, problem: str) -> UsageError:
        """Return the error that says what is wrong at a place."""
        return UsageError(f"{self.path}[{self.prefix}{place}]: {problem}")


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
    """Return the tables of a configuration, of which ``verify`` is one; raises what ``read_config`` does."""
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
    return ConfigDocument(path, prefix, tables)


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return what somebody may have meant by a key that there is not, or else all that there are."""
    names = {one.strip("[]").rpartition(".")[2]: one for one in known}
    if close := closest(key, names):
        return f"did you mean {names[close]}?"
    return f"there are {', '.join(known)}"


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


# Trusting -------------------------------------------------------------------------------------------


def ownership_doubt(status: os.stat_result) -> str | None:
    """Return why a file could hold what somebody else wrote, or None."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if stat.S_ISLNK(status.st_mode):  # a link's own mode says nothing
        return None
    if status.st_mode & stat.S_IWOTH:
        return "every user can write to it"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid, status.st_uid):
        return "other users of its group can write to it"
    return None


def _is_private(group: int, user: int) -> bool:
    """Tell whether a group is a user's own, as many systems make one for each."""
    import grp
    import pwd

    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:  # nobody has told the system their names
        return False
    return entry.gr_name == name and not set(entry.gr_mem) - {name}


def code_ownership_doubt(reference: str) -> str | None:
    """Return why code that a configuration names could be what somebody else wrote, and where; or None.

    Args:
        reference: ``file.py:Name`` or ``package.module:Name``. What is installed is not asked.
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
    """Return the files that are run for a module, and the directories whose others they may import."""
    if module.endswith(".py"):
        return [module, os.path.dirname(module), os.path.dirname(os.path.realpath(module))]
    parts = module.split(".")
    packages = [os.path.join(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = [os.path.join(one, "__init__.py") for one in packages] + [f"{one}.py" for one in packages]
    # The current directory is where modules are looked for that are not installed.
    is_here = any(map(os.path.lexists, (packages[0], f"{packages[0]}.py")))
    return [os.curdir, *packages, *files] if is_here else []


# Values ---------------------------------------------------------------------------------------------


class WrongValue(ValueError):
    """A value is none that its key can have; the text names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        shortened = text if len(text) <= 60 else f"{text[:59]}…"
        super().__init__(f"{key} is {shortened} ({allowed})")


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the value of a key, which it is called with, and names the key in its errors.

    Attributes:
        read: Returns the value, or raises ``WrongValue`` or ``UsageError``.
        schema: Which values it takes, as JSON Schema: never fewer, but maybe more. Its ``description``,
            ``default`` and ``examples`` are what ``ckpttool init`` writes.
    """

    read: Callable[[object, str], Any]
    schema: Mapping[str, Any]

    def __call__(self, value: object, key: str) -> Any:
        return self.read(value, key)

    def described(self, description: str, **more: Any) -> Reader:
        """Return the reader of a key that means this."""
        return replace(self, schema={"description": description, **self.schema, **more})


def takes(**schema: Any) -> Callable[[Callable[[object, str], Any]], Reader]:
    """Make a function that reads values a reader of what a schema describes."""
    return lambda read: Reader(read, schema)


def described_by(record: type, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """Return readers, by their keys, with what a record's options say of these."""
    options = options_of(record)
    defaults = {one.name: one.default for one in fields(record)}
    described = {}
    for name, option in options.items():
        if option.key in readers:
            more: dict[str, Any] = {}
            if defaults[name] not in (None, (), MISSING):
                more["default"] = defaults[name]
            elif option.example is not None:
                more["examples"] = [option.example]
            described[option.key] = readers[option.key].described(option.help, **more)
    return described


def object_schema(readers: Mapping[str, Reader], *, required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of a table with these keys."""
    properties = {key: dict(reader.schema) for key, reader in readers.items()}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": [*required]} if required else {}),
    }


@takes(type="string", minLength=1)
def glob_below(value: object, key: str) -> str:
    """Return a glob of what lies below a configuration's directory."""
    text: str = one_text(value, key).rstrip("/")
    parts = [part for part in text.split("/") if part != os.curdir]
    if os.path.isabs(text) or os.pardir in parts:
        raise WrongValue(key, value, "a glob below the directory of this file")
    if not all(parts) or any("**" in part and part != "**" for part in parts):
        raise WrongValue(key, value, "a glob like models/*.pth or **/*.pth, with ** as a whole name")
    if any(_UNCLOSED.search(part) for part in parts):
        raise WrongValue(key, value, "each [ needs its ]")
    return "/".join(parts)


@takes(type="boolean")
def truth(value: object, key: str) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise WrongValue(key, value, "true or false")
    return value


@takes(type="array", items={"type": "string", "minLength": 1}, minItems=1)
def texts(value: object, key: str) -> tuple[str, ...]:
    """Return a list of texts."""
    if not isinstance(value, list) or not value or not all(one and isinstance(one, str) for one in value):
        raise WrongValue(key, value, "a list of at least one text")
    return tuple(value)


@takes(type="string", minLength=1)
def one_text(value: object, key: str) -> str:
    """Return a text."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise WrongValue(key, value, "a text")
    return value


def whole_number(least: int) -> Reader:
    """Return what reads whole numbers that are not too small."""

    @takes(type="integer", minimum=least)
    def read(value: object, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise WrongValue(key, value, f"a whole number of {least} or more")
        return value

    return read


@takes(type=["string", "integer"], pattern="B$", minimum=1)
def parse_bytes(value: object, key: str) -> int:
    """Return a size in bytes: a whole number, or a text like ``512MB`` or ``8 GiB``.

    Raises:
        Wrong: It is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    wrong = WrongValue(key, value, "a size like 512MB, 8GB or 8GiB")
    if not isinstance(value, str) or not value.endswith("B"):
        raise wrong
    try:
        size = nbytes(value)
    except UsageError as failure:
        raise wrong from failure
    if not size:
        raise wrong
    return size


def naming_template(document: ConfigDocument) -> str | None:
    """Return the template of a configuration; None if it has no ``[naming]``."""
    table = document.tables.get("naming")
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise document.wrong("naming", f"{table!r:.40} (a table)")
    if unknown := sorted(table.keys() - {"template"}):
        raise document.wrong("naming", f"unknown key {unknown[0]} (there is template)")
    template = table.get("template")
    if not isinstance(template, str):
        raise document.wrong("naming", f"template = {template!r:.40} (a text)")
    return template

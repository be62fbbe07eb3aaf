"""Configuration files: discovery, parsing, and the permissions of each key.

A file that was found rather than named may come from a download. It is read only if no other user could have
written it, and until the user trusts it, its keys apply only to files below it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.amounts import nbytes
from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.options import options_of
from ckpttool.core.suggest import closest
from ckpttool.io import fs
from ckpttool.io.toml import parse_toml

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
_UNCLOSED = re.compile(r"\[(?!!?\]?[^\]]*\])")


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

    def require_trust(self, place: str, why: str) -> None:
        """Require that the file is trusted; ``why`` is what a value at ``place`` would do."""
        if (doubt := self.trust_doubt()) is not None:
            hint = f"--config {self.path} uses it anyway"
            if doubt.can_be_confirmed:
                hint = f"read it, and run ckpttool config --trust {self.path}, or use --config {self.path}"
            raise self.wrong(place, f"{why}, and the file is {doubt.text} ({hint})")

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


# Values ---------------------------------------------------------------------------------------------


class WrongValue(ValueError):
    """A value is none that its key can have; the text names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        shortened = text if len(text) <= 60 else f"{text[:59]}…"
        super().__init__(f"{key} is {shortened} ({allowed})")


class Reach(Enum):
    """Effect of a key; all but HARMLESS need a trusted configuration. The value completes error messages."""

    HARMLESS = None
    """Selects checkpoints below the file, or sets an option for them."""
    BELOW = "leads out of the directory of this file"
    """Names files: harmless below the configuration's directory; other paths, trackers and URLs are not."""
    YES = "answers for you"
    TARGET = "names a place to write to"
    CODE = "runs code"


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the value of a key, which it is called with, and names the key in its errors.

    Attributes:
        read: Returns the value, or raises ``WrongValue`` or ``UsageError``.
        schema: Which values it takes, as JSON Schema: never fewer, but maybe more. Its ``description``,
            ``default`` and ``examples`` are what ``ckpttool init`` writes.
        reach: Effect of the key. Without one, the key needs a trusted configuration.
    """

    read: Callable[[object, str], Any]
    schema: Mapping[str, Any]
    reach: Reach | None = None

    def __call__(self, value: object, key: str) -> Any:
        return self.read(value, key)

    def described(self, description: str, reach: Reach | None = None, **more: Any) -> Reader:
        """Return a copy with a description, and with an effect if one is given."""
        schema = {"description": description, **self.schema, **more}
        return replace(self, schema=schema, reach=self.reach if reach is None else reach)

    def reaching(self, reach: Reach) -> Reader:
        """Return a copy with another effect."""
        return replace(self, reach=reach)

    def reach_of(self, value: object, path: str) -> str | None:
        """Return the effect of a value that needs trust, None if it needs none; ``path`` is the file."""
        if value is False or self.reach is Reach.HARMLESS:
            return None
        if self.reach is not Reach.BELOW:
            return "reaches further than this file" if self.reach is None else self.reach.value
        places = value if isinstance(value, list) else [value]
        out = [one for one in places if not is_below(str(one), os.path.dirname(path))]
        return f"{self.reach.value} ({out[0]})" if out else None


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


_SCHEME = re.compile(r"[a-z][a-z0-9+-]+:", re.IGNORECASE)
"""Scheme of a URL or prefix of a tracker, such as ``s3:`` or ``mlflow:``."""
_COUNT = re.compile(r":(?:step|epoch)(?:[+-]\d+)?$")
"""Suffix that selects the counter of a log."""


def is_below(text: str, directory: str) -> bool:
    """Return whether a path, relative to a directory, resolves to that directory or below it."""
    if _SCHEME.match(text):
        return False
    root = os.path.join(os.path.realpath(directory), "")
    places = (os.path.realpath(os.path.join(directory, one)) for one in (text, _COUNT.sub("", text)))
    return all(os.path.join(place, "").startswith(root) for place in places)


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
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(one, str) and one and "\0" not in one for one in value)
    ):
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


# Tables ---------------------------------------------------------------------------------------------


def read_table(
    document: ConfigDocument,
    place: str,
    table: Mapping[str, Any],
    keys: Mapping[str, Reader],
    *,
    others: Sequence[str] = (),
    overridden: Collection[str] = (),
) -> dict[str, Any]:
    """Parse a table and return its values by key.

    Args:
        others: Further names to suggest for an unknown key.
        overridden: Keys that the command line overrides, which therefore need no trust.
    """
    values = {}
    for key, value in table.items():
        if key not in keys:
            raise document.wrong(place, f"unknown key {key} ({suggestion(key, [*keys, *others])})")
        try:
            values[key] = keys[key](value, key)
        except WrongValue as failure:
            raise document.wrong(place, str(failure)) from failure
        except UsageError as failure:
            raise document.wrong(place, f"{key}: {failure}") from failure
    check_reach(document, place, {key: table[key] for key in table if key not in overridden}, keys)
    return values


def check_reach(
    document: ConfigDocument, place: str, table: Mapping[str, Any], keys: Mapping[str, Reader]
) -> None:
    """Require a trusted configuration if a value needs one."""
    for key, value in table.items():
        if (why := keys[key].reach_of(value, document.path)) is not None:
            document.require_trust(place, f"{key} {why}")


NAMING_KEYS: Mapping[str, Reader] = {  # a template that names a directory is refused in any case
    "template": one_text.described("Template of names.", Reach.HARMLESS, examples=["{run}-e{epoch:04d}"])
}


def naming_template(document: ConfigDocument) -> str | None:
    """Return the template of a configuration; None if it has none."""
    table = read_table(document, "naming", document.table("naming"), NAMING_KEYS)
    template: str | None = table.get("template")
    return template

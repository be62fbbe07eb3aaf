"""``ckpttool config`` and ``ckpttool init``: the configuration in force, its schema, and a new one.

The records of the tables are imported when a command needs them, not for its help.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.cli.options import json_option, output_option, quiet_option
from ckpttool.cli.output import print_json, say_warning
from ckpttool.core.errors import CheckpointError, NotFound, UsageError, from_os_error
from ckpttool.core.options import EXECUTION_PANEL, Option, argument, option
from ckpttool.core.result import document_of
from ckpttool.core.text import printable
from ckpttool.storage import fs
from ckpttool.storage.held import open_file

if TYPE_CHECKING:
    from ckpttool.cli.config import ConfigDocument

_DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that Taplo reads, which the TOML extensions of editors are based on."""
_WIDEST_KEY = 40
"""Columns of a key with its value up to which comments are aligned."""
_NO_CONFIG = "no configuration (`ckpttool init` writes one)"
_MODE = 0o644
"""Mode of a new configuration, whatever the umask: one that others can write to is not trusted."""


# The command config ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigCommand:
    """The options of ``config``."""

    place: str | None = argument(
        "[PATH]", "Directory in which a command would run, or a configuration. [default: .]", default=None
    )
    trust: bool = option(
        "--trust",
        help="Trust the configuration as it is: let it write elsewhere, run code and answer questions.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    untrust: bool = option(
        "--untrust", help="Stop trusting the configuration.", panel=EXECUTION_PANEL, default=False
    )
    schema: bool = output_option(
        "--schema", help="Print the JSON schema of ckpttool.toml, for editors.", default=False
    )
    json: bool = json_option()


def config(command: ConfigCommand) -> int:
    """Show the configuration in force: each key, its value, and whether the file sets it.

    An untrusted configuration only affects files below it, unless a command names it with --config.
    """
    from ckpttool.cli.config import read_document, withdraw_trust

    place, trust, untrust = command.place, command.trust, command.untrust
    if command.schema:
        if place is not None or command.json or trust or untrust:
            raise UsageError("--schema can't be combined with other arguments")
        import json

        print(json.dumps(config_schema(), indent=2, ensure_ascii=False))
        return 0
    if (trust or untrust) and (command.json or trust == untrust):
        raise UsageError("--trust, --untrust and --json are mutually exclusive")
    path = _path_of(os.curdir if place is None else place, may_be_missing=untrust)
    if untrust:
        if path is None:
            raise UsageError(_NO_CONFIG)
        was_trusted = withdraw_trust(path)
        print(f"{printable(path)} {'is no longer trusted' if was_trusted else 'was not trusted'}")
        return 0
    document = None if path is None else read_document(path)
    entries = config_entries(document)
    if trust:
        _trust(document, entries)
    elif command.json:
        print_json(_document(document, entries))
    else:
        print(_text(document, entries))
    return 0


def _path_of(place: str, *, may_be_missing: bool) -> str | None:
    """Return a named configuration, or the one that applies in a directory."""
    from ckpttool.cli.config import find_config

    if os.path.isdir(place):
        return find_config(place)
    if may_be_missing or os.path.lexists(place):
        return place
    raise NotFound(place, "no such file or directory")


def _trust(document: ConfigDocument | None, entries: Sequence[ConfigEntry]) -> None:
    from ckpttool.cli.config import confirm_trust

    if document is None:
        raise UsageError(_NO_CONFIG)
    doubt = document.trust_doubt()
    if doubt is not None and not doubt.can_be_confirmed:
        hint = f"--config {document.path} uses it anyway"
        raise UsageError(f"{document.path}: the file is {doubt.text}, so it can't be trusted ({hint})")
    confirm_trust(document.path, document.tables)
    keys = ", ".join(printable(one.name) for one in entries if one.needs_trust)
    print(f"trusted {printable(document.path)}{f', with {keys}' if keys else ''}")


def _document(document: ConfigDocument | None, entries: Sequence[ConfigEntry]) -> dict[str, Any]:
    is_trusted = None if document is None else document.trust_doubt() is None
    values = [
        {
            **document_of(one, "table", "rule", "key", "value"),
            "source": "file" if one.is_from_file else "default",
            "refused": one.needs_trust and not is_trusted,
        }
        for one in entries
    ]
    path = None if document is None else document.path
    return {"schema": "ckpttool.config/1", "path": path, "trusted": is_trusted, "values": values}


def _text(document: ConfigDocument | None, entries: Sequence[ConfigEntry]) -> str:
    """Return the path of the configuration, and a line with value and source for each key."""
    from ckpttool.cli.render.terminal import display_width, pad
    from ckpttool.containers.toml import as_toml

    doubt = None if document is None else document.trust_doubt()
    found = _NO_CONFIG
    if document is not None:
        found = f"{printable(document.path)} ({printable(doubt.text) if doubt else 'trusted'})"
    rows = []
    for one in entries:
        value = "-" if one.value is None else printable(as_toml(one.value))
        source = "file" if one.is_from_file else "default"
        rows.append((printable(one.name), value, "file, refused" if one.needs_trust and doubt else source))
    widths = [max(display_width(row[at]) for row in rows) for at in range(2)]
    lines = (f"{pad(name, widths[0])}  {pad(value, widths[1])}  {source}" for name, value, source in rows)
    return "\n".join([found, *lines])


# The command init -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InitCommand:
    """The options of ``init``."""

    directory: str = argument("[DIR]", "Directory of the project. [default: .]", default=os.curdir)
    quiet: bool = quiet_option()


def init(command: InitCommand) -> int:
    """Write a ckpttool.toml with every key commented out, set to its default or an example."""
    from ckpttool.cli.config import NAME, confirm_trust, find_config, read_document

    directory, quiet = command.directory, command.quiet
    other = find_config(directory)
    path = os.path.normpath(os.path.join(directory, NAME))
    if other is not None and os.path.dirname(other) == os.path.dirname(path):
        hint = "edit it" if other == path else f"a {NAME} would override it"
        raise UsageError(f"{other}: the configuration already exists ({hint})")
    if not os.path.isdir(directory):
        raise NotFound(directory, "no such directory")
    # The user has just written it, so it is trusted as it is: empty. The first key that is set needs a
    # confirmation if it reaches beyond the directory.
    _create(path, config_template())
    try:
        confirm_trust(path, read_document(path).tables)
    except (CheckpointError, UsageError) as failure:
        say_warning(f"{failure}, so {printable(path)} is not trusted")
    if other is not None and not quiet:
        say_warning(f"{other} no longer applies in {printable(directory)}: the nearest configuration counts")
    if not quiet:
        print(f"wrote {printable(path)}; edit it, and run `ckpttool config` to check it")
    return 0


def _create(path: str, text: str) -> None:
    """Write a file that must not exist; it is removed if that fails."""
    try:
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except OSError as failure:
        raise from_os_error(failure, path) from failure
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as failure:
        with suppress(OSError):
            fs.unlink(path)
        raise from_os_error(failure, path) from failure


def config_template() -> str:
    """Return a configuration in which every key is commented out, with its default or an example."""
    from ckpttool.cli.config_keys import keys

    parts = [
        "# Configuration of ckpttool. Remove the # before a line to set its key; "
        "`ckpttool config` shows the values in force.\n"
    ]
    for name in ("verify", "retention", "watch"):
        record, summary = tables()[name]
        known = keys(record)
        own = {key: row for key, row in known.items() if row.item is None}
        parts.append(f"# {summary}\n[{name}]\n{_commented_keys(own)}")
        for key, row in known.items():
            if row.item is not None:
                parts.append(f"# {row.help}\n#[[{name}.{key}]]\n{_commented_keys(keys(row.item))}")
    return "\n".join(parts)


def _commented_keys(known: Mapping[str, Option]) -> str:
    from ckpttool.cli.config_keys import schema_of
    from ckpttool.containers.toml import as_toml

    lines = {}
    for key, row in known.items():
        schema = schema_of(row)
        examples = [schema["default"]] if "default" in schema else schema.get("examples") or schema["enum"]
        lines[f"#{key} = {as_toml(examples[0])}"] = row
    column = max(len(line) for line in lines if len(line) <= _WIDEST_KEY)
    return "".join(f"{line:{column}}  # {row.help}\n" for line, row in lines.items())


# Tables ---------------------------------------------------------------------------------------------


@cache
def tables() -> Mapping[str, tuple[type, str]]:
    """Return the record and the description of each table."""
    from ckpttool.cli.config_keys import Naming
    from ckpttool.cli.retention_config import Retention
    from ckpttool.cli.verify_config import VerifyConfig
    from ckpttool.cli.watch import WatchSettings

    retention = (
        "Checkpoints that `ckpttool prune` keeps without arguments. It does nothing until a rule is set."
    )
    return {
        "verify": (VerifyConfig, "Checkpoints that `ckpttool verify` checks without arguments."),
        "retention": (Retention, retention),
        "naming": (Naming, "Names that `ckpttool rename` gives without --template."),
        "watch": (WatchSettings, "Steps of `ckpttool watch` as checkpoints land."),
    }


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of ``ckpttool.toml``."""
    from ckpttool.cli.config_keys import object_schema

    return {
        "$schema": _DRAFT,
        "title": "ckpttool.toml",
        "type": "object",
        "properties": {
            name: {"description": text, **object_schema(record)} for name, (record, text) in tables().items()
        },
        "additionalProperties": False,
    }


class ConfigEntry(NamedTuple):
    """A key of a table, or of its rule with a number.

    Attributes:
        value: None if it is not set.
        needs_trust: Whether commands refuse the key unless the file is trusted.
    """

    table: str
    rule: int | None
    key: str
    value: Any
    is_from_file: bool
    needs_trust: bool = False

    @property
    def name(self) -> str:
        """Return the whole name, such as ``verify.rule.1.path``."""
        rule = "" if self.rule is None else f"rule.{self.rule}."
        return f"{self.table}.{rule}{self.key}"


def config_entries(document: ConfigDocument | None) -> list[ConfigEntry]:
    """Return each key of a configuration's tables, and those of its rules that are set.

    Raises:
        UsageError: The configuration is wrong.
    """
    from ckpttool.cli.config_keys import naming_template
    from ckpttool.cli.retention_config import read_retention
    from ckpttool.cli.verify_config import read_config
    from ckpttool.cli.watch import read_watch

    if document is None:
        return [entry for name in tables() for entry in _table_entries(name, {}, "")]
    # All tables are read for their errors. The file counts as named meanwhile: nothing is carried out, and an
    # untrusted key is to be shown, not refused.
    as_named = document._replace(is_named=True)
    read_config(as_named)
    read_retention(as_named)
    read_watch(as_named)
    naming_template(as_named)
    return [entry for name in tables() for entry in _table_entries(name, document.table(name), document.path)]


def _table_entries(name: str, table: Mapping[str, Any], path: str) -> Iterator[ConfigEntry]:
    from ckpttool.cli.config import reach_of
    from ckpttool.cli.config_keys import keys, schema_of

    for key, row in keys(tables()[name][0]).items():
        if row.item is not None:
            for number, rule in enumerate(table.get(key, ()), 1):
                for own, value in rule.items():
                    reach = reach_of(keys(row.item)[own], value, path)
                    yield ConfigEntry(name, number, own, value, True, reach is not None)
        elif key in table:
            reach = reach_of(row, table[key], path)
            yield ConfigEntry(name, None, key, table[key], True, reach is not None)
        else:
            yield ConfigEntry(name, None, key, schema_of(row).get("default"), False)

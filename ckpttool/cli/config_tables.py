"""All tables of a configuration: their JSON schema, what is in force, and the file that ``init`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpttool.cli.config import ConfigDocument
from ckpttool.cli.config_keys import Naming, keys, naming_template, object_schema, schema_of
from ckpttool.cli.config_trust import reach_of
from ckpttool.cli.retention_config import Retention, read_retention
from ckpttool.cli.verify_config import VerifyConfig, read_config
from ckpttool.cli.watch_config import WatchSettings, read_watch
from ckpttool.containers.toml import as_toml
from ckpttool.core.options import Option

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that Taplo reads, on which the TOML extensions of editors build."""
_WIDEST_KEY = 40
"""Columns of a key with its value, behind which the comments align."""


TABLES: Mapping[str, tuple[type, str]] = {
    "verify": (VerifyConfig, "What `ckpttool verify` without arguments checks."),
    "retention": (
        Retention,
        "Which checkpoints `ckpttool prune` without arguments keeps. It does nothing before a rule is set.",
    ),
    "naming": (Naming, "How `ckpttool rename` without --template names checkpoints."),
    "watch": (WatchSettings, "What `ckpttool watch` does as checkpoints land."),
}
"""For each table, its record and its description."""


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of ``ckpttool.toml``."""
    tables = TABLES.items()
    return {
        "$schema": DRAFT,
        "title": "ckpttool.toml",
        "type": "object",
        "properties": {
            name: {"description": text, **object_schema(record)} for name, (record, text) in tables
        },
        "additionalProperties": False,
    }


# What is in force -----------------------------------------------------------------------------------


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
    if document is None:
        return [entry for name in TABLES for entry in _table_entries(name, {}, "")]
    shown = document._replace(is_named=True)  # nothing is done that the file asks for
    read_config(shown)
    read_retention(shown)
    read_watch(shown)
    naming_template(shown)
    return [entry for name in TABLES for entry in _table_entries(name, document.table(name), document.path)]


def _table_entries(name: str, table: Mapping[str, Any], path: str) -> Iterator[ConfigEntry]:
    for key, row in keys(TABLES[name][0]).items():
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


# The file that init writes --------------------------------------------------------------------------

_HEAD = """\
# Configuration of ckpttool. Remove the # before a line to set it; `ckpttool config` shows what is in force.
"""


def config_template() -> str:
    """Return a configuration in which every key is commented out, with its default or an example."""
    parts = [_HEAD]
    for name in ("verify", "retention", "watch"):
        record, summary = TABLES[name]
        known = keys(record)
        own = {key: row for key, row in known.items() if row.item is None}
        parts.append(f"# {summary}\n[{name}]\n{_commented_keys(own)}")
        for key, row in known.items():
            if row.item is not None:
                parts.append(f"# {row.help}\n#[[{name}.{key}]]\n{_commented_keys(keys(row.item))}")
    return "\n".join(parts)


def _commented_keys(known: Mapping[str, Option]) -> str:
    lines = {f"#{key} = {as_toml(_sample(schema_of(row)))}": row for key, row in known.items()}
    column = max(len(line) for line in lines if len(line) <= _WIDEST_KEY)
    return "".join(f"{line:{column}}  # {row.help}\n" for line, row in lines.items())


def _sample(schema: Mapping[str, Any]) -> Any:
    """Return a key's default, else an example, else a word that it takes."""
    return schema["default"] if "default" in schema else (schema.get("examples") or schema["enum"])[0]

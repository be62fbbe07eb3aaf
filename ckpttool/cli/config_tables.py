"""All tables of a configuration: their JSON schema, what is in force, and the file that ``init`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpttool.cli import retention_config, verify_config, watch_config
from ckpttool.cli.config import NAMING_KEYS, ConfigDocument, Reader, naming_template, object_schema
from ckpttool.io.toml import as_toml

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that Taplo reads, on which the TOML extensions of editors build."""
_WIDEST_KEY = 40
"""Columns of a key with its value, behind which the comments align."""


class ConfigTable(NamedTuple):
    """The keys of a table and of its rules, with a sentence on what the table is for."""

    summary: str
    keys: Mapping[str, Reader]
    rule_keys: Mapping[str, Reader]
    rule_summary: str = ""


TABLES: Mapping[str, ConfigTable] = {
    "verify": ConfigTable(
        "What `ckpttool verify` without arguments checks.",
        verify_config.VERIFY_KEYS,
        verify_config.RULE_KEYS,
        "What some checkpoints need; all rules that match one apply.",
    ),
    "retention": ConfigTable(
        "Which checkpoints `ckpttool prune` without arguments keeps. It does nothing before a rule is set.",
        retention_config.KEYS,
        {key: one for key, one in retention_config.RULE_KEYS.items() if key != "max-total-size"},
        "Rules for some series instead of those above; the last one that matches decides.",
    ),
    "naming": ConfigTable(
        "How `ckpttool rename` without --template names checkpoints.",
        NAMING_KEYS,
        {},
    ),
    "watch": ConfigTable("What `ckpttool watch` does as checkpoints land.", watch_config.KEYS, {}),
}


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of ``ckpttool.toml``."""
    return {
        "$schema": DRAFT,
        "title": "ckpttool.toml",
        "type": "object",
        "properties": {name: _table_schema(table) for name, table in TABLES.items()},
        "additionalProperties": False,
    }


def _table_schema(table: ConfigTable) -> dict[str, Any]:
    schema = {"description": table.summary, **object_schema(table.keys)}
    if table.rule_keys:
        rules = {"type": "array", "items": object_schema(table.rule_keys, required=["path"])}
        schema["properties"]["rule"] = {"description": table.rule_summary, **rules}
    return schema


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
    verify_config.read_config(shown)
    retention_config.read_retention(shown)
    watch_config.read_watch(shown)
    naming_template(shown)
    return [entry for name in TABLES for entry in _table_entries(name, document.table(name), document.path)]


def _table_entries(name: str, table: Mapping[str, Any], path: str) -> Iterator[ConfigEntry]:
    for key, reader in TABLES[name].keys.items():
        is_set = key in table
        value = table[key] if is_set else reader.schema.get("default")
        yield ConfigEntry(name, None, key, value, is_set, is_set and _needs_trust(reader, value, path))
    readers = TABLES[name].rule_keys
    for number, rule in enumerate(table.get("rule", ()), 1):
        for key, value in rule.items():
            yield ConfigEntry(name, number, key, value, True, _needs_trust(readers[key], value, path))


def _needs_trust(reader: Reader, value: object, path: str) -> bool:
    return reader.reach_of(value, path) is not None


# The file that init writes --------------------------------------------------------------------------

_HEAD = """\
# Configuration of ckpttool. Remove the # before a line to set it; `ckpttool config` shows what is in force.
"""


def config_template() -> str:
    """Return a configuration in which every key is commented out, with its default or an example."""
    parts = [_HEAD]
    for name in ("verify", "retention", "watch"):
        table = TABLES[name]
        parts.append(f"# {table.summary}\n[{name}]\n{_commented_keys(table.keys)}")
        if table.rule_keys:
            parts.append(f"# {table.rule_summary}\n#[[{name}.rule]]\n{_commented_keys(table.rule_keys)}")
    return "\n".join(parts)


def _commented_keys(readers: Mapping[str, Reader]) -> str:
    lines = {f"#{key} = {as_toml(_sample(one.schema))}": one for key, one in readers.items()}
    column = max(len(line) for line in lines if len(line) <= _WIDEST_KEY)
    return "".join(f"{line:{column}}  # {one.schema['description']}\n" for line, one in lines.items())


def _sample(schema: Mapping[str, Any]) -> Any:
    """Return a key's default, else an example, else any value that it takes."""
    return next(_samples(schema))


def _samples(schema: Mapping[str, Any]) -> Iterator[Any]:
    if "default" in schema:
        yield schema["default"]
    yield from (*schema.get("examples", ()), *schema.get("enum", ()))
    yield {"boolean": True, "integer": schema.get("minimum", 1), "number": 1}.get(str(schema["type"]), "…")

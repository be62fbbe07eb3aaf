"""Configurations that tests write, and what ``verify`` reads of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from ckpttool.cli.config import ConfigDocument, confirm_trust, read_document
from ckpttool.cli.config_commands import tables
from ckpttool.cli.config_keys import keys
from ckpttool.cli.verify_config import VerifyConfig, read_config
from ckpttool.core.options import Option


def all_keys() -> dict[str, Mapping[str, Option]]:
    """Return the keys of each table and of its rules, by names such as ``verify.rule``."""
    found = {}
    for name, (record, _) in tables().items():
        found[name] = keys(record)
        found |= {f"{name}.{key}": keys(row.item) for key, row in found[name].items() if row.item}
    return found


def write(path: Path, text: str) -> Path:
    """Write a text, unindented, that only this user can change: a configuration must be, to be believed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), "utf-8")
    path.chmod(0o644)
    return path


def trusted_config(text: str) -> ConfigDocument:
    """Return a configuration in the current directory, as it is found once its user trusts it."""
    document = read_document(str(write(Path("ckpttool.toml"), text)))
    confirm_trust(document.path, document.tables)
    return document


def verify_config_of(text: str) -> VerifyConfig:
    """Return what a trusted configuration in the current directory says of ``verify``."""
    return read_config(trusted_config(text))

"""Configurations that tests write, and what ``verify`` reads of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ckpttool.cli.verify_config import VerifyConfig, read_config


def write(path: Path, text: str) -> Path:
    """Write a text, unindented, that only this user can change: a configuration must be, to be believed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), "utf-8")
    path.chmod(0o644)
    return path


def verify_config_of(text: str) -> VerifyConfig:
    """Return what a configuration in the current directory says of ``verify``."""
    write(Path("ckpttool.toml"), text)
    return read_config("ckpttool.toml")

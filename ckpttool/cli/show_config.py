"""``ckpttool config``: which configuration is in force, whether it is trusted, and its JSON schema."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import in_output, json_option
from ckpttool.cli.output import print_json
from ckpttool.core.errors import NotFound, UsageError
from ckpttool.core.options import EXECUTION_PANEL, argument, option
from ckpttool.core.result import document_of
from ckpttool.core.text import printable

if TYPE_CHECKING:
    from ckpttool.cli.config import ConfigDocument
    from ckpttool.cli.config_tables import ConfigEntry

_NOTHING = "there is no configuration (`ckpttool init` writes one)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigCommand:
    """The options of ``config``."""

    place: str | None = argument(
        "[PATH]", "Directory in which a command would run, or a configuration. [default: .]", default=None
    )
    trust: bool = option(
        "--trust",
        help="Trust the configuration as it is now: let it write elsewhere, run code, and say yes.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    untrust: bool = option(
        "--untrust", help="Trust the configuration no longer.", panel=EXECUTION_PANEL, default=False
    )
    schema: bool = in_output(
        "--schema", help="Print the JSON schema of ckpttool.toml, for editors.", default=False
    )
    json: bool = json_option()


def config(command: ConfigCommand) -> int:
    """Show which configuration is in force: each key, its value, and whether the file sets it.

    A configuration that was found may only speak of what lies below it, until you have read it and trust it.
    """
    from ckpttool.cli.config import read_document
    from ckpttool.cli.config_tables import config_entries, config_schema

    place, trust, untrust, json = command.place, command.trust, command.untrust, command.json
    if command.schema:
        if place is not None or json or trust or untrust:
            raise UsageError("--schema prints a JSON document (leave everything else out)")
        _print_schema(config_schema())
        return 0
    if (trust or untrust) and (json or trust == untrust):
        raise UsageError("--trust, --untrust and --json exclude each other")
    path = _path_of(os.curdir if place is None else place, may_be_missing=untrust)
    if untrust:
        return _untrust(path)
    document = None if path is None else read_document(path)
    entries = config_entries(document)
    if trust:
        return _trust(document, entries)
    if json:
        print_json(_document(document, entries))
    else:
        from ckpttool.cli.render.text_config import config_text

        print(config_text(document, entries))
    return 0


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


def _path_of(place: str, *, may_be_missing: bool) -> str | None:
    """Return the configuration that is named, or the one that applies in a directory."""
    from ckpttool.cli.config import find_config

    if os.path.isdir(place):
        return find_config(place)
    if may_be_missing or os.path.lexists(place):
        return place
    raise NotFound(place, "no such file or directory")


def _trust(document: ConfigDocument | None, entries: Sequence[ConfigEntry]) -> int:
    from ckpttool.cli.config_trust import confirm_trust

    if document is None:
        raise UsageError(_NOTHING)
    doubt = document.trust_doubt()
    if doubt is not None and not doubt.can_be_confirmed:
        hint = f"--config {document.path} uses it anyway"
        raise UsageError(f"{document.path}: the file is {doubt.text}, so it can't be trusted ({hint})")
    confirm_trust(document.path, document.tables)
    keys = ", ".join(printable(one.name) for one in entries if one.needs_trust)
    print(f"trusted {printable(document.path)}{f', with {keys}' if keys else ''}")
    return 0


def _untrust(path: str | None) -> int:
    from ckpttool.cli.config_trust import withdraw_trust

    if path is None:
        raise UsageError(_NOTHING)
    was_trusted = withdraw_trust(path)
    print(f"{printable(path)} {'is no longer trusted' if was_trusted else 'was not trusted'}")
    return 0


def _print_schema(schema: dict[str, object]) -> None:
    import json

    print(json.dumps(schema, indent=2, ensure_ascii=False))

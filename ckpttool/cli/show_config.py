"""``ckpttool config``: which configuration is in force, and its JSON schema."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ckpttool.cli.options import Json, typer_option
from ckpttool.cli.output import print_json
from ckpttool.core.errors import NotFound, UsageError
from ckpttool.core.options import OUTPUT_PANEL

Directory = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR]",
        readable=False,
        help="Directory in which a command would run. [default: .]",
        show_default=False,
    ),
]
Schema = Annotated[
    bool,
    typer_option("--schema", help="Print the JSON schema of ckpttool.toml, for editors.", panel=OUTPUT_PANEL),
]


def config(directory: Directory = None, schema: Schema = False, json: Json = False) -> int:
    """Show which configuration is in force: each key, its value, and whether the file sets it."""
    from ckpttool.cli.config import find_config
    from ckpttool.cli.config_tables import config_entries, config_schema

    if schema:
        if directory is not None or json:
            raise UsageError("--schema prints a JSON document (leave DIR and --json out)")
        _print_schema(config_schema())
        return 0
    directory = os.curdir if directory is None else directory
    if not os.path.isdir(directory):
        raise NotFound(directory, "no such directory")
    path = find_config(directory)
    entries = config_entries(path)
    if json:
        from ckpttool.cli.render.json import config_document

        print_json(config_document(path, entries))
    else:
        from ckpttool.cli.render.text_config import config_text

        print(config_text(path, entries))
    return 0


def _print_schema(schema: dict[str, object]) -> None:
    import json

    print(json.dumps(schema, indent=2, ensure_ascii=False))

"""``ckpttool list``: which checkpoints are here?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.cli.options import Exclude, Json, MaxDepth, Quiet
from ckpttool.cli.output import has_colour, say, say_warning
from ckpttool.cli.series import Directory, Null, print_paths, say_journals

if TYPE_CHECKING:
    from ckpttool.series.listing import Listing


def list_(
    directory: Directory = Path(),
    json: Json = False,
    null: Null = False,
    quiet: Quiet = False,
    exclude: Exclude = [],  # noqa: B006 - Typer copies it
    max_depth: MaxDepth = None,
) -> int:
    """List the checkpoints of a directory tree, series by series, each from the oldest on."""
    from ckpttool.series.listing import list_checkpoints

    listing = list_checkpoints(directory, exclude=exclude, max_depth=max_depth)
    if not quiet:
        _say(listing)
    _print(listing, directory, json=json, null=null, quiet=quiet)
    return int(bool(listing.problems))


def _say(listing: Listing) -> None:
    say_journals(listing.journals)
    for warning in listing.warnings:
        say_warning(warning)
    for problem in listing.problems:
        say_warning(f"{problem.path}: {problem.message}")


def _print(listing: Listing, directory: Path, *, json: bool, null: bool, quiet: bool) -> None:
    if json:
        from ckpttool.cli.output import print_json
        from ckpttool.render.json_list import list_document

        print_json(list_document(listing))
    elif quiet:
        pass
    elif not listing.checkpoints:
        say(f"{directory}: no checkpoint")
    elif null:
        print_paths([one.entry.path for one in listing.checkpoints], null=True)
    else:
        import time

        from ckpttool.render.text_list import list_text

        print(list_text(listing.checkpoints, now=time.time(), colour=has_colour(sys.stdout)))

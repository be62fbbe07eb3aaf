"""``ckpttool list``: which checkpoints are here?"""

from __future__ import annotations

import sys
from pathlib import Path

from ckpttool.cli.options import Exclude, Json, MaxDepth
from ckpttool.cli.output import has_colour, say, say_warning
from ckpttool.cli.series import Directory, Null, print_paths, say_journals


def list_(
    directory: Directory = Path(),
    json: Json = False,
    null: Null = False,
    exclude: Exclude = [],  # noqa: B006 - Typer copies it
    max_depth: MaxDepth = None,
) -> int:
    """List the checkpoints of a directory tree, series by series, each from the oldest on."""
    from ckpttool.series.listing import list_checkpoints

    listing = list_checkpoints(directory, exclude=exclude, max_depth=max_depth)
    say_journals(listing.journals)
    for warning in listing.warnings:
        say_warning(warning)
    for problem in listing.problems:
        say_warning(f"{problem.path}: {problem.message}")
    if json:
        from ckpttool.cli.output import print_json
        from ckpttool.render.json_series import list_document

        print_json(list_document(listing))
    elif not listing.checkpoints:
        say(f"{directory}: no checkpoint")
    elif null:
        print_paths([one.entry.path for one in listing.checkpoints], null=True)
    else:
        import time

        from ckpttool.render.text_series import list_text

        print(list_text(listing.checkpoints, now=time.time(), colour=has_colour(sys.stdout)))
    return int(bool(listing.problems))

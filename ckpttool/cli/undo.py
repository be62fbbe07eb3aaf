"""``ckpttool undo``: restores what the last prune moved to the trash, or the last rename renamed."""

from __future__ import annotations

import sys
from typing import Annotated

from ckpttool.cli.options import HERE, Directory, Given, Json, OptionsOf, Quiet, typer_option
from ckpttool.cli.output import has_colour, print_json, say, say_error, say_warning, terminal_width
from ckpttool.cli.paths import directory_name
from ckpttool.core.options import EXECUTION_PANEL
from ckpttool.runs.scope import Scope

DryRun = Annotated[
    bool,
    typer_option(
        "--dry-run", "-n", help="Show what would be restored; change nothing.", panel=EXECUTION_PANEL
    ),
]


def undo(
    directory: Directory = HERE,
    *,
    scope: Annotated[Given, OptionsOf(Scope, ("recursive",))],
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Undo the last prune --trash or rename: restore old names and pointers.

    Nothing is replaced: if a path is taken, undo names it and leaves that checkpoint where it is.
    """
    from ckpttool.runs.undo import undo as take_back

    done = take_back(str(directory), **scope, dry_run=dry_run)
    for warning in done.warnings if not quiet else ():
        say_warning(warning)
    for problem in done.problems:
        say_error(f"{problem.path}: {problem.message}")
    if json:
        from ckpttool.cli.render.json import undo_document

        print_json(undo_document(done))
    elif done.identity is None:
        if not quiet:
            subdirectories = (
                "1 subdirectory has" if done.below == 1 else f"{done.below:,} subdirectories have"
            )
            below = (
                f" in it, but {subdirectories} changes to undo (omit --no-recursive)" if done.below else ""
            )
            say(f"{directory_name(str(directory))}: nothing to undo{below}")
    elif not quiet:
        from ckpttool.cli.render.text_changes import undo_text

        print(undo_text(done, width=terminal_width(sys.stdout), colour=has_colour(sys.stdout)))
    return int(bool(done.problems))

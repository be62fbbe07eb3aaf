"""``ckpttool undo``: takes back the last prune into the trash, or the last renaming."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli.options import Directory, Given, Json, OptionsOf, Quiet
from ckpttool.cli.output import print_json, say, say_error, say_warning
from ckpttool.runs.scope import Scope

DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be restored; change nothing.")]


def undo(
    directory: Directory = Path(),
    *,
    scope: Annotated[Given, OptionsOf(Scope, ("recursive",))],
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Undo the last prune --trash or rename: restore old names and pointers.

    Nothing is replaced: if something is in the way of a checkpoint, undo names it and leaves that one.
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
            below = f" in it; something in {done.below:,} below (-r)" if done.below else ""
            say(f"{directory}: nothing to undo{below}")
    elif not quiet:
        from ckpttool.cli.render.text_changes import undo_text

        print(undo_text(done))
    return int(bool(done.problems))

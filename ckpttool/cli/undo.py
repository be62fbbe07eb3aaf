"""``ckpttool undo``: restore checkpoints that prune moved to the trash, or names before a rename."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ckpttool.cli.options import directory_argument, dry_run_option, json_option, quiet_option
from ckpttool.cli.output import has_colour, print_json, say, say_error, say_warning, terminal_width
from ckpttool.cli.paths import directory_name
from ckpttool.core.options import same_option
from ckpttool.runs.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoCommand:
    """The options of ``undo``."""

    directory: str = directory_argument()
    recursive: bool = same_option(Scope, "recursive")
    dry_run: bool = dry_run_option("Show what would be restored; change nothing.")
    json: bool = json_option()
    quiet: bool = quiet_option()


def undo(command: UndoCommand) -> int:
    """Undo the last prune --trash or rename: restore old names and pointers.

    Nothing is replaced: if a path is taken, undo reports it and doesn't restore that checkpoint.
    """
    from ckpttool.runs.undo import undo as take_back

    done = take_back(command.directory, recursive=command.recursive, dry_run=command.dry_run)
    for warning in done.warnings if not command.quiet else ():
        say_warning(warning)
    for problem in done.problems:
        say_error(f"{problem.path}: {problem.message}")
    if command.json:
        print_json(done.document())
    elif done.identity is None:
        if not command.quiet:
            subdirectories = (
                "1 subdirectory has" if done.below == 1 else f"{done.below:,} subdirectories have"
            )
            below = (
                f" in it, but {subdirectories} changes to undo (omit --no-recursive)" if done.below else ""
            )
            say(f"{directory_name(command.directory)}: nothing to undo{below}")
    elif not command.quiet:
        from ckpttool.cli.render.text_changes import undo_text

        print(undo_text(done, width=terminal_width(sys.stdout), colour=has_colour(sys.stdout)))
    return int(bool(done.problems))

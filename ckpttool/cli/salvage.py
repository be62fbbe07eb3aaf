"""``ckpttool salvage``: write a valid checkpoint with the intact tensors of a damaged one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ckpttool.cli.convert import target_argument
from ckpttool.cli.options import json_option, quiet_option
from ckpttool.cli.output import has_colour, print_json, say_error, say_warning
from ckpttool.cli.progress import progress
from ckpttool.core.errors import UsageError
from ckpttool.core.options import argument, group
from ckpttool.ops.conversion import ConvertOptions
from ckpttool.storage import fs

_WRITING = ("to", "only", "dtype", "shard_size", "dry_run", "force", "strict", "jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvageCommand:
    """The options of ``salvage``."""

    source: str = argument("SRC", "The truncated or damaged checkpoint.")
    target: str = target_argument()
    writing: ConvertOptions = group(ConvertOptions, _WRITING, is_record=True)
    json: bool = json_option()
    quiet: bool = quiet_option()


def salvage(command: SalvageCommand) -> int:
    """Write the intact tensors of a truncated or damaged checkpoint to a valid one, and list the lost ones.

    Tensors with missing bytes or a wrong checksum are left out. SRC is not changed.
    """
    from ckpttool.ops.salvage import salvage as carry_out

    target = command.target
    if not fs.place_of(target).opens_by_path:
        raise UsageError(
            f"{target}: salvage can't write to a store (write to a disk, then use ckpttool copy)"
        )
    with progress("reading", 0) as advance:
        done = carry_out(command.source, target, command.writing, advance=advance)
    for failure in done.converted.mismatches:
        say_error(f"{target}: {failure} (nothing was written)")
    for warning in done.converted.warnings:
        say_warning(warning)
    if command.json:
        print_json(done.document())
    elif not command.quiet and not done.converted.mismatches:
        from ckpttool.cli.render.text_changes import salvage_text

        print(salvage_text(done, colour=has_colour(sys.stdout)))
    return int(bool(done.lost or done.damage or done.converted.mismatches or not done.names_all))

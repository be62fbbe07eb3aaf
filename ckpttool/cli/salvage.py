"""``ckpttool salvage``: what is whole of a truncated or damaged checkpoint, as a sound one."""

from __future__ import annotations

import sys
from typing import Annotated

from ckpttool.cli.convert import Target
from ckpttool.cli.options import Given, Jobs, Json, OptionsOf, PathText, Quiet, path_argument
from ckpttool.cli.output import has_colour, print_json, say_error, say_warning
from ckpttool.cli.progress import progress
from ckpttool.core.errors import UsageError
from ckpttool.core.urls import is_remote
from ckpttool.ops.conversion import ConvertOptions

_WRITING = ("to", "only", "dtype", "shard_size", "dry_run", "force", "strict")


def salvage(
    source: Annotated[PathText, path_argument("SRC", "The truncated or damaged checkpoint.")],
    target: Target,
    *,
    given: Annotated[Given, OptionsOf(ConvertOptions, names=_WRITING)],
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Write what is whole of a truncated or damaged checkpoint as a sound one, and list what is lost.

    A tensor whose bytes are missing, or don't have their checksum, is left out. SRC stays as it is.
    """
    from ckpttool.ops.salvage import salvage as carry_out

    if is_remote(str(target)):
        raise UsageError(f"{target}: salvage writes to a disk (ckpttool copy brings the result to a store)")
    options = ConvertOptions(**given, jobs=jobs)
    with progress("reading", 0) as advance:
        done = carry_out(str(source), str(target), options, advance=advance)
    for failure in done.converted.mismatches:
        say_error(f"{target}: {failure} (nothing was written)")
    for warning in done.converted.warnings:
        say_warning(warning)
    if json:
        from ckpttool.cli.render.json import salvage_document

        print_json(salvage_document(done))
    elif not quiet and not done.converted.mismatches:
        from ckpttool.cli.render.text_changes import salvage_text

        print(salvage_text(done, colour=has_colour(sys.stdout)))
    return int(bool(done.lost or done.damage or done.converted.mismatches or not done.names_all))

"""``ckpttool convert`` and ``ckpttool merge``: write a checkpoint in another format, or from parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import json_option, quiet_option
from ckpttool.cli.output import has_colour, print_json, say_error, say_warning
from ckpttool.cli.progress import ProgressLines, progress
from ckpttool.core.errors import CheckpointError
from ckpttool.core.options import argument
from ckpttool.ops.conversion import ConvertOptions
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.ops.conversion_plan import ConversionPlan


def target_argument() -> Any:
    return argument("DST", "The path to write.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCommand(ConvertOptions):
    """The options of ``convert``."""

    source: str = argument("SRC", "The checkpoint to convert.")
    target: str = target_argument()
    json: bool = json_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCommand(ConvertOptions):
    """The options of ``merge``."""

    sources: Sequence[str] = argument("SRC...", "The parts: files, directories, an index or a prefix.")
    target: str = target_argument()
    json: bool = json_option()
    quiet: bool = quiet_option()


def convert(options: ConvertCommand) -> int:
    """Convert a checkpoint to another format and compare every bit.

    DST is written completely or not at all. Epoch, optimizer groups, containers and other metadata are
    preserved.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.formats import open_checkpoint
    from ckpttool.ops.conversion_plan import plan_conversion

    with open_checkpoint(single_checkpoint(options.source)) as checkpoint:
        return plan_and_convert(
            lambda path, following: plan_conversion(checkpoint, path, options, following),
            options.target,
            options,
            json=options.json,
            quiet=options.quiet,
        )


def merge(options: MergeCommand) -> int:
    """Merge the parts that a distributed job wrote into one checkpoint.

    Missing parts, duplicates and parts of another save are errors. DST is written completely or not at all.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.ops.merge import open_parts, plan_merge

    with open_parts([*map(single_checkpoint, options.sources)]) as whole:
        return plan_and_convert(
            lambda path, following: plan_merge(whole, path, options, following),
            options.target,
            options,
            json=options.json,
            quiet=options.quiet,
        )


@contextmanager
def _local_path(target: str) -> Iterator[str]:
    """Yield the path to write; for a target in a store, in a temporary directory of this machine."""
    # Writers and the comparison that follows need a file with random access; stores upload whole objects.
    if fs.place_of(target).opens_by_path:
        yield target
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="ckpttool-") as directory:
        yield os.path.join(directory, os.path.basename(target.rstrip("/")))


def _upload(path: str, target: str, options: ConvertOptions) -> None:
    """Copy the converted and compared checkpoint to its store, and verify the copy."""
    from ckpttool.runs.copying import copy

    destination = fs.dirname(target.rstrip("/"))
    copied = copy(
        path, destination, force=options.force, depth="quick", jobs=options.jobs, progress=ProgressLines()
    )
    for one in copied.checkpoints:
        if not one.is_there:
            raise CheckpointError(target, f"not written: {one.why}")
    if not copied.checkpoints:
        raise CheckpointError(target, "not written: the converted checkpoint was not found")


def plan_and_convert(
    make: Callable[[str, Checkpoint | None], ConversionPlan],
    target: str,
    options: ConvertOptions,
    *,
    json: bool,
    quiet: bool,
) -> int:
    """Plan a conversion, carry it out, print the result, and return the exit status."""
    from ckpttool.ops.conversion_plan import model_of
    from ckpttool.ops.convert import carry_out

    # The result is compared with the source before it is uploaded: a store never has an unverified object.
    with _local_path(target) as path:
        with model_of(options) as model:
            planned = make(path, model)
            with progress("writing", 0 if options.dry_run else planned.work) as advance:
                converted = replace(carry_out(planned, advance=advance), target=target)
        if path != target and not (options.dry_run or converted.mismatches):
            _upload(path, target, options)
    for failure in converted.mismatches:
        say_error(f"{target}: {failure} (nothing was written)")
    for warning in converted.warnings:
        say_warning(warning)
    for finding in converted.safety:
        place = f"{target}[{finding.where}]" if finding.where else target
        say_warning(f"{place}: {finding.message}")
    if json:
        print_json(converted.document())
    elif quiet:
        for value in converted.dropped:
            say_warning(f"{value.path} is not preserved: {value.why}")
    elif not converted.mismatches:
        from ckpttool.cli.render.text_changes import convert_text

        print(convert_text(converted, colour=has_colour(sys.stdout)))
    return int(bool(converted.mismatches))

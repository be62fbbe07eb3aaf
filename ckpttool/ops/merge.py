"""Merges the parts that a distributed job wrote into one checkpoint, and writes it in any format.

Parts that a reader puts together by itself (after an index, in a directory, after a prefix) are one source.
Several sources are the files of one set of shards, the directories of a job's machines, or checkpoints with
different tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, Unsupported, UsageError
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.formats import open_checkpoint
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.step_directory import RANKS
from ckpttool.formats.torch.deepspeed import DeepSpeed
from ckpttool.formats.torch.deepspeed_zero import VARIANT as UNIVERSAL
from ckpttool.formats.torch.ranks import VARIANT
from ckpttool.ops.conversion import Converted, ConvertKeywords, ConvertOptions
from ckpttool.ops.conversion_plan import ConversionPlan, model_of, plan_conversion
from ckpttool.ops.convert import carry_out
from ckpttool.ops.merging.fluid import merge_fluid
from ckpttool.ops.merging.joined_parts import MergePart, join_parts, shards_of
from ckpttool.ops.merging.merged_checkpoint import (
    MergedCheckpoint,
    is_intact,
    keep_first_rank,
    require_intact,
)
from ckpttool.ops.merging.source_paths import (
    enclosing_checkpoint,
    open_several_directories,
    require_one_serial,
)
from ckpttool.ops.merging.universal import universal_model
from ckpttool.ops.merging.zero import full_precision
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.work import Advance, no_advance

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DEEPSPEED = "deepspeed"
"""The variant of DeepSpeed's own files; others that it reads are merged as they are."""


@shows_keywords(ConvertOptions)
@holds("sources", "target")
def merge(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    advance: Advance | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Converted:
    """Write parts as one checkpoint, in constant memory, and compare it.

    The target appears whole or not at all.

    Args:
        sources: The parts: files, directories or indexes.
        target: Path to write to; its suffix selects the format, unless ``to`` does.
        options: Options of the conversion.
        advance: Called with the bytes done, from any thread.
        keywords: Attributes of ``ConvertOptions``, such as ``to="safetensors"``.

    Raises:
        CheckpointError: A part is missing, duplicate, stale or damaged, or the target can't be written.
        UsageError: The options are invalid, or the target's format can't hold the content.
    """
    options = with_keywords(options or ConvertOptions(), keywords)
    with open_parts(sources) as whole, model_of(options) as model:
        return carry_out(plan_merge(whole, os.fspath(target), options, model), advance=advance or no_advance)


def plan_merge(
    whole: MergedCheckpoint, target: str, options: ConvertOptions, model: Checkpoint | None = None
) -> ConversionPlan:
    """Return how a whole would be written; nothing is written."""
    dropped = whole.dropped if options.only == "all" else ()
    if dropped and options.strict:
        raise UsageError(f"{dropped[0].path} can't be preserved: {dropped[0].why} (--strict)")
    made = plan_conversion(whole.checkpoint, target, options, model, sources=whole.sources)
    return replace(made, dropped=(*dropped, *made.dropped), notes=(*whole.notes, *made.notes))


def open_parts(paths: Sequence[str | os.PathLike[str]]) -> MergedCheckpoint:
    """Return the checkpoint that parts make together.

    A single source is opened by its format's reader. DeepSpeed's parts become the weights in full precision,
    and the lookup tables of Paddle Fluid are joined from the shards of all parameter servers.
    """
    sources = tuple(os.fspath(path) for path in paths)
    places = [fs.realpath(path) for path in sources]
    for at, path in enumerate(sources):
        if places[at] in places[:at]:
            raise UsageError(f"{path} is given twice")
    if not sources:
        raise UsageError("nothing to merge")
    with ExitStack() as until_whole:
        checkpoint = until_whole.enter_context(_open_sources(sources))
        require_intact(checkpoint)
        if checkpoint.variant == RANKS:
            reason = "its ranks hold parts or copies of one model, and the files don't record the sharding"
            raise Unsupported(checkpoint.path, reason, expected="merge them with its framework")
        if checkpoint.format == DeepSpeed.name and checkpoint.variant == _DEEPSPEED:
            whole = full_precision(checkpoint, sources)
        elif checkpoint.variant == UNIVERSAL:
            whole = universal_model(checkpoint, sources)
        elif checkpoint.variant == VARIANT:
            whole = keep_first_rank(checkpoint, sources)
        elif checkpoint.format == Fluid.name:
            whole = merge_fluid(checkpoint, sources)
        else:
            whole = MergedCheckpoint(checkpoint=checkpoint, sources=sources)
        until_whole.pop_all()
    return whole


def _open_sources(sources: Sequence[str]) -> Checkpoint:
    """Return the checkpoint that sources make together, with its findings."""
    # A reader that knows the whole is preferred to joining parts: it has the index, the directory or the
    # prefix. Directories may be those of a job's machines, which one reader opens together, unless each of
    # them is a whole checkpoint by itself. Last come shards without an index, and parts with different
    # tensors.
    if all(fs.isdir(path) for path in sources):
        if len(sources) == 1:
            return open_checkpoint(sources[0])
        require_one_serial(sources)
        if all(map(_is_whole, sources)):
            return _open_several(sources)
        return open_several_directories(sources) or _open_several(sources)
    if any(fs.isdir(path) for path in sources):
        return _open_several(sources)
    if (path := enclosing_checkpoint(sources)) is not None:
        return open_checkpoint(path)
    if (shards := shards_of(sources)) is not None:
        return _open_parts(shards, variant="sharded")
    return _open_several(sources)


def _is_whole(path: str) -> bool:
    """Return whether a directory is a whole checkpoint by itself."""
    try:
        with open_checkpoint(path) as checkpoint:
            # One rank's chunks may look like a whole: a tensor's shape is known only from all of its chunks.
            is_of_rank = (checkpoint.format, checkpoint.variant) == ("torch-dcp", "safetensors")
            return is_intact(checkpoint) and not is_of_rank
    except CheckpointError:
        return False


def _open_several(sources: Sequence[str]) -> Checkpoint:
    return open_checkpoint(sources[0]) if len(sources) == 1 else _open_parts(sources, variant=None)


def _open_parts(sources: Sequence[str], *, variant: str | None) -> Checkpoint:
    """Return checkpoints with different tensors as one; those of ``variant`` are shards of one."""
    with ExitStack() as opened:
        parts: list[MergePart] = []
        for path in sources:
            checkpoint = opened.enter_context(open_checkpoint(path))
            require_intact(checkpoint)
            parts.append((path, checkpoint))
        whole = join_parts(parts, variant)
        whole.close = opened.pop_all().close
    return whole

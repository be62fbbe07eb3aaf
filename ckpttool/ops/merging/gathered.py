"""Gathers one whole out of the parts that a distributed job wrote; no value is read.

Parts that a reader puts together by itself (behind an index, in a directory, behind a prefix) come as one
source. Several sources are files of one set of shards, directories of the machines of a job, or checkpoints
with tensors of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CheckpointError, Unsupported, UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.step_directory import RANKS
from ckpttool.formats.torch.deepspeed import DeepSpeed
from ckpttool.formats.torch.ranks import VARIANT
from ckpttool.ops.merging.around import around
from ckpttool.ops.merging.directories import require_one_serial, spread
from ckpttool.ops.merging.fluid import whole_fluid
from ckpttool.ops.merging.left import first_of_each
from ckpttool.ops.merging.parts import Part, joined, shards_of
from ckpttool.ops.merging.zero import full_precision
from ckpttool.ops.whole import Whole, is_whole, require_whole

_DEEPSPEED = "deepspeed"


def gathered(paths: Sequence[str | os.PathLike[str]]) -> Whole:
    """Return what parts make together.

    One source is what a reader opens there. DeepSpeed's parts become the weights in full precision, and the
    lookup tables of Paddle Fluid come together from the shards of all parameter servers.

    Raises:
        CheckpointError: A part is missing, there twice, of another save, damaged, or can't be read.
        UsageError: The same path is given twice.
    """
    sources = tuple(os.fspath(path) for path in paths)
    _require_distinct(sources)
    with ExitStack() as until_whole:
        checkpoint = until_whole.enter_context(_opened(sources))
        require_whole(checkpoint)
        if checkpoint.variant == RANKS:
            reason = (
                "what its ranks hold are parts or copies of one model, and nothing says how they were cut"
            )
            raise Unsupported(checkpoint.path, reason, expected="merge them with its framework")
        if checkpoint.format == DeepSpeed.name and checkpoint.variant == _DEEPSPEED:
            whole = full_precision(checkpoint, sources)
        elif checkpoint.variant == VARIANT:
            whole = first_of_each(checkpoint, sources)
        elif checkpoint.format == Fluid.name:
            whole = whole_fluid(checkpoint, sources)
        else:
            whole = Whole(checkpoint=checkpoint, sources=sources)
        until_whole.pop_all()
    return whole


def _require_distinct(sources: Sequence[str]) -> None:
    places: dict[str, str] = {}
    for path in sources:
        place = os.path.realpath(path)
        if place in places:
            raise UsageError(f"{path} is given twice")
        places[place] = path
    if not places:
        raise UsageError("nothing to merge")


def _opened(sources: Sequence[str]) -> Checkpoint:
    """Return what sources make together, with its own faults."""
    if all(os.path.isdir(path) for path in sources):
        return _of_directories(sources)
    if any(os.path.isdir(path) for path in sources):
        return _of_several(sources)
    if (path := around(sources)) is not None:
        return open_checkpoint(path)
    if (shards := shards_of(sources)) is not None:
        return _joined(shards, variant="sharded")
    return _of_several(sources)


def _of_directories(sources: Sequence[str]) -> Checkpoint:
    if len(sources) == 1:
        return open_checkpoint(sources[0])
    require_one_serial(sources)
    if all(map(_stands_alone, sources)):
        return _of_several(sources)
    return spread(sources) or _of_several(sources)


def _stands_alone(path: str) -> bool:
    """Tell whether a directory is a whole checkpoint by itself."""
    try:
        with open_checkpoint(path) as checkpoint:
            # The chunks of one rank may look like a whole: only their number tells how large it is.
            return is_whole(checkpoint) and (checkpoint.format, checkpoint.variant) != (
                "torch-dcp",
                "safetensors",
            )
    except CheckpointError:
        return False


def _of_several(sources: Sequence[str]) -> Checkpoint:
    if len(sources) == 1:
        return open_checkpoint(sources[0])
    return _joined(sources, variant=None)


def _joined(sources: Sequence[str], *, variant: str | None) -> Checkpoint:
    """Return checkpoints with tensors of their own as one; those of ``variant`` are shards of one."""
    with ExitStack() as opened:
        parts = []
        for path in sources:
            checkpoint = opened.enter_context(open_checkpoint(path))
            require_whole(checkpoint)
            parts.append(Part(path, checkpoint))
        whole = joined(parts, variant)
        whole.close = opened.pop_all().close
    return whole

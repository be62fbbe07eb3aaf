"""One whole out of the parts that a distributed job wrote, in any format: gathered, then converted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError
from ckpttool.ops.conversion import Converted, ConvertWishes
from ckpttool.ops.convert import carry_out
from ckpttool.ops.merging.gathered import gathered
from ckpttool.ops.planning import Plan, model_of, plan
from ckpttool.ops.whole import Whole
from ckpttool.work import Advance

_AS_IT_IS = ConvertWishes()


def merge(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    wishes: ConvertWishes = _AS_IT_IS,
    *,
    advance: Advance = lambda nbytes: None,
) -> Converted:
    """Write what parts make together as one checkpoint, in constant memory, and compare it.

    The target appears whole or not at all.

    Raises:
        CheckpointError: A part is missing, there twice, stale or damaged, or the target can't be written.
        UsageError: The wishes can't be followed, or the target can't hold what the parts have.
    """
    with gathered(sources) as whole, model_of(wishes) as model:
        return carry_out(plan_merge(whole, os.fspath(target), wishes, model), advance=advance)


def plan_merge(whole: Whole, target: str, wishes: ConvertWishes, model: Checkpoint | None = None) -> Plan:
    """Return how a whole would be written; nothing is written.

    Raises:
        CheckpointError: The target can't be written there.
        UsageError: The wishes can't be followed, or the target can't hold what the parts have.
    """
    dropped = whole.dropped if wishes.only == "all" else ()
    if dropped and wishes.strict:
        raise UsageError(f"{dropped[0].path} can't be carried: {dropped[0].why} (--strict)")
    made = plan(whole.checkpoint, target, wishes, model, sources=whole.sources)
    return replace(made, dropped=(*dropped, *made.dropped), notes=(*whole.notes, *made.notes))

"""The checkpoint that parts make together: requirements on parts, and the state of ranks that is dropped.

Discarded is how the job was distributed, and whatever differs between a rank and the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Mapped
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.report import Finding, Problem, Severity
from ckpttool.core.tensor import Tensor
from ckpttool.formats.torch.deepspeed import KINDS
from ckpttool.formats.torch.deepspeed_zero import STATES
from ckpttool.formats.torch.ranks import is_rank_key
from ckpttool.ops.conversion_plan import MIXED_SAVES
from ckpttool.ops.merging.zero_partitions import BASE, FLAT, INNER, MASTERS, ZeroJob, rank_metadata, stem

_FATAL_WARNINGS = MIXED_SAVES | {"cut-not-said", "trainer-missing"}
"""Warnings of a part that may be of another save, or missing: a reader can live with it, a whole can't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCheckpoint(AbstractContextManager["MergedCheckpoint"]):
    """What parts make together; as a context manager it closes them.

    Attributes:
        checkpoint: It, opened.
        sources: The paths that were given.
        dropped: What of the parts it does not hold.
        notes: What was done with them.
    """

    checkpoint: Checkpoint
    sources: tuple[str, ...]
    dropped: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.checkpoint.close()


def with_contents(
    checkpoint: Checkpoint,
    *,
    tensors: tuple[Tensor, ...],
    metadata: Mapping[str, object],
    tree: object = None,
    native: Mapping[str, bytes],
) -> Checkpoint:
    """Return a checkpoint that holds something else of the same files; it closes them."""
    return checkpoint.but(
        tensors=tensors, metadata=lambda: metadata, tree=lambda: tree, native=lambda: native
    )


def is_intact(checkpoint: Checkpoint) -> bool:
    """Return whether nothing of a checkpoint is missing or wrong."""
    return checkpoint.complete and not any(map(_is_wrong, checkpoint.findings))


def _is_wrong(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR or finding.code in _FATAL_WARNINGS


def require_intact(checkpoint: Checkpoint) -> None:
    """Require that nothing of a checkpoint is missing or wrong."""
    for finding in sorted(checkpoint.findings, key=lambda one: one.severity is not Severity.ERROR):
        if _is_wrong(finding):
            raise DamagedCheckpoint(checkpoint.path, finding.message, where=finding.where, code=finding.code)
    if not checkpoint.complete:
        raise DamagedCheckpoint(checkpoint.path, "it is not complete", code="incomplete")


OF_PARTITIONS = frozenset(
    {
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "buffer_names", "dp_world_size", "mp_world_size", "num_experts"),
        *("checkpoint_parallel_dimensions", "ds_autoep_layers"),
    }
)
"""What model states say of how the job was cut; all else is the trainer's own."""
OF_OPTIMIZER = frozenset(
    {
        *(
            BASE,
            INNER,
            MASTERS,
            FLAT,
            "zero_stage",
            "group_paddings",
            "param_alignment_paddings",
            "ds_version",
        ),
        *("partition_count", "param_slice_mappings", "ds_config"),
    }
)
"""Likewise, of optimizer states."""
_DIFFERS = "another rank says something else than the first, whose is taken"


def discarded_rank_state(checkpoint: Checkpoint, job: ZeroJob) -> Iterator[Problem]:
    """Yield what no parameter is made of, and the first rank does not say as well."""
    first = checkpoint.metadata
    for path in job.others:
        own = rank_metadata(checkpoint, path)
        yield from _differing_keys(stem(path), first, own, OF_PARTITIONS)
        below = {str(one.path[1]) for one in checkpoint.tensors if one.path[0] == stem(path)}
        for key in sorted(below - OF_PARTITIONS):
            yield Problem(f"{stem(path)}.{key}", _DIFFERS)
    ranks = [rank for stage in job.stages for rank in stage.ranks]
    for rank in ranks[1:]:
        states, wanted = rank.metadata.get(STATES), ranks[0].metadata.get(STATES)
        if isinstance(states, Mapping) and isinstance(wanted, Mapping):
            yield from _differing_keys(f"{stem(rank.path)}.{STATES}", wanted, states, OF_OPTIMIZER)
    for entry in checkpoint.files:
        name = os.path.basename(entry.path)
        if stem(name) in checkpoint.metadata and not any(kind.fullmatch(name) for kind in KINDS.values()):
            yield Problem(stem(name), "a file beside the model and its optimizer")


def _differing_keys(
    stem: str, first: Mapping[str, Any], other: Mapping[str, Any], known: frozenset[str]
) -> Iterator[Problem]:
    for key, value in other.items():
        if key not in known and (key not in first or repr(first[key]) != repr(value)):  # NaN is NaN
            yield Problem(f"{stem}.{key}", _DIFFERS)


def keep_first_rank(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return what ranks hold together, of what each of them has otherwise the first one's alone."""
    tensors = tuple(one for one in checkpoint.tensors if not is_rank_key(one.path[0]))
    own = (
        key
        for key in (*checkpoint.metadata, *(one.path[0] for one in checkpoint.tensors))
        if is_rank_key(key)
    )
    tree = checkpoint.tree
    if isinstance(tree, dict):
        pairs = {key: value for key, value in tree.items() if not is_rank_key(key)}
        tree = Mapped(tree.kind, pairs, tree.state, tree.factory) if isinstance(tree, Mapped) else pairs
    whole = with_contents(
        checkpoint,
        tensors=tensors,
        metadata={key: value for key, value in checkpoint.metadata.items() if not is_rank_key(key)},
        tree=tree,
        native=checkpoint.native,
    )
    dropped = tuple(Problem(str(key), _DIFFERS) for key in dict.fromkeys(own))
    return MergedCheckpoint(checkpoint=whole, sources=sources, dropped=dropped)

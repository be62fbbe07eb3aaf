"""The result of a merge: requirements on its parts, and the state of ranks that it drops.

Dropped are the description of how the job was distributed, and any state in which a rank differs from the
first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import DictSubclass
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
"""Warnings that forbid a merge: a part may be missing or from another save, which a reader tolerates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCheckpoint(AbstractContextManager["MergedCheckpoint"]):
    """Result of a merge; as a context manager it closes the parts.

    Attributes:
        checkpoint: The merged checkpoint, open.
        sources: Paths given by the caller.
        dropped: Content of the parts that isn't in the merged checkpoint.
        notes: Sentences for the user about the merge.
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
    """Return a checkpoint of the same files with other content; closing it closes the files."""
    return checkpoint.replace(
        tensors=tensors, metadata=lambda: metadata, tree=lambda: tree, native=lambda: native
    )


def is_intact(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is complete, without errors and without warnings that forbid a merge."""
    return checkpoint.complete and not any(map(_is_wrong, checkpoint.findings))


def _is_wrong(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR or finding.code in _FATAL_WARNINGS


def require_intact(checkpoint: Checkpoint) -> None:
    """Raise DamagedCheckpoint for the worst finding of a checkpoint that isn't intact."""
    for finding in sorted(checkpoint.findings, key=lambda one: one.severity is not Severity.ERROR):
        if _is_wrong(finding):
            raise DamagedCheckpoint(checkpoint.path, finding.message, where=finding.where, code=finding.code)
    if not checkpoint.complete:
        raise DamagedCheckpoint(checkpoint.path, "it is incomplete", code="incomplete")


PARTITION_KEYS = frozenset(
    {
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "buffer_names", "dp_world_size", "mp_world_size", "num_experts"),
        *("checkpoint_parallel_dimensions", "ds_autoep_layers"),
    }
)
"""Keys of model states that describe the job's distribution; all other keys are the trainer's."""
OPTIMIZER_KEYS = frozenset(
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
"""Keys of optimizer states that describe the job's distribution."""
_DIFFERS = "ranks differ; the first rank's is kept"


def discarded_rank_state(checkpoint: Checkpoint, job: ZeroJob) -> Iterator[Problem]:
    """Yield the content of ranks that is neither part of a parameter nor equal to the first rank's."""
    first = checkpoint.metadata
    for path in job.others:
        own = rank_metadata(checkpoint, path)
        yield from _differing_keys(stem(path), first, own, PARTITION_KEYS)
        below = {str(one.path[1]) for one in checkpoint.tensors if one.path[0] == stem(path)}
        for key in sorted(below - PARTITION_KEYS):
            yield Problem(f"{stem(path)}.{key}", _DIFFERS)
    ranks = [rank for stage in job.stages for rank in stage.ranks]
    for rank in ranks[1:]:
        states, wanted = rank.metadata.get(STATES), ranks[0].metadata.get(STATES)
        if isinstance(states, Mapping) and isinstance(wanted, Mapping):
            yield from _differing_keys(f"{stem(rank.path)}.{STATES}", wanted, states, OPTIMIZER_KEYS)
    for entry in checkpoint.files:
        name = os.path.basename(entry.path)
        if stem(name) in checkpoint.metadata and not any(kind.fullmatch(name) for kind in KINDS.values()):
            yield Problem(stem(name), "a file that holds neither model nor optimizer")


def _differing_keys(
    stem: str, first: Mapping[str, Any], other: Mapping[str, Any], known: frozenset[str]
) -> Iterator[Problem]:
    for key, value in other.items():
        if key not in known and (key not in first or repr(first[key]) != repr(value)):  # NaN != NaN
            yield Problem(f"{stem}.{key}", _DIFFERS)


def keep_first_rank(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return the tensors and metadata that ranks share, without each rank's own."""
    # The reader puts a rank's own entries under ``rank_<K>``, and shared ones at the top.
    tensors = tuple(one for one in checkpoint.tensors if not is_rank_key(one.path[0]))
    own = (
        key
        for key in (*checkpoint.metadata, *(one.path[0] for one in checkpoint.tensors))
        if is_rank_key(key)
    )
    tree = checkpoint.tree
    if isinstance(tree, dict):
        pairs = {key: value for key, value in tree.items() if not is_rank_key(key)}
        tree = (
            DictSubclass(tree.kind, pairs, tree.state, tree.factory)
            if isinstance(tree, DictSubclass)
            else pairs
        )
    whole = with_contents(
        checkpoint,
        tensors=tensors,
        metadata={key: value for key, value in checkpoint.metadata.items() if not is_rank_key(key)},
        tree=tree,
        native=checkpoint.native,
    )
    dropped = tuple(Problem(str(key), _DIFFERS) for key in dict.fromkeys(own))
    return MergedCheckpoint(checkpoint=whole, sources=sources, dropped=dropped)

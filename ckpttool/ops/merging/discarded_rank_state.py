"""What a merge does not take from the ranks: how the job was cut, and where they differ from the first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Mapped
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.formats.torch.deepspeed import KINDS
from ckpttool.formats.torch.deepspeed_zero import STATES
from ckpttool.formats.torch.ranks import is_rank_key
from ckpttool.ops.conversion import Dropped
from ckpttool.ops.merging.merged_checkpoint import MergedCheckpoint, with_contents
from ckpttool.ops.merging.zero_partitions import BASE, FLAT, INNER, MASTERS, ZeroJob, rank_metadata, stem

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


def discarded_rank_state(checkpoint: Checkpoint, job: ZeroJob) -> Iterator[Dropped]:
    """Yield what no parameter is made of, and the first rank does not say as well."""
    first = checkpoint.metadata
    for path in job.others:
        own = rank_metadata(checkpoint, path)
        yield from _differing_keys(stem(path), first, own, OF_PARTITIONS)
        below = {str(one.path[1]) for one in checkpoint.tensors if one.path[0] == stem(path)}
        for key in sorted(below - OF_PARTITIONS):
            yield Dropped(f"{stem(path)}.{key}", _DIFFERS)
    ranks = [rank for stage in job.stages for rank in stage.ranks]
    for rank in ranks[1:]:
        states, wanted = rank.metadata.get(STATES), ranks[0].metadata.get(STATES)
        if isinstance(states, Mapping) and isinstance(wanted, Mapping):
            yield from _differing_keys(f"{stem(rank.path)}.{STATES}", wanted, states, OF_OPTIMIZER)
    for entry in checkpoint.files:
        name = os.path.basename(entry.path)
        if stem(name) in checkpoint.metadata and not any(kind.fullmatch(name) for kind in KINDS.values()):
            yield Dropped(stem(name), "a file beside the model and its optimizer")


def _differing_keys(
    stem: str, first: Mapping[str, Any], other: Mapping[str, Any], known: frozenset[str]
) -> Iterator[Dropped]:
    for key, value in other.items():
        if key not in known and (key not in first or repr(first[key]) != repr(value)):  # NaN is NaN
            yield Dropped(f"{stem}.{key}", _DIFFERS)


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
    dropped = tuple(Dropped(str(key), _DIFFERS) for key in dict.fromkeys(own))
    return MergedCheckpoint(checkpoint=whole, sources=sources, dropped=dropped)

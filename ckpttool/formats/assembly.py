"""From a tree taken apart to a checkpoint: names, ties, roles, and what is known of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, FileEntry, Path, Producer, Role, Span, Tensor, TrainingState
from ckpttool.formats.digests import told_below
from ckpttool.formats.interface import Probe
from ckpttool.formats.scalars import lazy_scalar
from ckpttool.formats.torch_objects import TensorParts
from ckpttool.formats.trees import Flat
from ckpttool.report import Finding
from ckpttool.roles import role_of
from ckpttool.training import is_training_scalar, training_state


def assemble(
    *,
    probe: Probe,
    format: str,
    variant: str | None,
    flat: Flat[TensorParts],
    files: tuple[FileEntry, ...],
    spans: Callable[[], Iterator[Span]],
    producer: Producer,
    findings: tuple[Finding, ...] = (),
    safety: tuple[Finding, ...] = (),
    records: Mapping[str, str] = {},
    tree: Callable[[tuple[Tensor, ...]], object] = lambda tensors: None,
) -> Checkpoint:
    """Return the checkpoint that a tree of objects makes.

    Args:
        tree: Gives ``Checkpoint.tree``, from the tensors with their names.
        records: How other records of the archive are told, by name.
    """
    tensors = named(flat.tensors, flat.plain)
    metadata = flat.plain if isinstance(flat.plain, dict) else {} if flat.plain is None else {"": flat.plain}
    if records:
        metadata = {**metadata, **told_below(records, metadata)}
    return Checkpoint(
        path=probe.path,
        format=format,
        variant=variant,
        tensors=tensors,
        files=files,
        spans=spans,
        metadata=lambda: metadata,
        training=lambda: training_of(metadata, tensors, probe.name),
        tree=lambda: tree(tensors),
        producer=producer,
        findings=findings,
        safety=safety,
        close=probe.close,
    )


def named(found: list[tuple[Path, TensorParts]], rest: object) -> tuple[Tensor, ...]:
    """Return the tensors with roles, and with the ties between them.

    Args:
        found: Tensors by path.
        rest: What else lies in the checkpoint, as plain data.
    """
    first: dict[object, str] = {}
    tensors = []
    guess = _guesser(found, rest)
    for path, parts in found:
        guessed = guess(path, parts.shape)
        tensor = Tensor(
            path or ("tensor",),
            parts.dtype,
            parts.shape,
            parts.role or guessed,
            parts.values,
            parts.extent,
            parts.storage,
            parts.byteorder,
        )
        owner = tensor.name
        if parts.identity is not None and parts.storage is not None and parts.storage.nbytes:
            owner = first.setdefault(parts.identity, tensor.name)
        tensors.append(tensor if owner == tensor.name else replace(tensor, shares_with=owner))
    return tuple(tensors)


def _guesser(found: list[tuple[Path, TensorParts]], rest: object) -> Callable[[Path, tuple[int, ...]], Role]:
    """Return what guesses a tensor's role from its path and shape, knowing the whole."""
    if isinstance(rest, dict) and "param_groups" in rest:
        return lambda path, shape: Role.OPTIMIZER
    is_bare = not isinstance(rest, dict) or not rest
    if is_bare and all(len(path) <= 1 for path, parts in found if parts.role is None):
        return _role_in_state_dict
    return role_of


def _role_in_state_dict(path: Path, shape: tuple[int, ...]) -> Role:
    return Role.TRAINING if path and shape == () and is_training_scalar(path[0]) else Role.WEIGHTS


def training_of(metadata: Mapping[str, Any], tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state from plain values, scalar tensors, and the file's name."""
    scalars = {
        tensor.path: lazy_scalar(tensor)
        for tensor in tensors
        if tensor.size == 1 and tensor.role in (Role.TRAINING, Role.OTHER)
    }
    return training_state(metadata, scalars, name)

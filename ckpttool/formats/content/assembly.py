"""From a tree taken apart to a checkpoint: names, ties, roles, and what is known of the training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.formats.content.belonging import guesser
from ckpttool.formats.content.digests import told_below
from ckpttool.formats.content.objects import told_apart
from ckpttool.formats.content.scalars import lazy_scalar
from ckpttool.formats.content.trees import Flat
from ckpttool.formats.interface import Probe
from ckpttool.formats.torch.distributed import shard_findings
from ckpttool.formats.torch.objects import TensorParts
from ckpttool.report import Finding
from ckpttool.tensor import Path, Role, Span, Tensor
from ckpttool.training import training_state


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
    tree: Callable[[tuple[Tensor, ...]], object] | None = None,
) -> Checkpoint:
    """Return the checkpoint that a tree of objects makes.

    Args:
        tree: Gives all that the file holds as ``Checkpoint.tree``, from the tensors with their names.
        records: How other records of the archive are told, by name.
    """
    tensors = named(flat.tensors, flat.plain, flat.modules, flat.optimizers)
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
        tree=lambda: None if tree is None else told_apart(tree(tensors)),
        producer=producer,
        findings=(*findings, *shard_findings(tensors)),
        safety=safety,
        close=probe.close,
    )


def named(
    found: list[tuple[Path, TensorParts]],
    rest: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> tuple[Tensor, ...]:
    """Return the tensors with roles, and with the ties between them.

    Args:
        found: Tensors by path.
        rest: What else lies in the checkpoint, as plain data.
        modules: As ``Flat.modules``.
        optimizers: As ``Flat.optimizers``.
    """
    first: dict[object, str] = {}
    tensors = []
    shapes = {path: parts.shape for path, parts in found if parts.role is None}
    guess = guesser(shapes, rest, modules, optimizers)
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
            shard=parts.shard,
        )
        name = owner = tensor.name
        if (view := _view_of(parts)) is not None:
            owner = first.setdefault(view, name)
        tensors.append(tensor if owner == name else replace(tensor, shares_with=owner))
    return tuple(tensors)


def _view_of(parts: TensorParts) -> object:
    """Return what tensors have in common that are one view of the same bytes; None where they have none.

    An array that lies in a pickle is the same as another where both are one object.
    """
    if parts.identity is not None:
        return parts.identity if parts.storage is not None and parts.storage.nbytes else None
    return (
        (id(parts.values), parts.dtype.name, parts.shape)
        if parts.values is not None and 0 not in parts.shape
        else None
    )


def training_of(metadata: Mapping[str, Any], tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state from plain values, scalar tensors, and the file's name."""
    scalars = {
        tensor.path: lazy_scalar(tensor)
        for tensor in tensors
        if tensor.size == 1 and tensor.role in (Role.TRAINING, Role.OTHER)
    }
    return training_state(metadata, scalars, name)

"""Makes a ``Checkpoint`` of a flattened tree: names, ties and roles of tensors, and the training state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.formats.content.flattening import Flat
from ckpttool.formats.content.plain_data import under_free_key
from ckpttool.formats.content.scalars import lazy_scalar
from ckpttool.formats.content.tree import mark_none
from ckpttool.formats.interface import Probe
from ckpttool.formats.torch.distributed import shard_findings
from ckpttool.formats.torch.objects import TensorParts
from ckpttool.report import Finding
from ckpttool.roles import WHOLE_WEIGHTS, is_beside_weights, role_below, role_of, role_of_module
from ckpttool.tensor import Path, Role, Span, Tensor
from ckpttool.training import is_training_scalar, training_state

_OWN = ("weight", "bias")
"""What the tensors of a layer that is a model by itself are called."""
Guess = Callable[[Path, tuple[int, ...]], Role]


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
    tensors = name_tensors(flat.tensors, flat.plain, flat.modules, flat.optimizers)
    metadata = flat.plain if isinstance(flat.plain, dict) else {} if flat.plain is None else {"": flat.plain}
    if records:
        metadata = {**metadata, **under_free_key(records, metadata)}
    return Checkpoint(
        path=probe.path,
        format=format,
        variant=variant,
        tensors=tensors,
        files=files,
        spans=spans,
        metadata=lambda: metadata,
        training=lambda: training_of(metadata, tensors, probe.name),
        tree=lambda: None if tree is None else mark_none(tree(tensors)),
        producer=producer,
        findings=(*findings, *shard_findings(tensors)),
        safety=safety,
        close=probe.close,
    )


def name_tensors(
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
    guess = infer_roles(shapes, rest, modules, optimizers)
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


def infer_roles(
    shapes: Mapping[Path, tuple[int, ...]],
    rest: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> Guess:
    """Return what guesses a tensor's role from its path and shape, knowing the whole.

    Args:
        shapes: Of all tensors whose roles are to be guessed, by path.
        rest: What else lies in the checkpoint, as plain data.
        modules: As ``Flat.modules``: all tensors in these belong to the model, whatever they are called.
        optimizers: As ``Flat.optimizers``: no tensor below these is a weight.
    """
    if isinstance(rest, dict) and "param_groups" in rest:
        return lambda path, shape: Role.OPTIMIZER
    inside = {path[:-1] for path in shapes}
    whole = {keys: role_of_module(keys) for keys in modules if keys in inside}
    is_bare = not isinstance(rest, dict) or not rest
    if is_bare and () not in whole and all(len(path) <= 1 for path in shapes):
        return _role_in_state_dict
    layers = _layers(shapes)
    of_optimizers = {
        around for around in inside if any(around[:count] in optimizers for count in range(len(around) + 1))
    }

    def guess(path: Path, shape: tuple[int, ...]) -> Role:
        if path and path[:-1] in of_optimizers:
            return Role.OPTIMIZER
        around = path[:-1]
        if path and around in whole:
            return whole[around]
        own = layers.get(around)
        return role_of(path, shape) if own is None else _role_among(path, shape, own)

    return guess


def _role_in_state_dict(path: Path, shape: tuple[int, ...]) -> Role:
    return Role.TRAINING if path and shape == () and is_training_scalar(path[0]) else Role.WEIGHTS


def _layers(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, set[str]]:
    """Return the places at which plain dictionaries hold the weights of modules, with the modules' names.

    Only where no key around them tells what they serve.
    """
    found: dict[Path, set[str]] = {}
    for path, shape in shapes.items():
        key = path[-1] if path else None
        if not isinstance(key, str) or ("." not in key and key not in _OWN):
            continue
        if role_of((key,), shape) is Role.WEIGHTS:
            found.setdefault(path[:-1], set()).add(key.partition(".")[0])
    return {keys: names for keys, names in found.items() if role_below(keys) is None}


def _role_among(path: Path, shape: tuple[int, ...], layers: Collection[str]) -> Role:
    """Return what a tensor serves that lies among the weights of modules."""
    key = path[-1]
    if not isinstance(key, str):
        return role_of(path, shape)
    told = role_of((key,), shape)
    if told in (Role.WEIGHTS, Role.OPTIMIZER):
        return told
    first, dot, _ = key.partition(".")
    if first in layers:
        return Role.WEIGHTS
    if any(WHOLE_WEIGHTS.search(name) for name in layers) or is_beside_weights(first):
        return role_of(path, shape)
    if not dot and shape == () and is_training_scalar(key):
        return Role.TRAINING
    return Role.WEIGHTS

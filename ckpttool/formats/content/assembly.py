"""Makes a ``Checkpoint`` of a flattened tree: names, ties and roles of tensors, and the training state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.core.parameters import logical_tensor_at
from ckpttool.core.report import Finding, error, note
from ckpttool.core.tensor import (
    WHOLE_WEIGHTS,
    Path,
    Role,
    Span,
    Tensor,
    is_beside_weights,
    role_below,
    role_of,
    role_of_module,
)
from ckpttool.core.training import is_training_scalar, training_state
from ckpttool.formats.content.flattening import Flat, Leaf, TensorParts, itself
from ckpttool.formats.content.plain_data import under_free_key
from ckpttool.formats.content.scalars import lazy_scalar
from ckpttool.formats.content.tree import mark_none
from ckpttool.formats.interface import Probe

if TYPE_CHECKING:
    from ckpttool.formats.content.tree_builder import FrameworkNode

_OWN = ("weight", "bias")
"""What the tensors of a layer that is a model by itself are called."""


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

    ``tree`` gives ``Checkpoint.tree`` from the tensors with their names; ``records`` describes the other
    records of the archive, by name.
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


def tree_of(
    root: object,
    leaf: Callable[[object], Leaf[TensorParts] | None],
    path: str,
    framework_node: FrameworkNode,
    unwrap: Callable[[object], object] = itself,
) -> Callable[[tuple[Tensor, ...]], object]:
    """Return what builds the tree of a pickle from tensors with names; most commands never ask for it.

    The arguments are those of ``TreeBuilder``.
    """

    def build(tensors: tuple[Tensor, ...]) -> object:
        from ckpttool.formats.content.tree_builder import TreeBuilder

        return TreeBuilder(leaf, tensors, path, framework_node, unwrap).run(root)

    return build


def name_tensors(
    parts_by_path: list[tuple[Path, TensorParts]],
    plain: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> tuple[Tensor, ...]:
    """Return the tensors with roles, and with the ties between them; see ``Flat`` for the arguments."""
    of_unknown_role = [(path, parts.shape) for path, parts in parts_by_path if parts.role is None]
    inferred = iter(infer_roles(of_unknown_role, plain, modules, optimizers))
    owners: dict[object, str] = {}
    tensors = []
    for path, parts in parts_by_path:
        tensor = Tensor(
            path or ("tensor",),
            parts.dtype,
            parts.shape,
            next(inferred) if parts.role is None else parts.role,
            parts.values,
            parts.extent,
            parts.storage,
            parts.byteorder,
            shard=parts.shard,
        )
        # What tensors have in common that are one view of the same bytes. An array that lies in a pickle is
        # the same as another if both are one object.
        view: object = None
        if parts.identity is not None:
            view = parts.identity if parts.storage is not None and parts.storage.nbytes else None
        elif parts.values is not None and 0 not in parts.shape:
            view = (id(parts.values), parts.dtype.name, parts.shape)
        owner = tensor.name if view is None else owners.setdefault(view, tensor.name)
        tensors.append(tensor if owner == tensor.name else replace(tensor, shares_with=owner))
    return tuple(tensors)


def infer_roles(
    tensors: Sequence[tuple[Path, tuple[int, ...]]],
    plain: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> list[Role]:
    """Return the role of each tensor, from its path and shape and from what lies around it.

    Args:
        tensors: Path and shape of each.
        plain: What else lies in the checkpoint, as plain data.
        modules: As ``Flat.modules``: all tensors in these belong to the model, whatever they are called.
        optimizers: As ``Flat.optimizers``: no tensor below these is a weight.
    """
    if isinstance(plain, dict) and "param_groups" in plain:
        return [Role.OPTIMIZER] * len(tensors)
    tensors, plain = _whole_tensors(tensors, plain)
    parents = {path[:-1] for path, _ in tensors}
    module_roles = {path: role_of_module(path) for path in modules if path in parents}
    has_nothing_else = not isinstance(plain, dict) or not plain
    if has_nothing_else and () not in module_roles and all(len(path) <= 1 for path, _ in tensors):
        # A bare state dict: its tensors are weights, whatever they are called.
        return [
            Role.TRAINING if path and shape == () and is_training_scalar(path[0]) else Role.WEIGHTS
            for path, shape in tensors
        ]
    layers = _layers(dict(tensors))
    of_optimizers = {
        parent for parent in parents if any(parent[:count] in optimizers for count in range(len(parent) + 1))
    }
    roles = []
    for path, shape in tensors:
        parent = path[:-1]
        if path and parent in of_optimizers:
            roles.append(Role.OPTIMIZER)
        elif path and parent in module_roles:
            roles.append(module_roles[parent])
        elif (layer_names := layers.get(parent)) is not None:
            roles.append(_role_among_layers(path, shape, layer_names))
        else:
            roles.append(role_of(path, shape))
    return roles


def _whole_tensors(
    tensors: Sequence[tuple[Path, tuple[int, ...]]], plain: object
) -> tuple[Sequence[tuple[Path, tuple[int, ...]]], object]:
    """Return the tensors with those that are components of one under its path, and the plain data without
    what describes tensors at the top.
    """
    if not isinstance(plain, dict) or not plain:
        return tensors, plain
    whole: list[tuple[Path, tuple[int, ...]]] = []
    described: set[Path] = set()
    for path, shape in tensors:
        found = logical_tensor_at(plain, path)
        if found is not None:
            path, logical = found
            described.add(path)
            shape = shape if logical.shape is None else logical.shape
        whole.append((path, shape))
    if () in described:
        return whole, None
    return whole, {key: value for key, value in plain.items() if (key,) not in described}


def _layers(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, set[str]]:
    """Return the places at which plain dictionaries hold the weights of modules, with the modules' names.

    Only where no key around them tells what they serve.
    """
    layers: dict[Path, set[str]] = {}
    for path, shape in shapes.items():
        key = path[-1] if path else None
        if not isinstance(key, str) or ("." not in key and key not in _OWN):
            continue
        if role_of((key,), shape) is Role.WEIGHTS:
            layers.setdefault(path[:-1], set()).add(key.partition(".")[0])
    return {path: names for path, names in layers.items() if role_below(path) is None}


def _role_among_layers(path: Path, shape: tuple[int, ...], layer_names: Collection[str]) -> Role:
    """Return the role of a tensor that lies among the weights of modules."""
    key = path[-1]
    if not isinstance(key, str):
        return role_of(path, shape)
    role = role_of((key,), shape)
    if role in (Role.WEIGHTS, Role.OPTIMIZER):
        return role
    first, dot, _ = key.partition(".")
    if first in layer_names:
        return Role.WEIGHTS
    if any(WHOLE_WEIGHTS.search(name) for name in layer_names) or is_beside_weights(first):
        return role_of(path, shape)
    if not dot and shape == () and is_training_scalar(key):
        return Role.TRAINING
    return Role.WEIGHTS


def training_of(metadata: Mapping[str, Any], tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state from plain values, scalar tensors, and the file's name."""
    scalars = {
        tensor.path: lazy_scalar(tensor)
        for tensor in tensors
        if tensor.size == 1 and tensor.role in (Role.TRAINING, Role.OTHER)
    }
    return training_state(metadata, scalars, name)


def shard_findings(tensors: Sequence[Tensor]) -> Iterator[Finding]:
    """Yield what is to be said of the parts of tensors that a file holds."""
    for tensor in tensors:
        if tensor.shard is not None and tensor.shard.is_partial:
            placements = ", ".join(tensor.shard.placements)
            message = f"{placements}: terms of a sum that was never made, not its values"
            yield error("dtensor-partial", message, tensor.name)
    cut = [tensor.shard for tensor in tensors if tensor.shard is not None and not tensor.shard.is_whole]
    if cut:
        rank = "a process" if cut[0].rank is None else f"rank {cut[0].rank:,}"
        world = f" of {cut[0].world:,}" if cut[0].world else ""
        message = f"what {rank}{world} kept of {len(cut):,} tensors; the others have the rest"
        yield note("rank-alone", message)

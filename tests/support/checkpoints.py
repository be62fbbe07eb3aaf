"""Checkpoints made of NumPy arrays, for what is told by names, shapes and contents alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpttool import Checkpoint, Role, Tensor, Verification
from ckpttool.core.layers import LayerKind
from ckpttool.core.tensor import Path, Values
from tests.support.tensors import Array, tensor_of

FORMATS = {"torch": "pytorch", "keras": "keras-h5", "paddle": "fluid"}


@dataclass(frozen=True)
class Sequential:
    """Values that can only be read from the first to the last, in blocks of odd sizes."""

    values: Values

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for block in self.values.blocks(limit):
            middle = len(block) // 3 // 16 * 16
            yield block[:middle]
            yield block[middle:]

    def once(self) -> Sequential:
        return self


def numbers(*shape: int, start: int = 0, dtype: str = "<f4") -> Array:
    """Return an array in which each element is another one."""
    return np.arange(start, start + int(np.prod(shape)), dtype=dtype).reshape(shape)


def tensor(name: str | Path, array: Array, role: Role = Role.WEIGHTS, **known: Any) -> Tensor:
    """Return an array under a name, or under a path."""
    path = (name,) if isinstance(name, str) else name
    return replace(tensor_of(array), path=path, role=role, **known)


def checkpoint(
    weights: Mapping[Any, Array],
    family: str = "torch",
    layers: Mapping[str, LayerKind | str] | None = None,
    **more: Any,
) -> Checkpoint:
    """Return a checkpoint of weights by name or path; ``more`` are roles, by what other names start with."""
    roles = {start: Role(role) for start, role in more.items()}
    tensors = [tensor(name, array, _role(name, roles)) for name, array in weights.items()]
    return of_tensors(tensors, family, layers)


def _role(name: str | Path, roles: Mapping[str, Role]) -> Role:
    first = name if isinstance(name, str) else str(name[0])
    return next((role for start, role in roles.items() if first.startswith(start)), Role.WEIGHTS)


def of_tensors(
    tensors: list[Tensor], family: str = "torch", layers: Mapping[str, LayerKind | str] | None = None
) -> Checkpoint:
    """Return a checkpoint of tensors."""
    return Checkpoint(
        path=f"{family}.ckpt",
        format=FORMATS.get(family, family),
        variant=None,
        tensors=tuple(tensors),
        files=(),
        spans=lambda: iter(()),
        layers=lambda: {name: _layer_kind(kind) for name, kind in (layers or {}).items()},
    )


def codes(checked: Checkpoint | Verification) -> set[str]:
    """Return the codes of the findings of opening or of verifying."""
    return {finding.code for finding in checked.findings}


def _layer_kind(kind: LayerKind | str) -> LayerKind:
    return kind if isinstance(kind, LayerKind) else LayerKind(kind)


def class_or_facts(kind: LayerKind) -> LayerKind | str:
    """Return the class of a layer if nothing else is known of it."""
    return kind.cls if kind == LayerKind(kind.cls) else kind

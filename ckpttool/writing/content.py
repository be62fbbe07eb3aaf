"""What is to be written, whatever the format: tensors by name, and all that lies around them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpttool.checkpoint import TrainingState
from ckpttool.tensor import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint holds, in the form in which it is to be written.

    Attributes:
        tensors: In their order. No two have one name; one that ``shares_with`` another comes behind that, and
            is the same view of the same bytes. A tensor without values (of the meta device) never is here.
        tree: As ``Checkpoint.tree``, with these same ``Tensor`` objects in their places; None: there is
            nothing but the tensors by name.
        metadata: What the source says beside its tensors, as plain data that JSON can hold; empty where the
            tree holds it.
        training: As ``Checkpoint.training``; empty where nothing but weights is wanted.
        native: As ``Checkpoint.native``.
        source_format: Name of the format that it comes from.
        mapped: What a map decided, by the names that it gave: ``name``, or the ``layout`` as well.
        conventions: Name of the format whose names and layouts the tensors have; empty where the format that
            is written tells that itself, and where nobody knows it.
        layers: As ``Checkpoint.layers``, by the names of now.
    """

    tensors: tuple[Tensor, ...]
    tree: object = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    native: Mapping[str, bytes] = field(default_factory=dict)
    source_format: str = ""
    training: TrainingState = field(default_factory=TrainingState)
    mapped: Mapping[str, str] = field(default_factory=dict)
    conventions: str = ""
    layers: Mapping[str, str] = field(default_factory=dict)
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def owned(self) -> tuple[Tensor, ...]:
        """Return the tensors without those that share the bytes of another."""
        return tuple(tensor for tensor in self.tensors if tensor.shares_with is None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements, shared ones once."""
        return sum(tensor.nbytes for tensor in self.owned)

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return what a writer makes of it, made when it is first asked for."""
        if what not in self._known:
            self._known[what] = make()
        made: T = self._known[what]
        return made

"""What every format opens into: a mapping of lazy tensors, and what lies around them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckpttool.tensor import Role, Span, Tensor

if TYPE_CHECKING:
    from types import TracebackType

    from ckpttool.report import Finding


class Granularity(str, enum.Enum):
    """How much of a training run a checkpoint holds."""

    FULL = "full"  # weights and optimizer
    PARTIAL = "partial"  # one of them
    LIGHTWEIGHT = "lightweight"  # neither: metrics and hyper-parameters


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Where in its run a checkpoint was saved, in the same words for every format.

    ``origin`` says for each field which key, file or name it came from.
    """

    epoch: int | float | None = None
    step: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    saved_at: str | None = None
    seed: int | None = None
    hyper_parameters: Mapping[str, object] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Producer:
    """The framework that wrote a checkpoint, and its version where the file says it."""

    framework: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that belongs to a checkpoint, and its size in bytes."""

    path: str
    nbytes: int


class Checkpoint(Mapping[str, Tensor], AbstractContextManager["Checkpoint"]):
    """One opened checkpoint: a mapping from names to lazy tensors.

    Its structure was checked when it was opened; no value was read. Close it, or use it as a context
    manager, to give the open files back. A name that two tensors would have goes to the first; the
    others are in ``tensors``, which has them all by path.

    Attributes:
        path: The file, directory or prefix, as the user gave it.
        format: Name of the format, as the documentation lists them.
        variant: Which kind of the format, or None.
        conventions: Name of the format whose names and layouts the tensors have: the one that it was
            converted from, if the file says it; otherwise its own.
        tensors: All tensors, in the order of the file.
        files: All files that belong to it.
        producer: What wrote it.
        findings: What is wrong or remarkable in its structure.
        safety: What loading it with its framework could run.
        judged: Absolute paths of the files by themselves that ``safety`` speaks of.
        complete: False where a part is missing.
        derives_metadata: Whether its metadata is worked out of a model's program: that takes its time, can be
            done once it is closed, and says nothing of a training.
    """

    def __init__(
        self,
        *,
        path: str,
        format: str,
        variant: str | None,
        tensors: tuple[Tensor, ...],
        files: tuple[FileEntry, ...],
        spans: Callable[[], Iterator[Span]],
        metadata: Callable[[], Mapping[str, object]] = dict,
        training: Callable[[], TrainingState] = TrainingState,
        layers: Callable[[], Mapping[str, str]] = dict,
        own_names: Callable[[], Mapping[str, str]] = dict,
        tree: Callable[[], object] = lambda: None,
        native: Callable[[], Mapping[str, bytes]] = dict,
        producer: Producer = Producer(),
        findings: tuple[Finding, ...] = (),
        safety: tuple[Finding, ...] = (),
        judged: frozenset[str] = frozenset(),
        conventions: str | None = None,
        complete: bool = True,
        derives_metadata: bool = False,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.format = format
        self.variant = variant
        self.conventions = conventions or format
        self.tensors = tensors
        self.files = files
        self.producer = producer
        self.findings = findings
        self.safety = safety
        self.judged = judged
        self.complete = complete
        self.derives_metadata = derives_metadata
        self.spans = spans
        """Iterate over every byte range worth scanning, in file order."""
        self.close = close
        """Give the open files back; tensors can't be read any more."""
        self._metadata = metadata
        self._training = training
        self._layers = layers
        self._own_names = own_names
        self._tree = tree
        self._native = native

    def but(self, **changes: Any) -> Checkpoint:
        """Return a checkpoint of the same files in which some things are others; only it is to be closed.

        Args:
            changes: Arguments of the constructor.
        """
        same: dict[str, Any] = {
            "path": self.path,
            "format": self.format,
            "variant": self.variant,
            "tensors": self.tensors,
            "files": self.files,
            "spans": self.spans,
            "metadata": lambda: self.metadata,
            "training": lambda: self.training,
            "layers": lambda: self.layers,
            "own_names": lambda: self.own_names,
            "tree": lambda: self.tree,
            "native": lambda: self.native,
            "producer": self.producer,
            "findings": self.findings,
            "safety": self.safety,
            "judged": self.judged,
            "conventions": self.conventions,
            "complete": self.complete,
            "derives_metadata": self.derives_metadata and "metadata" not in changes,
            "close": self.close,
        }
        return Checkpoint(**{**same, **changes})

    @cached_property
    def _by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in reversed(self.tensors)}

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(tensor.name for tensor in self.tensors))

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint {self.path!r}: {len(self.tensors)} tensors>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def metadata(self) -> Mapping[str, object]:
        """Return what is not a tensor, as plain data that JSON can hold."""
        return self._metadata()

    @cached_property
    def training(self) -> TrainingState:
        """Return epoch, step, loss and the like, with where each came from."""
        return self._training()

    @cached_property
    def layers(self) -> Mapping[str, str]:
        """Return the type of the layer of each weight whose layer the files tell, as its framework calls it.

        Keras's have the name of the class, ``Dense``, and ``Dense after Flatten (4, 3, 4)`` where what is
        flattened counts, with ``(*, 4)`` where only its channels are told, ``Dense of unknown wiring`` where
        nothing says what stands before it, and ``Dense unlike PyTorch's:`` with the reason where its weights
        may be in an order that PyTorch hasn't got; Paddle's have that of
        the operator or of the parameter: ``linear``, ``conv2d``.
        """
        return self._layers()

    @cached_property
    def own_names(self) -> Mapping[str, str]:
        """Return what variables were called when they were made, where the files say it, by tensor.

        TensorFlow keeps it beside the path through the objects, which is what a tensor is named by.
        """
        return self._own_names()

    @cached_property
    def tree(self) -> object:
        """Return all that the checkpoint holds as nested objects; None: the tensors by name are all.

        It consists of plain Python containers and values, of the tensors themselves, and of the nodes of
        ``ckpttool.wire.pickled`` for what plain Python has no type for. What can't be carried is ``Opaque``.
        """
        made = self._tree()
        self._tree = lambda: made  # what it was made of is needed no more
        return made

    @cached_property
    def native(self) -> Mapping[str, bytes]:
        """Return what serves the format alone and is needed to write it again, by the format and a name.

        ``tensorflow.object_graph``, ``keras.config``: nothing that a tensor or the metadata tells.
        """
        return self._native()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its files."""
        return sum(entry.nbytes for entry in self.files)

    @cached_property
    def parameters(self) -> int:
        """Return the number of elements of all weights, tied ones once."""
        weights = [tensor for tensor in self.tensors if tensor.role is Role.WEIGHTS]
        owned = sum(tensor.size for tensor in weights if tensor.shares_with is None)
        # Weights may be tied to what comes first and serves something else: these count here, once.
        others = {tensor.name for tensor in self.tensors if tensor.role is not Role.WEIGHTS}
        borrowed = {tensor.shares_with: tensor.size for tensor in weights if tensor.shares_with in others}
        return owned + sum(borrowed.values())

    @property
    def granularity(self) -> Granularity:
        """Return how much of a training run it holds."""
        roles = {tensor.role for tensor in self.tensors}
        if {Role.WEIGHTS, Role.OPTIMIZER} <= roles:
            return Granularity.FULL
        return Granularity.PARTIAL if roles & {Role.WEIGHTS, Role.OPTIMIZER} else Granularity.LIGHTWEIGHT

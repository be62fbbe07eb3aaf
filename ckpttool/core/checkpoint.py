"""Opened checkpoints of any format: a mapping of lazy tensors, with metadata and training state."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from warnings import warn

from ckpttool.core.state_dict import Framework, state_dict
from ckpttool.core.tensor import Role, Span, Tensor
from ckpttool.core.text import did_you_mean, shape_text

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Required, Unpack

    from ckpttool.core.layers import LayerKind
    from ckpttool.core.parameters import Elements
    from ckpttool.core.report import Finding


class Granularity(str, enum.Enum):
    """How much of a training run a checkpoint holds."""

    FULL = "full"  # weights and optimizer
    PARTIAL = "partial"  # one of them
    LIGHTWEIGHT = "lightweight"  # neither: metrics and hyper-parameters


class Origin(NamedTuple):
    """Origin of a value of the training state.

    Attributes:
        kind: ``key``, ``tensor``, ``file`` or ``name`` (of the checkpoint), or other words; may be empty.
        key: The dotted path of the value in the metadata; None if it isn't there.
        is_last: Whether it is the last item of a list.
        is_earlier_step: Whether it was measured at a step before the one that was saved.
    """

    kind: str
    key: str | None
    is_last: bool
    is_earlier_step: bool


# An origin is a text in documents and sidecars, such as ``key losses[-1]``, ``tensor step``,
# ``name model_epoch_3.pth`` or, in Paddle Fluid, ``file trainer_0/epoch_id``.
_TRAINER = re.compile(r"file trainer_(\d+)/(\w+)")
_INDEX = re.compile(r"\[(\d+)\]")
_LAST = "[-1]"
EARLIER_STEP = " of an earlier step"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Position of a checkpoint in its training run, in the same words for every format.

    ``origin`` has the key, file or name that each field came from.
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

    def origin_of(self, name: str) -> Origin:
        """Return the parsed origin of a field such as ``loss`` or ``metrics.accuracy``."""
        # Documents and sidecars hold origins as texts; this is the one place that reads them.
        text = self.origin.get(name, "")
        kind, _, rest = text.partition(" ")
        key = None
        if found := _TRAINER.fullmatch(text):
            key = f"trainers.{found[1]}.{found[2]}"
        elif kind == "key":
            key = _INDEX.sub(r".\1", rest.removesuffix(_LAST))
        return Origin(kind, key, _LAST in text, text.endswith(EARLIER_STEP))


class Producer(NamedTuple):
    """The framework that wrote a checkpoint, and its version if the file has it."""

    framework: str | None = None
    version: str | None = None


class FileEntry(NamedTuple):
    """A file that belongs to a checkpoint, and its size in bytes."""

    path: str
    nbytes: int


class CheckpointParts(TypedDict, total=False):
    """Parts of a checkpoint; expensive ones are functions, called at the first access.

    Attributes:
        path: The file, directory or prefix, as the user gave it.
        format: Name of the format, as the documentation lists them.
        variant: Which kind of the format, or None.
        tensors: All tensors, in the order of the file.
        files: All files that belong to it.
        spans: Iterates over all byte ranges to scan, in file order.
        metadata: All but the tensors, as plain data that JSON can hold.
        training: Epoch, step, loss and the like, with their origins.
        layers: Type of the layer of each weight, as far as the files declare it, by the weight's name.
        own_names: Names of variables at their creation, by tensor, if the files have them. TensorFlow keeps
            them in addition to the path through the objects, which is the name of a tensor.
        tree: The content as nested objects; None: the tensors by name are all. It consists of plain Python
            containers and values, of the tensors themselves, and of the nodes of
            ``ckpttool.containers.pickle.pickle_nodes`` for other types; values that can't be carried are
            ``Opaque``.
        part_trees: Trees of its files by the key that their tensors are below, if it has no tree of its own.
        config: Parsed ``config.json`` from the directory of the weights; empty without one.
        native: Format-specific parts needed to write the same format again, by the format and a name:
            ``tensorflow.object_graph``, ``keras.config``. Tensors and metadata are not repeated here.
        producer: The framework that wrote it.
        findings: Problems and remarkable properties of its structure.
        safety: Code that loading it with its framework could run.
        judged: Absolute paths of single files that ``safety`` covers.
        conventions: Name of the format whose names and layouts the tensors have: the source of a conversion
            if the file has it; otherwise its own.
        complete: Whether no part is missing.
        names_all: Whether all tensors that it should have are known by name; by default if it is complete.
        missing: Names of tensors that it should have and that can't be read, with the reason.
        derives_metadata: Whether the metadata is derived from a model's program: that is slow, works after
            closing, and has no training state.
        close: Closes the files; tensors can't be read any more.
    """

    path: Required[str]
    format: Required[str]
    variant: Required[str | None]
    tensors: Required[tuple[Tensor, ...]]
    files: Required[tuple[FileEntry, ...]]
    spans: Required[Callable[[], Iterator[Span]]]
    metadata: Callable[[], Mapping[str, object]]
    training: Callable[[], TrainingState]
    layers: Callable[[], Mapping[str, LayerKind]]
    own_names: Callable[[], Mapping[str, str]]
    tree: Callable[[], object]
    part_trees: Callable[[], Mapping[str, object]]
    config: Callable[[], Mapping[str, object]]
    native: Callable[[], Mapping[str, bytes]]
    producer: Producer
    findings: tuple[Finding, ...]
    safety: tuple[Finding, ...]
    judged: frozenset[str]
    conventions: str
    complete: bool
    names_all: bool
    missing: Mapping[str, str]
    derives_metadata: bool
    close: Callable[[], None]


_LAZY = frozenset({"metadata", "training", "layers", "own_names", "tree", "part_trees", "config", "native"})
"""Parts that are given as functions; the attributes are their results."""
_PRIVATE = frozenset({"own_names", "judged", "part_trees"})
"""Parts whose attributes aren't public: other modules ask ``own_names_of`` and ``judged_files``."""


class Checkpoint(Mapping[str, Tensor], AbstractContextManager["Checkpoint"]):
    """One opened checkpoint: a mapping from names to lazy tensors.

    Its structure was checked when it was opened; no value was read. Close it, or use it as a context
    manager, to close the files. If two tensors have the same name, it is that of the first; ``tensors``
    has all of them by path. ``CheckpointParts`` describes the attributes.
    """

    def __init__(self, **parts: Unpack[CheckpointParts]) -> None:
        self._parts = parts
        self.path = parts["path"]
        self.format = parts["format"]
        self.variant = parts["variant"]
        self.tensors = parts["tensors"]
        self.files = parts["files"]
        self.spans = parts["spans"]
        self.producer = parts.get("producer", Producer())
        self.findings = parts.get("findings", ())
        self.safety = parts.get("safety", ())
        self._judged = parts.get("judged", frozenset())
        self.conventions = parts.get("conventions") or self.format
        self.complete = parts.get("complete", True)
        self.names_all = parts.get("names_all", self.complete)
        self.missing = parts.get("missing", {})
        self.derives_metadata = parts.get("derives_metadata", False)
        self.close = parts.get("close", lambda: None)

    def replace(self, **changes: Any) -> Checkpoint:
        """Return a checkpoint of the same files with other values of some parts; close only the new one."""
        # A lazy part is passed on as a read of this checkpoint's attribute: it is computed at most once for
        # both. Other metadata than this checkpoint's isn't derived from a model's program.
        same: dict[str, Any] = {
            name: partial(getattr, self, own) if name in _LAZY else getattr(self, own)
            for name in CheckpointParts.__annotations__
            for own in (f"_{name}" if name in _PRIVATE else name,)
        }
        same["derives_metadata"] &= "metadata" not in changes
        return Checkpoint(**{**same, **changes})

    def but(self, **changes: Any) -> Checkpoint:
        """Return ``replace(**changes)``; this name is deprecated."""
        _warn_of("but", "use Checkpoint.replace")
        return self.replace(**changes)

    @property
    def judged(self) -> frozenset[str]:
        """Return the absolute paths of single files that ``safety`` covers; deprecated."""
        _warn_of("judged", "it is internal")
        return self._judged

    @property
    def own_names(self) -> Mapping[str, str]:
        """Return the names of variables at their creation, by tensor; deprecated."""
        _warn_of("own_names", "it is internal")
        return self._own_names

    @cached_property
    def _by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in reversed(self.tensors)}

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._by_name[name]
        except KeyError:
            hint = did_you_mean(name, self._by_name) if isinstance(name, str) else ""
            raise KeyError(f"{name}{f' ({hint})' if hint else ''}") from None

    def state_dict(self, framework: Framework = "torch", *, key: str | None = None) -> dict[str, Any]:
        """Return the weights as new tensors of a framework, ready for ``model.load_state_dict``.

        With the key of an optimizer, return its nested state dict, ready for ``optimizer.load_state_dict``.
        Nothing is unpickled, imported by name or run: the values are read from the file, each once. Tied
        weights are one tensor. Neither checksums nor values are checked; ``verify`` does that.

        Args:
            framework: ``torch``, ``numpy`` or ``tensorflow``; it is imported.
            key: Common parent of the wanted tensors, such as ``ema``, whatever their role; by default all
                weights, without the key that all are below (``model_state_dict``). ``optimizer`` is the
                checkpoint's only PyTorch optimizer, wherever it is; of several, each has its own key, such
                as ``optimizer_states.0``.

        Raises:
            KeyError: No tensor is below the key, or it is ``optimizer`` and there are several.
            MissingPackage: The framework is not installed.
            CheckpointError: The file can't be read, or is shorter than it was.
            TypeError: The framework has no such type, or an optimizer has an object that only unpickling
                makes.
        """
        tree = None if key is None else self._part_trees if self.tree is None else self.tree
        return state_dict(self.path, self.tensors, framework, key, tree, lambda: self.metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(tensor.name for tensor in self.tensors))

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"<{self.format} checkpoint {self.path!r}: {len(self.tensors)} tensors>"

    def _repr_html_(self) -> str:
        """Return a table of the first tensors, for notebooks."""
        from ckpttool.core.notebook import html_table

        rows = ((one.name, one.dtype.name, shape_text(one.shape), one.role.value) for one in self.tensors)
        return html_table(repr(self), ("tensor", "type", "shape", "role"), rows, len(self.tensors))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def metadata(self) -> Mapping[str, object]:
        """Return all but the tensors, as plain data that JSON can hold."""
        return self._parts.get("metadata", dict)()

    @cached_property
    def training(self) -> TrainingState:
        """Return epoch, step, loss and the like, with their origins."""
        return self._parts.get("training", TrainingState)()

    @cached_property
    def layers(self) -> Mapping[str, LayerKind]:
        """Return the type of the layer of each weight, if the files have it."""
        return self._parts.get("layers", dict)()

    @cached_property
    def _own_names(self) -> Mapping[str, str]:
        return self._parts.get("own_names", dict)()

    @cached_property
    def tree(self) -> object:
        """Return the content as nested objects; None: the tensors by name are all."""
        # The function may hold large objects, which can be freed now.
        return self._parts.pop("tree", lambda: None)()

    @cached_property
    def _part_trees(self) -> Mapping[str, object]:
        return self._parts.pop("part_trees", dict)()

    @cached_property
    def config(self) -> Mapping[str, object]:
        """Parsed ``config.json`` from the directory of the weights; empty without one."""
        return self._parts.get("config", dict)()

    @cached_property
    def native(self) -> Mapping[str, bytes]:
        """Return the format-specific parts needed to write the same format again, by format and name."""
        return self._parts.get("native", dict)()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its files."""
        return sum(entry.nbytes for entry in self.files)

    @cached_property
    def elements(self) -> Elements:
        """Return the numbers of parameters and of elements of buffers, each by type."""
        from ckpttool.core.parameters import count_elements

        return count_elements(self.tensors, {} if self.derives_metadata else self.metadata, self.config)

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters, by the shapes that they have in the model."""
        return self.elements.parameters.total()

    @property
    def buffers(self) -> int:
        """Return the number of elements of weights that aren't trained, such as running statistics."""
        return self.elements.buffers.total()

    @property
    def packed(self) -> int:
        """Return the number of packed words whose parameters can't be counted."""
        return self.elements.packed.total()

    @property
    def granularity(self) -> Granularity:
        """Return how much of a training run it holds."""
        roles = {tensor.role for tensor in self.tensors}
        if {Role.WEIGHTS, Role.OPTIMIZER} <= roles:
            return Granularity.FULL
        return Granularity.PARTIAL if roles & {Role.WEIGHTS, Role.OPTIMIZER} else Granularity.LIGHTWEIGHT


def _warn_of(name: str, advice: str) -> None:
    warn(f"Checkpoint.{name} is deprecated: {advice}", DeprecationWarning, stacklevel=3)


def own_names_of(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the names of variables at their creation, by tensor, if the files have them."""
    return checkpoint._own_names


def judged_files(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the absolute paths of single files that ``safety`` covers."""
    return checkpoint._judged


def add_safety(checkpoint: Checkpoint, judged: Iterable[str], findings: Iterable[Finding]) -> None:
    """Add files that were judged to those that ``safety`` covers, with their findings."""
    checkpoint._judged = checkpoint._judged.union(judged)
    checkpoint.safety = tuple(dict.fromkeys((*checkpoint.safety, *findings)))

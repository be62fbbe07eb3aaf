"""What every format opens into: a mapping of lazy tensors, and what lies around them."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ckpttool.dtypes import DType, numpy_dtype

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np

    from ckpttool.report import Finding

Path = tuple[str | int, ...]

BLOCK_BYTES = 1 << 20
"""How many bytes ``Tensor.blocks`` hands out at once."""


class Role(str, enum.Enum):
    """What a tensor serves."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    TRAINING = "training"
    OTHER = "other"


class Granularity(str, enum.Enum):
    """How much of a training run a checkpoint holds."""

    FULL = "full"  # weights and optimizer
    PARTIAL = "partial"  # one of them
    LIGHTWEIGHT = "lightweight"  # neither: metrics and hyper-parameters


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes of a file: ``offset`` and ``nbytes`` in bytes."""

    file: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range worth scanning.

    Attributes:
        extent: Where it lies.
        where: What the range is, for findings: a zip member, a tensor, a header.
        read: Fills a buffer from an offset in bytes within the range.
        crc32: The checksum that the format carries for exactly these bytes, or None.
        dtype: Type of the elements, where the bytes are nothing but values; None where they are not.
        byteorder: Byte order of the elements.
        inflated: How many bytes ``read`` gives, where they lie compressed, or are not summed as they lie.
        algorithm: Which checksum ``crc32`` is: zlib's CRC-32, or Castagnoli's CRC-32C.
    """

    extent: Extent
    where: str
    read: Callable[[int, memoryview], None]
    crc32: int | None = None
    dtype: DType | None = None
    byteorder: Literal["little", "big"] = "little"
    inflated: int | None = None
    algorithm: Literal["crc32", "crc32c"] = "crc32"

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that ``read`` gives."""
        return self.extent.nbytes if self.inflated is None else self.inflated


class Values(Protocol):
    """Where a tensor's elements come from."""

    def blocks(self, limit: int) -> Iterator[memoryview]:
        """Yield the elements as bytes in C order, little-endian, at most ``limit`` bytes at once."""

    def once(self) -> Values:
        """Return the same elements, each stored one once: an expanded tensor repeats its own."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor in a checkpoint; its values stay on disk until asked for.

    Attributes:
        path: Keys from the root of the checkpoint; integer keys stay integers.
        dtype: Type of the elements.
        shape: Outermost axis first; () is a scalar.
        role: What the tensor serves.
        values: Where the elements come from; None where the file holds none (meta tensors).
        extent: Where the elements lie, when in one piece and in C order.
        storage: The stored bytes that the tensor is a view of; ties have the same one.
        byteorder: Byte order of the elements in the file.
        key: The raw name in the file, where people know another.
        shares_with: Name of the first tensor that is the same view of the same bytes.
    """

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    role: Role = Role.OTHER
    values: Values | None = field(default=None, compare=False, repr=False)
    extent: Extent | None = None
    storage: Extent | None = None
    byteorder: Literal["little", "big"] = "little"
    key: str | None = None
    shares_with: str | None = None
    _name: str | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return the path joined by dots, as people write it."""
        name = self._name
        if name is None:
            name = ".".join(map(str, self.path))
            object.__setattr__(self, "_name", name)
        return name

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements, packed; of strings, the bytes that store them."""
        if self.dtype.kind == "string":
            return self.extent.nbytes if self.extent else 0
        return self.dtype.nbytes(self.size)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """Yield all elements as bytes, in C order and little-endian, in bounded memory.

        Each block is valid until the next is asked for.

        Raises:
            CheckpointError: The file can't be read as far as it said.
        """
        return iter(()) if self.values is None else self.values.blocks(limit)

    def tobytes(self) -> bytes:
        """Return all elements as bytes, in C order and little-endian."""
        return b"".join(map(bytes, self.blocks()))

    def array(self) -> np.ndarray[Any, Any]:
        """Return the values: a read-only map where they lie in one piece, a copy elsewhere.

        A map follows the file: should a writer cut the file short, touching the map kills the process.

        Raises:
            CheckpointError: The file can't be read as far as it said.
            TypeError: NumPy and ml_dtypes have no such type, or the file holds no values.
        """
        import numpy as np

        if self.values is None:
            raise TypeError(f"{self.name} has no values: it was saved from the meta device")
        dtype = numpy_dtype(self.dtype)
        in_place = self.extent is not None and self.byteorder == sys.byteorder and self.dtype.bits >= 8
        if in_place and self.extent is not None and self.size > 0:
            bytes_ = np.memmap(self.extent.file, np.uint8, "r", self.extent.offset, (self.nbytes,))
            return bytes_.view(dtype).reshape(self.shape)
        packed = np.frombuffer(bytearray(self.tobytes()), np.uint8)
        if self.dtype.bits < 8:
            return _unpacked(packed, self.dtype.bits, self.size).view(dtype).reshape(self.shape)
        if sys.byteorder == "big":
            packed = packed.view(f"u{self.dtype.word_bytes}").byteswap()
        return packed.view(dtype).reshape(self.shape)


def _unpacked(packed: np.ndarray[Any, Any], bits: int, count: int) -> np.ndarray[Any, Any]:
    """Return one byte an element, of elements packed from the low bits up."""
    import numpy as np

    columns = np.unpackbits(packed, bitorder="little")[: count * bits].reshape(count, bits)
    return np.packbits(columns, axis=1, bitorder="little").reshape(count)


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
        tensors: All tensors, in the order of the file.
        files: All files that belong to it.
        producer: What wrote it.
        findings: What is wrong or remarkable in its structure.
        safety: What loading it with its framework could run.
        complete: False where a part is missing.
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
        complete: bool = True,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.format = format
        self.variant = variant
        self.tensors = tensors
        self.files = files
        self.producer = producer
        self.findings = findings
        self.safety = safety
        self.complete = complete
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
            "complete": self.complete,
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
        flattened counts, with ``(*, 4)`` where only its channels are told, and ``Dense unlike PyTorch's:``
        with the reason where its weights may be in an order that PyTorch hasn't got; Paddle's have that of
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

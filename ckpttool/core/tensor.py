"""Tensors of a checkpoint: name, type, shape, role, and lazy values."""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ckpttool.core.dtypes import DType, numpy_dtype
from ckpttool.core.result import document_of
from ckpttool.core.urls import is_url

if TYPE_CHECKING:
    import numpy as np

Path = tuple[str | int, ...]

BLOCK_BYTES = 1 << 20
"""Default size of the blocks of ``Tensor.blocks``."""


class Role(str, enum.Enum):
    """The purpose of a tensor."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    TRAINING = "training"
    OTHER = "other"


class Extent(NamedTuple):
    """A range of bytes of a file: ``offset`` and ``nbytes`` in bytes."""

    file: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Span(NamedTuple):
    """A byte range to scan.

    Attributes:
        extent: The range in the file.
        where: The name of the range, for findings: a zip member, a tensor, a header.
        read: Fills a buffer from an offset in bytes within the range.
        crc32: The format's checksum of exactly these bytes, or None.
        dtype: Type of the elements if all bytes are values; else None.
        byteorder: Byte order of the elements.
        inflated: Number of bytes that ``read`` gives, if they are compressed or summed in another form.
        algorithm: Kind of ``crc32``: zlib's CRC-32, or Castagnoli's CRC-32C.
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


Range = tuple[int, int]
"""Start and end of a run of indexes along an axis."""


class Shard(NamedTuple):
    """The part of a tensor that a process of a distributed job saved.

    Attributes:
        shape: Of the whole tensor.
        ranges: For each axis the runs of indexes of the whole that the part has, in its order; several if two
            dimensions of a mesh cut one axis. None if unknown.
        placements: Placement on each dimension of the mesh of processes, in PyTorch's words.
        mesh: Processes along each of these dimensions.
        rank: Number of the process in the job, None if unknown.
        world: Number of processes of the job; 0 if unknown.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...] | None
    placements: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    rank: int | None = None
    world: int = 0

    def document(self) -> dict[str, Any]:
        return document_of(self, "shape", "ranges", "placements", "mesh", "rank")

    @property
    def is_partial(self) -> bool:
        """Return whether the elements are terms of a pending sum."""
        return any("Partial" in placement for placement in self.placements)

    @property
    def is_empty(self) -> bool:
        """Return whether the part has no element of a tensor that has some."""
        return 0 not in self.shape and self.ranges is not None and not all(self.ranges)

    @property
    def is_whole(self) -> bool:
        """Return whether the part is all of the tensor."""
        every = tuple(((0, length),) if length else () for length in self.shape)
        return self.ranges == every


class Values(Protocol):
    """Source of a tensor's elements."""

    def blocks(self, limit: int) -> Iterator[memoryview]:
        """Yield the elements as bytes in C order, little-endian, at most ``limit`` bytes at once."""


@dataclass(frozen=True, slots=True, repr=False)
class Tensor:
    """A named tensor in a checkpoint; its values are read from disk when they are accessed.

    Attributes:
        path: Keys from the root of the checkpoint; integer keys stay integers.
        dtype: Type of the elements.
        shape: Outermost axis first; () is a scalar.
        role: The purpose of the tensor.
        values: Source of the elements; None if the file has none (meta tensors).
        extent: Bytes of the elements, if contiguous and in C order.
        storage: Stored bytes of which the tensor is a view; tied tensors have the same.
        byteorder: Byte order of the elements in the file.
        key: The raw name in the file, if another one is usual.
        shares_with: Name of the first tensor that is the same view of the same bytes.
        shard: Its place in the whole tensor if it is the part of one process; else None.
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
    shard: Shard | None = None
    _name: str | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return the path joined by dots."""
        # Kept after the first access, as a name is asked for many times; the record is frozen otherwise.
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
        """Return the packed size of all elements in bytes; of strings, the stored size."""
        if self.dtype.kind == "string":
            return self.extent.nbytes if self.extent else 0
        return self.dtype.nbytes(self.size)

    def document(self) -> dict[str, Any]:
        """Return it as documents have it."""
        # Spelled out, since a checkpoint may have 100,000 tensors: document_of takes three times as long.
        extent = self.extent
        document: dict[str, Any] = {
            "name": self.name,
            "path": list(self.path),
            "role": self.role.value,
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "bytes": self.nbytes,
            "file": extent.file if extent else None,
            "offset": extent.offset if extent else None,
            "shares_with": self.shares_with,
        }
        if self.key is not None:
            document["key"] = self.key
        if self.shard is not None:
            document["shard"] = self.shard.document()
        return document

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.dtype.name} {self.shape} {self.role.value}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the values for NumPy: ``np.asarray(tensor)``; see ``array``."""
        import numpy as np

        array = self.array()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(
                    f"{self.name} is {self.dtype.name}: converting it to another type needs a copy"
                )
            return array.astype(dtype)
        return np.array(array) if copy else array

    def __getitem__(self, index: Any) -> Any:
        """Return some of the values, indexed as in NumPy; if ``array`` maps the file, only these are read."""
        return self.array()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array())

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a scalar and has no length")
        return self.shape[0]

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
        """Return the values: a read-only map of a local file if they are contiguous, else a copy.

        If a writer truncates the file, access to the map kills the process.

        Raises:
            CheckpointError: The file can't be read, or is shorter than it was.
            TypeError: NumPy and ml_dtypes have no such type, or the file holds no values.
        """
        import numpy as np

        if self.values is None:
            raise TypeError(f"{self.name} has no values: it was saved from the meta device")
        # A map costs neither reading nor memory until elements are used. It needs whole bytes in the
        # machine's byte order, contiguous in a local file; NumPy can't map an empty range.
        dtype = numpy_dtype(self.dtype)
        in_place = self.byteorder == sys.byteorder and self.dtype.bits >= 8 and self.size > 0
        if in_place and self.extent is not None and not is_url(self.extent.file):
            bytes_ = np.memmap(self.extent.file, np.uint8, "r", self.extent.offset, (self.nbytes,))
            return bytes_.view(dtype).reshape(self.shape)
        packed = np.frombuffer(bytearray(self.tobytes()), np.uint8)
        if self.dtype.bits < 8:
            return _unpacked(packed, self.dtype.bits, self.size).view(dtype).reshape(self.shape)
        if sys.byteorder == "big":
            packed = packed.view(f"u{self.dtype.word_bytes}").byteswap()
        return packed.view(dtype).reshape(self.shape)


def _unpacked(packed: np.ndarray[Any, Any], bits: int, count: int) -> np.ndarray[Any, Any]:
    """Return one byte for each element, of elements packed from the low bits up."""
    import numpy as np

    # Bits in little order are one stream in which each element has ``bits`` of them, across bytes if ``bits``
    # doesn't divide 8. Packing the rows again pads each element to a byte with zeros.

    columns = np.unpackbits(packed, bitorder="little")[: count * bits].reshape(count, bits)
    return np.packbits(columns, axis=1, bitorder="little").reshape(count)


# Roles by keys ----------------------------------------------------------------------------------------------


OPTIMIZER = re.compile(r"optim|(^|_)opt(_|$)|^param_groups$", re.IGNORECASE)
"""Keys of an optimizer's state."""
FLAT_OPTIMIZER = re.compile(
    r"(chained_\d+\.)?optimizer\."
    r"(state\.[^.]+\.(?P<weight>.+)|param_(groups|state)|distributed\.dp_group_idx_\d)"
)
"""Start of the flat keys of optimizer states in a distributed checkpoint of Megatron's.

A model may have a module ``optimizer``, too, which is why the next part of the key counts.

Source: NVIDIA/Megatron-LM ``megatron/core/optimizer/distrib_optimizer.py``, ``optimizer.py``
(``ChainedOptimizer.sharded_state_dict``).
"""
TRAINING_OBJECTS = re.compile(
    r"sched|scaler|^amp|rng|random|callback|^loops$|history|sampler|early_stop", re.IGNORECASE
)
"""Keys of training objects other than model and optimizer."""
WHOLE_WEIGHTS = re.compile(
    r"(^|_)(model|net|network|weights|params|(model_)?state|state_dict)$", re.IGNORECASE
)
"""Keys of all tensors of a model."""
_WHOLE_STATE = re.compile(r"^(train|trainer|training|extra)_state$", re.IGNORECASE)
_TRAINING = re.compile(
    r"loss|metric|epoch|(^|_)step|iter|(^|_)best|accuracy|(^|_)acc$|(^|_)lr$|learning_rate|seed|score",
    re.IGNORECASE,
)
_WEIGHTS = re.compile(
    r"model|state_dict|net|module|param|weight|encoder|decoder|generator|discriminator|backbone|"
    r"teacher|student|critic|actor|policy|head|bias|running_",
    re.IGNORECASE,
)
AVERAGE = re.compile(r"(^|_)(ema|swa|shadow|averaged)(_|$)", re.IGNORECASE)
"""Keys of a moving average of the weights."""


_MEASURED = re.compile(
    r"loss|metric|epoch|(^|_)best|accuracy|(^|_)acc$|(^|_)lr$|learning_rate|seed|score", re.IGNORECASE
)
_OF_LOSSES = re.compile(r"loss|metric", re.IGNORECASE)
SEARCHED_CHARACTERS = 512
"""Limit on the characters of a key that are searched for words; each takes a microsecond."""


def role_of(path: Path, shape: tuple[int, ...]) -> Role:
    """Return the role of a tensor by its keys: the outermost known one decides.

    A moving average of the weights isn't a second set of them.
    """
    role = role_below(path) if len(path) > 1 else _role_at_top(path)
    if role is not None:
        return role
    is_named = len(path) > 1 and all(isinstance(key, str) for key in path)
    return Role.WEIGHTS if shape and is_named else Role.OTHER


def role_below(keys: Path) -> Role | None:
    """Return the role of all tensors below some keys, or None if none of the keys has one."""
    # The outermost known key decides, as inner ones name layers: ``model.loss_head.weight`` is a weight. For
    # one key, the order counts: ``ema_model`` is an average, ``optimizer_step`` belongs to the optimizer, and
    # ``train_state`` doesn't hold weights alone.
    for key in keys:
        if not isinstance(key, str):
            continue
        key = key[:SEARCHED_CHARACTERS]
        if AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        if TRAINING_OBJECTS.search(key):
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key) and not _WHOLE_STATE.search(key):
            return Role.WEIGHTS
        if _TRAINING.search(key):
            return Role.TRAINING
        if _WEIGHTS.search(key):
            return Role.WEIGHTS
    return None


def role_of_module(keys: Path) -> Role:
    """Return the role of a module's state dict by the keys above it."""
    for key in keys:
        if not isinstance(key, str):
            continue
        key = key[:SEARCHED_CHARACTERS]
        if AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        if TRAINING_OBJECTS.search(key) or _OF_LOSSES.search(key):
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key):
            break
    return Role.WEIGHTS


def is_training_key(key: str) -> bool:
    """Return whether a key next to a model's tensors belongs to the optimizer or to the training."""
    return any(keys.search(key) for keys in (OPTIMIZER, TRAINING_OBJECTS, _MEASURED, _WHOLE_STATE))


def _role_at_top(path: Path) -> Role | None:
    key = path[0] if path else None
    if not isinstance(key, str):
        return None
    key = key[:SEARCHED_CHARACTERS]
    if OPTIMIZER.search(key):
        return Role.OPTIMIZER
    if (TRAINING_OBJECTS.search(key) or _TRAINING.search(key)) and "." not in key:
        return Role.TRAINING
    return Role.WEIGHTS if _WEIGHTS.search(key) else None

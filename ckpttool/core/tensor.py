"""A tensor in a checkpoint: its name, type and shape, and where its values lie, which stay on disk."""

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
"""How many bytes ``Tensor.blocks`` hands out at once."""


class Role(str, enum.Enum):
    """What a tensor serves."""

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


Range = tuple[int, int]
"""Where a run of indexes along an axis begins, and where it ends."""


class Shard(NamedTuple):
    """Which part of a tensor a process of a distributed job kept.

    Attributes:
        shape: Of the whole tensor.
        ranges: For each axis the indexes of the whole that the part has, in its order; they are runs, several
            where two dimensions of a mesh cut one axis. None: the file doesn't say.
        placements: How the tensor lies on each dimension of the mesh of processes, as PyTorch writes it.
        mesh: Processes along each of these dimensions.
        rank: Number of the process in the job, None where the file doesn't say.
        world: Processes of the job, as far as the file knows; 0 where it doesn't.
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
        """Tell whether the elements are terms of a sum that was never made."""
        return any("Partial" in placement for placement in self.placements)

    @property
    def is_empty(self) -> bool:
        """Tell whether other processes kept all of the tensor, which has elements."""
        return 0 not in self.shape and self.ranges is not None and not all(self.ranges)

    @property
    def is_whole(self) -> bool:
        """Tell whether the part is all of the tensor."""
        every = tuple(((0, length),) if length else () for length in self.shape)
        return self.ranges == every


class Values(Protocol):
    """Where a tensor's elements come from."""

    def blocks(self, limit: int) -> Iterator[memoryview]:
        """Yield the elements as bytes in C order, little-endian, at most ``limit`` bytes at once."""


@dataclass(frozen=True, slots=True, repr=False)
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
        shard: Of which tensor it is one process's part; None where it is a tensor of its own.
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
                raise ValueError(f"{self.name} is {self.dtype.name}: another type takes a copy")
            return array.astype(dtype)
        return np.array(array) if copy else array

    def __getitem__(self, index: Any) -> Any:
        """Return some of the values, as NumPy indexes them; of what ``array`` maps, no others are read."""
        return self.array()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array())

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a scalar, and has no length")
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
        """Return the values: a read-only map where they lie in one piece on this machine, a copy elsewhere.

        A map follows the file: should a writer cut the file short, touching the map kills the process.

        Raises:
            CheckpointError: The file can't be read as far as it said.
            TypeError: NumPy and ml_dtypes have no such type, or the file holds no values.
        """
        import numpy as np

        if self.values is None:
            raise TypeError(f"{self.name} has no values: it was saved from the meta device")
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
    """Return one byte an element, of elements packed from the low bits up."""
    import numpy as np

    columns = np.unpackbits(packed, bitorder="little")[: count * bits].reshape(count, bits)
    return np.packbits(columns, axis=1, bitorder="little").reshape(count)


# Roles ----------------------------------------------------------------------------------------------


OPTIMIZER = re.compile(r"optim|(^|_)opt(_|$)|^param_groups$", re.IGNORECASE)
"""Keys of an optimizer's state."""
FLAT_OPTIMIZER = re.compile(
    r"(chained_\d+\.)?optimizer\."
    r"(state\.[^.]+\.(?P<weight>.+)|param_(groups|state)|distributed\.dp_group_idx_\d)"
)
"""How the flat keys of optimizer states begin in a distributed checkpoint of Megatron's.

A model may have a module ``optimizer``, too: what follows makes it a state.

Source: NVIDIA/Megatron-LM ``megatron/core/optimizer/distrib_optimizer.py``, ``optimizer.py``
(``ChainedOptimizer.sharded_state_dict``).
"""
MACHINERY = re.compile(
    r"sched|scaler|^amp|rng|random|callback|^loops$|history|sampler|early_stop", re.IGNORECASE
)
"""Keys of what makes the training go, and is neither model nor optimizer."""
WHOLE_WEIGHTS = re.compile(
    r"(^|_)(model|net|network|weights|params|(model_)?state|state_dict)$", re.IGNORECASE
)
"""Keys under which all that a model has lies."""
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
MOST_READ = 512
"""Characters of a key that are searched for words: the search takes a microsecond for each."""


def role_of(path: Path, shape: tuple[int, ...]) -> Role:
    """Return what a tensor serves, from its keys: the outermost that tells decides.

    A moving average of the weights is no second set of them.
    """
    role = role_below(path) if len(path) > 1 else _role_at_top(path)
    if role is not None:
        return role
    is_named = len(path) > 1 and all(isinstance(key, str) for key in path)
    return Role.WEIGHTS if shape and is_named else Role.OTHER


def role_below(keys: Path) -> Role | None:
    """Return what all serves that lies below some keys, or None where none of them tells."""
    for key in keys:
        if not isinstance(key, str):
            continue
        key = key[:MOST_READ]
        if AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        if MACHINERY.search(key):
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key) and not _WHOLE_STATE.search(key):
            return Role.WEIGHTS
        if _TRAINING.search(key):
            return Role.TRAINING
        if _WEIGHTS.search(key):
            return Role.WEIGHTS
    return None


def role_of_module(keys: Path) -> Role:
    """Return what the state dict of a module serves, from the keys under which it lies."""
    for key in keys:
        if not isinstance(key, str):
            continue
        key = key[:MOST_READ]
        if AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        if MACHINERY.search(key) or _OF_LOSSES.search(key):
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key):
            break
    return Role.WEIGHTS


def is_beside_weights(key: str) -> bool:
    """Tell whether a key among those of a model's tensors is that of something else."""
    return any(keys.search(key) for keys in (OPTIMIZER, MACHINERY, _MEASURED, _WHOLE_STATE))


def _role_at_top(path: Path) -> Role | None:
    key = path[0] if path else None
    if not isinstance(key, str):
        return None
    key = key[:MOST_READ]
    if OPTIMIZER.search(key):
        return Role.OPTIMIZER
    if (MACHINERY.search(key) or _TRAINING.search(key)) and "." not in key:
        return Role.TRAINING
    return Role.WEIGHTS if _WEIGHTS.search(key) else None

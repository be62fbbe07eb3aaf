"""The interface of writers: contents, options and targets, and the writers of formats.

A writer refuses content that its format can't hold, and streams the rest. The format's row in ``traits.py``
names it. ``ops.conversion_plan`` makes the content to write from a source, and asks the writer for refusals;
``ops.convert`` lets it write into a staged target, opens that and compares every tensor before the target
appears.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.layers import LayerKind
from ckpttool.core.tensor import Path, Span, Tensor
from ckpttool.formats.traits import TRAITS, class_at
from ckpttool.storage.sink import Sink
from ckpttool.storage.work import Advance

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint to be written.

    Attributes:
        tensors: The tensors in order, with unique names. One that ``shares_with`` another comes after it, and
            is the same view of the same bytes. Tensors without values (of the meta device) are left out.
        tree: As ``Checkpoint.tree``, with these same ``Tensor`` objects; None if there are only tensors by
            name.
        metadata: The source's metadata, as plain data that JSON can hold; empty if it is in the tree.
        training: As ``Checkpoint.training``; empty if only weights are written.
        native: As ``Checkpoint.native``.
        source_format: Name of the source's format.
        mapped: Decisions of a map, by the new names: ``name``, or ``layout`` if it decided that as well.
        conventions: Name of the format whose names and layouts the tensors have; empty if it is the format
            that is written, or isn't known.
        layers: As ``Checkpoint.layers``, by the new names.
    """

    tensors: tuple[Tensor, ...]
    tree: object = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    native: Mapping[str, bytes] = field(default_factory=dict)
    source_format: str = ""
    training: TrainingState = field(default_factory=TrainingState)
    mapped: Mapping[str, str] = field(default_factory=dict)
    conventions: str = ""
    layers: Mapping[str, LayerKind] = field(default_factory=dict)
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def owned(self) -> tuple[Tensor, ...]:
        """Return the tensors without those that share the bytes of another."""
        return tuple(tensor for tensor in self.tensors if tensor.shares_with is None)

    @property
    def nbytes(self) -> int:
        """Return the size of all elements in bytes, shared ones once."""
        return sum(tensor.nbytes for tensor in self.owned)

    def memoized(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a value that is computed from the content once."""
        if key not in self._memo:
            self._memo[key] = make()
        made: T = self._memo[key]
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a writer.

    Attributes:
        shard_size: Maximum size of a file in bytes, for a content that is split; None for a single file.
        name: Last part of the target's path, as the user gave it.
    """

    shard_size: int | None = None
    name: str = ""


class Target(Protocol):
    """The place into which a writer writes.

    Attributes:
        target: Final path.
    """

    target: str

    def create(self, name: str = "") -> Sink:
        """Return a new file of the target.

        Args:
            name: Path in a directory, or the text after a prefix; empty for a single file.
        """


class Rewritten(NamedTuple):
    """Files of a directory that were rewritten; names are relative to it.

    Attributes:
        files: New names by old ones, the same for a file that is replaced.
        replaced: Names of the old files, also of those without a new one.
        spans: The copied bytes, with their checksums when they were read.
    """

    files: Mapping[str, str]
    replaced: frozenset[str]
    spans: tuple[Span, ...]


class Trim(NamedTuple):
    """Removal of entries from the state dict of a directory; all others are kept as they are.

    Attributes:
        lost: Names of the entries.
        write: Writes the changed files into a target, and calls the second argument with the number of bytes
            copied. Raises a CheckpointError or, if the target can't be written, an OSError.
    """

    lost: frozenset[str]
    write: Callable[[Target, Advance], Rewritten]


class Writer(ABC):
    """Writer of one format.

    Attributes:
        name: Name in the documentation.
        dtypes: Names of the element types that it can hold.
        shape: Kind of target: one file, a directory, or several files with a common prefix.
        takes_shards: Whether the content can be split into several files (the target is a directory then).
        own_metadata: Keys of the metadata that the format stores in its own form.
        own_native: Native parts that it stores in its own form.
    """

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[str]]
    shape: ClassVar[Literal["file", "directory", "prefix"]] = "file"
    takes_shards: ClassVar[bool] = False
    own_metadata: ClassVar[frozenset[str]] = frozenset()
    own_native: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        """Yield a sentence, with the tensor's name, for content that the format can't hold, except types."""

    def unsafe_globals(self, content: Content, options: WriteOptions) -> tuple[str, ...]:
        """Return the globals that the format's loader only allows if its caller names them; none by default.

        Raises:
            Unsupported: The content can't be written.
        """
        return ()

    def reader_name(self, tensor: Tensor) -> str:
        """Return the name that the reader gives to a tensor of the content; its own by default."""
        return tensor.name

    def trim(self, path: str, gone: Collection[Path]) -> Trim | None:
        """Return the removal of the entries below some keys from a directory; None if it isn't supported.

        Args:
            path: The directory.
            gone: The removed keys, as paths in the state dict.

        Raises:
            CheckpointError: It can't be read, or has content that can't be written again.
        """
        return None

    def dropped_native(self, content: Content) -> frozenset[str]:
        """Return the native parts that are not written since they belong to tensors outside the content."""
        return frozenset()

    @abstractmethod
    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        """Write the content, in constant memory.

        Raises:
            CheckpointError: The source can't be read.
            OSError: The target can't be written.
        """


def fold_name(name: str) -> str:
    """Return a name in the form in which file systems that ignore case compare names."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


WRITABLE = tuple(format for format, traits in TRAITS.items() if traits.writer)
"""Names of the formats that can be written."""


def format_of(name: str, *, has_architecture: bool) -> str | None:
    """Return the format that a target's name means, or None.

    Args:
        name: Last part of its path.
        has_architecture: Whether the model's architecture is known.
    """
    # The longest suffix decides: ``m.weights.h5`` is Keras's, ``m.h5`` is plain HDF5 without a model.
    endings = {ending: format for format in WRITABLE for ending in TRAITS[format].suffixes}
    if has_architecture:
        endings |= {ending: format for format in WRITABLE for ending in TRAITS[format].model_suffixes}
    meant = [ending for ending in endings if name.lower().endswith(ending)]
    return endings[max(meant, key=len)] if meant else None


def writer_of(name: str) -> Writer:
    """Return the writer of a format, which is one of ``WRITABLE``."""
    made: Writer = class_at(TRAITS[name].writer)()
    return made

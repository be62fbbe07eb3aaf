"""The interface of writers: contents, options and targets, and the writers of formats.

A writer knows what its format can't hold, and streams the rest. The format's row in ``traits.py`` names it.
``ops.conversion_plan`` brings the content of a source into the form that was asked for, and asks the writer
what it can't hold; ``ops.convert`` lets it write into a staged target, opens that again and compares every
tensor before it appears.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.layers import LayerKind
from ckpttool.core.tensor import Path, Span, Tensor
from ckpttool.formats.traits import TRAITS
from ckpttool.storage.sink import Sink
from ckpttool.storage.work import Advance

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint to be written.

    Attributes:
        tensors: In their order. No two have one name; one that ``shares_with`` another comes behind that, and
            is the same view of the same bytes. A tensor without values (of the meta device) never is here.
        tree: As ``Checkpoint.tree``, with these same ``Tensor`` objects in their places; None: there is
            nothing but the tensors by name.
        metadata: What the source says next to its tensors, as plain data that JSON can hold; empty where the
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
    layers: Mapping[str, LayerKind] = field(default_factory=dict)
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def owned(self) -> tuple[Tensor, ...]:
        """Return the tensors without those that share the bytes of another."""
        return tuple(tensor for tensor in self.tensors if tensor.shares_with is None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements, shared ones once."""
        return sum(tensor.nbytes for tensor in self.owned)

    def memoized(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a value that a writer computes from the content once."""
        if key not in self._memo:
            self._memo[key] = make()
        made: T = self._memo[key]
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a writer.

    Attributes:
        shard_size: The most bytes of one file, where the content is to be cut into several.
        name: Last part of the target's path, as the user gave it.
    """

    shard_size: int | None = None
    name: str = ""


class Target(Protocol):
    """The place into which a writer writes.

    Attributes:
        target: Where it will stand.
    """

    target: str

    def create(self, name: str = "") -> Sink:
        """Return a new file of the target.

        Args:
            name: Of a directory, the path in it; of a prefix, what comes after it; of a file, nothing.
        """


class Rewritten(NamedTuple):
    """Files of a directory that were written anew; names are relative to it.

    Attributes:
        files: New names by old ones, the same for a file that is replaced.
        replaced: Names of the old files, of which some have no successor.
        spans: What was copied, with the checksums that the bytes had when they were read.
    """

    files: Mapping[str, str]
    replaced: frozenset[str]
    spans: tuple[Span, ...]


class Trim(NamedTuple):
    """How a directory loses some entries of its state dict, and keeps all others as they are.

    Attributes:
        lost: Names of the entries.
        write: Writes the files that change into a target, and tells the second argument the bytes that were
            copied. Raises a CheckpointError or, if the target can't be written, an OSError.
    """

    lost: frozenset[str]
    write: Callable[[Target, Advance], Rewritten]


class Writer(ABC):
    """One format, as it is written.

    Attributes:
        name: As the documentation lists it.
        dtypes: Names of the element types that it can hold.
        shape: What a target is: one file, a directory, or several files with a common prefix.
        takes_shards: Whether the content can be cut into several files (a target is a directory then).
        own_metadata: Keys of the metadata that the format says in its own words.
        own_native: Native parts that it holds in its own form.
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
        """Return the names that the format's loader admits only where its caller asks: none, for most.

        Raises:
            Unsupported: The content can't be written.
        """
        return ()

    def reader_name(self, tensor: Tensor) -> str:
        """Return the name that a reader gives to a tensor of the content: its own, for most."""
        return tensor.name

    def trim(self, path: str, gone: Collection[Path]) -> Trim | None:
        """Return how a directory loses the entries below some keys; None where nothing takes them out.

        Args:
            path: The directory.
            gone: The keys, as paths in the state dict.

        Raises:
            CheckpointError: It can't be read, or has what can't be written again.
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
    """Return a name in the form that file systems which ignore case compare."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


WRITABLE = tuple(format for format, traits in TRAITS.items() if traits.writer)
"""The names of the formats that can be written."""


def format_of(name: str, *, has_architecture: bool) -> str | None:
    """Return the format that a target's name means, or None.

    Args:
        name: The last part of its path.
        has_architecture: Whether it is known which model the weights are of.
    """
    endings = {ending: format for format in WRITABLE for ending in TRAITS[format].suffixes}
    if has_architecture:
        endings |= {ending: format for format in WRITABLE for ending in TRAITS[format].model_suffixes}
    meant = [ending for ending in endings if name.lower().endswith(ending)]
    return endings[max(meant, key=len)] if meant else None


def writer_of(name: str) -> Writer:
    """Return the writer of a format, which is one of ``WRITABLE``."""
    module, _, kind = TRAITS[name].writer.partition(":")
    made: Writer = getattr(import_module(f"ckpttool.formats.{module}"), kind)()
    return made

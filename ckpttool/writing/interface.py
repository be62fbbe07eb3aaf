"""What a writer is: something that knows what its format can't hold, and streams the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ckpttool.tensor import Tensor
from ckpttool.wire.staged_output import StagedOutput
from ckpttool.writing.content import Content


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What a writer is told beside the content.

    Attributes:
        shard_size: The most bytes of one file, where the content is to be cut into several.
        name: Last part of the target's path, as the user gave it.
    """

    shard_size: int | None = None
    name: str = ""


class Writer(ABC):
    """One format, as it is written.

    Attributes:
        name: As the documentation lists it.
        dtypes: Names of the element types that it can hold.
        shape: What a target is: one file, a directory, or several files behind a common prefix.
        takes_shards: Whether the content can be cut into several files (a target is a directory then).
    """

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[str]]
    shape: ClassVar[Literal["file", "directory", "prefix"]] = "file"
    takes_shards: ClassVar[bool] = False

    @abstractmethod
    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        """Yield what the format can't hold, a sentence each that names the tensor; types are asked apart."""

    def dropped(self, content: Content, options: WriteOptions) -> Iterator[tuple[str, str]]:
        """Yield what will not come back from this format, as (path, why): nothing, for most."""
        return iter(())

    def strangers(self, content: Content, options: WriteOptions) -> tuple[str, ...]:
        """Return the names that the format's loader admits only where its caller asks: none, for most.

        Raises:
            Unsupported: The content can't be written.
        """
        return ()

    def named(self, tensor: Tensor) -> str:
        """Return the name that a reader gives to a tensor of the content: its own, for most."""
        return tensor.name

    @abstractmethod
    def write(self, content: Content, target: StagedOutput, options: WriteOptions) -> None:
        """Write the content, in constant memory.

        Raises:
            CheckpointError: The source can't be read.
            OSError: The target can't be written.
        """

"""Base class of pointer kinds: text files that name checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, NamedTuple

MAX_POINTER = 4096
"""Size limit of a text file that names one path, in bytes."""

MAX_STATE = 1 << 26
"""Size limit of JSON that is read for a pointer, in bytes; a trainer's whole history takes less."""

Renamer = Callable[[str], str | None]
"""Maps a path to its new spelling, or to None if it is unchanged."""


class FileChange(NamedTuple):
    """A file whose contents change in a renaming: its SHA-256 before and after, and its new size in bytes."""

    before: str
    after: str
    nbytes: int


Changes = Mapping[str, FileChange]
"""Changed files by their old paths."""
NO_CHANGES: Changes = MappingProxyType({})


class StalePaths(Enum):
    """How a path that leads nowhere is resolved in a renaming, as the run may have been moved.

    ``KEPT``: it isn't. ``PATH``: by its last name, among the checkpoints beside the file; only that changes.
    ``NAME``: likewise, and the new name alone is written.
    """

    KEPT = "kept"
    PATH = "path"
    NAME = "name"


class PointerKind(ABC):
    """Kind of text file that names checkpoints.

    All commands go by the table in ``runs/pointers/kinds.py``.

    Attributes:
        files: Names of such files.
        limit: Size limit in bytes.
        protects: Whether ``targets`` are kept by ``prune``, each for the reason that the file gives.
        is_certain: Whether every file of such a name is of this kind: one that can't be read may name
            anything.
        formats: Formats that such a file may name when it can't be read; None for all.
        stale_paths: How paths that lead nowhere are resolved.
    """

    files: ClassVar[tuple[str, ...]] = ()
    limit: ClassVar[int] = MAX_STATE
    protects: ClassVar[bool] = False
    is_certain: ClassVar[bool] = True
    formats: ClassVar[frozenset[str] | None] = None
    stale_paths: ClassVar[StalePaths] = StalePaths.KEPT

    def matches(self, name: str) -> bool:
        """Return whether a file name belongs to this kind."""
        return name in self.files

    def reason(self, name: str) -> str:
        """Return the reason for protecting the targets of a file."""
        return name

    @abstractmethod
    def names(self, text: str) -> tuple[str, ...]:
        """Return the paths of checkpoints, or of their files, in a text.

        Raises:
            ValueError: The text is malformed, so that it may name anything.
        """

    def targets(self, text: str, siblings: Container[str]) -> tuple[str, ...]:
        """Return the paths to protect; ``siblings`` are the names in the directory of the file."""
        return self.names(text)

    @abstractmethod
    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        """Return a text with renamed paths; all other bytes are preserved.

        Args:
            text: The text.
            new: The new forms of its paths.
            changes: Files whose contents change, too, for lists of digests.

        Raises:
            ValueError: The text can't have the new names.
        """


class CheckpointList(PointerKind):
    """Kind of file in which a framework lists all checkpoints of a directory.

    A removal takes checkpoints out of it, and an undo puts them back.
    """

    @abstractmethod
    def without(self, text: str, directory: str, removed: Collection[str]) -> str:
        """Return a text without removed checkpoints; one that is malformed is unchanged.

        Args:
            text: The text.
            directory: The directory of the file.
            removed: Names of the checkpoints in it that are removed.
        """

    @abstractmethod
    def merged(self, now: str, wrote: str, was: str, restored: Collection[str]) -> str:
        """Return the current text with restored checkpoints; what others wrote since is preserved.

        Args:
            now: The current text.
            wrote: The text that ckpttool wrote.
            was: The text that this replaced.
            restored: Names of the restored checkpoints.

        Raises:
            ValueError: A text is malformed, or names no checkpoint.
        """

"""Base classes of pointer kinds: the files and symlinks that name checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping
from enum import Enum, Flag, auto
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
    """Resolution of dangling paths in a renaming, as the run may have been moved.

    ``KEPT``: unchanged. ``PATH``: its last name is looked up among the checkpoints next to the file, and only
    that is replaced. ``NAME``: likewise, but the new name replaces the whole path.
    """

    KEPT = "kept"
    PATH = "path"
    NAME = "name"


class FilePlace(Flag):
    """Places in which files of a kind are searched for.

    ``BESIDE``: in the same directory as checkpoints. ``INSIDE``: in a checkpoint that is a directory, where
    ``rename`` rewords it; only the trainer's state protects from there. ``MEMBER``: among the files that a
    checkpoint consists of.
    """

    NOWHERE = 0
    BESIDE = auto()
    INSIDE = auto()
    MEMBER = auto()


class PointerKind:
    """Kind of pointer; ``runs/pointers/kinds.py`` has the table of all.

    Attributes:
        what: Name in the reference of ``prune``; empty if the kind protects nothing.
        where: Directories in which it is searched for, in the words of the reference.
        formats: Formats that an unreadable pointer may name; None for all.
        hint: Advice on a dangling pointer.
        fallback: The program's behaviour if the target was removed; empty if it needs the target.
    """

    what: ClassVar[str] = ""
    where: ClassVar[str] = ""
    formats: ClassVar[frozenset[str] | None] = None
    hint: ClassVar[str] = ""
    fallback: ClassVar[str] = ""


class TextKind(PointerKind, ABC):
    """Kind of pointer that is a text: a small file, or the target of a symlink.

    Attributes:
        files: Names of such files.
        places: Places in which they are searched for.
        limit: Size limit in bytes.
        protects: Whether ``prune`` keeps the ``targets`` of files next to checkpoints, with ``reason``.
        is_certain: Whether the name alone identifies the kind, so that an unreadable file may name anything.
        blocks_renames: Whether checkpoints keep their names if such a file next to them can't be reworded.
        has_digests: Whether it has digests of other files, so that it is reworded after them.
        stale_paths: Resolution of dangling paths.
    """

    where = "DIR, next to checkpoints"
    files: ClassVar[tuple[str, ...]] = ()
    places: ClassVar[FilePlace] = FilePlace.BESIDE
    limit: ClassVar[int] = MAX_STATE
    protects: ClassVar[bool] = False
    is_certain: ClassVar[bool] = True
    blocks_renames: ClassVar[bool] = False
    has_digests: ClassVar[bool] = False
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


class CheckpointList(TextKind):
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
        """Return the current text with restored checkpoints, and with all later changes by other programs.

        Args:
            now: The current text.
            wrote: The text that ckpttool wrote.
            was: The text that this replaced.
            restored: Names of the restored checkpoints.

        Raises:
            ValueError: A text is malformed, or names no checkpoint.
        """

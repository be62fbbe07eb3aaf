"""Base class of the engines that change a directory: on a disk by renames, in a store by requests.

Both kinds of engine write the same journals and records; ``engines.engine_of`` chooses one for a directory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import ClassVar

from ckpttool.transaction.files import Contents
from ckpttool.transaction.history import CommandRecord
from ckpttool.transaction.journal import Group, OperationList
from ckpttool.transaction.settling import Settled
from ckpttool.transaction.transaction import Failure, Outcome


class UndoMethod(Enum):
    """How a removal can be undone: not at all, from the bucket's older versions, or from the trash."""

    NONE = "none"
    VERSIONS = "versions"
    TRASH = "trash"


class Engine(ABC):
    """Commands on one directory. All methods raise ``CheckpointError`` or ``OSError``.

    Attributes:
        directory: The directory.
        loss_warning: Warning if a removal can't be undone; None on disks, where removal is final.
    """

    loss_warning: ClassVar[str | None] = None

    def __init__(self, directory: str) -> None:
        self.directory = directory

    # Removal and undo

    @abstractmethod
    def undo_method(self, removals: Sequence[tuple[str, Contents]], *, is_trash: bool) -> UndoMethod:
        """Return how removals can be undone.

        Args:
            removals: Directory and contents of each checkpoint, all in one place.
            is_trash: Whether they are moved to the trash.
        """

    @abstractmethod
    def remove(self, removals: Sequence[Group], identity: str, method: UndoMethod) -> Outcome:
        """Remove checkpoints, or move them to the trash; those that changed since the plan was made are kept.

        Args:
            removals: The checkpoints.
            identity: Identity of the command.
            method: The way in which it can be undone.
        """

    @abstractmethod
    def restorable(
        self, record: CommandRecord, undoing: OperationList, *, is_latest_step: bool, dry_run: bool
    ) -> tuple[list[int], frozenset[int], dict[str, Failure]]:
        """Return which groups of an undo step can be restored; nothing is changed.

        Args:
            record: The record of the command.
            undoing: The step.
            is_latest_step: Whether it is the step that was done last, so that it is undone first.
            dry_run: Whether to report only. If not, an engine whose ``restore`` checks may return all groups.

        Returns:
            The groups that can be restored, those of them that are in place already, and the reasons why the
            others can't be restored, by path.
        """

    @abstractmethod
    def restore(self, record: CommandRecord, undoing: OperationList) -> tuple[Outcome, frozenset[int]]:
        """Restore checkpoints; return the outcome, and the groups that were in place already."""

    @abstractmethod
    def purge(
        self, record: CommandRecord, listed: OperationList, *, dry_run: bool
    ) -> Iterator[tuple[int, int | Exception]]:
        """Remove checkpoints from the trash; yield the bytes that each group frees, or its error."""

    @abstractmethod
    def age(self, identity: str) -> float:
        """Return the age of a command's record, in seconds."""

    # Interrupted commands

    @abstractmethod
    def journals(self) -> list[str]:
        """Return the paths of journals that wait for recovery, the oldest first."""

    @abstractmethod
    def owner_of(self, journal: str) -> str | None:
        """Return the other user who owns a journal; None if it can be recovered."""

    @abstractmethod
    def hidden_names(self) -> frozenset[str]:
        """Return names in the directory that belong to incomplete checkpoints until recovery."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return the paths of everything that interrupted commands left, with and without a journal."""

    @abstractmethod
    def settle(self, path: str) -> Settled | None:
        """Complete or revert an interrupted command; return None if only leftovers without a journal remain.

        Raises:
            DamagedCheckpoint: It has files that its journal doesn't list.
        """

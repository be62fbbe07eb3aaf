"""Writes the provably good tensors of a damaged checkpoint as a new one, with a list of losses.

A tensor is lost if its bytes are beyond the end of their file, in a missing file, or in a record with another
checksum. Tensors that no checksum covers are kept, and counted as unproven.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, UsageError
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.report import Finding, Severity
from ckpttool.core.result import Result, document_of
from ckpttool.core.tensor import Extent, Role, Span, Tensor, role_below
from ckpttool.core.text import counted
from ckpttool.core.values import storages_of
from ckpttool.formats import open_path
from ckpttool.ops.conversion import Converted, ConvertKeywords, ConvertOptions
from ckpttool.ops.conversion_plan import plan_conversion
from ckpttool.ops.convert import carry_out
from ckpttool.ops.scan_findings import checksum_findings
from ckpttool.ops.verdict import Survival, survival_of
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.scan import ScannedSpan, scan
from ckpttool.storage.work import Advance, default_jobs, no_advance
from ckpttool.weights.converting.tree_edits import edit_tree

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Loss:
    """A tensor that could not be salvaged, and why; its size in bytes is None if only its name is known."""

    name: str
    why: str
    nbytes: int | None
    role: Role


@dataclass(frozen=True, slots=True, repr=False)
class Salvaged(Result):
    """The result of salvaging a checkpoint.

    Attributes:
        source: Path of the checkpoint.
        converted: Result of writing.
        lost: Lost tensors.
        damage: Other damage of the source: a missing shard, headers that disagree.
        proven: Number of salvaged tensors with the checksums that the format records.
        unproven: Number of salvaged tensors that no checksum covers.
        nbytes: Bytes of the salvaged tensors.
        names_all: Whether the names of all tensors are known; if not, more than ``lost`` may be lost.
        roles: Roles of the salvaged tensors.
    """

    source: str
    converted: Converted
    lost: tuple[Loss, ...]
    proven: int
    unproven: int
    nbytes: int
    damage: tuple[Finding, ...] = ()
    names_all: bool = True
    roles: tuple[Role, ...] = ()

    @property
    def kept(self) -> int:
        """Return the number of salvaged tensors."""
        return self.proven + self.unproven

    @property
    def amount(self) -> str:
        """Return the number of salvaged tensors, of those known."""
        if not self.lost:
            return f"{'all ' if self.names_all else ''}{counted(self.kept, 'tensor')}"
        least = "" if self.names_all else "at least "
        return f"{self.kept:,} of {least}{counted(self.kept + len(self.lost), 'tensor')}"

    @property
    def survival(self) -> Survival:
        """Return the amounts of saved weights, optimizer state and the rest."""
        return _survival(self.roles, self.lost, names_all=self.names_all)

    @property
    def summary(self) -> str:
        """Return the amount in a few words."""
        return f"{self.amount} salvaged"

    def document(self) -> dict[str, Any]:
        """Return the document of the conversion, with the losses."""
        return {
            **self.converted.document(),
            "schema": "ckpttool.salvage/1",
            **document_of(self, "source", "proven", "unproven", "names_all", "damage", "survival", "lost"),
        }


@shows_keywords(ConvertOptions)
@holds("source", "target")
def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    advance: Advance | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Salvaged:
    """Write the intact tensors of a truncated or damaged checkpoint as a new one; the source is not changed.

    Args:
        source: A file, directory or index.
        target: Path to write to; its suffix selects the format, unless ``to`` does.
        options: Options of the conversion.
        advance: Called with the bytes done, from any thread.
        keywords: Attributes of ``ConvertOptions``, such as ``to="safetensors"``.

    Raises:
        CheckpointError: It can't be opened, not even to list its tensors; or no tensor is intact.
        UsageError: The options are invalid, or the target's format can't hold the content.
    """
    options = with_keywords(options or ConvertOptions(), keywords)
    advance = advance or no_advance
    with open_path(source, allows_losses=True) as checkpoint:
        good, lost, proven, sound = _assess(checkpoint, options.jobs, advance)
        # The training state may come from a scalar tensor. If one is lost, it can't be trusted to be
        # complete.
        kept = {one.name for one in good}
        has_numbers = all(one.name in kept for one in checkpoint.tensors if one.size == 1)
        left = checkpoint.replace(
            tensors=good,
            tree=lambda: _tree_of(checkpoint, good),
            training=lambda: checkpoint.training if has_numbers else TrainingState(),
            spans=lambda: iter(sound),
            findings=(),
            complete=True,
        )
        converted = carry_out(plan_conversion(left, os.fspath(target), options), advance=advance)
        return Salvaged(
            checkpoint.path,
            converted,
            lost,
            proven,
            len(good) - proven,
            sum(tensor.nbytes for tensor in good),
            tuple(one for one in checkpoint.findings if one.severity is Severity.ERROR),
            checkpoint.names_all,
            tuple(one.role for one in good),
        )


def salvageable(source: str, *, jobs: int | None = None, advance: Advance = no_advance) -> Survival | None:
    """Return the amounts that ``salvage`` would save, reading the checkpoint; None if nothing is intact."""
    try:
        with open_path(source, allows_losses=True) as checkpoint:
            good, lost, _, _ = _assess(checkpoint, jobs, advance)
            return _survival([one.role for one in good], lost, names_all=checkpoint.names_all)
    except CheckpointError:  # the verdict has the reason already
        return None


def _survival(kept: Iterable[Role], lost: Iterable[Loss], *, names_all: bool) -> Survival:
    return survival_of(kept, ((one.name, one.role) for one in lost), names_all=names_all)


def _assess(
    checkpoint: Checkpoint, jobs: int | None, advance: Advance
) -> tuple[tuple[Tensor, ...], tuple[Loss, ...], int, tuple[Span, ...]]:
    """Read all tensors; return intact and lost ones, the number proven by checksums, and the intact ranges.

    Raises:
        DamagedCheckpoint: No tensor is intact, or the list of tensors is damaged.
    """
    # Ranges beyond the end of a file aren't read. A tensor is lost for the first of: a reason that the reader
    # recorded, missing bytes, a damaged range. Intact ranges are kept as the result's spans, so that the
    # conversion compares their checksums again.
    sizes = _Sizes()
    spans = [span for span in checkpoint.spans() if sizes.holds(span.extent)]
    scanned = scan(spans, jobs=jobs or default_jobs(), values=False, advance=advance)
    cover, missing = _CheckedRanges(checkpoint, scanned), checkpoint.missing
    reasons = {
        one.name: missing.get(one.name) or sizes.missing_reason(one) or cover.damage_reason(one)
        for one in checkpoint.tensors
    }
    good = tuple(one for one in checkpoint.tensors if reasons[one.name] is None)
    if not good:
        raise DamagedCheckpoint(checkpoint.path, "no intact tensor found", code="damaged")
    lost = [
        Loss(one.name, why, one.nbytes, one.role) for one in checkpoint.tensors if (why := reasons[one.name])
    ]
    unread = [(name, why) for name, why in missing.items() if name not in reasons]
    # If only the name of a tensor is known, its role is guessed: from the name, else the most common one.
    common = Counter(one.role for one in checkpoint.tensors).most_common(1)[0][0]
    lost += [Loss(name, why, None, role_below((name,)) or common) for name, why in unread]
    sound = tuple(one.span for one in scanned if not _is_damaged(one))
    return good, tuple(lost), sum(map(cover.proves, good)), sound


class _Sizes:
    """Cache of the sizes of files."""

    def __init__(self) -> None:
        self._sizes: dict[str, int | None] = {}

    def _size(self, file: str) -> int | None:
        if file not in self._sizes:
            try:
                self._sizes[file] = fs.stat(file).st_size
            except OSError:
                self._sizes[file] = None
        return self._sizes[file]

    def holds(self, extent: Extent) -> bool:
        """Return whether a range is inside its file."""
        size = self._size(extent.file)
        return size is not None and extent.end <= size

    def missing_reason(self, tensor: Tensor) -> str | None:
        """Return why a tensor's bytes are missing; None if they exist."""
        if tensor.values is None:
            return "its values can't be read from the file"
        for extent in storages_of(tensor):
            size = self._size(extent.file)
            if size is None:
                return f"{extent.file} can't be read"
            if extent.end > size:
                return f"its bytes are not in the file, which ends at byte {size:,}"
        return None


class _CheckedRanges:
    """Ranges with checksums, and which of them are damaged, by tensor."""

    def __init__(self, checkpoint: Checkpoint, scanned: Sequence[ScannedSpan]) -> None:
        """Sort the ranges that were read.

        Raises:
            DamagedCheckpoint: A damaged range belongs to no tensor: it may be the list of tensors.
        """
        # A damaged range that has no tensor's bytes is a header or an index: names, shapes or offsets in it
        # may be wrong, so that no tensor can be trusted, whatever its own checksum is.
        self._ranges: dict[str, list[ScannedSpan]] = defaultdict(list)
        for one in scanned:
            self._ranges[one.span.extent.file].append(one)
        for ranges in self._ranges.values():
            ranges.sort(key=_start)
        self._first_damage: str | None = None
        used = {id(one) for tensor in checkpoint.tensors for one in self._ranges_of(tensor)}
        for one in scanned:
            if _is_damaged(one):
                (finding,) = checksum_findings([one])
                if id(one) not in used:
                    why = f"{finding.message}: the list of tensors can't be trusted"
                    raise DamagedCheckpoint(checkpoint.path, why, where=finding.where, code=finding.code)
                self._first_damage = self._first_damage or _damage_text(one)

    def _ranges_of(self, tensor: Tensor) -> Iterator[ScannedSpan]:
        """Yield the ranges that have bytes of a tensor."""
        for extent in storages_of(tensor):
            # The range with the last start at or before the tensor's; it counts if it ends at or after it,
            # too.
            ranges = self._ranges.get(extent.file, [])
            at = bisect_right(ranges, extent.offset, key=_start) - 1
            if at >= 0 and ranges[at].span.extent.end >= extent.end:
                yield ranges[at]

    def damage_reason(self, tensor: Tensor) -> str | None:
        """Return why a tensor can't be trusted; any damage counts for a tensor of unknown position."""
        if not storages_of(tensor):
            return self._first_damage if tensor.nbytes else None
        return next((_damage_text(one) for one in self._ranges_of(tensor) if _is_damaged(one)), None)

    def proves(self, tensor: Tensor) -> bool:
        """Return whether checksums cover all bytes of a tensor."""
        storages = [extent for extent in storages_of(tensor) if extent.nbytes]
        covered = sum(one.span.crc32 is not None for one in self._ranges_of(tensor) if one.span.nbytes)
        return bool(storages_of(tensor)) and covered >= len(storages)


def _start(one: ScannedSpan) -> int:
    return one.span.extent.offset


def _is_damaged(one: ScannedSpan) -> bool:
    return one.failure is not None or not one.matches


def _damage_text(one: ScannedSpan) -> str:
    (finding,) = checksum_findings([one])
    return finding.placed_message


def _tree_of(checkpoint: Checkpoint, good: Sequence[Tensor]) -> object:
    """Return the content tree without lost tensors."""
    tree = checkpoint.tree
    kept = {id(tensor): tensor for tensor in good}
    edits: dict[int, list[Tensor]] = {id(one): [] for one in checkpoint.tensors if id(one) not in kept}
    if tree is None or not edits:
        return tree
    try:
        return edit_tree(tree, edits, kept, checkpoint.tensors)[0]
    except UsageError:  # a lost tensor is in no dictionary, and can't be left out
        return None

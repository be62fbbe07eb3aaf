"""Compares the tensors and metadata of two checkpoints of any formats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint, UsageError
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.report import Sentence, Severity
from ckpttool.core.tensor import Role, Span
from ckpttool.core.text import counted, first_names
from ckpttool.core.values import storages_of
from ckpttool.formats import open_checkpoint
from ckpttool.formats.traits import traits_of
from ckpttool.ops.difference import (
    ABSENT,
    Change,
    Difference,
    DiffKeywords,
    DiffOptions,
    Kind,
    SideSummary,
    TensorFacts,
    UndecidedTensor,
    UnreadableTensor,
    ValueChange,
)
from ckpttool.ops.metadata_diff import compare_metadata, partly_known
from ckpttool.ops.resume import resume_verdict
from ckpttool.ops.scan_findings import checksum_findings
from ckpttool.storage.scan import scan
from ckpttool.storage.work import Advance, default_jobs, no_advance
from ckpttool.weights.comparing.compare import (
    Comparison,
    NotCompared,
    Outcome,
    Side,
    Tolerance,
    Unreadable,
    compare_all,
)
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.map_file import read_map
from ckpttool.weights.pairing.notes import display_name
from ckpttool.weights.pairing.pair_up import Pair, Pairing, PairingOptions, pair_up

if TYPE_CHECKING:
    from typing_extensions import Unpack

Compared = tuple[Pair, Outcome]

_RENAMED = ("content", "shape")
_TURNED = "it is unknown if one side is transposed"
_DECIDED_BY = {
    True: "use --map or --layout as-is to decide whether one side is transposed",
    False: "a whole Keras model (.keras, .h5) or a --map with a [[tensor]] gives the order of elements",
}
"""Hints for tensors of unknown layout, by whether they were compared as stored."""
_FEW = 0.1
"""The share of a tensor's elements below which a change looks like damage."""


@shows_keywords(DiffOptions)
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    options: DiffOptions | None = None,
    *,
    advance: Advance | None = None,
    **keywords: Unpack[DiffKeywords],
) -> Difference:
    """Return how two checkpoints differ; both are read once, in constant memory.

    The result is true if they are equal.

    Args:
        a: File, directory or index.
        b: The one to compare it with.
        options: Options of the comparison.
        advance: Called with the bytes read, from any thread.
        keywords: Attributes of ``DiffOptions``: ``diff(a, b, rtol=1e-3)``.

    Raises:
        CheckpointError: One can't be opened; or is damaged, unless ``keep_going``.
        UsageError: The map file or the options are invalid.
    """
    options = with_keywords(options or DiffOptions(), keywords)
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        return diff_checkpoints(first, second, options, advance=advance or no_advance)


def diff_checkpoints(
    a: Checkpoint, b: Checkpoint, options: DiffOptions, *, advance: Advance = no_advance
) -> Difference:
    """Return how two open checkpoints differ; see ``diff``."""
    # Damage is no difference: it is looked for in the structure before the comparison, and in the bytes of
    # tensors that differ like damaged ones after it. Without ``keep_going`` it is an error; with it, the
    # tensor is listed as unreadable, and not as changed.
    broken = [*structural_damage(a, Side.A), *structural_damage(b, Side.B)]
    _require_readable(broken, a, b, options)
    pairing_options = PairingOptions(
        layout=options.layout,
        mapping=read_map(options.mapping) if options.mapping is not None else None,
        rename=options.rename,
        only=options.only,
        ignore=options.ignore,
    )
    pairing = pair_up(a, b, pairing_options)
    to_compare = pairing.pairs or pairing.added or pairing.removed or pairing.undecided
    if not to_compare and (a.tensors or b.tensors):
        notes = "; ".join(pairing.notes)
        raise UsageError(f"no tensors left to compare{f' ({notes})' if notes else ''}")
    jobs = options.jobs or default_jobs()
    tolerance = Tolerance(rtol=options.rtol, atol=options.atol, bitwise=options.bitwise)
    pairs = [*pairing.pairs, *pairing.undecided]
    tensors = [(pair.a.tensor, pair.b.tensor) for pair in pairs]
    compared = [*zip(pairs, compare_all(tensors, tolerance, jobs=jobs, advance=advance), strict=True)]
    for pair, outcome in compared:
        if isinstance(outcome, Unreadable):
            item = pair.a if outcome.side is Side.A else pair.b
            broken.append(UnreadableTensor(display_name(item), outcome.side, Sentence(outcome.error.reason)))
    corrupted = [*corrupted_tensors(compared, a, b, jobs)]
    broken += corrupted
    _require_readable(broken, a, b, options)
    names = {side: {one.name for one in corrupted if one.side is side} for side in Side}
    sound = [
        (pair, outcome)
        for pair, outcome in compared
        if names[Side.A].isdisjoint(source.name for source in pair.a.sources)
        and names[Side.B].isdisjoint(source.name for source in pair.b.sources)
    ]
    difference = _difference_of(a, b, options, pairing, sound)
    return replace(difference, broken=tuple(broken), tolerance=tolerance)


def _require_readable(
    broken: Sequence[UnreadableTensor], a: Checkpoint, b: Checkpoint, options: DiffOptions
) -> None:
    """Raise CheckpointError if a side is damaged, unless ``keep_going`` compares the readable tensors."""
    if broken and not options.keep_going:
        first = broken[0]
        path = (a if first.side is Side.A else b).path
        raise DamagedCheckpoint(path, first.why, where=first.name if first.name != path else None)


def _difference_of(
    a: Checkpoint, b: Checkpoint, options: DiffOptions, pairing: Pairing, compared: Sequence[Compared]
) -> Difference:
    undecided = _undecided_pairs(pairing, compared)
    measured = [
        (pair, outcome)
        for pair, outcome in compared
        if isinstance(outcome, Comparison) and id(pair) not in undecided
    ]
    changes = [_change_of_pair(pair, outcome) for pair, outcome in measured]
    values, reported, value_notes, ignored = _value_changes(a, b, options, pairing)
    bookkeeping = []
    for side, item in pairing.bookkeeping:
        present = f"{item.tensor.dtype.name} tensor"
        one, other = (present, ABSENT) if side == "a" else (ABSENT, present)
        bookkeeping.append(ValueChange(display_name(item), one, other))
    not_compared = [
        f"{display_name(pair.a)}: {one.why}" for pair, one in compared if isinstance(one, NotCompared)
    ]
    if options.only == "all":
        not_compared += partly_known(a, b)
    # A's rule comes before B's; a rule that both sides have counts once.
    used = (rule for pair, _ in measured for rule in dict.fromkeys((pair.a.rule, pair.b.rule)))
    rules = Counter(rule for rule in used if rule is not None)
    sizes = [(pair.a.tensor.nbytes, pair.b.tensor.nbytes) for pair, _ in measured]
    is_one_family = traits_of(a.conventions).family == traits_of(b.conventions).family
    return Difference(
        a=_side_facts(a),
        b=_side_facts(b),
        compared=len(changes),
        unchanged=changes.count(None),
        weights=sum(pair.a.tensor.role is Role.WEIGHTS for pair, _ in measured),
        changed=tuple(change for change in changes if change is not None),
        added=tuple(map(_facts, pairing.added)),
        removed=tuple(map(_facts, pairing.removed)),
        renamed=tuple(
            (display_name(pair.a), display_name(pair.b)) for pair, _ in compared if pair.how in _RENAMED
        ),
        rename_counts=is_one_family or bool(pairing.crossed),
        values=tuple(values),
        reported=(*bookkeeping, *reported),
        rules=dict(rules),
        notes=(*pairing.notes, *_layout_notes(pairing, undecided), *value_notes),
        not_compared=tuple(not_compared),
        undecided=tuple(undecided.values()),
        ignored=bool(ignored) or len(pairing.unmatched) < len(options.ignore),
        compared_nbytes=max(map(sum, zip(*sizes, strict=True)), default=0),
    )


def _value_changes(
    a: Checkpoint, b: Checkpoint, options: DiffOptions, pairing: Pairing
) -> tuple[list[ValueChange], list[ValueChange], list[str], int]:
    """Return differing values, differences that are only reported, notes, and the count of ignored values."""

    def is_ignored(change: ValueChange) -> bool:
        return any(fnmatchcase(change.path, glob) for glob in options.ignore)

    differing, reported = compare_metadata(a, b)
    if a.format == b.format:
        # Different keys may have the same dotted name, such as the integer 0 and the string "0".
        for pair in pairing.pairs:
            one, other = pair.a.sources[0], pair.b.sources[0]
            if one.name == other.name and one.path != other.path:
                of_weights = one.role is Role.WEIGHTS
                keys = list(one.path), list(other.path)
                differing.append(ValueChange(f"{one.name} (keys)", *keys, of_weights=of_weights))
    notes = []
    if gone := sum(map(is_ignored, differing)):
        notes.append(f"ignored: {counted(gone, 'value')} that differ{'s' if gone == 1 else ''}")
    for glob in pairing.unmatched:
        if not any(fnmatchcase(change.path, glob) for change in differing):
            notes.append(f"--ignore {glob}: matches no tensor and no differing value")
    values = [change for change in differing if not is_ignored(change)]
    if options.only == "all":
        return values, reported, notes, gone
    others = [change for change in values if not change.of_weights]
    return [change for change in values if change.of_weights], [*others, *reported], notes, gone


def _undecided_pairs(pairing: Pairing, compared: Iterable[Compared]) -> dict[int, UndecidedTensor]:
    """Return the undecided pairs by ``id``, without those that are equal as stored."""
    # If only a transposition is in doubt, tensors that are equal as stored count as equal. With a doubt about
    # the order of elements (``pair.doubt``) they don't: equal bytes may be different weights.
    candidates = {id(pair) for pair in pairing.undecided}
    undecided = {}
    for pair, outcome in compared:
        if id(pair) not in candidates or not isinstance(outcome, Comparison):
            continue
        if pair.doubt is None and outcome.equal:
            continue
        statistics = outcome.statistics
        if outcome.equal or statistics is None:
            seen = "equal"
        else:
            differ = "differs" if statistics.count == 1 else "differ"
            seen = f"{statistics.count:,} of {counted(statistics.size, 'element')} {differ}"
        layout = "as stored" if pair.a.rule is None and pair.b.rule is None else "in the usual layout"
        name = display_name(pair.b if pair.b.doubt else pair.a)
        why = pair.doubt.text if pair.doubt else Sentence(_TURNED)
        undecided[id(pair)] = UndecidedTensor(name, f"{seen} {layout}", why)
    return undecided


def _layout_notes(pairing: Pairing, undecided: Mapping[int, UndecidedTensor]) -> Iterator[str]:
    """Yield notes of tensors of unknown layout that count as equal, and how to decide on the others."""
    equal = [pair for pair in pairing.undecided if pair.doubt is None and id(pair) not in undecided]
    if equal:
        names = first_names([display_name(pair.a) for pair in equal])
        yield f"equal as stored, but their layer types are unknown: {names}"
    kinds = dict.fromkeys(pair.doubt is None for pair in pairing.undecided if id(pair) in undecided)
    yield from (_DECIDED_BY[kind] for kind in kinds)


def _change_of_pair(pair: Pair, outcome: Comparison) -> Change | None:
    """Return the difference of a pair; None if it is equal in shape, type and values."""
    a, b = pair.a.tensor, pair.b.tensor
    kind: Kind = "shape" if a.shape != b.shape else "dtype" if a.dtype is not b.dtype else "values"
    if kind == "values" and outcome.equal:
        return None
    return Change(a=_facts(pair.a), b=_facts(pair.b), kind=kind, how=pair.how, statistics=outcome.statistics)


def _facts(item: LayoutItem) -> TensorFacts:
    tensor = item.tensor
    return TensorFacts(display_name(item), tensor.role, tensor.dtype, tensor.shape, tensor.nbytes)


def _side_facts(checkpoint: Checkpoint) -> SideSummary:
    return SideSummary(
        checkpoint.path,
        checkpoint.format,
        checkpoint.variant,
        checkpoint.producer.framework,
        checkpoint.nbytes,
        len(checkpoint.tensors),
        checkpoint.parameters,
        resume_verdict(checkpoint).found,
    )


# Damage -----------------------------------------------------------------------------------------------


def structural_damage(checkpoint: Checkpoint, side: Side) -> Iterator[UnreadableTensor]:
    """Yield the structural damage of one side."""
    for finding in checkpoint.findings:
        if finding.severity is Severity.ERROR:
            yield UnreadableTensor(finding.where or checkpoint.path, side, finding.message)


def corrupted_tensors(
    compared: Sequence[tuple[Pair, Outcome]], a: Checkpoint, b: Checkpoint, jobs: int
) -> Iterator[UnreadableTensor]:
    """Yield tensors that differ in a few elements because their bytes fail a checksum."""
    # Training changes most elements of a tensor, a flipped bit changes one. So the formats' checksums are
    # compared only for tensors with few differing elements.
    doubtful = []
    for pair, outcome in compared:
        statistics = outcome.statistics if isinstance(outcome, Comparison) else None
        if statistics is not None and 0 < statistics.count <= max(1, statistics.size * _FEW):
            doubtful.append(pair)
    yield from _checksum_mismatches(a, Side.A, [pair.a for pair in doubtful], jobs)
    yield from _checksum_mismatches(b, Side.B, [pair.b for pair in doubtful], jobs)


def _checksum_mismatches(
    checkpoint: Checkpoint, side: Side, items: Iterable[LayoutItem], jobs: int
) -> Iterator[UnreadableTensor]:
    names = {
        (storage.file, storage.offset): source.name
        for item in items
        for source in item.sources
        for storage in storages_of(source)
    }
    if not names:
        return
    spans = [span for span in checkpoint.spans() if span.crc32 is not None and _place(span) in names]
    for scanned in scan(spans, jobs=jobs, values=False):
        for finding in checksum_findings([scanned]):
            yield UnreadableTensor(names[_place(scanned.span)], side, finding.message)


def _place(span: Span) -> tuple[str, int]:
    return span.extent.file, span.extent.offset

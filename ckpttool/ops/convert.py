"""Converts a checkpoint to another format: planned without reading a value, written, compared, put in place.

The output is opened again and compared with the planned tensors, to the last bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, UsageError, from_os_error
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.readable import reader_from
from ckpttool.core.report import Finding, Severity
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.core.values import Contiguous
from ckpttool.formats import open_checkpoint
from ckpttool.formats.content.tree import trees_equal, without_opaque
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.sidecar import training_document
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Content, Writer
from ckpttool.ops.conversion import Converted, ConvertKeywords, ConvertOptions
from ckpttool.ops.conversion_plan import ConversionPlan, SummedTensor, and_more, model_of, plan_conversion
from ckpttool.ops.scan_findings import checksum_findings
from ckpttool.ops.target_path import target_error
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.scan import ScannedSpan, scan
from ckpttool.storage.sink import WrittenTensor
from ckpttool.storage.work import Advance, default_jobs, no_advance
from ckpttool.transaction.staged_output import StagedOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

_READ_AT_ONCE = 1 << 12
"""Tensors that are read back at once, which limits the memory for their results."""


def mismatches(
    content: Content,
    opened: Checkpoint,
    writer: Writer,
    written: Iterable[WrittenTensor],
    *,
    jobs: int,
    advance: Advance,
) -> Iterator[str]:
    """Yield a sentence for each difference of a target from its content.

    Args:
        content: The planned content.
        opened: The target, open.
        writer: Its writer.
        written: Checksums of tensors, computed when they were written; the other tensors are read again.
        jobs: Number of threads.
        advance: Called with the bytes read.
    """
    # The writer computed a checksum of each tensor while it was written. The target's bytes are read back,
    # and must have it, which saves a second read of the source.
    for finding in opened.findings:
        if finding.severity is Severity.ERROR:
            yield f"{finding.where or 'structure'}: {finding.message}"
    if not opened.complete:
        yield "it is incomplete"
    found = {tensor.name: tensor for tensor in opened.tensors}
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in content.tensors:
        name = writer.reader_name(tensor)
        other = found.get(name)
        if other is None:
            yield f"{name} is missing"
        elif (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            now, was = (f"{one.dtype} {list(one.shape)}" for one in (other, tensor))
            yield f"{name} is {now} instead of {was}"
        elif tensor.shares_with is None:
            pairs.append((tensor, other))
    wanted = {writer.reader_name(tensor) for tensor in content.tensors}
    yield from (f"unexpected tensor {name}" for name in found if name not in wanted)
    if len(found) < len(opened.tensors):
        yield f"{len(opened.tensors) - len(found):,} of its tensors have a duplicate name"
    yield from roundtrip_mismatches(content, opened, writer)
    yield from _differing_tensors(pairs, written, jobs, advance)


def _differing_tensors(
    pairs: Iterable[tuple[Tensor, Tensor]], written: Iterable[WrittenTensor], jobs: int, advance: Advance
) -> Iterator[str]:
    """Yield the tensors whose bytes differ from the written ones."""
    sums = {id(one.tensor): one for one in written}
    spans, others = [], []
    for tensor, found in pairs:
        own = sums.get(id(tensor))
        values = found.values
        if own is None or not isinstance(values, Contiguous) or values.swap != 1:
            others.append((tensor, found))
        else:
            spans.append((own, found, values))
    for at in range(0, len(spans), _READ_AT_ONCE):
        batch = []
        for own, found, values in spans[at : at + _READ_AT_ONCE]:
            # The bytes of the target, with the checksum that they should have.
            extent = found.extent or Extent(values.source.path, values.offset, values.nbytes)
            read = reader_from(values.source, values.offset)
            batch.append(Span(extent, own.tensor.name, read, own.elements_checksum, algorithm=own.algorithm))
        for one in scan(batch, jobs=jobs, values=False, advance=advance):
            if one.failure is not None:
                yield f"{one.span.where}: {one.failure.reason}"
            elif not one.matches:
                yield f"{one.span.where}: its values differ"
    if others:
        yield from _element_mismatches(others, jobs, advance)


def _element_mismatches(pairs: Sequence[tuple[Tensor, Tensor]], jobs: int, advance: Advance) -> Iterator[str]:
    """Yield the tensors whose elements differ, by reading both sides."""
    from ckpttool.weights.comparing.compare import (
        Comparison,
        NotCompared,
        Side,
        Tolerance,
        Unreadable,
        compare_all,
    )

    outcomes = compare_all(pairs, Tolerance(bitwise=True), jobs=jobs, advance=advance)
    for (tensor, _), outcome in zip(pairs, outcomes, strict=True):
        if isinstance(outcome, Unreadable):
            if outcome.side is Side.A:
                raise outcome.error
            yield f"{tensor.name}: {outcome.error.reason}"
        elif isinstance(outcome, NotCompared):
            yield f"{tensor.name}: not compared: {outcome.why}"
        elif isinstance(outcome, Comparison) and not outcome.equal:
            yield f"{tensor.name}: its values differ"


def roundtrip_mismatches(content: Content, opened: Checkpoint, writer: Writer) -> Iterator[str]:
    """Yield a sentence for each part of a content, except elements, that a target lacks or changed.

    Args:
        content: The planned content.
        opened: The target, open.
        writer: Its writer.
    """
    for finding in opened.findings:
        if finding.code == "content-entry":
            yield str(finding.message)
    found = {tensor.name: tensor for tensor in opened.tensors}
    pairs = [(one, found[name]) for one in content.tensors if (name := writer.reader_name(one)) in found]
    for tensor, other in pairs:
        if other.role is not tensor.role:
            yield f"{tensor.name} has the role {other.role.value} instead of {tensor.role.value}"
        is_flat = len(tensor.path) == 1  # some formats take a name apart at its dots
        if other.name == tensor.name and other.path != tensor.path and not is_flat:
            yield f"{tensor.name} is at {list(other.path)} instead of {list(tensor.path)}"
    yield from _tie_mismatches(pairs)
    if content.conventions:
        if opened.conventions != content.conventions:
            yield f"the recorded layout is that of {opened.conventions} instead of {content.conventions}"
        for tensor, other in pairs:
            if opened.layers.get(other.name) != content.layers.get(tensor.name):
                yield f"the recorded layer type of {tensor.name} differs"
    # Nodes may differ in what no writer carries (opaque ones), if all else is the same to the last bit.
    if content.tree is not None and not trees_equal(content.tree, opened.tree):
        own, written = (_tree_text(without_opaque(tree)) for tree in (content.tree, opened.tree))
        if own != written:
            yield "content other than tensors differs"
    metadata = {key: value for key, value in content.metadata.items() if not _is_of_files(key, content)}
    yield from _lost_entries("metadata", metadata, opened.metadata, writer.own_metadata)
    dropped = writer.dropped_native(content)
    native = {key: part for key, part in content.native.items() if key not in dropped}
    yield from _lost_entries("native part", native, opened.native, writer.own_native)
    training = training_document(content.training)
    training.pop("origin", None)
    yield from _lost_entries("training state", training, training_document(opened.training), frozenset())


def _is_of_files(key: str, content: Content) -> bool:
    """Return whether metadata describe the source's files, unlike a user's text in a header."""
    traits = traits_of(content.source_format)
    is_written = traits.holds_tensors_alone and isinstance(content.metadata[key], str)
    return key in traits.file_metadata and not is_written


def _tie_mismatches(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Yield a sentence for each tensor that lost a tie; empty tensors have none.

    If the writer has one name for several tensors, which are one in the target, the first counts.
    """
    # Ties are equal if owners correspond one to one. A tensor whose owner was written as another than its
    # owner's before lost its tie; one whose owner in the target stands for two owners gained one.
    written_as: dict[str, str] = {}
    written_from: dict[str, str] = {}
    once = {id(other): (tensor, other) for tensor, other in reversed(pairs)}
    for tensor, other in reversed(once.values()):
        if not tensor.nbytes:
            continue
        mine, theirs = tensor.shares_with or tensor.name, other.shares_with or other.name
        if written_as.setdefault(mine, theirs) != theirs:
            yield f"{tensor.name} is no longer tied to {mine}"
        elif written_from.setdefault(theirs, mine) != mine:
            yield f"{tensor.name} is tied to {written_from[theirs]}, unlike in the source"


def _lost_entries(
    what: str, entries: Mapping[str, object], found: Mapping[str, object], in_own_words: frozenset[str]
) -> Iterator[str]:
    """Yield a sentence for each missing or different entry; keys of the format's own need only exist."""
    for key, value in entries.items():
        if key not in found:
            yield f"{what} {key!r} is missing"
        elif key not in in_own_words and not _plain_data_equal(value, found[key]):
            yield f"{what} {key!r} differs"


def _plain_data_equal(value: object, other: object) -> bool:
    """Return whether plain data are equal to the last bit; shared objects may be separate ones."""
    if value is other or trees_equal(value, other):
        return True
    try:
        return json.dumps(value, default=repr) == json.dumps(other, default=repr)
    except (RecursionError, TypeError, ValueError):
        return False


def _tree_text(tree: object) -> str:
    """Return a tree as text that distinguishes 1, 1.0 and True, and +0 and -0."""
    return json.dumps(encode_tree(tree))


_AT_ONCE = 1 << 12
"""Byte ranges that are read at once, which limits the memory for their results."""


@shows_keywords(ConvertOptions)
@holds("source", "target")
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    advance: Advance | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Converted:
    """Write the content of a checkpoint in another format, in constant memory, and compare it.

    The target appears whole or not at all.

    Args:
        source: A file, directory or index.
        target: Path to write to; its suffix selects the format, unless ``to`` does.
        options: Options of the conversion.
        advance: Called with the bytes done, from any thread.
        keywords: Attributes of ``ConvertOptions``, such as ``to="safetensors"``.

    Raises:
        CheckpointError: The source can't be opened or is damaged, or the target can't be written.
        UsageError: The options are invalid, or the target's format can't hold the content.
    """
    options = with_keywords(options or ConvertOptions(), keywords)
    with open_checkpoint(source) as checkpoint, model_of(options) as model:
        return carry_out(
            plan_conversion(checkpoint, os.fspath(target), options, model), advance=advance or no_advance
        )


def carry_out(
    plan: ConversionPlan,
    *,
    advance: Advance = no_advance,
    place: Callable[[StagedOutput], None] = StagedOutput.commit,
) -> Converted:
    """Write a planned conversion, compare it with the source, and put it in place."""
    if plan.options.dry_run:
        return plan.converted(nbytes=plan.content.nbytes, verified=False)
    # Nothing is put in place before it was proven. The output is written next to the target and completed,
    # read back by its path and compared. Then its directory must still be ours, as else something else was
    # read back. The source's recorded checksums must be right, and its files unchanged since the start: if a
    # trainer saves again meanwhile, the parts that were read may be of two saves. Only then is the output
    # renamed.
    jobs = plan.options.jobs or default_jobs()
    marks = _file_states(plan.source)
    shape = "directory" if plan.write_options.shard_size is not None else plan.writer.shape
    try:
        with StagedOutput(plan.target, shape, replaces=plan.replaces, jobs=jobs, advance=advance) as staged:
            plan.writer.write(plan.content, staged, plan.write_options)
            staged.settle()
            converted = _read_back(plan, staged, jobs, advance)
            staged.require_in_place()
            read = [(one.tensor, one.algorithm, one.elements_checksum) for one in staged.written]
            _require_sums(plan.source, [*read, *plan.summed], jobs, advance)
            for path, mark in _file_states(plan.source).items():
                if mark != marks[path]:
                    raise DamagedCheckpoint(path, "it changed while it was read")
            if converted.verified:
                place(staged)
    except OSError as error:
        raise target_error(error, plan.target) from error
    return replace(converted, warnings=staged.warnings)


def _read_back(plan: ConversionPlan, staged: StagedOutput, jobs: int, advance: Advance) -> Converted:
    """Open the staged output and compare it with the plan."""
    try:
        opened = open_checkpoint(staged.path)
    except CheckpointError as error:
        failure = f"{error.where}: {error.reason}" if error.where else error.reason
        return plan.converted(nbytes=0, verified=False, failures=(f"it can't be opened: {failure}",))
    with opened:
        found = mismatches(
            plan.content,
            opened,
            plan.writer,
            staged.written,
            jobs=jobs,
            advance=advance,
        )
        failures = tuple(found)
        safety = tuple(one for one in opened.safety if one.severity is not Severity.NOTE)
        if safety and plan.options.strict:
            first = safety[0]
            raise UsageError(
                f"{first.where or plan.target}: {first.message}{and_more(len(safety), 1)} (--strict)"
            )
        return plan.converted(nbytes=opened.nbytes, verified=not failures, failures=failures, safety=safety)


def _file_states(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of each file of a source, which change when it is written to."""
    marks = {}
    for entry in checkpoint.files:
        try:
            status = fs.stat(entry.path)
        except OSError as error:
            raise from_os_error(error, entry.path) from error
        marks[entry.path] = status.st_ino, status.st_size, status.st_mtime_ns
    return marks


def _require_sums(checkpoint: Checkpoint, read: Sequence[SummedTensor], jobs: int, advance: Advance) -> None:
    """Raise DamagedCheckpoint if bytes of the source don't have their recorded checksums.

    Tensors that were summed while they were read aren't read again.
    """
    known = {}
    for tensor, algorithm, checksum in read:
        # The checksum of elements is that of the stored bytes only if the tensor is the whole storage,
        # contiguous and little-endian.
        is_little = tensor.byteorder == "little" or tensor.dtype.word_bytes == 1
        if tensor.extent is not None and tensor.extent == tensor.storage and is_little:
            known[tensor.extent, algorithm] = checksum
    summed = (span for span in checkpoint.spans() if span.crc32 is not None)
    found: list[Finding] = []
    while batch := list(islice(summed, _AT_ONCE)):
        owns = [known.get((span.extent, span.algorithm)) for span in batch]
        scanned = [ScannedSpan(span, own) for span, own in zip(batch, owns, strict=True) if own is not None]
        spans = [span for span, own in zip(batch, owns, strict=True) if own is None]
        found += checksum_findings([*scanned, *scan(spans, jobs=jobs, values=False, advance=advance)])
    if found:
        first = found[0]
        raise DamagedCheckpoint(
            checkpoint.path, f"{first.message}{and_more(len(found), 1)}", where=first.where, code=first.code
        )

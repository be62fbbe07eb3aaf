"""Opens what a conversion wrote, and compares it with what was to be written, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.readable import reader_from
from ckpttool.core.report import Severity
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.core.values import Contiguous
from ckpttool.formats.content.tree import trees_equal, without_opaque
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.sidecar import training_document
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Content, Writer
from ckpttool.storage.scan import scan
from ckpttool.storage.sink import Written
from ckpttool.storage.work import Advance

_NONE = frozenset[str]()
_AT_ONCE = 1 << 12
"""How many tensors are read back at once: what is noted of each takes memory."""


def mismatches(
    content: Content,
    opened: Checkpoint,
    writer: Writer,
    written: Iterable[Written],
    *,
    jobs: int,
    advance: Advance,
) -> Iterator[str]:
    """Yield in what a target differs from the content that it was made of, a sentence each.

    Args:
        content: What was to be written.
        opened: What stands there.
        writer: What wrote it.
        written: Checksums of what was read while it was written; the other tensors are read once more.
        jobs: Number of threads.
        advance: Told the bytes that were read.
    """
    for finding in opened.findings:
        if finding.severity is Severity.ERROR:
            yield f"{finding.where or 'structure'}: {finding.message}"
    if not opened.complete:
        yield "it is not complete"
    found = {tensor.name: tensor for tensor in opened.tensors}
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in content.tensors:
        name = writer.reader_name(tensor)
        other = found.get(name)
        if other is None:
            yield f"{name} is missing"
        elif (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            stands, was = (f"{one.dtype} {list(one.shape)}" for one in (other, tensor))
            yield f"{name} is {stands} instead of {was}"
        elif tensor.shares_with is None:
            pairs.append((tensor, other))
    wanted = {writer.reader_name(tensor) for tensor in content.tensors}
    yield from (f"{name} is one too many" for name in found if name not in wanted)
    if len(found) < len(opened.tensors):
        yield f"{len(opened.tensors) - len(found):,} of its tensors have the name of another"
    yield from roundtrip_mismatches(content, opened, writer)
    yield from _differing_tensors(pairs, written, jobs, advance)


def _differing_tensors(
    pairs: Iterable[tuple[Tensor, Tensor]], written: Iterable[Written], jobs: int, advance: Advance
) -> Iterator[str]:
    """Yield which tensors hold other bytes than those that were to be written."""
    sums = {id(one.tensor): one for one in written}
    spans, others = [], []
    for tensor, found in pairs:
        own = sums.get(id(tensor))
        values = found.values
        if own is None or not isinstance(values, Contiguous) or values.swap != 1:
            others.append((tensor, found))
        else:
            spans.append((own, found, values))
    for at in range(0, len(spans), _AT_ONCE):
        batch = []
        for own, stands, values in spans[at : at + _AT_ONCE]:  # the bytes, with the checksum they should have
            extent = stands.extent or Extent(values.source.path, values.offset, values.nbytes)
            read = reader_from(values.source, values.offset)
            batch.append(Span(extent, own.tensor.name, read, own.elements_checksum, algorithm=own.algorithm))
        for one in scan(batch, jobs=jobs, values=False, advance=advance):
            if one.failure is not None:
                yield f"{one.span.where}: {one.failure.reason}"
            elif not one.matches:
                yield f"{one.span.where}: its values are others"
    if others:
        yield from _element_mismatches(others, jobs, advance)


def _element_mismatches(pairs: Sequence[tuple[Tensor, Tensor]], jobs: int, advance: Advance) -> Iterator[str]:
    """Yield which tensors hold other elements, by reading both sides."""
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
            yield f"{tensor.name}: its values are others"


def roundtrip_mismatches(content: Content, opened: Checkpoint, writer: Writer) -> Iterator[str]:
    """Yield what of a content a target lacks or says otherwise, elements aside, a sentence each.

    Args:
        content: What was to be written.
        opened: What stands there.
        writer: What wrote it.
    """
    for finding in opened.findings:
        if finding.code == "content-entry":
            yield finding.message
    found = {tensor.name: tensor for tensor in opened.tensors}
    pairs = [(one, found[name]) for one in content.tensors if (name := writer.reader_name(one)) in found]
    for tensor, other in pairs:
        if other.role is not tensor.role:
            yield f"{tensor.name} serves {other.role.value} instead of {tensor.role.value}"
        is_flat = len(tensor.path) == 1  # some formats take a name apart at its dots
        if other.name == tensor.name and other.path != tensor.path and not is_flat:
            yield f"{tensor.name} lies at {list(other.path)} instead of {list(tensor.path)}"
    yield from _tie_mismatches(pairs)
    if content.conventions:
        if opened.conventions != content.conventions:
            yield f"the layout is told to be that of {opened.conventions} instead of {content.conventions}"
        for tensor, other in pairs:
            if opened.layers.get(other.name) != content.layers.get(tensor.name):
                yield f"{tensor.name} is told to be of another type of layer"
    if content.tree is not None and not _trees_carry_the_same(content.tree, opened.tree):
        yield "what is not a tensor came back as something else"
    metadata = {key: value for key, value in content.metadata.items() if not _is_of_files(key, content)}
    yield from _lost_entries("metadata", metadata, opened.metadata, writer.own_metadata)
    dropped = writer.dropped_native(content)
    native = {key: part for key, part in content.native.items() if key not in dropped}
    yield from _lost_entries("native part", native, opened.native, writer.own_native)
    training = training_document(content.training)
    training.pop("origin", None)
    yield from _lost_entries("training state", training, training_document(opened.training), _NONE)


def _is_of_files(key: str, content: Content) -> bool:
    """Tell whether metadata describe the files of the source; what a user wrote into a header is text."""
    traits = traits_of(content.source_format)
    is_written = traits.holds_tensors_alone and isinstance(content.metadata[key], str)
    return key in traits.file_metadata and not is_written


def _tie_mismatches(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Yield which tensors are not tied to those that they were tied to; an empty one can't be told.

    Of two that a writer calls by one name, which are one in the target, the first counts.
    """
    there: dict[str, str] = {}
    back: dict[str, str] = {}
    once = {id(other): (tensor, other) for tensor, other in reversed(pairs)}
    for tensor, other in reversed(once.values()):
        if not tensor.nbytes:
            continue
        mine, theirs = tensor.shares_with or tensor.name, other.shares_with or other.name
        if there.setdefault(mine, theirs) != theirs:
            yield f"{tensor.name} isn't tied to {mine} any more"
        elif back.setdefault(theirs, mine) != mine:
            yield f"{tensor.name} is tied to {back[theirs]}, and was not"


def _lost_entries(
    what: str, entries: Mapping[str, object], found: Mapping[str, object], in_own_words: frozenset[str]
) -> Iterator[str]:
    """Yield what is not there, or is something else; what is said in own words only has to be there."""
    for key, value in entries.items():
        if key not in found:
            yield f"{what} {key!r} is missing"
        elif key not in in_own_words and not _plain_data_equal(value, found[key]):
            yield f"{what} {key!r} came back as something else"


def _plain_data_equal(value: object, other: object) -> bool:
    """Tell whether plain data are equal, to the last bit of a number, whatever they share."""
    if value is other or trees_equal(value, other):
        return True
    try:
        return json.dumps(value, default=repr) == json.dumps(other, default=repr)
    except (RecursionError, TypeError, ValueError):
        return False


def _trees_carry_the_same(tree: object, other: object) -> bool:
    """Tell whether two trees carry the same; what differs in its nodes may still be carried the same."""
    return trees_equal(tree, other) or _text(without_opaque(tree)) == _text(without_opaque(other))


def _text(tree: object) -> str:
    """Return a tree as text, in which 1, 1.0 and True are three things, and +0 and -0 two."""
    return json.dumps(encode_tree(tree))

"""The same tensors in another format: planned without reading a value, written, compared, put in place."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpttool.checkpoint import Checkpoint, Tensor
from ckpttool.errors import DamagedCheckpoint, UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.discovery import discover, unit_at
from ckpttool.formats.objects import dropped as dropped_of
from ckpttool.ops.conversion import Converted, ConvertWishes, Dropped
from ckpttool.ops.placing import check_place, check_space, format_for, told
from ckpttool.ops.scanned import checksum_findings
from ckpttool.ops.written import mismatches
from ckpttool.report import Severity
from ckpttool.wire.scan import Scanned, scan
from ckpttool.wire.sink import Written
from ckpttool.wire.staged import Staged
from ckpttool.work import Advance, default_jobs
from ckpttool.writing import writer_of
from ckpttool.writing.content import Content
from ckpttool.writing.interface import WriteOptions, Writer

_AS_IT_IS = ConvertWishes()
_ARCHITECTURE = "keras.config"
_PROGRAMS = {
    "savedmodel": ("saved_model.pb", "the graph, its functions and signatures"),
    "torchscript": ("code", "the program"),
    "torch-export": ("models", "the program"),
    "paddle inference": ("program", "what is computed"),
    "paddle training": ("program", "what is computed"),
    "fluid inference": ("program", "what is computed"),
}
"""What computes with the tensors, by format or variant: no other format could run it."""
_SHOWN = 3
"""How many of the tensors that can't be held are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A conversion that can be carried out: all that can be known without reading a value is known to fit.

    Attributes:
        source: What is read.
        content: What will be written.
        target: Where it will stand.
        replaces: Names beside it that give way; None where nothing stands there.
        dropped: What of the source the target won't hold.
        notes: What is done that the wishes don't say word by word.
        sources: Paths of what it is made of, where that is not the source's alone.
    """

    source: Checkpoint
    content: Content
    writer: Writer
    options: WriteOptions
    target: str
    replaces: Sequence[str] | None
    wishes: ConvertWishes
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...] = ()

    @property
    def work(self) -> int:
        """Return about how many bytes carrying it out reads: to write, and to compare."""
        return 2 * self.content.nbytes

    def converted(self, *, nbytes: int, verified: bool, failures: tuple[str, ...] = ()) -> Converted:
        """Return what came of it."""
        return Converted(
            sources=self.sources or (self.source.path,),
            target=self.target,
            format=self.writer.name,
            tensors=len(self.content.tensors),
            nbytes=nbytes,
            verified=verified,
            dry_run=self.wishes.dry_run,
            dropped=self.dropped,
            notes=self.notes,
            mismatches=failures,
        )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    wishes: ConvertWishes = _AS_IT_IS,
    *,
    advance: Advance = lambda nbytes: None,
) -> Converted:
    """Write the content of a checkpoint in another format, in constant memory, and compare it.

    The target appears whole or not at all.

    Raises:
        CheckpointError: The source can't be opened or is damaged, or the target can't be written.
        UsageError: The wishes can't be followed, or the target can't hold what the source has.
    """
    with open_checkpoint(source) as checkpoint, model_of(wishes) as model:
        return carry_out(plan(checkpoint, os.fspath(target), wishes, model), advance=advance)


@contextmanager
def model_of(wishes: ConvertWishes) -> Iterator[Checkpoint | None]:
    """Open the checkpoint that the target is to follow, as long as the context lasts; None: there is none.

    Raises:
        CheckpointError: It can't be opened, or is damaged.
    """
    if wishes.model is None:
        yield None
        return
    with open_checkpoint(wishes.model) as model:
        _require_intact(model)
        yield model


def plan(checkpoint: Checkpoint, target: str, wishes: ConvertWishes, model: Checkpoint | None = None) -> Plan:
    """Return how an open checkpoint would be converted; no value is read, and nothing is written.

    Args:
        checkpoint: The source.
        target: Where the result is to stand.
        wishes: How it is to be converted.
        model: The checkpoint that the wishes name, open.

    Raises:
        CheckpointError: It is damaged, or the target can't be written there.
        UsageError: The wishes can't be followed, or the target can't hold what the source has.
    """
    _require_intact(checkpoint)
    content, notes = _content(checkpoint, wishes, model)
    name = format_for(target, wishes, has_architecture=_ARCHITECTURE in content.native)
    writer = writer_of(name)
    if writer.shape == "prefix" and target.endswith(".index"):
        target = target.removesuffix(".index")
    if wishes.shard_size is not None and not writer.takes_shards:
        raise UsageError(f"--shard-size: {name} is written as one whole")
    options = WriteOptions(shard_size=wishes.shard_size, name=os.path.basename(target.rstrip(os.sep)))
    _require_holdable(content, writer, options)
    gone = [Dropped(path, why) for path, why in _dropped(checkpoint, content, writer, options)]
    if gone and wishes.strict:
        raise UsageError(f"{gone[0].path} can't be carried: {gone[0].why}{_more(len(gone), 1)} (--strict)")
    replaces = check_place(target, [checkpoint, *([model] if model is not None else [])], wishes)
    check_space(target, content.nbytes)
    return Plan(
        source=checkpoint,
        content=content,
        writer=writer,
        options=options,
        target=target,
        replaces=replaces,
        wishes=wishes,
        dropped=tuple(gone),
        notes=tuple(notes),
    )


def carry_out(plan: Plan, *, advance: Advance = lambda nbytes: None) -> Converted:
    """Write what was planned, compare it with the source, and put it in place; see ``convert``."""
    if plan.wishes.dry_run:
        return plan.converted(nbytes=plan.content.nbytes, verified=False)
    jobs = plan.wishes.jobs or default_jobs()
    shape = "directory" if plan.options.shard_size is not None else plan.writer.shape
    try:
        with Staged(plan.target, shape, replaces=plan.replaces, jobs=jobs, advance=advance) as staged:
            plan.writer.write(plan.content, staged, plan.options)
            staged.settle()
            with open_checkpoint(_whole_at(staged.path)) as opened:
                nbytes = opened.nbytes
                failures = tuple(
                    mismatches(plan.content, opened, plan.writer, staged.written, jobs=jobs, advance=advance)
                )
            _require_sums(plan.source, staged.written, jobs, advance)
            if not failures:
                staged.commit()
    except OSError as error:
        raise told(error, plan.target) from error
    return plan.converted(nbytes=nbytes, verified=not failures, failures=failures)


def _whole_at(path: str) -> str:
    """Return the path of the one checkpoint at a path: itself, or what lies in it (a Fluid root's serial)."""
    if not os.path.isdir(path) or unit_at(path) is not None:
        return path
    found = [unit.path for unit in discover(path)]
    return found[0] if len(found) == 1 else path


# The source -------------------------------------------------------------------------------------------


def _require_intact(checkpoint: Checkpoint) -> None:
    """Require that nothing is wrong with the structure of a source, and nothing missing.

    Raises:
        DamagedCheckpoint: Something is.
    """
    for finding in checkpoint.findings:
        if finding.severity is Severity.ERROR:
            raise DamagedCheckpoint(checkpoint.path, finding.message, where=finding.where, code=finding.code)
    if not checkpoint.complete:
        raise DamagedCheckpoint(checkpoint.path, "it is not complete", code="incomplete")


def _require_sums(checkpoint: Checkpoint, written: Sequence[Written], jobs: int, advance: Advance) -> None:
    """Require that all bytes have the checksums that the source states for them.

    What was summed while it was written isn't read again.

    Raises:
        DamagedCheckpoint: Some have others.
    """
    known = {(one.tensor.extent, one.algorithm): one.own for one in written if _is_whole_storage(one.tensor)}
    scanned, spans = [], []
    for span in checkpoint.spans():
        own = known.get((span.extent, span.algorithm))
        if span.crc32 is not None and own is not None:
            scanned.append(Scanned(span, own))
        elif span.crc32 is not None:
            spans.append(span)
    scanned += scan(spans, jobs=jobs, values=False, advance=advance)
    found = checksum_findings(scanned)
    if found:
        first = found[0]
        raise DamagedCheckpoint(
            checkpoint.path, f"{first.message}{_more(len(found), 1)}", where=first.where, code=first.code
        )


def _is_whole_storage(tensor: Tensor) -> bool:
    """Tell whether a tensor is all of the bytes that it lies in, in their own order."""
    is_little = tensor.byteorder == "little" or tensor.dtype.word_bytes == 1
    return tensor.extent is not None and tensor.extent == tensor.storage and is_little


# What is taken, and how -------------------------------------------------------------------------------


def _content(
    checkpoint: Checkpoint, wishes: ConvertWishes, model: Checkpoint | None
) -> tuple[Content, list[str]]:
    """Return what is to be written, and notes on how it came about.

    Raises:
        UsageError: The wishes can't be followed.
        CheckpointError: The map file can't be read.
    """
    content = content_of(checkpoint)
    notes: list[str] = []
    for step in _steps(checkpoint, wishes, model):
        content, told = step(content)
        notes += told
    if not content.tensors and checkpoint.tensors:
        raise UsageError(f"{checkpoint.path}: no tensor is left to write")
    return content, notes


Step = Callable[[Content], tuple[Content, Sequence[str]]]
"""What brings content into another form, and says what it did that nobody asked for word by word."""


def _steps(checkpoint: Checkpoint, wishes: ConvertWishes, model: Checkpoint | None) -> Iterator[Step]:
    """Yield what the wishes come to; each module is imported where it is wished for."""
    if wishes.only == "weights":
        from ckpttool.converting.selecting import only_weights

        yield lambda content: only_weights(content, checkpoint)
    if wishes.mapping is not None:
        from ckpttool.converting.renaming import renamed
        from ckpttool.pairing.mapping import read_map

        told = read_map(wishes.mapping)
        yield lambda content: renamed(content, told)
    if wishes.layout != "as-is":
        from ckpttool.converting.laying_out import laid_out

        layout = wishes.layout
        yield lambda content: laid_out(content, checkpoint, layout)
    if model is not None:
        from ckpttool.converting.following import following

        yield lambda content: following(content, checkpoint, model)
    if wishes.dtype is not None:
        from ckpttool.converting.casting import cast

        dtype = wishes.dtype
        yield lambda content: cast(content, dtype)


def content_of(checkpoint: Checkpoint) -> Content:
    """Return all that a checkpoint holds, as it is.

    Raises:
        UsageError: Two tensors have one name, or one has no values.
    """
    twice = [name for name, times in Counter(one.name for one in checkpoint.tensors).items() if times > 1]
    if twice:
        raise UsageError(f"{checkpoint.path}: {len(twice):,} names are two tensors', like {twice[0]!r}")
    bare = [one.name for one in checkpoint.tensors if one.values is None]
    if bare:
        raise UsageError(f"{checkpoint.path}[{bare[0]}]: it has no values{_more(len(bare), 1)}")
    tree = checkpoint.tree
    return Content(
        tensors=checkpoint.tensors,
        tree=tree,
        metadata={} if tree is not None else checkpoint.metadata,
        native=checkpoint.native,
        source_format=checkpoint.format,
        training=checkpoint.training,
    )


def _require_holdable(content: Content, writer: Writer, options: WriteOptions) -> None:
    """Require that a format can hold the content.

    Raises:
        UsageError: It can't.
    """
    strange = [tensor for tensor in content.tensors if tensor.dtype.name not in writer.dtypes]
    if strange:
        raise UsageError(_no_type(strange, writer))
    refusals = [*writer.refusals(content, options)]
    if refusals:
        raise UsageError(f"{refusals[0]}{_more(len(refusals), 1)}")


def _no_type(strange: Sequence[Tensor], writer: Writer) -> str:
    names = ", ".join(tensor.name for tensor in strange[:_SHOWN]) + _more(len(strange), _SHOWN)
    types = " or ".join(sorted({tensor.dtype.name for tensor in strange}))
    is_float = all(tensor.dtype.kind == "float" for tensor in strange)
    way = " (--dtype float32 converts them)" if is_float else ""
    return f"{writer.name} has no {types}: {names}{way}"


def _more(count: int, shown: int) -> str:
    return f" (and {count - shown:,} more)" if count > shown else ""


def _dropped(
    checkpoint: Checkpoint, content: Content, writer: Writer, options: WriteOptions
) -> Iterator[tuple[str, str]]:
    """Yield what of the source the target won't hold: its path, and why."""
    program = _PROGRAMS.get(checkpoint.format) or _PROGRAMS.get(f"{checkpoint.format} {checkpoint.variant}")
    if program is not None:
        yield program
    if content.tree is not None:
        yield from dropped_of(content.tree)
    yield from writer.dropped(content, options)

"""Plans a conversion before any value is read: content, losses and refusals."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint, UsageError
from ckpttool.core.report import Finding, Problem, Severity
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.core.values import Strided, strided_length
from ckpttool.formats import open_checkpoint
from ckpttool.formats.content.tree import opaque_nodes
from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.formats.keras.native import ASSET
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Content, WriteOptions, Writer, writer_of
from ckpttool.ops.conversion import Converted, ConvertOptions
from ckpttool.ops.target_path import check_space, check_target, target_format
from ckpttool.storage.sink import Algorithm

_ARCHITECTURE = "keras.config"
_SHOWN, _NAMED = 3, 8
"""Limits on the names in a message: of tensors that can't be held, of classes that a loader must allow."""
_NOT_READ = frozenset(
    {
        "bytes-unused",
        "content-entry",
        "hdf5-soft-link",
        "layout-not-read",
        "metadata-duplicate-key",
        "more-pickles",
        "not-part",
        "part-not-checked",
        "part-unrecognised",
        "trailing-bytes",
        "unknown-field",
        "unused-storage",
        "weights-not-read",
    }
)
"""Warnings that a part of the source wasn't read."""


SummedTensor = tuple[Tensor, Algorithm, int | None]
"""A tensor of a source, and the checksum of its bytes, computed while they were read."""

_BRACKETED = re.compile(r"(?<![^.])\[+([^\[\]]*)\]+(?![^.])")
"""A key with brackets that distinguish it from others; see ``content.tree``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """A conversion that passed all checks that need no values.

    Attributes:
        source: The checkpoint to read.
        writer: Writer of the target's format.
        content: Content to write.
        target: Path to write to.
        replaces: Names in its directory that are replaced; None if there are none.
        dropped: Content of the source that the target won't have.
        notes: Sentences on steps that the options don't request explicitly.
        sources: Paths of the sources, if there are several.
        shares: Weight of each source, for an average.
        summed: Tensors that were read to compute others; filled as they are read.
    """

    source: Checkpoint
    content: Content
    writer: Writer
    write_options: WriteOptions
    target: str
    replaces: Sequence[str] | None
    options: ConvertOptions
    dropped: tuple[Problem, ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    summed: Sequence[SummedTensor] = ()

    @property
    def work(self) -> int:
        """Return an estimate of the bytes read to write and to compare."""
        return 2 * self.content.nbytes

    def converted(
        self,
        *,
        nbytes: int,
        verified: bool,
        failures: tuple[str, ...] = (),
        safety: tuple[Finding, ...] = (),
    ) -> Converted:
        """Return the result of the conversion."""
        return Converted(
            sources=self.sources or (self.source.path,),
            target=self.target,
            format=self.writer.name,
            tensors=len(self.content.tensors),
            nbytes=nbytes,
            verified=verified,
            dry_run=self.options.dry_run,
            shares=self.shares,
            dropped=self.dropped,
            notes=self.notes,
            mismatches=failures,
            safety=safety,
        )


@contextmanager
def model_of(options: ConvertOptions) -> Iterator[Checkpoint | None]:
    """Open the checkpoint whose names and layout the target takes, for the context; None without one."""
    if options.model is None:
        yield None
        return
    with open_checkpoint(options.model) as model:
        require_intact(model)
        yield model


def plan_conversion(
    checkpoint: Checkpoint,
    target: str,
    options: ConvertOptions,
    model: Checkpoint | None = None,
    *,
    sources: Sequence[str] = (),
) -> ConversionPlan:
    """Return how an open checkpoint would be converted; no value is read, and nothing is written.

    Args:
        checkpoint: The source.
        target: Path of the result.
        options: Options of the conversion.
        model: The checkpoint that the options name, open.
        sources: Paths of the sources, if there are several.
    """
    require_intact(checkpoint)
    content = content_of(checkpoint)
    notes: list[str] = []
    for step in _content_steps(checkpoint, options, model):
        content, step_notes = step(content)
        notes += step_notes
    if not content.tensors and checkpoint.tensors:
        raise UsageError(f"{checkpoint.path}: no tensors left to write")
    name = target_format(target, options, has_architecture=_ARCHITECTURE in content.native)
    writer = writer_of(name)
    if writer.shape == "prefix" and target.endswith(".index"):
        target = target.removesuffix(".index")
    if options.shard_size is not None and not writer.takes_shards:
        raise UsageError(f"--shard-size: {name} can't be sharded")
    # Conventions are recorded only if they don't follow from the target's format. A map that changes layouts
    # leaves tensors in a layout that only its author knows, so none is recorded.
    is_family = traits_of(content.conventions).family == traits_of(writer.name).family and not content.layers
    if content.conventions == writer.name or is_family or "layout" in content.mapped.values():
        content = replace(content, conventions="", layers={})
    write_options = WriteOptions(shard_size=options.shard_size, name=os.path.basename(target.rstrip(os.sep)))
    require_holdable(content, writer, write_options)
    dropped = [*conversion_losses(checkpoint, content)]
    if dropped and options.strict:
        first = dropped[0]
        raise UsageError(
            f"{first.path} can't be preserved: {first.why}{and_more(len(dropped), 1)} (--strict)"
        )
    trust: list[str] = []
    if unsafe := writer.unsafe_globals(content, write_options):
        shown = ", ".join(unsafe[:_NAMED]) + and_more(len(unsafe), _NAMED)
        trust = [f"torch.load needs weights_only=False, or these safe globals: {shown}"]
        if options.strict:
            raise UsageError(f"{target}: {trust[0]} (--strict)")
    opened = [checkpoint, *([model] if model is not None else [])]
    replaces = check_target(target, opened, options, is_prefix=writer.shape == "prefix", also=sources)
    check_space(target, content.nbytes)
    sidecars = [name for name in replaces or () if name.endswith(MANIFEST_SUFFIXES)]
    stale = [f"{name} describes the replaced checkpoint, and is removed with it" for name in sidecars]
    return ConversionPlan(
        source=checkpoint,
        content=content,
        writer=writer,
        write_options=write_options,
        target=target,
        replaces=replaces,
        options=options,
        dropped=tuple(dropped),
        notes=(*notes, *_bracket_notes(content), *_split_view_notes(content.tensors), *trust, *stale),
        sources=tuple(sources),
    )


def _bracket_notes(content: Content) -> Iterator[str]:
    """Yield a note on names with brackets that no framework looks for, if the source has no tree."""
    if content.tree is not None:
        return
    plain = {tensor.name: _BRACKETED.sub(r"\1", tensor.name) for tensor in content.tensors}
    counts = Counter(plain.values())
    names = [name for name, bare in plain.items() if name != bare and counts[bare] > 1]
    if names:
        shown = ", ".join(names[:_SHOWN]) + and_more(len(names), _SHOWN)
        yield f"brackets distinguish names that would be equal; no framework looks for these names: {shown}"


def _split_view_notes(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield a note on overlapping views of one storage that become separate tensors; ties aren't such."""
    views = defaultdict(list)
    for tensor in tensors:
        if tensor.storage is not None and tensor.shares_with is None and tensor.nbytes:
            views[tensor.storage].append(tensor)
    count = sum(_count_overlaps(alike) for alike in views.values() if len(alike) > 1)
    if count:
        yield f"{counted(count, 'tensor')} overlapped in storage; each is stored separately now"


def _count_overlaps(views: Sequence[Tensor]) -> int:
    """Return the number of views of one storage that overlap another, by their positions."""
    reaches = []
    for at, view in enumerate(views):
        start, nbytes = 0, 0
        if view.extent is not None:
            start, nbytes = view.extent.offset, view.extent.nbytes
        elif isinstance(values := view.values, Strided):  # the bytes between, too
            start, nbytes = values.offset, strided_length(values.shape, values.strides) * values.itemsize
        elif view.storage is not None:
            start, nbytes = view.storage.offset, view.storage.nbytes
        reaches.append((start, start + nbytes, at))
    # In the order of their starts, a view overlaps if it starts before the largest end so far; then the view
    # with that end overlaps, too.
    overlapping, last, widest = set(), -1, -1
    for start, end, at in sorted(reaches):
        if start < last:
            overlapping |= {at, widest}
        if end > last:
            last, widest = end, at
    return len(overlapping)


# The source -------------------------------------------------------------------------------------------


MIXED_SAVES = frozenset({"shard-total-size"})
"""Warnings that forbid a conversion: a part of a set may be from another save, which a reader tolerates."""


def require_intact(checkpoint: Checkpoint) -> None:
    """Raise DamagedCheckpoint if a source has an error in its structure, or isn't complete."""
    for finding in checkpoint.findings:
        if finding.severity is Severity.ERROR or finding.code in MIXED_SAVES:
            raise DamagedCheckpoint(checkpoint.path, finding.message, where=finding.where, code=finding.code)
    if not checkpoint.complete:
        raise DamagedCheckpoint(checkpoint.path, "it is incomplete", code="incomplete")


# Content ----------------------------------------------------------------------------------------------


ContentStep = Callable[[Content], tuple[Content, Sequence[str]]]
"""Step that changes content to the requested form, with notes on changes that no option requests."""


def _content_steps(
    checkpoint: Checkpoint, options: ConvertOptions, model: Checkpoint | None
) -> Iterator[ContentStep]:
    """Yield the steps of the options; a module is imported only if its step is needed."""
    # Each step sees the names and layouts of the ones before: a map is written for the names of the selected
    # weights, a layout or a template decides on the mapped ones. Conventions are stated in between, as layout
    # and template need to know what they start from. Types come last, since they change no name or shape.
    if options.only == "weights":
        from ckpttool.weights.converting.weight_selection import only_weights

        yield lambda content: only_weights(content, checkpoint)
    if options.mapping is not None:
        from ckpttool.weights.converting.map_edits import rename_by_map
        from ckpttool.weights.pairing.map_file import read_map

        tensor_map = read_map(options.mapping)
        yield lambda content: rename_by_map(content, tensor_map)
    from ckpttool.weights.converting.content_view import state_conventions

    yield lambda content: (state_conventions(content, checkpoint), ())
    if options.layout != "as-is":
        from ckpttool.weights.converting.framework_layout import to_layout

        layout = options.layout
        yield lambda content: to_layout(content, checkpoint, layout)
    if model is not None:
        from ckpttool.weights.converting.template_model import follow_template

        yield lambda content: follow_template(content, checkpoint, model, by_order=options.by_order)
    if options.dtype is not None:
        from ckpttool.weights.converting.dtype_cast import cast

        dtype = options.dtype
        yield lambda content: cast(content, dtype)


def content_of(checkpoint: Checkpoint) -> Content:
    """Return the whole content of a checkpoint, unchanged."""
    twice = [name for name, times in Counter(one.name for one in checkpoint.tensors).items() if times > 1]
    if twice:
        names = ", ".join(map(repr, twice[:_SHOWN])) + and_more(len(twice), _SHOWN)
        raise UsageError(f"{checkpoint.path}: {counted(len(twice), 'duplicate tensor name')}: {names}")
    bare = [one.name for one in checkpoint.tensors if one.values is None]
    if bare:
        raise UsageError(f"{checkpoint.path}[{bare[0]}]: it has no values{and_more(len(bare), 1)}")
    for one in checkpoint.tensors:
        if one.shard is not None and not one.shard.is_whole:
            found = f"{list(one.shape)} of {list(one.shard.shape)}: only one rank's part"
            raise UsageError(
                f"{checkpoint.path}[{one.name}]: {found}; give the files of all ranks, or their directory"
            )
    tree = checkpoint.tree
    return Content(
        tensors=checkpoint.tensors,
        tree=tree,
        metadata={} if tree is not None else checkpoint.metadata,
        native=checkpoint.native,
        source_format=checkpoint.format,
        training=checkpoint.training,
    )


def require_holdable(content: Content, writer: Writer, options: WriteOptions) -> None:
    """Raise UsageError if a format can't hold the content."""
    if any(ENTRY in (tensor.name, tensor.key) for tensor in content.tensors):
        raise UsageError(f"{ENTRY}: this name is reserved (rename the tensor with --map)")
    strange = [tensor for tensor in content.tensors if tensor.dtype.name not in writer.dtypes]
    if strange:
        names = ", ".join(tensor.name for tensor in strange[:_SHOWN]) + and_more(len(strange), _SHOWN)
        types = " or ".join(sorted({tensor.dtype.name for tensor in strange}))
        is_float = all(tensor.dtype.kind == "float" for tensor in strange)
        way = " (--dtype float32 converts them)" if is_float else ""
        raise UsageError(f"{writer.name} doesn't support {types}: {names}{way}")
    refusals = [*writer.refusals(content, options)]
    if refusals:
        raise UsageError(f"{refusals[0]}{and_more(len(refusals), 1)}")


# Losses -----------------------------------------------------------------------------------------------


def conversion_losses(checkpoint: Checkpoint, content: Content) -> Iterator[Problem]:
    """Yield the parts of a source that are not in its content, or that no format could hold."""
    traits = traits_of(checkpoint.format)
    # A model's program is never carried over. A graph of variables alone is no loss: the object graph has
    # them.
    program = traits.program_in(checkpoint.variant)
    if program is not None and not (traits.has_object_graph and _is_of_variables(checkpoint, program.key)):
        yield Problem(program.path, program.content)
    for key in traits.unread_files:
        files = checkpoint.metadata.get(key)
        for name in files if isinstance(files, Mapping) else ():
            if ASSET + name not in content.native:
                yield Problem(name, "a separate file; only its size and checksum are known")
    for finding in checkpoint.findings:
        if finding.severity is Severity.WARNING and finding.code in _NOT_READ:
            path = ENTRY if finding.code == "content-entry" else finding.where or finding.code
            yield Problem(path, str(finding.message))
    if content.tree is not None:
        yield from (Problem(*one) for one in opaque_nodes(content.tree))


def _is_of_variables(checkpoint: Checkpoint, key: str) -> bool:
    """Return whether all graphs of a checkpoint have only variables: no nodes, functions or signatures."""
    graphs = checkpoint.metadata.get(key)
    if not isinstance(graphs, Mapping):
        return True
    counts = (graph.values() if isinstance(graph, Mapping) else ("unknown",) for graph in graphs.values())
    return not any(value and not str(value).startswith("<0 ") for value in chain.from_iterable(counts))


def and_more(count: int, shown: int) -> str:
    """Return the number of items that aren't shown as text; empty if all are."""
    return f" (and {count - shown:,} more)" if count > shown else ""

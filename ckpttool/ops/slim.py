"""Slims a checkpoint: removes its training state, keeping format and name.

A new file is written next to the old one, opened again and compared; the caller's ``place`` replaces the old
one. A directory loses the files that have only training state; the rest is opened first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, UsageError, from_os_error
from ckpttool.core.report import Severity
from ckpttool.core.tensor import Span
from ckpttool.formats import open_checkpoint
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Rewritten, Trim, WriteOptions, writer_of
from ckpttool.ops.conversion import Converted, ConvertOptions
from ckpttool.ops.conversion_plan import (
    ConversionPlan,
    content_of,
    conversion_losses,
    require_holdable,
    require_intact,
)
from ckpttool.ops.convert import carry_out
from ckpttool.ops.manifest import has_digests, manifests_of
from ckpttool.ops.scan_findings import checksum_findings
from ckpttool.ops.target_path import check_space
from ckpttool.storage import fs
from ckpttool.storage.scan import scan
from ckpttool.storage.work import Advance, Progress, default_jobs, no_advance, no_progress
from ckpttool.transaction.staged_output import StagedOutput
from ckpttool.weights.converting.content_view import state_conventions
from ckpttool.weights.converting.training_state import (
    is_state_tensor,
    training_state_paths,
    without_training_state,
)


class NotSlim(Exception):
    """A checkpoint can't be slimmed; the message is the reason."""


def plan_slim_file(
    checkpoint: Checkpoint, dtype: str | None = None, jobs: int | None = None
) -> ConversionPlan:
    """Return the plan of a file without its training state; no value is read.

    Args:
        checkpoint: The file, open.
        dtype: Type that floating weights are converted to; None keeps theirs.
        jobs: Number of threads.

    Raises:
        NotSlim: The rest can't be written again unchanged.
    """
    traits = traits_of(checkpoint.format)
    if not traits.writer or checkpoint.variant not in traits.rewritten:
        kind = " ".join(filter(None, (traits.title or checkpoint.format, checkpoint.variant)))
        raise NotSlim(f"{kind} can't be rewritten in its own form")
    try:
        require_intact(checkpoint)
        whole = state_conventions(content_of(checkpoint), checkpoint)
        lost = next(conversion_losses(checkpoint, whole), None)
        if lost is not None:
            raise NotSlim(f"{lost.path} can't be rewritten: {lost.why}")
        content = without_training_state(whole)
        rest = next(filter(is_state_tensor, content.tensors), None)
        if rest is not None:
            raise NotSlim(f"{rest.name} isn't proven to be only training state")
        if dtype is not None:
            from ckpttool.weights.converting.dtype_cast import cast

            content, _ = cast(content, dtype)
        writer, options = writer_of(checkpoint.format), WriteOptions(name=os.path.basename(checkpoint.path))
        require_holdable(content, writer, options)
    except (CheckpointError, UsageError) as error:
        raise NotSlim(str(error).removeprefix(f"{checkpoint.path}: ")) from error
    return ConversionPlan(
        source=checkpoint,
        content=content,
        writer=writer,
        write_options=options,
        target=checkpoint.path,
        replaces=None,
        options=ConvertOptions(jobs=jobs),
        dropped=(),
        notes=(),
    )


def write_slim_file(
    plan: ConversionPlan, place: Callable[[StagedOutput], None], advance: Advance = no_advance
) -> Converted:
    """Write a slim file next to the old one, compare them, and have the new one placed.

    Raises:
        NotSlim: It differs, or isn't smaller.
        CheckpointError: The old one is damaged, or the new one can't be written.
    """
    check_space(plan.target, plan.content.nbytes)

    def place_smaller(staged: StagedOutput) -> None:
        if fs.getsize(staged.path) >= plan.source.nbytes:
            raise NotSlim("it wouldn't be smaller")
        place(staged)

    written = carry_out(plan, advance=advance, place=place_smaller)
    if not written.verified:
        raise NotSlim(f"the written file differs: {written.mismatches[0]}")
    return written


def plan_trim(checkpoint: Checkpoint) -> Trim:
    """Return the plan of a directory without its training state; no value is read.

    Raises:
        NotSlim: Its files can't be written without these entries, or no entry is proven to be training state.
    """
    trim = None
    try:
        require_intact(checkpoint)
        if traits_of(checkpoint.format).writer:
            gone = training_state_paths(content_of(checkpoint))
            trim = writer_of(checkpoint.format).trim(checkpoint.path, gone)
    except (CheckpointError, UsageError) as error:
        raise NotSlim(str(error).removeprefix(checkpoint.path).removeprefix(": ")) from error
    if trim is None:
        raise NotSlim("its training state isn't in separate files")
    if not trim.lost:
        rest = next(filter(is_state_tensor, checkpoint.tensors))
        raise NotSlim(f"{rest.name} isn't proven to be only training state")
    return trim


def write_trimmed(
    path: str,
    place: Callable[[StagedOutput, Rewritten], None],
    jobs: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write the files of a directory that change when it loses its training state, and have them placed.

    Args:
        path: The directory.
        place: Moves the written files, which were compared, into place.
        jobs: Number of threads.
        progress: Progress of reading.

    Raises:
        NotSlim: The result would have other weights, or wouldn't be smaller.
        CheckpointError: It is damaged, or the new files can't be written.
    """
    # The new files are written into a stage, where hard links to the unchanged files complete the directory.
    # So it is opened, compared and checked like any checkpoint before the caller moves the new files into
    # place.
    with open_checkpoint(path) as whole:
        trim = plan_trim(whole)
        stays = [os.path.relpath(entry.path, path) for entry in whole.files]
        check_space(path, sum(tensor.nbytes for tensor in whole.tensors if not is_state_tensor(tensor)))
        try:
            with (
                progress(os.path.basename(path), 2 * whole.nbytes) as advance,
                StagedOutput(path, "directory") as staged,
            ):
                new = trim.write(staged, advance)
                staged.settle()
                staged.link_in(path, [name for name in stays if name not in new.replaced])
                with open_checkpoint(staged.path) as rest:
                    _require_same(whole, rest)
                    _require_sums(new.spans, rest, jobs or default_jobs(), advance)
                if _nbytes_of(staged.path, new.files.values()) >= _nbytes_of(path, new.replaced):
                    raise NotSlim("it wouldn't be smaller")
                staged.require_in_place()
                place(staged, new)
        except OSError as error:
            raise from_os_error(error, path) from error


def _nbytes_of(directory: str, names: Iterable[str]) -> int:
    return sum(fs.getsize(os.path.join(directory, name)) for name in names)


def _require_sums(copied: Sequence[Span], rest: Checkpoint, jobs: int, advance: Advance) -> None:
    """Raise NotSlim if copied data can't be read back, or the rest doesn't have its recorded checksums."""
    for one in scan(copied, jobs=jobs, values=False, advance=advance):
        if one.failure is not None or not one.matches:
            raise NotSlim(f"{one.span.where} differs when read back")
    scanned = scan(rest.spans(), jobs=jobs, values=False, advance=advance)
    for finding in checksum_findings(scanned):
        raise NotSlim(f"{finding.where}: {finding.message}")


def require_slim_directory(path: str, without: Sequence[str]) -> None:
    """Raise NotSlim unless a directory without some files is an intact checkpoint with the same weights.

    Args:
        path: The directory.
        without: The paths of the files, relative to it.
    """
    with open_checkpoint(path) as whole:
        stays = [os.path.relpath(entry.path, path) for entry in whole.files]
        kept = [name for name in stays if name not in without]
        try:
            with StagedOutput(path, "directory") as staged:
                staged.link_in(path, kept)
                with open_checkpoint(staged.path) as rest:
                    _require_same(whole, rest)
        except OSError as error:
            raise from_os_error(error, path) from error


def _require_same(whole: Checkpoint, rest: Checkpoint) -> None:
    # A directory without some of its files is simulated in a stage with hard links to the others, and opened
    # like any checkpoint. All commands must see the same: format, completeness, tensors, and the facts that
    # order a series, which may be recorded in the training state alone.
    if (whole.format, whole.variant) != (rest.format, rest.variant):
        raise NotSlim(f"without its training state it would be {rest.format}, not {whole.format}")
    faults = [one.message for one in rest.findings if one.severity is Severity.ERROR]
    if faults or not rest.complete:
        raise NotSlim(
            f"without its training state it would be incomplete: {(*faults, 'a part is missing')[0]}"
        )
    shapes = [
        [(one.shape, one.dtype) for one in of.tensors if not is_state_tensor(one)] for of in (whole, rest)
    ]
    if shapes[0] != shapes[1]:
        raise NotSlim("files of its training state also hold other content")
    for name in ("epoch", "step", "loss", "metrics", "saved_at"):
        if getattr(whole.training, name) != getattr(rest.training, name):
            raise NotSlim(f"only its training state records its {name}")


def manifest_of(checkpoint: Checkpoint) -> str | None:
    """Return the name of a manifest or of digests of the checkpoint's current files.

    Raises:
        CheckpointError: One can't be read.
    """
    for manifest in manifests_of(checkpoint):
        return os.path.basename(manifest.path)
    return "its digests" if has_digests(checkpoint) else None

"""The card of a checkpoint: what it is, what was measured, what people say of it, and how to load it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.result import Result
from ckpttool.formats import open_checkpoint
from ckpttool.formats.traits import traits_of
from ckpttool.io import fs
from ckpttool.io.work import Advance, default_jobs, no_advance
from ckpttool.ops.digests import digest_of_list, sha256_of_files
from ckpttool.ops.inspect import Inspection, inspection
from ckpttool.ops.verdict import Verification
from ckpttool.runs.members.run_directories import Parameters, flatten
from ckpttool.runs.pointers.pins import remark_on
from ckpttool.runs.pointers.remarks import Remark
from ckpttool.transaction.paths import bare


@dataclass(frozen=True, slots=True)
class CardFile:
    """A file of a checkpoint: its path below the checkpoint's directory, its bytes, and its SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, repr=False)
class Card(Result):
    """What a card says; what isn't known doesn't appear in it.

    Attributes:
        name: The checkpoint's own name.
        inspection: What it is.
        files: Its files, with their digests.
        hyper_parameters: What its training was started with, nested names with dots.
        remark: What people say of it.
        verification: What ``verify`` found; None: it was not asked.
    """

    name: str
    inspection: Inspection
    files: tuple[CardFile, ...]
    hyper_parameters: Parameters = field(default_factory=dict)
    remark: Remark = field(default_factory=Remark)
    verification: Verification | None = None

    @property
    def summary(self) -> str:
        """Return it in a few words."""
        return self.inspection.summary

    @property
    def library(self) -> str | None:
        """Return the library that loads it, as Hugging Face's model cards name it."""
        checkpoint = self.inspection.checkpoint
        if "config" in checkpoint.metadata or self.inspection.architecture.family:
            return "transformers"
        return traits_of(checkpoint.format).library or None

    def to_markdown(self) -> str:
        """Return it as Markdown, with the front matter of Hugging Face's model cards."""
        from importlib import import_module

        text: str = import_module("ckpttool.cli.render.card").card_markdown(self)
        return text


def card(
    path: str | os.PathLike[str],
    *,
    verify: bool = False,
    jobs: int | None = None,
    advance: Advance | None = None,
) -> Card:
    """Return the card of a checkpoint; all its files are read for their digests.

    Args:
        path: A file, directory or index.
        verify: Whether to verify it, too.
        jobs: Number of threads.
        advance: Called with the bytes read, from any thread.

    Raises:
        CheckpointError: It is none, or can't be read.
    """
    with open_checkpoint(path) as checkpoint:
        inspected = inspection(checkpoint)
        hyper_parameters = dict(flatten(checkpoint.training.hyper_parameters))
    advance = advance or no_advance
    files = _files(checkpoint, jobs, advance)
    verification = None
    if verify:
        from ckpttool.ops.verify import verify as run_checks

        verification = run_checks(path, jobs=jobs, advance=advance)
    place = os.fspath(path)
    name = os.path.basename(bare(place)) or place
    return Card(name, inspected, files, hyper_parameters, remark_on(place), verification)


def source_text(path: str | os.PathLike[str], *, advance: Advance = no_advance) -> str:
    """Return what a card says of a checkpoint that another was made from: its path and its SHA-256.

    Of several files it is the digest of what ``sha256sum`` prints of them, sorted by name.
    """
    with open_checkpoint(path) as checkpoint:
        files = _files(checkpoint, None, advance)
    return f"{os.fspath(path)} (sha256:{digest_of_list({file.name: file.sha256 for file in files})})"


def _files(checkpoint: Checkpoint, jobs: int | None, advance: Advance) -> tuple[CardFile, ...]:
    sums = sha256_of_files((entry.path for entry in checkpoint.files), jobs or default_jobs(), advance)
    above = fs.commonpath([os.path.dirname(path) for path in sums])
    return tuple(
        CardFile(os.path.relpath(path, above or os.curdir), one.nbytes or 0, one.digests["sha256"])
        for path, one in sums.items()
    )

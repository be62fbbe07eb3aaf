"""Card of a checkpoint: facts, metrics, remarks, and code that loads it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.result import Result, document_of, plain
from ckpttool.core.text import file_size, number, printable
from ckpttool.formats import open_checkpoint
from ckpttool.formats.traits import traits_of
from ckpttool.ops.digests import digest_of_list, sha256_of_files
from ckpttool.ops.inspect import Inspection, inspection
from ckpttool.ops.verdict import Safety, Status, Verification
from ckpttool.runs.pointers.pin_lists import Remark
from ckpttool.runs.pointers.pins import remark_on
from ckpttool.runs.run_directories import Parameters, flatten
from ckpttool.storage import fs
from ckpttool.storage.work import Advance, default_jobs, no_advance
from ckpttool.transaction.paths import without_trailing_slashes

_FRONT_MATTER_KEYS = ("license", "base_model", "language", "pipeline_tag")
_DATASET_KEYS = ("data", "dataset", "datasets")
_SAFETY = {Safety.SAFE: "", Safety.UNSAFE: ", unsafe to load", Safety.UNKNOWN: ", of unknown safety"}
_MARKS = re.compile(r"([\\`*_{}\[\]<>|#~&])")
_MOST_PARAMETERS = 40
_CLASS = "<class>"


@dataclass(frozen=True, slots=True)
class CardFile:
    """A file of a checkpoint: its path below the checkpoint's directory, its bytes, and its SHA-256."""

    name: str
    nbytes: int
    sha256: str

    def document(self) -> dict[str, Any]:
        return document_of(self, names={"path": "name"})


@dataclass(frozen=True, slots=True, repr=False)
class Card(Result):
    """Contents of a card; unknown facts are left out.

    Attributes:
        name: The checkpoint's own name.
        inspection: Result of ``inspect``.
        files: Its files, with their digests.
        hyper_parameters: Hyper-parameters of its training; nested names have dots.
        remark: Remark of users.
        verification: Result of ``verify``; None if it wasn't run.
    """

    name: str
    inspection: Inspection
    files: tuple[CardFile, ...]
    hyper_parameters: Parameters = field(default_factory=dict)
    remark: Remark = field(default_factory=Remark)
    verification: Verification | None = None

    @property
    def summary(self) -> str:
        """Return path, format and number of tensors in a few words."""
        return self.inspection.summary

    @property
    def library(self) -> str | None:
        """Return the library that loads it, by its name in Hugging Face's model cards."""
        checkpoint = self.inspection.checkpoint
        if "config" in checkpoint.metadata or self.inspection.architecture.family:
            return "transformers"
        return traits_of(checkpoint.format).library or None

    def document(self) -> dict[str, Any]:
        checkpoint, found = self.inspection.checkpoint, self.verification
        return {
            "schema": "ckpttool.card/1",
            "name": self.name,
            **document_of(checkpoint, "format", "variant", "producer"),
            "library": self.library,
            "bytes": checkpoint.nbytes,
            "files": plain(self.files),
            **document_of(checkpoint, "parameters", "buffers", "packed"),
            "model": self.inspection.architecture.document(),
            "training": plain(checkpoint.training),
            "resume": plain(self.inspection.resume),
            "about": self.remark.document(),
            "verified": None
            if found is None
            else {
                "valid": found.is_valid,
                "safety": found.safety.value,
                "checks": {one.name: one.status.value for one in found.checks},
            },
        }

    def to_markdown(self) -> str:
        """Return it as Markdown, with the front matter of Hugging Face's model cards."""
        return _markdown(self)


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
        CheckpointError: It isn't a checkpoint, or can't be read.
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
    name = os.path.basename(without_trailing_slashes(place)) or place
    return Card(name, inspected, files, hyper_parameters, remark_on(place), verification)


def source_text(path: str | os.PathLike[str], *, advance: Advance = no_advance) -> str:
    """Return the line of a card about the source of a conversion: its path and its SHA-256.

    For several files, it is the digest of ``sha256sum``'s output for them, sorted by name.
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


# Markdown --------------------------------------------------------------------------------------------


def _markdown(card: Card) -> str:
    """Return a card as Markdown; names and texts from files are escaped."""
    parts = ["\n".join(["---", *_front_matter(card), "---"]), f"# {escaped(card.name)}"]
    if card.remark.note is not None:
        parts.append("\n".join(f"> {escaped(line)}" for line in card.remark.note.splitlines() or [""]))
    parts.append(_table(("", ""), _facts(card)))
    if metrics := card.inspection.checkpoint.training.metrics:
        rows = [(name, f"{value:.6g}") for name, value in metrics.items()]
        parts += ["## Metrics", _table(("metric", "value"), rows)]
    settings = [(name, str(one)) for name, one in card.hyper_parameters.items() if not name.endswith(_CLASS)]
    if settings:
        omitted = len(settings) - _MOST_PARAMETERS
        more = [("…", f"and {omitted:,} more (--json has all)")] if omitted > 0 else []
        rows = [*settings[:_MOST_PARAMETERS], *more]
        parts += ["## Hyper-parameters", _table(("name", "value"), rows)]
    files = [(one.name, f"{one.nbytes:,}", f"`{one.sha256}`") for one in card.files]
    parts += ["## Files", _table(("file", "bytes", "SHA-256"), files, plain=2)]
    parts += ["## Load", f"```python\n{load_snippet(card)}\n```"]
    return "\n\n".join(parts) + "\n"


def _front_matter(card: Card) -> Iterator[str]:
    """Yield lines of YAML; strings are in JSON, which is a subset of it."""
    facts, checkpoint = card.remark.facts, card.inspection.checkpoint
    if card.library is not None:
        yield f"library_name: {card.library}"
    for key in _FRONT_MATTER_KEYS:
        if key in facts:
            yield f"{key}: {json.dumps(facts[key], ensure_ascii=False)}"
    for key in _DATASET_KEYS:
        if key in facts:
            yield "datasets:"
            yield f"- {json.dumps(facts[key], ensure_ascii=False)}"
            break
    yield "tags:"
    yield f"- {checkpoint.format}"


def _facts(card: Card) -> Iterator[tuple[str, str]]:
    inspection, checkpoint = card.inspection, card.inspection.checkpoint
    variant = f" ({checkpoint.variant})" if checkpoint.variant else ""
    yield "format", f"{checkpoint.format}{variant}"
    producer = checkpoint.producer
    if producer.framework:
        yield "written by", f"{producer.framework} {producer.version or ''}".strip()
    yield "size", file_size(checkpoint.nbytes)
    if checkpoint.parameters:
        types = ", ".join(name for name, _ in checkpoint.elements.parameters.most_common())
        yield "parameters", f"{checkpoint.parameters:,} ({types})"
    if checkpoint.packed:
        yield "packed words", f"{checkpoint.packed:,}, with an unknown number of further parameters"
    if inspection.architecture.model or inspection.architecture.family:
        family = inspection.architecture.family
        yield (
            "model",
            " ".join(filter(None, (inspection.architecture.model, f"({family})" if family else ""))),
        )
    yield from _training(checkpoint.training)
    yield "resumes", str(inspection.resume)
    yield "verified", _verdict(card)
    yield from card.remark.facts.items()


def _training(state: TrainingState) -> Iterator[tuple[str, str]]:
    for label, value in (
        ("epoch", state.epoch),
        ("step", state.step),
        ("loss", state.loss),
        ("learning rate", state.learning_rate),
        ("seed", state.seed),
    ):
        if value is not None:
            yield label, number(value) if label in ("epoch", "step") else f"{value:.6g}"
    if state.saved_at is not None:
        yield "saved at", state.saved_at


def _verdict(card: Card) -> str:
    found = card.verification
    if found is None:
        return "no: only its structure was read"
    if not found.is_valid:
        return "damaged or incomplete"
    words = {Status.PASSED: "", Status.PARTIAL: " (partial)"}
    passed = ", ".join(f"{one.name}{words[one.status]}" for one in found.checks if one.status in words)
    return f"valid: {passed}{_SAFETY[found.safety]}"


def _table(heading: Sequence[str], rows: Iterable[tuple[str, ...]], plain: int | None = None) -> str:
    """Return a table of escaped texts; the column ``plain`` is Markdown already."""
    lines = [f"| {' | '.join(heading)} |", f"|{' --- |' * len(heading)}"]
    for row in rows:
        cells = [cell if at == plain else escaped(cell) for at, cell in enumerate(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return a text escaped for Markdown, on one line."""
    # Names and values come from the checkpoint's file: without escapes they could be links or HTML in a page
    # that users publish.
    return _MARKS.sub(r"\\\1", printable(text))


# How to load it -------------------------------------------------------------------------------------


def load_snippet(card: Card) -> str:
    """Return Python that loads the checkpoint with its framework, or else with ckpttool."""
    checkpoint, name = card.inspection.checkpoint, json.dumps(card.name, ensure_ascii=False)
    if card.library == "transformers":
        model = card.inspection.architecture.model
        loader = model if model.isidentifier() and model.isascii() else "AutoModel"
        return f"from transformers import {loader}\n\nmodel = {loader}.from_pretrained({name})"
    lines = traits_of(checkpoint.format).loaders.get(checkpoint.variant)
    # A framework's loader isn't recommended for a checkpoint that runs code when it is loaded, or might.
    runs_code = any(one.severity.value != "note" for one in checkpoint.safety)
    return (_LOAD_WITH_CKPTTOOL if lines is None or runs_code else lines).replace("NAME", name)


_LOAD_WITH_CKPTTOOL = """import ckpttool

with ckpttool.open_checkpoint(NAME) as checkpoint:
    weights = checkpoint.state_dict("numpy")"""

"""A checkpoint's card in Markdown: front matter for Hugging Face, facts, notes, and how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.cli.render.numbers import file_size, number
from ckpttool.cli.render.terminal import printable
from ckpttool.core.checkpoint import TrainingState
from ckpttool.formats.traits import traits_of
from ckpttool.ops.verdict import Safety, Status
from ckpttool.runs.card import Card

_FRONT = ("license", "base_model", "language", "pipeline_tag")
_DATA = ("data", "dataset", "datasets")
_SAFETY = {Safety.SAFE: "", Safety.UNSAFE: ", unsafe to load", Safety.UNKNOWN: ", of unknown safety"}
_MARKS = re.compile(r"([\\`*_{}\[\]<>|#~&])")
_MOST_PARAMETERS = 40
_CLASS = "<class>"


def card_markdown(card: Card) -> str:
    """Return a card as Markdown; names and texts of others can't be taken for markup."""
    parts = ["\n".join(["---", *_front_matter(card), "---"]), f"# {escaped(card.name)}"]
    if card.remark.note is not None:
        parts.append("\n".join(f"> {escaped(line)}" for line in card.remark.note.splitlines() or [""]))
    parts.append(_table(("", ""), _facts(card)))
    if metrics := card.inspection.checkpoint.training.metrics:
        rows = [(name, f"{value:.6g}") for name, value in metrics.items()]
        parts += ["## Metrics", _table(("metric", "value"), rows)]
    settings = [(name, str(one)) for name, one in card.hyper_parameters.items() if not name.endswith(_CLASS)]
    if settings:
        left = len(settings) - _MOST_PARAMETERS
        more = [("…", f"and {left:,} more (--json has all)")] if left > 0 else []
        rows = [*settings[:_MOST_PARAMETERS], *more]
        parts += ["## Hyper-parameters", _table(("name", "value"), rows)]
    files = [(one.name, f"{one.nbytes:,}", f"`{one.sha256}`") for one in card.files]
    parts += ["## Files", _table(("file", "bytes", "SHA-256"), files, plain=2)]
    parts += ["## Load", f"```python\n{load_snippet(card)}\n```"]
    return "\n\n".join(parts) + "\n"


def _front_matter(card: Card) -> Iterator[str]:
    """Yield lines of YAML; a JSON string is one of YAML's, too."""
    facts, checkpoint = card.remark.facts, card.inspection.checkpoint
    if card.library is not None:
        yield f"library_name: {card.library}"
    for key in _FRONT:
        if key in facts:
            yield f"{key}: {json.dumps(facts[key], ensure_ascii=False)}"
    for key in _DATA:
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
        return "no: only its structure was looked at"
    if not found.is_valid:
        return "it is damaged or incomplete"
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
    """Return a text as Markdown shows it, on one line."""
    return _MARKS.sub(r"\\\1", printable(text))


# How to load it -------------------------------------------------------------------------------------


def load_snippet(card: Card) -> str:
    """Return Python that loads the checkpoint with its framework; what has no other way, with ckpttool."""
    checkpoint, name = card.inspection.checkpoint, json.dumps(card.name, ensure_ascii=False)
    if card.library == "transformers":
        model = card.inspection.architecture.model
        loader = model if model.isidentifier() and model.isascii() else "AutoModel"
        return f"from transformers import {loader}\n\nmodel = {loader}.from_pretrained({name})"
    lines = traits_of(checkpoint.format).loaders.get(checkpoint.variant)
    return (_ANY if lines is None or _runs_code(card) else lines).replace("NAME", name)


def _runs_code(card: Card) -> bool:
    """Tell whether its framework's loader runs code, or may: then that is no advice."""
    return any(one.severity.value != "note" for one in card.inspection.checkpoint.safety)


_ANY = """import ckpttool

with ckpttool.open_checkpoint(NAME) as checkpoint:
    weights = checkpoint.state_dict("numpy")"""

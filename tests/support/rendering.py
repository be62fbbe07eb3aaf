"""What a command shows of a result: its text, its document, a report for a CI, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ckpttool import CheckpointError, Difference, Inspection, Verification
from ckpttool.cli.render import github, junit, plot_results, sarif
from ckpttool.cli.render.text_changes import undo_text
from ckpttool.cli.render.text_diff import diff_text, drift_text, name_only_text
from ckpttool.cli.render.text_inspect import inspect_text
from ckpttool.cli.render.verdicts import VerifyStyle, verify_text
from ckpttool.core.result import dumps
from ckpttool.core.text import printable
from ckpttool.ops.drift import Drift
from ckpttool.ops.inspect import SCHEMA
from ckpttool.ops.verdict import verify_document
from ckpttool.runs.listing import Listing
from ckpttool.runs.undo import Undone


def text_of(result: Inspection | Difference | Drift | Undone | Sequence[Verification], **options: Any) -> str:
    """Return what people read of a result, and of a difference its names alone if ``names_only``."""
    match result:
        case Inspection():
            return inspect_text(result, **options)
        case Difference() if options.pop("names_only", False):
            return name_only_text(result)
        case Difference():
            return diff_text(result, **options)
        case Drift():
            return drift_text(result, **options)
        case Undone():
            return undo_text(result)
    return verify_text(list(result), VerifyStyle(**options))


def lines_of(result: Any, **options: Any) -> list[str]:
    """Return the lines that people read of a result."""
    return text_of(result, **options).split("\n")


def json_text(document: object) -> str:
    """Return a document as it is printed."""
    return dumps(document)


def inspect_json(*inspections: Inspection) -> dict[str, Any]:
    """Return what a script reads of what checkpoints are."""
    return _read({"schema": SCHEMA, "checkpoints": [one.row() for one in inspections]})


def verify_json(*verifications: Verification) -> dict[str, Any]:
    """Return what a script reads of verdicts."""
    return _read(
        verify_document(verifications, passed=all(one.passes(strict=False) for one in verifications))
    )


def diff_json(result: Difference | Drift) -> dict[str, Any]:
    """Return what a script reads of a difference, or of a series of them."""
    return _read(result.document())


def _read(document: dict[str, Any]) -> dict[str, Any]:
    read = json.loads(json_text(document))
    assert isinstance(read, dict)
    return read


def report_of(
    form: Literal["github", "junit", "sarif", "summary"],
    verifications: Sequence[Verification] = (),
    unread: Sequence[CheckpointError] = (),
    **options: Any,
) -> str:
    """Return the report of verdicts, and of what could not be read, in a form that a CI takes."""
    write = {
        "github": github.workflow_commands,
        "junit": junit.junit,
        "sarif": sarif.sarif,
        "summary": github.summary,
    }
    return write[form](verifications, unread, **options)


def limit_results(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let a SARIF log hold so many results at most."""
    patch.setattr(sarif, "MAX_RESULTS", count)


def escaped(text: str) -> str:
    """Return a text out of a file as a terminal is given it."""
    return printable(text)


def picture_of(result: Difference | Drift | Listing, kind: str = "svg", title: str = "run") -> bytes:
    """Return the picture of a result; a list of checkpoints has a title."""
    match result:
        case Difference():
            return plot_results.difference_picture(kind, result)
        case Drift():
            return plot_results.drift_picture(kind, result)
    return plot_results.series_picture(kind, title, result)


@dataclass
class Drawn:
    """What would have been drawn."""

    title: str = ""
    drawings: list[Any] = field(default_factory=list)
    table: Sequence[Sequence[str]] = ()


def draw_nothing(patch: pytest.MonkeyPatch) -> Drawn:
    """Have pictures not drawn; return what is told, each time, of what would have been in them."""
    drawn = Drawn()

    def picture(kind: str, title: str, drawings: list[Any], table: Sequence[Sequence[str]] = ()) -> bytes:
        drawn.title, drawn.drawings, drawn.table = title, drawings, table
        return b"drawn"

    patch.setattr(plot_results, "picture", picture)
    return drawn

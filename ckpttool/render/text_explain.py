"""What people read of ``prune --explain``: why one checkpoint stays or goes."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.render.escape import printable
from ckpttool.render.text_findings import styled
from ckpttool.series.pruning.explanation import Explanation


def explain_text(explanation: Explanation, *, colour: bool = False) -> str:
    """Return whether it stays, where it stands in its series, and what speaks for and against it."""
    return "\n".join(_lines(explanation, colour))


def _lines(explanation: Explanation, colour: bool) -> Iterator[str]:
    if explanation.asked is not None:
        yield f"{printable(explanation.asked)} belongs to {printable(explanation.entry.path)}"
    verb = "stays" if explanation.stays else "goes"
    yield styled(f"{printable(explanation.entry.path)} {verb}", "yellow", colour and not explanation.stays)
    place = "; ".join(explanation.place)
    yield f"  {printable(explanation.key)}{': ' if place else ''}{printable(place)}"
    for reason in explanation.reasons:
        yield f"  for      {printable(reason)}"
    if not explanation.reasons:
        yield "  for      nothing: no rule keeps it, nothing points at it, it is not pinned"
    for reason in explanation.against:
        yield f"  against  {printable(reason)}"

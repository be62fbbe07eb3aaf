"""``ckpttool explain``: print the meaning of a finding, and its remedy."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ckpttool.core.errors import UsageError
from ckpttool.core.options import argument
from ckpttool.core.text import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainCommand:
    """The options of ``explain``."""

    code: str | None = argument(
        "[CODE]", "A finding's code. [default: list all]", default=None, complete="finding"
    )


def explain(command: ExplainCommand) -> int:
    """Explain what a finding of verify means and what to do about it."""
    from ckpttool.cli.explanations import as_sentence, explanations, plain
    from ckpttool.cli.output import has_colour, width
    from ckpttool.cli.render.terminal import Style, hanging_lines, styled

    code, rows = command.code, explanations()
    colour, room = has_colour(sys.stdout), min(width(sys.stdout), 100)
    if code is None:
        for section in dict.fromkeys(row.section for row in rows.values()):
            print(styled(section, Style.BOLD, colour))
            for row in rows.values():
                if row.section == section:
                    lines = hanging_lines("  ", f"{row.code}: {plain(row.meaning)}", room, 4)
                    print("\n".join(lines))
            print()
        return 0
    if code not in rows:
        hint = did_you_mean(code, rows) or "ckpttool explain lists all"
        raise UsageError(f"no finding has the code {code!r:.80} ({hint})")
    row = rows[code]
    print(f"{styled(row.code, Style.BOLD, colour)}  {styled(row.section, Style.DIM, colour)}")
    for head, phrase in (("  ", row.meaning), ("  → ", row.remedy)):
        print("\n".join(hanging_lines(head, as_sentence(plain(phrase)), room, 4)))
    return 0

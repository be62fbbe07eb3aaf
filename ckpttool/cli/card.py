"""``ckpttool card``: a description of a checkpoint in Markdown, and the user's note on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.cli.options import in_output, json_option
from ckpttool.cli.output import print_json, say_warning
from ckpttool.cli.progress import progress
from ckpttool.core.errors import UsageError
from ckpttool.core.options import argument, option
from ckpttool.storage import fs

REMARK_PANEL = "Notes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardCommand:
    """The options of ``card``."""

    path: str = argument("PATH", "The checkpoint.")
    output: str | None = in_output(
        *("--output", "-o"), metavar="FILE", help="Write to this file: .md or .json.", is_output=True
    )
    force: bool = in_output("--force", "-f", help="Replace an existing FILE.", default=False)
    verify: bool = in_output("--verify", help="Verify PATH, too, and say what was checked.", default=False)
    note: str | None = option(
        "--note", metavar="TEXT", help="Note this of PATH; an empty TEXT removes it.", panel=REMARK_PANEL
    )
    facts: Sequence[str] = option(
        "--set",
        metavar="KEY=TEXT",
        help="Note a fact of PATH, such as data=CIFAR-10 or license=mit.",
        panel=REMARK_PANEL,
        default=(),
    )
    sources: Sequence[str] = option(
        "--from",
        metavar="SRC",
        help="Note that PATH was made from SRC, with its SHA-256.",
        panel=REMARK_PANEL,
        default=(),
    )
    json: bool = json_option()


def card(command: CardCommand) -> int:
    """Write a card of a checkpoint in Markdown: what it is, its digests and metrics, and how to load it.

    With --note, --set and --from, note what people should know of it; this is kept beside it, as pins are,
    and shown by inspect.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.runs.card import card as make_card

    output, note = command.output, command.note
    place = single_checkpoint(command.path)
    as_json = command.json or (output is not None and output.lower().endswith(".json"))
    if output is not None:
        _check_output(output, force=command.force)
    if note is not None or command.facts or command.sources:
        from ckpttool.runs.card import source_text
        from ckpttool.runs.pointers.pin_lists import parse_facts
        from ckpttool.runs.pointers.pins import remark

        told = dict(map(_fact, command.facts))
        if command.sources:
            told["source"] = "; ".join(map(source_text, command.sources))
        done = remark([place], note=note, facts=parse_facts(told))
        for message in done.recovered:
            say_warning(message)
    with progress("reading", 0) as advance:
        made = make_card(place, verify=command.verify, advance=advance)
    if output is None and as_json:
        print_json(made.to_dict())
        return 0
    text = f"{_dumps(made.to_dict())}\n" if as_json else made.to_markdown()
    if output is None:
        print(text, end="")
    else:
        from ckpttool.cli.reports import write_report

        write_report("--output", output, text.encode())
    return 0


def _check_output(output: str, *, force: bool) -> None:
    if not output.lower().endswith((".md", ".json")):
        raise UsageError(f"-o {output}: a card is Markdown (.md) or JSON (.json)")
    if fs.isfile(output) and not force:
        raise UsageError(f"{output} already exists (--force replaces it)")


def _fact(text: str) -> tuple[str, str]:
    key, mark, value = text.partition("=")
    if not mark:
        raise UsageError(f"--set {text}: expected KEY=TEXT")
    return key.strip(), value


def _dumps(document: object) -> str:
    import json

    return json.dumps(document, indent=1, ensure_ascii=False)

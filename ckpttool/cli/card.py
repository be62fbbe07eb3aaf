"""``ckpttool card``: a description of a checkpoint in Markdown, and the user's note on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.cli.options import json_option, output_option
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
    output: str | None = output_option(
        *("--output", "-o"), metavar="FILE", help="Write to this file: .md or .json.", is_output=True
    )
    force: bool = output_option("--force", "-f", help="Replace an existing FILE.", default=False)
    verify: bool = output_option("--verify", help="Also verify PATH, and list the checks.", default=False)
    note: str | None = option(
        "--note", metavar="TEXT", help="Set the note on PATH; an empty TEXT removes it.", panel=REMARK_PANEL
    )
    facts: Sequence[str] = option(
        "--set",
        metavar="KEY=TEXT",
        help="Record a fact about PATH, such as data=CIFAR-10 or license=mit.",
        panel=REMARK_PANEL,
        default=(),
    )
    sources: Sequence[str] = option(
        "--from",
        metavar="SRC",
        help="Record SRC, with its SHA-256, as a source of PATH.",
        panel=REMARK_PANEL,
        default=(),
    )
    json: bool = json_option()


def card(command: CardCommand) -> int:
    """Write a Markdown card of a checkpoint: contents, digests, metrics, and how to load it.

    Notes of --note, --set and --from are stored next to the checkpoint, as pins are, and shown by inspect.
    """
    import json

    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.runs.card import card as make_card

    output, note = command.output, command.note
    place = single_checkpoint(command.path)
    as_json = command.json or (output is not None and output.lower().endswith(".json"))
    if output is not None:
        if not output.lower().endswith((".md", ".json")):
            raise UsageError(f"-o {output}: a card is Markdown (.md) or JSON (.json)")
        if fs.isfile(output) and not command.force:
            raise UsageError(f"{output} already exists (--force replaces it)")
    # Notes are written first, so that the card has them; the file's name was checked before any change.
    if note is not None or command.facts or command.sources:
        from ckpttool.runs.card import source_text
        from ckpttool.runs.pointers.pin_lists import parse_facts
        from ckpttool.runs.pointers.pins import remark

        facts = dict(map(_fact, command.facts))
        if command.sources:
            facts["source"] = "; ".join(map(source_text, command.sources))
        changed = remark([place], note=note, facts=parse_facts(facts))
        for message in changed.recovered:
            say_warning(message)
    with progress("reading", 0) as advance:
        made = make_card(place, verify=command.verify, advance=advance)
    if output is None and as_json:
        print_json(made.to_dict())
        return 0
    text = made.to_markdown()
    if as_json:
        text = f"{json.dumps(made.to_dict(), indent=1, ensure_ascii=False)}\n"
    if output is None:
        print(text, end="")
    else:
        from ckpttool.cli.report_files import write_report

        write_report("--output", output, text.encode())
    return 0


def _fact(text: str) -> tuple[str, str]:
    key, mark, value = text.partition("=")
    if not mark:
        raise UsageError(f"--set {text}: expected KEY=TEXT")
    return key.strip(), value

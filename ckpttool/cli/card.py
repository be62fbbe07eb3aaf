"""``ckpttool card``: what a checkpoint is, in Markdown, and what people say of it."""

from __future__ import annotations

from typing import Annotated

from ckpttool.cli.options import Json, PathText, path_argument, typer_option
from ckpttool.cli.output import print_json, say_warning
from ckpttool.cli.progress import progress
from ckpttool.core.errors import UsageError
from ckpttool.core.options import OUTPUT_PANEL
from ckpttool.io import fs

REMARK_PANEL = "Notes"

Note = Annotated[
    str | None,
    typer_option(
        "--note", metavar="TEXT", help="Note this of PATH; an empty TEXT removes it.", panel=REMARK_PANEL
    ),
]
Facts = Annotated[
    list[str] | None,
    typer_option(
        "--set",
        metavar="KEY=TEXT",
        help="Note a fact of PATH, such as data=CIFAR-10 or license=mit. May be repeated.",
        panel=REMARK_PANEL,
    ),
]
Sources = Annotated[
    list[str] | None,
    typer_option(
        "--from",
        metavar="SRC",
        help="Note that PATH was made from SRC, with its SHA-256. May be repeated.",
        panel=REMARK_PANEL,
    ),
]
Output = Annotated[
    str | None,
    typer_option(
        *("--output", "-o"), metavar="FILE", help="Write to this file: .md or .json.", panel=OUTPUT_PANEL
    ),
]
Force = Annotated[bool, typer_option("--force", "-f", help="Replace an existing FILE.", panel=OUTPUT_PANEL)]
Verify = Annotated[
    bool, typer_option("--verify", help="Verify PATH, too, and say what was checked.", panel=OUTPUT_PANEL)
]


def card(
    path: Annotated[PathText, path_argument("PATH", "The checkpoint.")],
    *,
    output: Output = None,
    force: Force = False,
    verify: Verify = False,
    note: Note = None,
    facts: Facts = None,
    sources: Sources = None,
    json: Json = False,
) -> int:
    """Write a card of a checkpoint in Markdown: what it is, its digests and metrics, and how to load it.

    With --note, --set and --from, note what people should know of it; this is kept beside it, as pins are,
    and shown by inspect.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.runs.card import card as make_card

    place = single_checkpoint(str(path))
    as_json = json or (output is not None and output.lower().endswith(".json"))
    if output is not None:
        _check_output(output, as_json=as_json, force=force)
    if note is not None or facts or sources:
        from ckpttool.runs.card import source_text
        from ckpttool.runs.pointers.pins import remark
        from ckpttool.runs.pointers.remarks import parse_facts

        told = dict(map(_fact, facts or ()))
        if sources:
            told["source"] = "; ".join(map(source_text, sources))
        done = remark([place], note=note, facts=parse_facts(told))
        for message in done.recovered:
            say_warning(message)
    with progress("reading", 0) as advance:
        made = make_card(place, verify=verify, advance=advance)
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


def _check_output(output: str, *, as_json: bool, force: bool) -> None:
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

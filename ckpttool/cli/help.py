"""Help and manual pages of commands: options, examples, exit statuses and environment variables.

Both are made from the same tables; ``ckpttool help --man DIR`` writes the pages, in roff.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckpttool.cli.examples import CLOSINGS, ROOT

if TYPE_CHECKING:
    from typing import Any

    from ckpttool.cli.examples import Closing

ARGUMENTS = "Arguments"
_OTHERS = "Options"
_WIDEST = 26
"""Columns of an option's usage up to which its help begins on the same line."""


def panels_of(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the arguments and options of a command by heading, each with its usage and its help."""
    panels: dict[str, list[tuple[str, str]]] = {}
    parameters = sorted(command.params, key=lambda one: one.param_type_name != "argument")
    for one in parameters:
        if one.param_type_name == "argument":
            panels.setdefault(ARGUMENTS, []).append((one.make_metavar(context), one.described))
        else:
            given, _ = one.get_help_record(context)
            panels.setdefault(getattr(one, "panel", None) or _OTHERS, []).append((given, one.help))
    return panels


def write_closing(name: str | None, formatter: Any) -> None:
    """Write the examples, exit statuses, variables and page of a command, or of ``ckpttool`` for None."""
    closing = ROOT if name is None else CLOSINGS.get(name)
    if closing is None:
        return
    formatter.write("\nExamples:\n")
    for purpose, line in closing.examples.items():
        formatter.write(f"  # {purpose}\n  $ {line}\n")
    with formatter.section("Exit status"):
        formatter.write_dl([(str(status), meaning) for status, meaning in closing.statuses.items()])
    if closing.environment:
        with formatter.section("Environment"):
            formatter.write_dl([*closing.environment.items()])
    formatter.write(f"\nDocumentation: {closing.page}\n")


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Write the arguments and options of a command to the formatter of its help."""
    for name, records in panels_of(command, context).items():
        with formatter.section(name):
            formatter.write_dl(records, col_max=_WIDEST)


# Manual pages ---------------------------------------------------------------------------------------


def write_pages(group: Any, context: Any, directory: str) -> list[str]:
    """Write a page for the program and one for each command, and return their paths.

    Raises:
        CheckpointError: The directory can't be made, or a page not be written.
    """
    from ckpttool.core.errors import from_os_error
    from ckpttool.storage.directories import write_atomically

    pages = {
        os.path.join(directory, f"{_title(name)}.1"): manual_page(group, context, name)
        for name in (None, *group.summaries)
    }
    try:
        os.makedirs(directory, exist_ok=True)
        for path, page in pages.items():
            write_atomically(path, page.encode())
    except OSError as failure:
        raise from_os_error(failure, directory) from failure
    return [*pages]


def manual_page(group: Any, context: Any, name: str | None) -> str:
    """Return the page of a command, or of the program."""
    from importlib.metadata import version

    command, closing, summary = group, ROOT, "tool for machine-learning checkpoints"
    if name is not None:
        command, closing = group.resolve_command(context, [name])[1], CLOSINGS[name]
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        summary = group.summaries[name].rstrip(".")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH {_title(name).upper()} 1 "" "ckpttool {version("ckpttool")}" "ckpttool"',
        *(".nh", ".ad l"),  # no hyphenation and ragged lines, so that words can be copied whole
        *(".SH NAME", f"{_text(_title(name))} \\- {_text(summary)}"),
        *(".SH SYNOPSIS", f".B ckpttool{'' if name is None else f' {name}'}", _text(usage)),
        ".SH DESCRIPTION",
    ]
    for paragraph in re.split(r"\n{2,}", inspect.cleandoc(command.help)):
        lines += [".PP", _text(" ".join(paragraph.split()))]
    lines += _options(panels_of(command, context))
    if name is None:
        lines += [".SH COMMANDS", *_definitions(group.summaries.items())]
    lines += _closing(closing, group.summaries if name is None else (None,))
    return "\n".join(lines) + "\n"


def _title(name: str | None) -> str:
    return "ckpttool" if name is None else f"ckpttool-{name}"


def _text(text: str) -> str:
    """Return a line that roff prints unchanged."""
    # A backslash begins an escape. A plain "-" may be printed as a hyphen, U+2010, so that a copied option
    # isn't found: "\-" is the minus sign, which terminals show as "-". A dot or an apostrophe at the start of
    # a line begins a request, unless the zero-width "\&" precedes it.
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _definitions(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, meaning in rows:
        yield from (".TP", f".B {_text(term)}", _text(meaning))


def _options(panels: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    if ARGUMENTS in panels:
        yield ".SH ARGUMENTS"
        yield from _definitions(panels[ARGUMENTS])
    yield ".SH OPTIONS"
    for heading, rows in panels.items():
        if heading != ARGUMENTS:
            yield f'.SS "{_text(heading)}"'
            yield from _definitions(rows)


def _closing(closing: Closing, others: Iterable[str | None]) -> Iterator[str]:
    yield ".SH EXAMPLES"
    for purpose, line in closing.examples.items():
        yield from (".PP", f"{_text(purpose)}:", ".PP", ".RS 4", ".nf", _text(line), ".fi", ".RE")
    yield ".SH EXIT STATUS"
    yield from _definitions((str(status), meaning) for status, meaning in closing.statuses.items())
    if closing.environment:
        yield ".SH ENVIRONMENT"
        yield from _definitions(closing.environment.items())
    yield ".SH SEE ALSO"
    yield ", ".join(f"\\fB{_text(_title(other))}\\fR(1)" for other in others)
    yield from (".PP", _text(closing.page))

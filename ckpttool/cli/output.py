"""What goes to stdout and to stderr, in what colour, and the exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.core.text import printable

FOUND_SOMETHING, COULD_NOT, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit statuses: something needs a look, it could not be done, and what shells say of Ctrl-C and SIGTERM."""

if TYPE_CHECKING:
    from ckpttool.transaction.paths import Problem


COMPLETE_VARIABLE = "_CKPTTOOL_COMPLETE"
"""Environment variable by which a shell asks for completions."""
COLOURS = ("auto", "always", "never")
"""When output is coloured."""

_chosen = "auto"


def choose_colour(choice: str | None) -> None:
    """Take what ``--color`` says, if it is given, until the next choice."""
    global _chosen
    _chosen = choice or _chosen


def say(text: str) -> None:
    """Write a line to stderr: warnings, notes, prompts."""
    print(text, file=sys.stderr)


def say_error(text: str) -> None:
    """Write an error as its one line on stderr."""
    say(f"ckpttool: {_label('error:', '1;31')} {printable(text)}")


def say_warning(text: str) -> None:
    """Write a warning as one line on stderr."""
    say(f"ckpttool: {_label('warning:', '1;33')} {printable(text)}")


def _label(word: str, style: str) -> str:
    return f"\x1b[{style}m{word}\x1b[0m" if has_colour(sys.stderr) else word


def has_colour(stream: TextIO) -> bool:
    """Tell whether colour may be written: by --color, NO_COLOR, FORCE_COLOR, or else to terminals."""
    if _chosen != "auto":
        return _chosen == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def width(stream: TextIO) -> int:
    """Return how many columns a text may take."""
    if not stream.isatty() and "COLUMNS" not in os.environ:
        return 120
    import shutil

    return shutil.get_terminal_size().columns


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of a terminal, or COLUMNS; None where lines stay whole, as in a pipe."""
    return width(stream) if stream.isatty() or "COLUMNS" in os.environ else None


def paged() -> AbstractContextManager[None]:
    """Return the context of output that goes through a pager, if it is for a person at a terminal."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return nullcontext()
    from ckpttool.cli.pager import held_for_pager

    return held_for_pager()


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document."""
    from ckpttool.core.result import dumps

    print(dumps(document))


def grouped_messages(problems: Iterable[Problem]) -> Iterator[tuple[str, str]]:
    """Yield each message once: the first of its paths, and the message with how many more there are."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(problem.message, []).append(problem.path)
    for message, (first, *others) in alike.items():
        yield first, f"{message} (and {len(others):,} more)" if others else message

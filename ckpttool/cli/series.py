"""What the commands about directories of checkpoints share: options, and how paths are printed."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.grouped import LOOKED_AT, SHOWN
from ckpttool.cli.output import say, say_error, say_warning

if TYPE_CHECKING:
    from ckpttool.series.reasons import Problem


class Depth(str, enum.Enum):
    """How a checkpoint is verified."""

    QUICK = "quick"
    FULL = "full"


class Mode(str, enum.Enum):
    """Which values of a metric are good."""

    MIN = "min"
    MAX = "max"


Directory = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", readable=False, help="Where the checkpoints lie. [default: .]", show_default=False
    ),
]
Null = Annotated[
    bool,
    typer.Option("--null", "-0", help="End paths with NUL, as xargs -0 reads them.", rich_help_panel=SHOWN),
]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Descend into directories.", rich_help_panel=LOOKED_AT)
]


_HALF = "some checkpoints may be half there, or seen twice, until that user's next command settles it"


def say_journals(journals: Sequence[str]) -> None:
    """Say that an interrupted command waits to be settled."""
    from ckpttool.series.changing.home import owner_of
    from ckpttool.series.changing.journal import owner_of_journal
    from ckpttool.series.paths import shown

    for path in journals:
        directory = owner_of(os.path.dirname(path))
        told = "a command was interrupted here; the next that changes it settles it"
        if (user := owner_of_journal(path)) is not None:
            told = f"a command of another user, {user}, was interrupted here, or is at work: {_HALF}"
        say_warning(f"{directory}: {told} ({shown(path)})")


def once_each(problems: Iterable[Problem]) -> Iterator[tuple[str, str]]:
    """Yield each message once: the first of its paths, and the message with how many more there are."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(problem.message, []).append(problem.path)
    for message, (first, *others) in alike.items():
        yield first, f"{message} (and {len(others):,} more)" if others else message


def called(directory: str) -> str:
    """Return a directory as a message names it."""
    if os.path.normpath(directory) == os.curdir:
        return "the current directory"
    from ckpttool.render.escape import printable

    return printable(directory)


def say_nothing(directory: str, *, recursive: bool, quiet: bool = False, checks: bool = False) -> bool:
    """Say that no checkpoint lies in a directory, and return whether that is an error.

    It is one where some lie below, at which nobody looks then; however quiet it is, that is said.

    Args:
        directory: The directory.
        recursive: Whether it was descended into.
        quiet: Whether nothing but an error is said.
        checks: Whether it is an error anyway: what looks at nothing finds nothing wrong.
    """
    from ckpttool.series.surveying.survey import NOTHING, nothing_in

    told = nothing_in(directory, recursive=recursive)
    is_error = checks or told != NOTHING
    if is_error:
        say_error(f"{directory}: {told}")
    elif not quiet:
        say(f"{called(directory)}: {told}")
    return is_error


def print_paths(paths: Sequence[str], *, null: bool) -> None:
    """Print paths so that another program gets them byte for byte; a terminal gets them escaped."""
    if sys.stdout.isatty() and not null:
        from ckpttool.render.escape import printable

        print("\n".join(map(printable, paths)))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(b"".join(os.fsencode(path) + (b"\0" if null else b"\n") for path in paths))
    sys.stdout.buffer.flush()

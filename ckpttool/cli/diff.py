"""``ckpttool diff``: compare two checkpoints, or each of a series with the one before."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.cli.options import json_option, output_option, quiet_option
from ckpttool.cli.output import FAILED, has_colour, print_json, say, say_error, width
from ckpttool.cli.paths import say_journals, single_checkpoint
from ckpttool.cli.progress import progress
from ckpttool.cli.report_files import check_plot, write_report
from ckpttool.core.options import argument
from ckpttool.core.text import printable
from ckpttool.ops.difference import DiffOptions
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.ops.difference import Difference
    from ckpttool.runs.entry import Entry
    from ckpttool.runs.series import Group

_NO_FILE = ("/dev/null", os.devnull)
"""Paths that mean no checkpoint: git passes one for an added or deleted file."""
_UNSORTED = re.compile(r"[^0-9a-z]")
"""Characters that a shell ignores when it sorts names by a locale such as en_US.UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffCommand(DiffOptions):
    """The options of ``diff``."""

    paths: Sequence[str] = argument("A B [C...]", "Two checkpoints, or more; or one directory with a series.")
    all: bool = output_option("--all", help="Show all rows, not just the first 40.", default=False)
    stat: bool = output_option("--stat", help="Count changes by module; list no tensors.", default=False)
    name_only: bool = output_option(
        "--name-only", help="Print only names: M changed, R renamed, D removed, A added.", default=False
    )
    plot: str | None = output_option(
        "--plot",
        metavar="FILE",
        help="Plot how far each layer moved: .svg, .png or .html.",
        is_output=True,
    )
    json: bool = json_option()
    quiet: bool = quiet_option()


def diff(options: DiffCommand) -> int:
    """Show how checkpoints differ, whatever their formats.

    Tensors are paired by name, convention or content; epoch, step, loss and settings are compared, too. With
    three or more, or the directory of a series, each is compared with the one before.
    """
    paths = options.paths if len(options.paths) > 1 else _paths_in_series(options.paths[0])
    _check_options(paths, options)
    if options.plot is not None:
        check_plot(options.plot, [*paths, *filter(None, [options.mapping])])
    compare = compare_two if len(paths) == 2 else compare_series
    return compare([*map(single_checkpoint, paths)], options)


def _check_options(paths: Sequence[str], options: DiffCommand) -> None:
    """Require options that can be combined, and finite tolerances."""
    from ckpttool.core.errors import UsageError

    views = [flag for flag in ("json", "stat", "name_only") if getattr(options, flag)]
    flags = [f"--{view.replace('_', '-')}" for view in views]
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]} are mutually exclusive")
    if len(paths) > 2 and views and not options.json:
        raise UsageError(f"{flags[0]} needs exactly two checkpoints")
    for flag, value in (("--rtol", options.rtol), ("--atol", options.atol)):
        if value and options.bitwise:
            raise UsageError(f"{flag} can't be combined with --bitwise")
        if not math.isfinite(value):
            raise UsageError(f"{flag} {value}: everything would be equal")


# Two checkpoints ------------------------------------------------------------------------------------


def compare_two(paths: Sequence[str], options: DiffCommand) -> int:
    """Compare two checkpoints, print how they differ, and return the exit status."""
    from ckpttool.ops.diff import diff_checkpoints

    with (
        _open_both(*paths) as (a, b),
        progress("comparing", a.nbytes + b.nbytes) as advance,
    ):
        difference = diff_checkpoints(a, b, options, advance=advance)
    if options.plot is not None:
        from ckpttool.cli.render.plot_results import difference_picture
        from ckpttool.integrations.matplotlib import kind_of

        write_report("--plot", options.plot, difference_picture(kind_of(options.plot), difference))
    if not options.quiet:
        _print_difference(difference, options)
    return _status([difference])


@contextmanager
def _open_both(a: str, b: str) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open both sides; a null device is an empty checkpoint of the other's format."""
    from contextlib import ExitStack

    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.formats import open_checkpoint

    with ExitStack() as stack:
        is_none = [path in _NO_FILE for path in (a, b)]
        if any(is_none) and not all(is_none):
            only = stack.enter_context(open_checkpoint(b if is_none[0] else a))
            nothing = Checkpoint(
                path=a if is_none[0] else b,
                format=only.format,
                variant=only.variant,
                producer=only.producer,
                tensors=(),
                files=(),
                spans=lambda: iter(()),
            )
            yield (nothing, only) if is_none[0] else (only, nothing)
        else:
            yield stack.enter_context(open_checkpoint(a)), stack.enter_context(open_checkpoint(b))


def _print_difference(difference: Difference, options: DiffCommand) -> None:
    if options.json:
        print_json(difference.document())
    elif options.name_only:
        from ckpttool.cli.render.text_diff import name_only_text

        if names := name_only_text(difference):
            print(names)
    else:
        from ckpttool.cli.render.text_diff import diff_text

        colour, columns = has_colour(sys.stdout), width(sys.stdout)
        print(diff_text(difference, all=options.all, stat=options.stat, colour=colour, width=columns))


# Three or more --------------------------------------------------------------------------------------


def compare_series(paths: Sequence[str], options: DiffCommand) -> int:
    """Compare each checkpoint with the one before, print it, and return the exit status."""
    from ckpttool.formats import open_checkpoint
    from ckpttool.ops.drift import drift

    if (ordered := _training_order(paths)) != [*paths]:
        paths = ordered
        if not options.quiet:
            say("compared in training order, not in the order of the names")
    sizes = []
    for path in paths:  # report paths that can't be opened before reading
        with open_checkpoint(path) as checkpoint:
            sizes.append(checkpoint.nbytes)
    # Each checkpoint is read once for the norms of its weights, and once for each neighbour.
    with progress("comparing", 3 * sum(sizes) - sizes[0] - sizes[-1]) as advance:
        series = drift(paths, options, advance=advance)
    if options.plot is not None:
        from ckpttool.cli.render.plot_results import drift_picture
        from ckpttool.integrations.matplotlib import kind_of

        write_report("--plot", options.plot, drift_picture(kind_of(options.plot), series))
    if options.json and not options.quiet:
        print_json(series.document())
    elif not options.quiet:
        from ckpttool.cli.render.text_diff import drift_text

        print(drift_text(series, colour=has_colour(sys.stdout), width=width(sys.stdout)))
    return _status([step.difference for step in series.steps])


def _paths_in_series(directory: str) -> list[str]:
    """Return the checkpoints of the one series in a directory, the oldest first."""
    from ckpttool.core.errors import UsageError
    from ckpttool.formats.discovery import unit_at
    from ckpttool.runs.survey import survey_directory

    if not fs.isdir(directory):
        raise UsageError("diff needs at least two checkpoints")
    if unit_at(directory) is not None:
        raise UsageError(f"{directory} is one checkpoint; name a second one, or the directory of a series")
    survey = survey_directory(directory)
    for error in survey.errors:
        raise error
    several = [group for group in survey.groups if len(group.entries) > 1]
    if len(several) > 1:
        say(printable(f"ckpttool: {directory} holds several series; each can be compared:"))
        for series in several:
            say(printable(f"  ckpttool diff {_series_words(series, several)}"))
        raise UsageError(f"{directory}: {len(several):,} series in it; expected one")
    if not several:
        raise UsageError(f"{directory}: no series of checkpoints in it; diff needs at least two checkpoints")
    say_journals(survey.journals)
    others = [group.entries[0].path for group in survey.groups if group is not several[0]]
    if others:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        say(printable(f"ckpttool: not in the series, and not compared: {others[0]}{more}"))
    return [entry.path for entry in several[0].entries]


def _series_words(series: Group, others: Sequence[Group]) -> str:
    """Return the shell's words for one of several series: a directory, else a glob, else all its paths."""
    # A directory only if the others have nothing in it; a glob only if it matches no other file.
    from glob import glob
    from shlex import quote

    directory = series.entries[0].directory
    below = os.path.join(directory, "")
    elsewhere = [entry for group in others if group is not series for entry in group.entries]
    if not any(os.path.join(entry.directory, "").startswith(below) for entry in elsewhere):
        return quote(directory)
    paths = [entry.path for entry in series.entries]
    if sorted(glob(series.key)) == sorted(paths):
        return "*".join(quote(part) if part else "" for part in series.key.split("*"))
    return " ".join(map(quote, paths))


def _training_order(paths: Sequence[str]) -> list[str]:
    """Return the paths in the order of training if they are in the order in which a shell sorts ``DIR/*``."""
    # A shell sorts epoch 10 before epoch 2: by code points in the locale C, and else without regard to case,
    # or to punctuation either. Any other order is the user's choice and is kept, as is one for which the
    # numbers in the names give no order.
    from ckpttool.formats.discovery import unit_at
    from ckpttool.runs.look import look_at
    from ckpttool.runs.series import order_by_numbers

    given = [*paths]
    folded = [path.casefold() for path in paths]
    bare = [_UNSORTED.sub("", path) for path in folded]
    if not any(names == sorted(names) for names in (given, folded, bare)):
        return given
    entries: dict[str, Entry] = {}
    for path in paths:
        unit = unit_at(path)
        entry = look_at(unit) if unit is not None else None
        if entry is None:
            return given
        entries[path] = entry
    ordered = order_by_numbers([*entries.values()]) if len(entries) == len(given) else None
    positions = {id(entry): position for position, entry in enumerate(ordered or ())}
    return sorted(given, key=lambda path: positions[id(entries[path])]) if ordered else given


# The exit status ------------------------------------------------------------------------------------


def _status(differences: Sequence[Difference]) -> int:
    """Print errors of the comparison, and return the exit status."""
    for difference in differences:
        for one in difference.broken:
            path = (difference.a if one.side == "a" else difference.b).path
            say_error(f"{path}[{one.name}]: {one.why}" if one.name != path else f"{path}: {one.why}")
    if any(difference.broken for difference in differences):
        return FAILED
    return int(not all(difference.equal for difference in differences))

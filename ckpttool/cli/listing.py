"""What ``list`` does with what was asked: look, draw, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.cli.output import has_colour, print_json, progress, say, say_warning, width
from ckpttool.cli.pictures import check_plot, write_picture
from ckpttool.cli.series import called, print_paths, say_journals

if TYPE_CHECKING:
    from ckpttool.series.listing import Listing
    from ckpttool.series.pruning.planning import Request

_MOST_PROBLEMS = 10
"""More than that push the list itself off the screen."""


class Shown(NamedTuple):
    """How the answer is to be shown."""

    plot: str | None
    json: bool
    null: bool
    quiet: bool
    flat: bool | None
    long: bool
    wanted: tuple[str | None, ...]


def listed(directory: str, parameters: Mapping[str, Any], config: str | None, shown: Shown) -> int:
    """List a directory, show it, and return the exit status.

    Args:
        directory: Where the checkpoints lie.
        parameters: The options, by the names of attributes.
        config: The configuration that says what a policy would keep.
        shown: How.

    Raises:
        UsageError: What was asked for contradicts itself, or no checkpoint has the metric.
        CheckpointError: The directory can't be looked at, or a picture can't be written.
    """
    from ckpttool.series.listing import list_checkpoints

    if shown.plot is not None:
        check_plot(shown.plot, [directory, *parameters["metrics"]])
    looks, retention = _asked(directory, parameters, config)
    listing = list_checkpoints(
        directory,
        **looks,
        sort=parameters["sort"],
        reverse=parameters["reverse"],
        best=parameters["metric"],
        mode=parameters["mode"],
        depth=parameters["verify"],
        retention=retention,
        progress=progress,
    )
    if not shown.quiet:
        _say(listing, everything=shown.long or not sys.stderr.isatty())
    if shown.plot is not None and listing.checkpoints:
        _draw(shown.plot, directory, listing)
    _show(listing, directory, shown)
    return int(bool(listing.problems))


def _asked(
    directory: str, parameters: Mapping[str, Any], config: str | None
) -> tuple[dict[str, Any], Request | None]:
    """Return what is looked at, and what policy would keep what; None where there is none."""
    from ckpttool.cli.retaining import wishes
    from ckpttool.series.pruning.planning import Request
    from ckpttool.series.surveying.scope import Scope

    given = dict(parameters)
    if given["keep_best"] is None:
        del given["metric"], given["mode"]
    told = wishes(directory, given, config)
    alike = {"jobs", *(one.name for one in fields(Scope))}
    looks = {name: value for name, value in told.looks.items() if name in alike} | {"recursive": True}
    if told.policies is None:
        return looks, None
    depth = parameters["verify"]
    return looks, Request(directory=directory, policies=told.policies, depth=depth, **looks)


def _say(listing: Listing, *, everything: bool) -> None:
    """Say on stderr what must not be missed; of many problems the first, where people read them."""
    say_journals(listing.journals)
    for warning in listing.warnings:
        say_warning(warning)
    shown = listing.problems if everything else listing.problems[:_MOST_PROBLEMS]
    for problem in shown:
        say_warning(f"{problem.path}: {problem.message}")
    if left := len(listing.problems) - len(shown):
        say_warning(f"{left:,} more are not sound, or can't be looked at (-v shows all)")


def _draw(path: str, directory: str, listing: Listing) -> None:
    from ckpttool.render.plot import kind_of
    from ckpttool.render.plot_series import series_picture

    write_picture(path, series_picture(kind_of(path), directory, listing))


def _show(listing: Listing, directory: str, shown: Shown) -> None:
    if shown.json:
        from ckpttool.render.json_list import list_document

        print_json(list_document(listing))
    elif shown.quiet:
        pass
    elif not listing.checkpoints:
        say(f"{called(directory)}: no checkpoint")
    elif shown.null:
        print_paths([one.entry.path for one in listing.checkpoints], null=True)
    else:
        _print(listing, shown)


def _print(listing: Listing, shown: Shown) -> None:
    """Print text: for people on a terminal, and a line a checkpoint with all of it elsewhere."""
    import time

    from ckpttool.render.list_cells import Look
    from ckpttool.render.text_list import flat_text, list_text

    is_terminal = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    look = Look(
        now=time.time(),
        width=width(sys.stdout) if is_terminal else None,
        long=shown.long,
        colour=has_colour(sys.stdout),
        wanted=tuple(name for name in shown.wanted if name is not None),
    )
    is_flat = not is_terminal if shown.flat is None else shown.flat
    print(flat_text(listing, look) if is_flat else list_text(listing, look))

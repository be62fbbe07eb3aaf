"""What ``list`` does with what was asked: look, draw, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.cli.output import has_colour, print_json, progress, say, say_error, say_warning, width
from ckpttool.cli.pictures import check_plot
from ckpttool.cli.pruning import placed
from ckpttool.cli.series import print_paths, say_journals, say_nothing
from ckpttool.cli.targets import write_report
from ckpttool.errors import CheckpointError, UsageError
from ckpttool.render.escape import printable

if TYPE_CHECKING:
    from ckpttool.cli.retaining import Wishes
    from ckpttool.series.listing import DirectoryPreview, ListedDirectory, Listing
    from ckpttool.series.pruning.planning import Depth
    from ckpttool.series.reasons import Problem

COULD_NOT = 2
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


def listed(directory: str | None, parameters: Mapping[str, Any], config: str | None, shown: Shown) -> int:
    """List directories, show it, and return the exit status.

    Args:
        directory: Where the checkpoints lie; None where a configuration, if there is one, is to say it.
        parameters: The options, by the names of attributes.
        config: The configuration that is named.
        shown: How.

    Raises:
        UsageError: What was asked for contradicts itself, or no checkpoint has the metric.
        CheckpointError: The only directory can't be looked at, or a picture can't be written.
    """
    from ckpttool.cli.retaining import wishes
    from ckpttool.series.listing import listing_of

    given = dict(parameters)
    if given["keep_best"] is None:
        del given["metric"], given["mode"]
    told = wishes(directory, given, config)
    paths = told.directories()
    if shown.plot is not None:
        check_plot(shown.plot, [*paths, *told.looks.get("metrics", ())])
    places, wrong = _places(told, parameters["verify"])
    looked = _looked_at(places)
    listing = listing_of(
        list(looked.values()),
        sort=parameters["sort"],
        reverse=parameters["reverse"],
        best=parameters["metric"],
        mode=parameters["mode"],
        depth=parameters["verify"],
        jobs=parameters["jobs"],
        progress=progress,
    )
    listing = replace(listing, problems=(*wrong, *listing.problems))
    if not shown.quiet:
        _say_read(told, config)
        _say(listing, everything=shown.long or not sys.stderr.isatty())
    if shown.plot is not None and listing.checkpoints:
        _draw(shown.plot, paths[0] if len(paths) == 1 else os.curdir, listing)
    _show(listing, [place for place in places if place.directory in looked], shown)
    return COULD_NOT if len(looked) < len(places) else int(bool(listing.problems))


def _places(told: Wishes, depth: Depth) -> tuple[list[ListedDirectory], list[Problem]]:
    """Return what is looked at, with what prune would do there, and why it would do nothing."""
    from ckpttool.cli.unmatched import unmatched_rules
    from ckpttool.series.listing import ListedDirectory
    from ckpttool.series.surveying.survey import Scope

    looks = {"recursive": told.read is None, **told.looks}
    scope = Scope(**{one.name: looks[one.name] for one in fields(Scope) if one.name in looks})
    if told.policies is None and told.looks.get("failed") is None:
        return [ListedDirectory(path, scope) for path in told.directories()], []
    requests = replace(told, looks={**looks, "depth": depth}).requests()
    if wrong := unmatched_rules(told, requests):
        return [ListedDirectory(one.directory, scope) for one in requests], wrong
    return [ListedDirectory(one.directory, scope, one) for one in requests], []


def _looked_at(places: Sequence[ListedDirectory]) -> dict[str, DirectoryPreview]:
    """Return what lies in directories, by their paths; what can't be looked at is told.

    Raises:
        UsageError, CheckpointError: The only one can't be.
    """
    from ckpttool.series.listing import preview_directory

    looked = {}
    for place in places:
        try:
            looked[place.directory] = preview_directory(place, progress)
        except (CheckpointError, UsageError) as failure:
            if len(places) == 1:
                raise
            say_error(placed(failure, place.directory))
    return looked


def _say_read(told: Wishes, config: str | None) -> None:
    """Say which configuration says what is listed, where nobody named one."""
    if told.read is not None and config is None:
        hint = "ckpttool list . lists all that lies here"
        say(f"{printable(told.read)} says what is listed, as it does for prune ({hint})")


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

    write_report(path, series_picture(kind_of(path), directory, listing))


def _show(listing: Listing, places: Sequence[ListedDirectory], shown: Shown) -> None:
    if shown.json:
        from ckpttool.render.json_list import list_document

        print_json(list_document(listing))
    elif shown.quiet:
        pass
    elif not listing.checkpoints:
        for place in places:
            say_nothing(place.directory, recursive=place.scope.recursive)
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

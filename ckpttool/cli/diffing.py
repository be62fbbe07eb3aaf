"""What ``diff`` does with what was asked: open, compare, draw, print."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.cli.output import has_colour, print_json, progress, say, say_error, width
from ckpttool.cli.targets import write_report

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.ops.diff import DiffWishes
    from ckpttool.ops.difference import Difference
    from ckpttool.ops.drift import Drift
    from ckpttool.series.members.entry import Entry

_NOTHING = ("/dev/null", os.devnull)
"""What stands for no checkpoint: git hands it over for a file that was added or deleted."""
_MOST_CANDIDATES = 10
_UNSORTED = re.compile(r"[^0-9a-z]")
"""What has no say where a shell sorts names by the rules of a language."""


class Shown(NamedTuple):
    """How the answer is to be shown."""

    json: bool
    all: bool
    stat: bool
    name_only: bool
    quiet: bool
    plot: str | None


def chosen(path: str) -> str:
    """Return the checkpoint that a path stands for.

    Raises:
        NotACheckpoint: It is a directory of several.
        CheckpointError: It can't be looked at.
    """
    if not os.path.isdir(path):
        return path
    from ckpttool.errors import NotACheckpoint
    from ckpttool.formats.discovery import discover, unit_at

    if unit_at(path) is not None:
        return path
    found = [unit.path for unit in discover(path)]
    if len(found) > 1:
        names = [os.path.relpath(one, path) for one in found]
        listed = ", ".join([*names[:_MOST_CANDIDATES], *(["…"] if len(names) > _MOST_CANDIDATES else [])])
        raise NotACheckpoint(path, f"{len(found):,} checkpoints in it", expected=f"name one: {listed}")
    return found[0] if found else path


# Two ------------------------------------------------------------------------------------------------


def compare_two(paths: Sequence[str], wishes: DiffWishes, shown: Shown) -> int:
    """Compare two checkpoints, show how they differ, and return the exit status.

    Raises:
        CheckpointError: One can't be opened or read, or a picture can't be written.
        UsageError: The map file or the wishes can't be followed.
    """
    from ckpttool.ops.diff import diff_checkpoints

    with (
        _opened(*paths) as (a, b),
        progress("comparing", a.nbytes + b.nbytes) as advance,
    ):
        difference = diff_checkpoints(a, b, wishes, advance=advance)
    if shown.plot is not None:
        from ckpttool.render.plot import kind_of
        from ckpttool.render.plot_diff import difference_picture

        write_report(shown.plot, difference_picture(kind_of(shown.plot), difference))
    if not shown.quiet:
        _print_difference(difference, shown)
    return _status([difference])


@contextmanager
def _opened(a: str, b: str) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open both sides; one that is no file at all is an empty checkpoint of the other's format."""
    from contextlib import ExitStack

    from ckpttool.formats import open_checkpoint

    with ExitStack() as stack:
        is_none = [path in _NOTHING for path in (a, b)]
        if any(is_none) and not all(is_none):
            only = stack.enter_context(open_checkpoint(b if is_none[0] else a))
            nothing = _nothing(only, a if is_none[0] else b)
            yield (nothing, only) if is_none[0] else (only, nothing)
        else:
            yield stack.enter_context(open_checkpoint(a)), stack.enter_context(open_checkpoint(b))


def _nothing(other: Checkpoint, path: str) -> Checkpoint:
    from ckpttool.checkpoint import Checkpoint

    return Checkpoint(
        path=path,
        format=other.format,
        variant=other.variant,
        producer=other.producer,
        tensors=(),
        files=(),
        spans=lambda: iter(()),
    )


def _print_difference(difference: Difference, shown: Shown) -> None:
    if shown.json:
        from ckpttool.render.json_diff import diff_document

        print_json(diff_document(difference))
    elif shown.name_only:
        from ckpttool.render.text_diff import name_only_text

        if names := name_only_text(difference):
            print(names)
    else:
        from ckpttool.render.text_diff import diff_text

        colour, columns = has_colour(sys.stdout), width(sys.stdout)
        print(diff_text(difference, all=shown.all, stat=shown.stat, colour=colour, width=columns))


# Three or more --------------------------------------------------------------------------------------


def compare_series(paths: Sequence[str], wishes: DiffWishes, shown: Shown) -> int:
    """Compare each checkpoint with the one before, show it, and return the exit status.

    Raises:
        CheckpointError: One can't be opened or read, or a picture can't be written.
        UsageError: The map file or the wishes can't be followed.
    """
    from ckpttool.formats import open_checkpoint
    from ckpttool.ops.drift import drift

    if (ordered := _in_training_order(paths)) != [*paths]:
        paths = ordered
        if not shown.quiet:
            say("compared in the order of training: the names sort in another")
    sizes = []
    for path in paths:  # what can't be opened is told before anything is read
        with open_checkpoint(path) as checkpoint:
            sizes.append(checkpoint.nbytes)
    with progress("comparing", 3 * sum(sizes) - sizes[0] - sizes[-1]) as advance:
        found = drift(paths, wishes, advance=advance)
    if shown.plot is not None:
        from ckpttool.render.plot import kind_of
        from ckpttool.render.plot_diff import drift_picture

        write_report(shown.plot, drift_picture(kind_of(shown.plot), found))
    if not shown.quiet:
        _print_drift(found, shown)
    return _status([step.difference for step in found.steps])


def _in_training_order(paths: Sequence[str]) -> list[str]:
    """Return the paths in the order of training, where they come as a shell sorts ``DIR/*``.

    Names that a shell sorts have epoch 10 before epoch 2. Any other order is the user's own, and stays; so
    does one that the numbers of all of them don't tell.

    Raises:
        CheckpointError: A path can't be looked at.
    """
    from ckpttool.formats.discovery import unit_at
    from ckpttool.series.members.look import look_at
    from ckpttool.series.members.order import order_by_numbers

    given = [*paths]
    folded = [path.casefold() for path in paths]
    bare = [_UNSORTED.sub("", path) for path in folded]
    if not any(names == sorted(names) for names in (given, folded, bare)):
        return given
    found: dict[str, Entry] = {}
    for path in paths:
        unit = unit_at(path)
        entry = look_at(unit) if unit is not None else None
        if entry is None:
            return given
        found[path] = entry
    ordered = order_by_numbers([*found.values()]) if len(found) == len(given) else None
    places = {id(entry): place for place, entry in enumerate(ordered or ())}
    return sorted(given, key=lambda path: places[id(found[path])]) if ordered else given


def _print_drift(drift: Drift, shown: Shown) -> None:
    if shown.json:
        from ckpttool.render.json_diff import drift_document

        print_json(drift_document(drift))
    else:
        from ckpttool.render.text_drift import drift_text

        print(drift_text(drift, colour=has_colour(sys.stdout), width=width(sys.stdout)))


def _status(differences: Sequence[Difference]) -> int:
    """Return the exit status, and say on stderr what couldn't be compared."""
    for difference in differences:
        for one in difference.broken:
            path = (difference.a if one.side == "a" else difference.b).path
            say_error(f"{path}[{one.name}]: {one.why}" if one.name != path else f"{path}: {one.why}")
    if any(difference.broken for difference in differences):
        return 2
    return int(not all(difference.equal for difference in differences))

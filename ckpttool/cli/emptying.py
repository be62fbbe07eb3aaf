"""Empties the trash of directories: what ``prune --trash`` has put there, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.output import print_json, say_error, say_warning
from ckpttool.cli.pruning import Manner, placed
from ckpttool.errors import CheckpointError

if TYPE_CHECKING:
    from ckpttool.cli.retaining import Wishes
    from ckpttool.series.undoing.trash import Emptied


def emptied(wanted: Wishes, manner: Manner) -> int:
    """Remove what the trash of all directories holds, and return the exit status: the worst of theirs.

    Raises:
        CheckpointError: The only directory can't be looked at or changed.
    """
    if not manner.consent.is_given:
        preview, _ = _outcomes(wanted, dry_run=True)
        if any(one.removed for one in preview) and not _is_to_be_emptied(preview, manner):
            _print_declined(preview, manner)
            return 1
    found, failures = _outcomes(wanted, dry_run=manner.dry_run)
    for failure in failures:
        say_error(failure)
    return _told(found, manner, failed=bool(failures))


def _outcomes(wanted: Wishes, *, dry_run: bool) -> tuple[list[Emptied], list[str]]:
    """Return what became of each trash, or would, and why some directories have none that can be looked at.

    Raises:
        CheckpointError: The only directory can't be looked at or changed.
    """
    from ckpttool.series.undoing.trash import empty

    found: list[Emptied] = []
    failures: list[str] = []
    for path in wanted.paths or (os.curdir,):
        try:
            for place in _trashes(path, wanted.recursive):
                found.append(empty(place, wanted.older_than, dry_run=dry_run))
        except CheckpointError as failure:
            if len(wanted.paths) <= 1:
                raise
            failures.append(placed(failure, path))
    return found, failures


def _trashes(path: str, recursive: bool) -> Iterator[str]:
    from ckpttool.series.paths import require_directory
    from ckpttool.series.undoing.undo import with_trash

    root = require_directory(path)
    yield from with_trash(root) if recursive else [root]


def _is_to_be_emptied(preview: Sequence[Emptied], manner: Manner) -> bool:
    if manner.consent.asks:
        from ckpttool.render.text_prune import empty_text

        print(empty_text(preview), file=sys.stderr if manner.json else sys.stdout, flush=True)
    return manner.consent.to("Remove them for good?")


def _told(found: Sequence[Emptied], manner: Manner, *, failed: bool) -> int:
    """Say what came of it; where a directory failed as a whole, stdout stays empty."""
    problems = [problem for one in found for problem in one.problems]
    if not manner.quiet:
        for warning in (warning for one in found for warning in one.warnings):
            say_warning(warning)
    for problem in problems:
        say_error(f"{problem.path}: {problem.message}")
    if manner.json and not failed:
        _print(found)
    elif not manner.quiet:
        from ckpttool.render.text_prune import empty_text

        print(empty_text(found), file=sys.stderr if failed else sys.stdout)
    would_go = manner.check and any(one.removed for one in found)
    return 2 if failed else int(bool(problems) or would_go)


def _print_declined(preview: Sequence[Emptied], manner: Manner) -> None:
    """Print what would have been removed; who sat at the terminal has seen it."""
    if manner.json:
        _print(preview)
    elif not (manner.quiet or manner.consent.asks):
        from ckpttool.render.text_prune import empty_text

        print(empty_text(preview))


def _print(found: Sequence[Emptied]) -> None:
    from ckpttool.render.json_prune import empty_document

    print_json(empty_document(found))

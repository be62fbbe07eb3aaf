"""``ckpttool latest``: print the newest intact checkpoint, for a job to resume from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.cli.options import (
    json_option,
    null_option,
    quiet_option,
)
from ckpttool.cli.output import FAILED, discard, grouped_messages, print_json, say, say_error, say_warning
from ckpttool.cli.paths import print_paths, say_inferred_mode, say_journals
from ckpttool.cli.progress import ProgressLines
from ckpttool.core.options import argument, group
from ckpttool.core.text import printable
from ckpttool.runs.latest import latest_of
from ckpttool.runs.look import no_progress
from ckpttool.runs.resume_choice import Latest, LatestQuery

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestCommand:
    """The options of ``latest``."""

    directories: Sequence[str] = argument(
        "[DIR...]", "Directories of checkpoints. [default: .]", default=(os.curdir,)
    )
    query: LatestQuery = group(
        LatestQuery,
        (
            *("best", "mode", "metrics", "before", "allow_unsafe", "resume_exact"),
            *("recursive", "exclude", "max_depth", "depth", "wait", "missing_ok", "jobs"),
        ),
        is_record=True,
    )
    json: bool = json_option()
    null: bool = null_option()
    quiet: bool = quiet_option()


def latest(command: LatestCommand) -> int:
    """Print the path of the newest intact checkpoint.

    With several directories, such as a disk and its copy in a store, print the newest of all.
    """
    # Scripts read stdout, as in "$(ckpttool latest runs)": it has the path and nothing else. All notes are
    # written to stderr, the one on what a training resumes only on a terminal.
    places, query, quiet = command.directories, command.query, command.quiet
    found = latest_of(
        places,
        query,
        tell=(lambda text: None) if quiet else _say_now,
        progress=no_progress if quiet else ProgressLines(),
    )
    if not quiet:
        say_inferred_mode(query.best, query.mode)
        if found.waited_for:
            names = ", ".join(found.waited_for[:_MAX_NAMED])
            more = ", …" if len(found.waited_for) > _MAX_NAMED else ""
            _say_now(f"waited {found.waited:.1f} s for {names}{more}")
        say_journals(found.journals)
        for path, message in grouped_messages(found.passed_over):
            say_warning(f"{path}: skipped: {message}")
        for warning in found.warnings:
            say_warning(warning)
        if found.entry is not None and found.resume is not None and sys.stderr.isatty():
            _say_now(f"{found.entry.path} resumes {found.resume}")
    try:
        _print(found, json=command.json, null=command.null, quiet=quiet)
        sys.stdout.flush()
    except BrokenPipeError:
        # Other commands exit with 1. Of ``latest``, that means that there is no checkpoint, and a job would
        # start a new training although one exists.
        discard(sys.stdout)
        return FAILED
    if found.entry is None and query.missing_ok and found.none_yet:
        if not quiet:
            _say_now(f"{', '.join(places)}: no checkpoint yet")
        return 0
    if found.entry is None:
        say_error(found.reason or "")
    return int(found.entry is None)


def _say_now(text: str) -> None:
    say(f"ckpttool: {printable(text)}")
    sys.stderr.flush()


def _print(found: Latest, *, json: bool, null: bool, quiet: bool) -> None:
    if json:
        print_json(found.document())
    elif found.entry is not None and not quiet:
        if found.entry.path.endswith("\n") and not null:
            say_warning(f"{found.entry.path}: its name ends in a line break, which $(…) strips (use -0)")
        print_paths([found.entry.path], null=null)

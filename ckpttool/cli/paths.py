"""Paths on the command line: which checkpoint one means, and how paths are printed and named in messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ckpttool.cli.output import error_text, say, say_error, say_warning
from ckpttool.core.text import printable
from ckpttool.storage import fs

_HALF = "some checkpoints may be incomplete, or listed twice, until that user's next command recovers them"
_MOST_CANDIDATES = 10


def single_checkpoint(path: str) -> str:
    """Return the path of the checkpoint at or in a path; several in a directory are an error."""
    if not fs.isdir(path):
        return path
    from ckpttool.core.errors import NotACheckpoint
    from ckpttool.formats.discovery import discover, unit_at

    if unit_at(path) is not None:
        return path
    # One of several is never guessed: ``diff`` or ``convert`` would silently use a checkpoint that the user
    # didn't mean.
    found = [unit.path for unit in discover(path)]
    if len(found) > 1:
        names = [os.path.relpath(one, path) for one in found]
        listed = ", ".join([*names[:_MOST_CANDIDATES], *(["…"] if len(names) > _MOST_CANDIDATES else [])])
        raise NotACheckpoint(path, f"{len(found):,} checkpoints in it", expected=f"name one: {listed}")
    return found[0] if found else path


def directory_name(directory: str) -> str:
    """Return the name of a directory for messages."""
    if fs.normpath(directory) == os.curdir:
        return "the current directory"
    return printable(directory)


def with_directory(failure: Exception, directory: str) -> str:
    """Return an error's text with the directory in which it happened."""
    text = error_text(failure)
    return text if text.startswith(directory) else f"{directory}: {text}"


def print_paths(paths: Sequence[str], *, null: bool) -> None:
    """Print paths so that another program gets them byte for byte; a terminal gets them escaped."""
    if sys.stdout.isatty() and not null:
        print("\n".join(map(printable, paths)))
        return
    # Names of files are bytes; those that aren't UTF-8 are decoded with surrogates, which only ``fsencode``
    # restores.
    sys.stdout.flush()
    sys.stdout.buffer.write(b"".join(os.fsencode(path) + (b"\0" if null else b"\n") for path in paths))
    sys.stdout.buffer.flush()


def say_empty(directory: str, *, recursive: bool, quiet: bool = False, checks: bool = False) -> bool:
    """Print that a directory has no checkpoint, and return whether that is an error.

    It is an error if there would be some with ``--recursive``.

    Args:
        directory: The directory.
        recursive: Whether subdirectories were searched.
        quiet: Whether only errors are printed.
        checks: Whether it is always an error, since a check of nothing must not pass.
    """
    from ckpttool.runs.survey import NOTHING, nothing_in

    message = nothing_in(directory, recursive=recursive)
    is_error = checks or message != NOTHING
    if is_error:
        say_error(f"{directory}: {message}")
    elif not quiet:
        say(f"{directory_name(directory)}: {message}")
    return is_error


def say_unread(unread: Mapping[str, str], consequence: str, *, everything: bool) -> None:
    """Warn of files and directories that look like models and are not read: a line for each reason.

    Args:
        unread: Why each is not read, by path.
        consequence: Such as "not verified".
        everything: Whether each path has a line.
    """
    alike: dict[str, list[str]] = {}
    for path, why in unread.items():
        alike.setdefault(path if everything else why, []).append(path)
    for first, *others in alike.values():
        more = f" and {len(others):,} more" if others else ""
        say_warning(f"{first}{more}: {consequence}: {unread[first]}")


def say_inferred_mode(metric: str | None, mode: object) -> None:
    """Print whether low or high values of a metric are better, if that is inferred."""
    if metric is not None and mode is None:
        from ckpttool.runs.modes import mode_note

        if note := mode_note(metric):
            say(f"ckpttool: {printable(note)}")


def say_journals(journals: Sequence[str]) -> None:
    """Warn of interrupted commands, whose journals are still to be recovered."""
    from ckpttool.transaction.paths import shown
    from ckpttool.transaction.recovery import directory_of_journal, owner_of_journal

    for path in journals:
        directory = directory_of_journal(path)
        message = "a command was interrupted here; the next command that changes this directory recovers it"
        if not fs.place_of(path).can_rename:  # a store, which has no locks either
            message = "a prune was interrupted here, or is still running; the next prune finishes it"
        if (user := owner_of_journal(path)) is not None:
            message = f"a command of another user, {user}, was interrupted here, or is still running: {_HALF}"
        say_warning(f"{directory}: {message} ({shown(path)})")

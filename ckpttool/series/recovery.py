"""Settles what a removal that was killed has left: finished where it must be, else undone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial

from ckpttool.errors import AccessDenied, DamagedCheckpoint
from ckpttool.series.files import Fingerprint, fingerprint, opened
from ckpttool.series.journal import JOURNAL, Removal, read, stages
from ckpttool.series.removal import (
    Changed,
    Stage,
    clear,
    persist,
    remove_directories,
    status_of,
    unlink_file,
)


@dataclass(slots=True)
class Settled:
    """What was finished, what was put back, and what could be neither, by path with the reason."""

    finished: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def settle_all(directory: str) -> Settled:
    """Settle every removal that was interrupted in a directory.

    Raises:
        CheckpointError: A journal can't be understood, or the directory not changed.
    """
    total = Settled()
    for name in stages(directory):
        one = settle(directory, name)
        total.finished += one.finished
        total.put_back += one.put_back
        total.failed |= one.failed
    return total


def settle(directory: str, name: str) -> Settled:
    """Settle one interrupted removal. What it had not begun is left to the next plan.

    Raises:
        CheckpointError: Its journal can't be understood, or the directory not changed.
    """
    settled = Settled()
    path = os.path.join(directory, name)
    journal_path = os.path.join(path, JOURNAL)
    try:
        if os.path.lexists(journal_path):
            removals = read(journal_path).removals
            with opened(directory) as home, opened(name, home) as inner:
                stage = Stage(path, home, inner)
                for number, removal in enumerate(removals):
                    _settle_one(stage, number, removal, settled)
        if not clear(path) and not settled.failed:
            raise DamagedCheckpoint(path, "files that no journal tells of", expected="move them where they belong")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AccessDenied(path, f"an interrupted prune can't be settled: {reason}") from error
    return settled


def _settle_one(stage: Stage, number: int, removal: Removal, settled: Settled) -> None:
    if status_of(str(number), stage.inner) is None:
        return
    try:
        with opened(str(number), stage.inner) as place:
            if not os.listdir(place):
                has_begun = _is_destroyed(stage.home, place, removal)
                persist(partial(os.rmdir, str(number), dir_fd=stage.inner))
                settled.finished += [removal.path] * has_begun
                return
            is_wanted = all(status_of(name, stage.home) for name in removal.survivors)
            if is_wanted or _is_destroyed(stage.home, place, removal):
                _finish(stage, place, removal)
                persist(partial(os.rmdir, str(number), dir_fd=stage.inner))
                settled.finished.append(removal.path)
                return
        stage.put_back(number, removal)
        settled.put_back.append(removal.path)
    except Changed as change:
        settled.failed[removal.path] = f"{change}; what is left of it lies in {stage.path}"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        settled.failed[removal.path] = f"{reason}; what is left of it lies in {stage.path}"


def _is_destroyed(home: int, place: int, removal: Removal) -> bool:
    """Tell whether a file of it exists in neither place any more."""
    return not all(_is_there(file, place) or _is_there(file, home) for file in removal.contents.files)


def _is_there(file: Fingerprint, directory: int) -> bool:
    parent, name = os.path.split(file.path)
    try:
        with opened(parent, directory) as inner:
            status = status_of(name, inner)
    except OSError:  # the directory around it is gone
        return False
    return status is not None and fingerprint(file.path, status).identity == file.identity


def _finish(stage: Stage, place: int, removal: Removal) -> None:
    """Rename away what is still in its place, unless it is another file by now, and unlink all."""
    for name in removal.members:
        files = [file for file in removal.contents.files if file.path.split(os.sep)[0] == name]
        if files and all(_is_there(file, stage.home) for file in files):
            if status_of(name, place) is not None:
                os.unlink(name, dir_fd=place)  # put back already, but for this second name
            persist(partial(os.rename, name, name, src_dir_fd=stage.home, dst_dir_fd=place))
    for file in removal.contents.files:
        try:
            unlink_file(place, file)
        except FileNotFoundError:  # its directory went before
            continue
    remove_directories(place, removal.contents)

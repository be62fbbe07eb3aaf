"""Settles what a removal that was killed has left: finished where it must be, else undone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial

from ckpttool.errors import AccessDenied, DamagedCheckpoint
from ckpttool.series.files import Fingerprint, fingerprint, opened
from ckpttool.series.journal import JOURNAL, Removal, read, stages, stages_beside
from ckpttool.series.removal import clear
from ckpttool.series.stage import Changed, Stage, persist, remove_directories, status_of, unlink_file


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
    within = [os.path.join(directory, name) for name in stages(directory)]
    for stage in within + stages_beside(directory):
        one = settle(directory, stage)
        total.finished += one.finished
        total.put_back += one.put_back
        total.failed |= one.failed
    return total


def settle(directory: str, path: str) -> Settled:
    """Settle the interrupted removal that left a stage. What it had not begun is left to the next plan.

    Raises:
        CheckpointError: Its journal can't be understood, or the directory not changed.
    """
    settled = Settled()
    around, name = os.path.split(path)
    journal_path = os.path.join(path, JOURNAL)
    try:
        if os.path.lexists(journal_path):
            removals = read(journal_path).removals
            with opened(directory) as home, opened(around) as place, opened(name, place) as inner:
                stage = Stage(path, home, inner)
                for number, removal in enumerate(removals):
                    _settle_one(stage, number, removal, settled)
        if not clear(path) and not settled.failed:
            expected = "move them where they belong"
            raise DamagedCheckpoint(path, "files that no journal tells of", expected=expected)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AccessDenied(path, f"an interrupted prune can't be settled: {reason}") from error
    return settled


def _settle_one(stage: Stage, number: int, removal: Removal, settled: Settled) -> None:
    if status_of(str(number), stage.inner) is None:
        return
    try:
        with opened(str(number), stage.inner) as place:
            is_finished = _finished(stage, place, removal)
        if is_finished:
            persist(partial(os.rmdir, str(number), dir_fd=stage.inner))
        else:
            stage.put_back(number, removal)
        (settled.finished if is_finished else settled.put_back).append(removal.path)
    except Changed as change:
        settled.failed[removal.path] = f"{change}; what is left of it lies in {stage.path}"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        settled.failed[removal.path] = f"{reason}; what is left of it lies in {stage.path}"


def _finished(stage: Stage, place: int, removal: Removal) -> bool:
    """Finish a removal, if a part is lost already or it is whole and still wanted; tell whether it was."""
    states = [_states(file, place, stage.home) for file in removal.contents.files]
    is_lost = any(not found for found in states)
    is_whole = all(True in found for found in states)
    is_wanted = bool(os.listdir(place)) and all(status_of(name, stage.home) for name in removal.survivors)
    if not is_lost and not (is_whole and is_wanted):
        return False
    _finish(stage, place, removal)
    return True


def _states(file: Fingerprint, *directories: int) -> list[bool]:
    """Return for each directory that has a file of that name whether it is the one that is meant."""
    return [is_same for one in directories if (is_same := _is_there(file, one)) is not None]


def _is_there(file: Fingerprint, directory: int) -> bool | None:
    """Tell whether a file is the one that is meant; None where there is no such name."""
    parent, name = os.path.split(file.path)
    try:
        with opened(parent, directory) as inner:
            status = status_of(name, inner)
    except OSError:  # the directory around it is gone
        return None
    return status and fingerprint(file.path, status).identity == file.identity


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

"""Opens a path or what discovery found with a format, and adds what other readings of the files could run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.formats.interface import Format, Probe, SetFormat, Unit
from ckpttool.formats.readings import add_readings, further_readings


def open_with(path: str | os.PathLike[str], choose: Callable[[Probe], Format]) -> Checkpoint:
    """Return the checkpoint at a path, opened by the format that ``choose`` returns for it.

    The checkpoint closes the file; if there comes to be none, it is closed here.
    """
    return open_probe(Probe(path), choose)


def open_probe(probe: Probe, choose: Callable[[Probe], Format]) -> Checkpoint:
    """Return the checkpoint at a path that was looked at already; see ``open_with``."""
    with ExitStack() as until_opened:
        until_opened.enter_context(probe)
        checkpoint = _open_and_judge(choose(probe), probe)
        until_opened.pop_all()
    return checkpoint


def _open_and_judge(format: Format, probe: Probe) -> Checkpoint:
    """Return the checkpoint with what all other readings of its file or directory could run.

    What those readings say of one that can't be opened is in the ``safety`` of the error.
    """
    is_file = not probe.is_directory and not isinstance(format, SetFormat)
    try:
        checkpoint = format.open(probe)
    except DamagedCheckpoint as failure:
        with suppress(CheckpointError):  # it is damaged, and perhaps closed already
            if is_file:
                findings = further_readings(probe, format, damaged=True)
                failure.safety = tuple(dict.fromkeys((*failure.safety, *findings)))
            elif probe.is_directory:
                from ckpttool.formats.bystanders import bystander_findings

                failure.safety += bystander_findings(probe.path)
        raise
    if is_file:
        add_readings(checkpoint, probe, format)
        return checkpoint
    root = probe.path if probe.is_directory else checkpoint.path
    if os.path.isdir(root):
        from ckpttool.formats.bystanders import add_bystanders

        add_bystanders(checkpoint, root)
    return checkpoint


def open_unit(format: Format, unit: Unit) -> Checkpoint:
    """Return the checkpoint that discovery found; see ``Format.open``."""
    checkpoint = format.open_unit(unit)
    return open_with(unit.path, lambda probe: format) if checkpoint is None else checkpoint

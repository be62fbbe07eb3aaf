"""Opens a path or what discovery found with a format, and adds what other readings of the files could run.

``Opening`` is what a format's reader gathers meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, memory_checked
from ckpttool.core.report import Finding, error
from ckpttool.formats.architecture import hub_config
from ckpttool.formats.copy_notes import COPYING, interrupted_copy
from ckpttool.formats.interface import Format, Probe, SetFormat, Unit
from ckpttool.formats.readings import add_readings, further_readings
from ckpttool.storage import fs

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(kw_only=True, eq=False)
class Opening:
    """What was found of a checkpoint so far; a context manager that closes its files if opening fails.

    Attributes:
        findings: What is wrong with it.
        safety: What loading it could run.
        complete: Whether all that belongs to it is there and could be read.
        opened: Closes its files.
    """

    findings: list[Finding] = field(default_factory=list)
    safety: list[Finding] = field(default_factory=list)
    complete: bool = True
    opened: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.opened.close()

    def fault(self, code: str, message: str, where: str | None = None) -> None:
        """Note an error because of which the checkpoint is not complete."""
        self.findings.append(error(code, message, where))
        self.complete = False

    def keep(self) -> Callable[[], None]:
        """Return what closes the files; leaving the context does so no more."""
        return self.opened.pop_all().close


def open_with(path: str | os.PathLike[str], choose: Callable[[Probe], Format]) -> Checkpoint:
    """Return the checkpoint at a path, opened by the format that ``choose`` returns for it.

    The checkpoint closes the file; if there comes to be none, it is closed here.
    """
    return open_probe(Probe(path), choose)


def open_probe(probe: Probe, choose: Callable[[Probe], Format]) -> Checkpoint:
    """Return the checkpoint at a path that was looked at already; see ``open_with``."""
    with ExitStack() as until_opened:
        until_opened.enter_context(probe)
        with memory_checked(probe.path):
            checkpoint = _open_and_judge(choose(probe), probe)
        until_opened.pop_all()
    return _with_config(checkpoint)


def _open_and_judge(format: Format, probe: Probe) -> Checkpoint:
    """Return the checkpoint with what all other readings of its file or directory could run.

    What those readings say of one that can't be opened is in the ``safety`` of the error.
    """
    is_file = not probe.is_directory and not isinstance(format, SetFormat)
    if COPYING in probe.entries:
        raise interrupted_copy(probe.path)
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
    if fs.isdir(root):
        from ckpttool.formats.bystanders import add_bystanders

        add_bystanders(checkpoint, root)
    return checkpoint


def open_unit(format: Format, unit: Unit) -> Checkpoint:
    """Return the checkpoint that discovery found; see ``Format.open``."""
    with memory_checked(unit.path):
        checkpoint = format.open_unit(unit)
    if checkpoint is None:
        return open_with(unit.path, lambda probe: format)
    return _with_config(checkpoint)


def _with_config(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the configuration beside its files, which is read if it is asked for."""
    return checkpoint.but(config=partial(hub_config, checkpoint.files))

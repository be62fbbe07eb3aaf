"""Exported programs: what ``torch.export.save`` writes, a graph as JSON with weights and constants."""

from __future__ import annotations

from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import Format, Probe

_FIRST_RECORDS = ("data/weights/", "data/constants/", "data/aotinductor/", "models/", "archive_format")
OLD_PROGRAM = "serialized_exported_program.json"
"""What archives of PyTorch 2.1 to 2.7 have."""


class TorchExport(Format):
    """A file that ``torch.export.save`` wrote, or a package of compiled models."""

    name: ClassVar[str] = "torch-export"
    suffixes = (".pt2",)

    def matches(self, probe: Probe) -> bool:
        members = probe.members
        if "archive_format" in members:
            return True
        if len(members) == 1 and min(members).startswith(_FIRST_RECORDS):
            return True  # of a zip whose directory is lost only the first record is known
        if any(name.startswith("models/") and name.endswith(".json") for name in members):
            return any(name.startswith("data/") for name in members)
        return _is_old(probe)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.torch.export_programs import open_program

        return open_program(probe, self.name, OLD_PROGRAM if _is_old(probe) else None)


def _is_old(probe: Probe) -> bool:
    try:
        return probe.is_zip and OLD_PROGRAM in probe.archive.names
    except CheckpointError:
        return False

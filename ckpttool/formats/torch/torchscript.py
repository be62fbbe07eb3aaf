"""TorchScript archives: what ``torch.jit.save`` writes, a model with its code."""

from __future__ import annotations

from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.formats.interface import Format, Probe

_FIRST_RECORDS = ("data/0", "extra/")


class TorchScript(Format):
    """A file that ``torch.jit.save`` wrote."""

    name: ClassVar[str] = "torchscript"
    suffixes = (".torchscript", ".ptl", ".jit")

    def matches(self, probe: Probe) -> bool:
        if {"data.pkl", "constants.pkl"} <= probe.members:
            return True
        # Of a zip whose directory is lost only the first record is known; torch.save's is data.pkl.
        return len(probe.members) == 1 and min(probe.members).startswith(_FIRST_RECORDS)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.torch.torchscript_records import open_torchscript

        return open_torchscript(probe, self.name)

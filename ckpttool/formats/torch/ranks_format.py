"""The format of a save in which each rank wrote its own file, recognised by the files' names.

``rank_files.py`` parses the names. ``ranks.py`` opens the files and assembles their tensors; it is imported
only when a checkpoint is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.formats.interface import Format, Probe, SetFormat, Unit
from ckpttool.formats.pickles import PytorchLegacy
from ckpttool.formats.torch.rank_files import (
    COMPANION,
    FSDP,
    LOADABLE,
    METADATA,
    Entries,
    files_at,
    files_by_stem,
    matches_at_ends,
    parse_rank_file,
    rank_files,
)
from ckpttool.formats.torch.zip import PytorchZip

_SHARDED = re.compile(rb"\b(DTensor|ShardedTensor)\b")


class RankFiles(SetFormat):
    """The files of all ranks of one save."""

    name: ClassVar[str] = "pytorch"
    specialises: ClassVar[tuple[type[Format], ...]] = (PytorchZip, PytorchLegacy)
    takes_in = True

    def matches(self, probe: Probe) -> bool:
        return bool(files_at(probe))

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.torch.ranks import open_ranks

        files = files_at(probe)
        probe.close()
        metadata = probe.entries.get(METADATA)
        others = [name for name in probe.entries if COMPANION.fullmatch(name) and name.endswith(LOADABLE)]
        path = None if metadata is None else metadata.path
        return open_ranks(probe.path, files, path, others, allows_losses=probe.allows_losses)

    def open_unit(self, unit: Unit, *, allows_losses: bool = False) -> Checkpoint | None:
        from ckpttool.formats.torch.ranks import open_ranks

        directory = os.path.dirname(unit.path)
        files = [
            file
            for name in unit.parts
            if (file := parse_rank_file(os.path.join(directory, name))) is not None
        ]
        return open_ranks(unit.path, files, allows_losses=allows_losses) if files else None

    def units(self, directory: str, entries: Entries) -> Iterator[Unit]:
        for stem, files in files_by_stem(rank_files(entries)).items():
            if matches_at_ends(files[0].path, _SHARDED):
                yield Unit(os.path.join(directory, stem), tuple(file.name for file in files), self)


def fsdp_units(directory: str, entries: Entries) -> list[Unit]:
    """Return the files of the ranks of each model and optimizer that Accelerate saved, as units."""
    files = (file for file in rank_files(entries) if FSDP.fullmatch(file.name))
    return [
        Unit(os.path.join(directory, stem), tuple(file.name for file in group), RankFiles())
        for stem, group in files_by_stem(files).items()
    ]

"""Names of the files of a save in which each process of the job wrote its own file of ``torch.save``.

``model_world_size_2_rank_0.pt`` with ``optim_…`` and ``extra_state_…`` (verl, SkyRL), and ``checkpoint_0.pt``
next to ``metadata.pkl`` (torch_checkpointing), have a directory to themselves. Names that end in the number
of a rank, ``pytorch_model_fsdp_rank0.bin`` or ``model_0000999.rank_0.pth``, may share a directory with other
saves: if they hold parts of tensors they are one checkpoint, named by their common stem.

Source: volcengine/verl ``verl/utils/checkpoint/fsdp_checkpoint_manager.py``; huggingface/accelerate
``utils/fsdp_utils.py``; meta-pytorch/torch_checkpointing ``metadata_manager.py``; facebookresearch/dinov2
``dinov2/fsdp/__init__.py``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import RANKED, Probe, natural, ranked_paths
from ckpttool.storage import fs

METADATA = "metadata.pkl"
FSDP = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d{1,4})?_rank\d{1,9}\.bin")
"""Accelerate's files of a process's part of a model or optimizer, in a directory with other files."""

_WORLD_FILE = re.compile(
    r"(?P<stem>model|optim|optimizer|extra_state)_world_size_(?P<world>\d{1,9})"
    r"_rank_(?P<rank>\d{1,9})\.(pt|pth|bin)"
)
_NUMBERED = re.compile(r"(?P<stem>checkpoint)_(?P<rank>\d{1,9})\.pt")
LOADABLE = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl")
COMPANION = re.compile(
    r"(data|dataloader|rng_state|random_states|scheduler|scaler|training_args)([._-]?\d{1,9})?\.\w+"
)
"""Other files of the same save; any other loadable file in the directory is another save."""
_WORLD_SIZE = re.compile(rb"\bworld_size\b")
_SEARCHED = 1 << 16
"""Bytes searched at each end of a file: its pickle is at the start, and a count may be its last entry."""

Entries = Mapping[str, os.DirEntry[str]]


class RankFile(NamedTuple):
    """The file of one process; ``world`` is the number of ranks in its name, 0 if there is none."""

    path: str
    stem: str
    rank: int
    world: int = 0

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def _files_of_one_save(entries: Entries) -> list[RankFile]:
    """Return the files of the ranks in a directory; none if it holds another checkpoint too."""
    files = [file for entry in entries.values() if (file := _parse_world_file(entry.path)) is not None]
    if not files and METADATA in entries and matches_at_ends(entries[METADATA].path, _WORLD_SIZE):
        matches = ((entry.path, _NUMBERED.fullmatch(name)) for name, entry in entries.items())
        files = [RankFile(path, match["stem"], int(match["rank"])) for path, match in matches if match]
    names = {METADATA, *(file.name for file in files)}
    others = (name for name in entries if name.endswith(LOADABLE) and name not in names)
    if any(not COMPANION.fullmatch(name) and entries[name].is_file() for name in others):
        return []
    return sorted(files, key=_sort_key)


def parse_rank_file(path: str) -> RankFile | None:
    """Return the parts of a name that ends in the number of a rank; None for another name."""
    match = RANKED.fullmatch(os.path.basename(path))
    if match is None:
        return None
    world_file = _parse_world_file(path)
    return RankFile(path, match["stem"], int(match["rank"]), world_file.world if world_file else 0)


def rank_files(entries: Entries) -> Iterator[RankFile]:
    """Yield the files among the entries whose names end in the number of a rank, of any number of saves."""
    return (file for entry in entries.values() if (file := parse_rank_file(entry.path)) is not None)


def files_at(probe: Probe) -> list[RankFile]:
    """Return the files of all ranks of the one save at a path, as ``RankFiles`` opens it, by stem and rank.

    The path is a directory of theirs, or the common stem of their names (``interface.ranked_paths`` lists the
    files of a stem). ``rank_files`` finds all such files of a directory, which may be of several saves.
    """
    if probe.is_directory:
        return _files_of_one_save(probe.entries)
    if fs.lexists(probe.path):
        return []
    files = [file for path in ranked_paths(probe.path) if (file := parse_rank_file(path)) is not None]
    return sorted(files, key=_sort_key)


def _parse_world_file(path: str) -> RankFile | None:
    match = _WORLD_FILE.fullmatch(os.path.basename(path))
    return match and RankFile(path, match["stem"], int(match["rank"]), int(match["world"]))


def _sort_key(file: RankFile) -> tuple[bool, object, int]:
    return file.stem != "model", natural(file.stem), file.rank


def files_by_stem(files: Iterable[RankFile]) -> dict[str, list[RankFile]]:
    """Return the files of each stem in the order of ranks; stems with a rank twice are left out."""
    groups: dict[str, list[RankFile]] = defaultdict(list)
    for file in sorted(files, key=_sort_key):
        groups[file.stem].append(file)
    return {stem: group for stem, group in groups.items() if len({file.rank for file in group}) == len(group)}


def matches_at_ends(path: str, pattern: re.Pattern[bytes]) -> bool:
    """Return whether a file has the pattern in its first or last ``_SEARCHED`` bytes."""
    try:
        with fs.open_source(path) as source:
            length = min(source.size, _SEARCHED)
            ends = source.read(0, length) + source.read(source.size - length, length)
    except CheckpointError:  # opening the file reports it
        return False
    return pattern.search(ends) is not None

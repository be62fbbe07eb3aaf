"""One save of which every process of the job wrote its own file of ``torch.save``: how these are named.

``model_world_size_2_rank_0.pt`` with ``optim_…`` and ``extra_state_…`` (verl, SkyRL) and ``checkpoint_0.pt``
beside ``metadata.pkl`` (torch_checkpointing) have a directory to themselves. Names that end in the number of
a rank, ``pytorch_model_fsdp_rank0.bin`` or ``model_0000999.rank_0.pth``, may lie beside those of other saves:
they are one checkpoint where they hold parts of tensors, under what their names have in common.

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
"""How Accelerate names what a process kept of a model and of its optimizer, beside other parts."""

_WORLD_FILE = re.compile(
    r"(?P<stem>model|optim|optimizer|extra_state)_world_size_(?P<world>\d{1,9})"
    r"_rank_(?P<rank>\d{1,9})\.(pt|pth|bin)"
)
_NUMBERED = re.compile(r"(?P<stem>checkpoint)_(?P<rank>\d{1,9})\.pt")
LOADABLE = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl")
COMPANION = re.compile(
    r"(data|dataloader|rng_state|random_states|scheduler|scaler|training_args)([._-]?\d{1,9})?\.\w+"
)
"""What trainers write next to the files of the ranks; any other checkpoint there is another save."""
_WORLD_SIZE = re.compile(rb"\bworld_size\b")
_SEARCHED = 1 << 16
"""How many first and last bytes are searched: a file's pickle comes first, a count in it perhaps last."""

Entries = Mapping[str, os.DirEntry[str]]


class RankFile(NamedTuple):
    """A file of one process: what it holds, whose it is, and of how many, where the name says it."""

    path: str
    stem: str
    rank: int
    world: int = 0

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def _files_of_one_save(entries: Entries) -> list[RankFile]:
    """Return the ranks' files in a directory that one save has to itself; none beside another checkpoint."""
    files = [file for entry in entries.values() if (file := _parse_world_file(entry.path)) is not None]
    if not files and METADATA in entries and has_at_an_end(entries[METADATA].path, _WORLD_SIZE):
        matches = ((entry.path, _NUMBERED.fullmatch(name)) for name, entry in entries.items())
        files = [RankFile(path, match["stem"], int(match["rank"])) for path, match in matches if match]
    names = {METADATA, *(file.name for file in files)}
    others = (name for name in entries if name.endswith(LOADABLE) and name not in names)
    if any(not COMPANION.fullmatch(name) and entries[name].is_file() for name in others):
        return []
    return sorted(files, key=_order)


def parse_rank_file(path: str) -> RankFile | None:
    """Return what a name that ends in the number of a rank says; None of any other."""
    match = RANKED.fullmatch(os.path.basename(path))
    if match is None:
        return None
    world_file = _parse_world_file(path)
    return RankFile(path, match["stem"], int(match["rank"]), world_file.world if world_file else 0)


def rank_files(entries: Entries) -> Iterator[RankFile]:
    return (file for entry in entries.values() if (file := parse_rank_file(entry.path)) is not None)


def files_at(probe: Probe) -> list[RankFile]:
    """Return the files of ranks that a path represents: a directory, or what their names begin with."""
    if probe.is_directory:
        return _files_of_one_save(probe.entries)
    if fs.lexists(probe.path):
        return []
    files = [file for path in ranked_paths(probe.path) if (file := parse_rank_file(path)) is not None]
    return sorted(files, key=_order)


def _parse_world_file(path: str) -> RankFile | None:
    match = _WORLD_FILE.fullmatch(os.path.basename(path))
    return match and RankFile(path, match["stem"], int(match["rank"]), int(match["world"]))


def _order(file: RankFile) -> tuple[bool, object, int]:
    return file.stem != "model", natural(file.stem), file.rank


def files_by_stem(files: Iterable[RankFile]) -> dict[str, list[RankFile]]:
    """Return files by what their names have in common, in the order of ranks; no rank is there twice."""
    groups: dict[str, list[RankFile]] = defaultdict(list)
    for file in sorted(files, key=_order):
        groups[file.stem].append(file)
    return {stem: group for stem, group in groups.items() if len({file.rank for file in group}) == len(group)}


def has_at_an_end(path: str, pattern: re.Pattern[bytes]) -> bool:
    try:
        with fs.open_source(path) as source:
            length = min(source.size, _SEARCHED)
            ends = source.read(0, length) + source.read(source.size - length, length)
    except CheckpointError:  # whoever opens it says why
        return False
    return pattern.search(ends) is not None

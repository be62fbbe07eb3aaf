"""Finds the checkpoint that the given files or directories are parts of.

If all files of a checkpoint are given one by one (by a shell's ``*``), the reader of the whole is better than
joining them: it knows the index, the prefix or the directory. So these are looked for next to the files.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, from_os_error
from ckpttool.core.naming import parse_name
from ckpttool.formats import detect
from ckpttool.formats.interface import Probe, ranked_paths, scan
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.paddle.parts import MODEL, TABLES
from ckpttool.formats.sharded import indexes, mapped_files
from ckpttool.formats.torch.dcp import METADATA, TorchDcp
from ckpttool.formats.torch.dcp_safetensors import DcpSafetensors
from ckpttool.formats.torch.deepspeed import DeepSpeed
from ckpttool.formats.torch.rank_files import parse_rank_file
from ckpttool.formats.torch.ranks_format import RankFiles
from ckpttool.storage import fs

_BEHIND_A_PREFIX = re.compile(r"(\.index|\.meta|\.data-\d{5}-of-\d{5}|-\d{5}-of-\d{5})$")
_KERAS_SHARD = re.compile(r"(?P<stem>.+)_\d{5}\.weights\.h5", re.DOTALL)
_OF_A_DIRECTORY = re.compile(
    r".*\.distcp|(__\d+)?\.metadata|shard-\d+-model-.*\.safetensors|.*(model|optim)_states\.pt"
    r"|\w+_world_size_\d+_rank_\d+\.\w+|checkpoint_\d+\.pt|metadata\.pkl",
    re.DOTALL,
)
"""Names of files that are a checkpoint only together with the others of their directory."""
_READ_TOGETHER = (Fluid, DeepSpeed, TorchDcp, DcpSafetensors, RankFiles)
"""Formats whose reader can read several directories as one."""
_FIRST = (MODEL, METADATA, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Files that only the directory of the first machine has."""
_TEXT = (".json", ".md", ".py", ".txt")
"""Suffixes of files without tensors, which each directory may have a copy of."""
_MAX_TEXT = 1 << 20


def enclosing_checkpoint(paths: Sequence[str]) -> str | None:
    """Return the path of the checkpoint that files are parts of; None if it isn't found next to them."""
    # From the strongest evidence to the weakest: an index that lists the files, Keras's list of shards, the
    # prefix that a job's ranks share, and a directory whose format reads such files only together. Unless the
    # index itself is given, each requires all other parts to be among the files.
    prefixes = {_BEHIND_A_PREFIX.sub("", path) for path in paths}  # TensorFlow's checkpoints are prefixes
    if len(prefixes) == 1 and prefixes != set(paths):
        return prefixes.pop()
    places = {os.path.dirname(fs.abspath(path)) for path in paths}
    if len(places) != 1 or not all(map(fs.isfile, paths)):
        return None
    directory, names = os.path.dirname(paths[0]) or os.curdir, {os.path.basename(path) for path in paths}
    return (
        _enclosing_index(directory, names)
        or _enclosing_shard_list(directory, names)
        or _rank_file_prefix(paths)
        or _enclosing_directory(directory, names)
    )


def _enclosing_index(directory: str, names: Collection[str]) -> str | None:
    """Return the index that lists all of the files; it may be one of them."""
    for index in indexes(directory, scan(directory)):
        path, own = os.path.join(directory, index), set(names) - {index}
        mapped = set(mapped_files(path))
        if own <= mapped:
            if index not in names:
                _require_all(path, mapped - own)
            return path
    return None


def _enclosing_shard_list(directory: str, names: Collection[str]) -> str | None:
    """Return the ``.weights.json`` of the sharded Keras model whose shards the files are."""
    stems = {match["stem"] if (match := _KERAS_SHARD.fullmatch(name)) else None for name in names}
    stem = next(iter(stems))
    if len(stems) != 1 or stem is None:
        return None
    path = os.path.join(directory, f"{stem}.weights.json")
    if not fs.isfile(path):
        found = "it is missing, but it records which shard holds which layer"
        raise DamagedCheckpoint(path, found, code="index-missing")
    present = {name for name in scan(directory) if (m := _KERAS_SHARD.fullmatch(name)) and m["stem"] == stem}
    _require_all(path, present - set(names))
    return path


def _rank_file_prefix(paths: Sequence[str]) -> str | None:
    """Return the common prefix of files that the ranks of one job wrote."""
    stems = {None if (file := parse_rank_file(path)) is None else file.stem for path in paths}
    if len(stems) != 1 or (stem := next(iter(stems))) is None:
        return None
    prefix = os.path.join(os.path.dirname(paths[0]), stem)
    if fs.lexists(prefix):
        return None
    names = {os.path.basename(path) for path in ranked_paths(prefix)}
    _require_all(prefix, names - {os.path.basename(path) for path in paths})
    return prefix


def _enclosing_directory(directory: str, names: Collection[str]) -> str | None:
    """Return the directory, if its format reads such files only together."""
    if not all(map(_OF_A_DIRECTORY.fullmatch, names)):
        return None
    with Probe(directory) as probe:
        format = detect(probe)
        if not isinstance(format, DeepSpeed | TorchDcp | DcpSafetensors | RankFiles):
            return None
        kinds = {os.path.splitext(name)[1] for name in names}
        own = {name for name in probe.entries if os.path.splitext(name)[1] in kinds}
    _require_all(directory, own - set(names))
    return directory


def _require_all(path: str, lacking: Collection[str]) -> None:
    """Raise DamagedCheckpoint if a part of a whole isn't among the sources."""
    if lacking:
        first, *others = sorted(lacking)
        more = f" (and {len(others):,} more)" if others else ""
        message = f"this part is not among the sources{more}"
        raise DamagedCheckpoint(
            path, message, expected="all parts, or this path alone", where=first, code="part-missing"
        )


class JoinedDirectories(Probe):
    """Probe of several directories as if they were one: each machine of a job wrote one to its own disk."""

    def __init__(self, paths: Sequence[str]) -> None:
        """List the directories; raise DamagedCheckpoint if two have the same part."""
        # The first directory that has an entry provides it. Parameter servers each write a directory of
        # tables with the same name, which are read together; other entries may be alike only if they aren't
        # parts.
        super().__init__(paths[0])
        self._found: dict[str, os.DirEntry[str]] = {}
        others: dict[str, tuple[os.DirEntry[str], ...]] = defaultdict(tuple)
        for path in paths:
            for name, entry in scan(path).items():
                first = self._found.setdefault(name, entry)
                if first is entry:
                    continue
                if name in TABLES and first.is_dir() and entry.is_dir():
                    others[name] += (entry,)
                elif not _is_aside(first, entry):
                    raise duplicate_part(entry.path, first.path)
        self.other_entries = others

    @cached_property
    def entries(self) -> Mapping[str, os.DirEntry[str]]:
        """Return the entries of all directories by name."""
        return self._found


def duplicate_part(path: str, first: str) -> CheckpointError:
    """Return the error for a part that is given twice."""
    return DamagedCheckpoint(path, f"{first} is the same part", expected="each part once", code="part-twice")


def _is_aside(first: os.DirEntry[str], other: os.DirEntry[str]) -> bool:
    """Return whether an entry is no part: a hidden file, or a text file with the same content in both."""
    if other.name.startswith(".") and not other.name.endswith(METADATA):
        return True
    if not other.name.endswith(_TEXT) and other.name != "latest":
        return False
    try:
        if max(first.stat().st_size, other.stat().st_size) > _MAX_TEXT:
            return False
        with fs.open_regular(first.path) as one, fs.open_regular(other.path) as two:
            return one.read() == two.read()
    except OSError as error:
        raise from_os_error(error, other.path) from error


def require_one_serial(paths: Sequence[str]) -> None:
    """Raise DamagedCheckpoint if directories are named by different serials, epochs or steps."""
    seen: dict[str, tuple[object, str]] = {}
    for path in paths:
        name = os.path.basename(fs.abspath(path))
        serial, fields = SERIAL.fullmatch(name), parse_name(name)
        numbers = {"serial": int(serial[1]) if serial else None, "epoch": fields.epoch, "step": fields.step}
        for kind, number in numbers.items():
            first, where = seen.setdefault(kind, (number, path)) if number is not None else (None, path)
            if first != number:
                found = f"{kind} {number}, but {where} is {kind} {first}"
                raise DamagedCheckpoint(path, found, expected="parts of one save", code="part-stale")


def open_several_directories(paths: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint that is spread over several directories; None for formats that never are."""
    # The first directory gives the checkpoint's path, and an entry that all have alike is read from it: so
    # the first machine's comes first, in whatever order they are given.
    first = sorted(paths, key=lambda path: not any(fs.lexists(os.path.join(path, name)) for name in _FIRST))
    kinds = set()
    for path in paths:
        with Probe(path) as probe:
            kinds.add(type(detect(probe)))
    if not kinds & set(_READ_TOGETHER):
        return None
    with ExitStack() as until_opened:
        probe = until_opened.enter_context(JoinedDirectories(first))
        format = detect(probe)
        if not isinstance(format, _READ_TOGETHER):
            return None
        checkpoint = format.open(probe)
        until_opened.pop_all()
    return checkpoint

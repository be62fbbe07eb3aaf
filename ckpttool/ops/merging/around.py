"""What whole files belong to that are given one by one: a set behind an index, a prefix, a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats import detect
from ckpttool.formats.interface import Probe, ranked_paths, scan
from ckpttool.formats.shard_index import indexes, mapped_files
from ckpttool.formats.torch.dcp import TorchDcp
from ckpttool.formats.torch.dcp_safetensors import DcpSafetensors
from ckpttool.formats.torch.deepspeed import DeepSpeed
from ckpttool.formats.torch.rank_files import RankFiles, ranked
from ckpttool.report import counted

_BEHIND_A_PREFIX = re.compile(r"(\.index|\.meta|\.data-\d{5}-of-\d{5}|-\d{5}-of-\d{5})$")
_KERAS_SHARD = re.compile(r"(?P<stem>.+)_\d{5}\.weights\.h5", re.DOTALL)
_OF_A_DIRECTORY = re.compile(
    r".*\.distcp|(__\d+)?\.metadata|shard-\d+-model-.*\.safetensors|.*(model|optim)_states\.pt"
    r"|\w+_world_size_\d+_rank_\d+\.\w+|checkpoint_\d+\.pt|metadata\.pkl",
    re.DOTALL,
)
"""How files are named of which a directory makes one checkpoint, and none is one for itself."""


def around(paths: Sequence[str]) -> str | None:
    """Return the path of the checkpoint of which files are parts, or None where nothing beside them says so.

    Raises:
        DamagedCheckpoint: Parts of it are not among them.
        CheckpointError: Their directory can't be read.
    """
    prefix = _prefix(paths)
    if prefix is not None:
        return prefix
    places = {os.path.dirname(os.path.abspath(path)) for path in paths}
    if len(places) != 1 or not all(map(os.path.isfile, paths)):
        return None
    directory, names = os.path.dirname(paths[0]) or os.curdir, {os.path.basename(path) for path in paths}
    return (
        _indexed(directory, names)
        or _listed(directory, names)
        or _ranked(paths)
        or _directory(directory, names)
    )


def _prefix(paths: Sequence[str]) -> str | None:
    """Return the prefix that the files of one TensorFlow checkpoint share."""
    prefixes = {_BEHIND_A_PREFIX.sub("", path) for path in paths}
    if len(prefixes) != 1 or prefixes == set(paths):
        return None
    (prefix,) = prefixes
    return prefix


def _indexed(directory: str, names: Collection[str]) -> str | None:
    """Return the index that maps to files, or is the one that is given."""
    for index in indexes(directory, scan(directory)):
        path, own = os.path.join(directory, index), set(names) - {index}
        mapped = set(mapped_files(path))
        if own <= mapped:
            if index not in names:
                _require_all(path, mapped - own)
            return path
    return None


def _listed(directory: str, names: Collection[str]) -> str | None:
    """Return the list of the files of a sharded Keras model that files belong to."""
    stems = {match["stem"] if (match := _KERAS_SHARD.fullmatch(name)) else None for name in names}
    stem = next(iter(stems))
    if len(stems) != 1 or stem is None:
        return None
    path = os.path.join(directory, f"{stem}.weights.json")
    if not os.path.isfile(path):
        raise DamagedCheckpoint(
            path, "it is missing: it says which shard holds which layer", code="index-missing"
        )
    beside = {name for name in scan(directory) if (m := _KERAS_SHARD.fullmatch(name)) and m["stem"] == stem}
    _require_all(path, beside - set(names))
    return path


def _ranked(paths: Sequence[str]) -> str | None:
    """Return what the names of files have in common that the ranks of one job wrote."""
    stems = {None if (file := ranked(path)) is None else file.stem for path in paths}
    if len(stems) != 1 or (stem := next(iter(stems))) is None:
        return None
    prefix = os.path.join(os.path.dirname(paths[0]), stem)
    if os.path.lexists(prefix):
        return None
    names = {os.path.basename(path) for path in ranked_paths(prefix)}
    _require_all(prefix, names - {os.path.basename(path) for path in paths})
    return prefix


def _directory(directory: str, names: Collection[str]) -> str | None:
    """Return the directory whose files make one checkpoint, where files are of the kind."""
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
    """Require that no part of a whole was left out."""
    if lacking:
        first, *others = sorted(lacking)
        more = f", nor {counted(len(others), 'other part')}" if others else ""
        message = f"it belongs to the whole, and is not among the sources{more}"
        raise DamagedCheckpoint(
            path, message, expected="all parts, or this path alone", where=first, code="part-missing"
        )

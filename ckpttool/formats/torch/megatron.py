"""What Megatron writes beside a distributed checkpoint: what is not sharded, and by which means it was saved.

``common.pt`` comes first, ``metadata.json`` last: Megatron loads no directory that lacks one of them.

Source: NVIDIA/Megatron-LM ``megatron/core/dist_checkpointing/core.py``, ``strategies/common.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ckpttool.errors import DamagedCheckpoint
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.source import Source

COMMON, CONFIG = "common.pt", "metadata.json"

_BACKEND = "sharded_backend"
_MAX_CONFIG = 1 << 16
_SEPARATELY = "torch"
"""The one means of saving what is not sharded by which it gets a file of its own."""

Fault = tuple[str, str, str]
"""What is wrong with a file: ``missing`` or ``damaged``, a sentence, and its name."""


def is_beside(entries: Mapping[str, os.DirEntry[str]], *, is_megatron: bool) -> bool:
    """Tell whether Megatron wrote the files of a directory.

    Args:
        entries: What lies there.
        is_megatron: Whether its ``.metadata`` says so.
    """
    return is_megatron or _BACKEND.encode() in _config(entries)


def faults(entries: Mapping[str, os.DirEntry[str]]) -> Iterator[Fault]:
    """Yield what Megatron would miss in a directory that it wrote."""
    means: object = _SEPARATELY
    if CONFIG not in entries:
        yield "missing", "Megatron writes it last: the save was interrupted, or it was not copied", CONFIG
    else:
        try:
            means = _means(entries[CONFIG].path, _config(entries))
        except DamagedCheckpoint as failure:
            yield "damaged", failure.reason, CONFIG
    if means == _SEPARATELY and COMMON not in entries:
        yield "missing", "all that is not sharded lies in it: iteration, arguments, schedules", COMMON


def _means(path: str, data: bytes) -> object:
    """Return by which means was saved what is not sharded.

    Raises:
        DamagedCheckpoint: It doesn't say by which the rest was.
    """
    told = parse_json(path, data, "metadata")
    if not isinstance(told, dict) or not isinstance(told.get(_BACKEND), str):
        raise DamagedCheckpoint(path, f"no {_BACKEND} is named in it")
    return told.get("common_backend", _SEPARATELY)


def _config(entries: Mapping[str, os.DirEntry[str]]) -> bytes:
    entry = entries.get(CONFIG)
    if entry is None or not entry.is_file():
        return b""
    with Source(entry.path) as source:
        return bytes(source.read(0, min(source.size, _MAX_CONFIG)))

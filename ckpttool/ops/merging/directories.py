"""One checkpoint that lies in several directories: each machine of a job wrote to a disk of its own."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CheckpointError, DamagedCheckpoint, from_os_error
from ckpttool.formats import detect
from ckpttool.formats.interface import Probe, scan
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.paddle.fluid_parts import MODEL, TABLES
from ckpttool.formats.paddle.fluid_siblings import SERIAL
from ckpttool.formats.torch.dcp import METADATA, TorchDcp
from ckpttool.formats.torch.dcp_safetensors import DcpSafetensors
from ckpttool.formats.torch.deepspeed import DeepSpeed
from ckpttool.formats.torch.rank_files import RankFiles
from ckpttool.naming import parse_name
from ckpttool.wire.regular import open_regular

_READ_TOGETHER = (Fluid, DeepSpeed, TorchDcp, DcpSafetensors, RankFiles)
_FIRST = (MODEL, METADATA, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""What lies in the directory of the first machine alone."""
_TEXT = (".json", ".md", ".py", ".txt")
"""What may lie in each directory alike, and holds no tensor."""
_MAX_TEXT = 1 << 20


class Spread(Probe):
    """Several directories, looked at as if they were one."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Look at directories.

        Raises:
            DamagedCheckpoint: A part lies in two of them.
            CheckpointError: One can't be read.
        """
        super().__init__(paths[0])
        self._found: dict[str, os.DirEntry[str]] = {}
        also: dict[str, tuple[os.DirEntry[str], ...]] = defaultdict(tuple)
        for path in paths:
            for name, entry in scan(path).items():
                first = self._found.setdefault(name, entry)
                if first is entry:
                    continue
                if name in TABLES and first.is_dir() and entry.is_dir():
                    also[name] += (entry,)
                elif not _is_aside(first, entry):
                    raise twice(entry.path, first.path)
        self.also = also

    @cached_property
    def entries(self) -> Mapping[str, os.DirEntry[str]]:
        """Return what lies in all of them, by name."""
        return self._found


def twice(path: str, first: str) -> CheckpointError:
    """Return the error for a part that another one is as well."""
    return DamagedCheckpoint(path, f"{first} is the same part", expected="each part once", code="part-twice")


def _is_aside(first: os.DirEntry[str], other: os.DirEntry[str]) -> bool:
    """Tell whether an entry is no part: a manifest of one directory, or a text that lies in both alike."""
    if other.name.startswith(".") and not other.name.endswith(METADATA):
        return True
    if not other.name.endswith(_TEXT) and other.name != "latest":
        return False
    try:
        if max(first.stat().st_size, other.stat().st_size) > _MAX_TEXT:
            return False
        with open_regular(first.path) as one, open_regular(other.path) as two:
            return one.read() == two.read()
    except OSError as error:
        raise from_os_error(error, other.path) from error


def require_one_serial(paths: Sequence[str]) -> None:
    """Require that directories which are named like serials, epochs or steps are named like one.

    Raises:
        DamagedCheckpoint: They are of different saves.
    """
    seen: dict[str, tuple[object, str]] = {}
    for path in paths:
        name = os.path.basename(os.path.abspath(path))
        serial, fields = SERIAL.fullmatch(name), parse_name(name)
        told = {"serial": int(serial[1]) if serial else None, "epoch": fields.epoch, "step": fields.step}
        for kind, number in told.items():
            first, where = seen.setdefault(kind, (number, path)) if number is not None else (None, path)
            if first != number:
                found = f"{kind} {number}, and {where} is {kind} {first}"
                raise DamagedCheckpoint(path, found, expected="parts of one save", code="part-stale")


def spread(paths: Sequence[str]) -> Checkpoint | None:
    """Return the checkpoint that lies in several directories together; None where they are no such parts.

    Raises:
        CheckpointError: A part lies in two of them, is missing, or can't be read.
    """
    first = sorted(
        paths, key=lambda path: not any(os.path.lexists(os.path.join(path, name)) for name in _FIRST)
    )
    kinds = set()
    for path in paths:
        with Probe(path) as probe:
            kinds.add(type(detect(probe)))
    if not kinds & set(_READ_TOGETHER):
        return None
    with ExitStack() as until_opened:
        probe = until_opened.enter_context(Spread(first))
        format = detect(probe)
        if not isinstance(format, _READ_TOGETHER):
            return None
        checkpoint = format.open(probe)
        until_opened.pop_all()
    return checkpoint

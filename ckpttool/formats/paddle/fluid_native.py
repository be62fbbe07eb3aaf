"""What a Fluid checkpoint says beside its tensors, and needs to be written again."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckpttool.errors import CheckpointError
from ckpttool.formats.paddle.fluid_parts import Parts
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.lodtensor import lod_bytes

HEIGHTS = "fluid.heights"
"""How many rows there are in all, of which a SelectedRows holds some: JSON, by its name."""
LEVELS = "fluid.levels/"
"""In front of a tensor's name: its sequences, as they lie in the file."""


def native_of(parts: Parts) -> dict[str, bytes]:
    """Return what a checkpoint's tensors don't tell, by name; see ``Checkpoint.native``.

    Raises:
        CheckpointError: It can't be read.
    """
    told = {LEVELS + name: lod_bytes(*found) for name, found in parts.levels.items()}
    if parts.heights:
        told[HEIGHTS] = json.dumps(parts.heights).encode()
    return told


def heights_of(native: Mapping[str, bytes]) -> dict[str, int]:
    """Return the heights that were told; none where they are no such thing."""
    try:
        told = parse_json("", native.get(HEIGHTS, b"{}"), HEIGHTS)
    except CheckpointError:
        return {}
    pairs = told.items() if isinstance(told, dict) else ()
    return {name: height for name, height in pairs if type(height) is int and 0 <= height < 1 << 63}

"""What conversions and merges make of checkpoints, before and after it is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Checkpoint, open_checkpoint
from ckpttool.formats.paddle import fluid_serial
from ckpttool.formats.writer import writer_of
from ckpttool.ops.conversion_plan import content_of
from ckpttool.ops.convert import mismatches
from ckpttool.ops.merge import open_parts
from ckpttool.ops.merging import fluid
from ckpttool.testing import digest, expected_digests, read_truth
from ckpttool.transaction.staged_output import StagedOutput


@contextmanager
def whole_of(*parts: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """Open what parts make together, as it would be written."""
    with open_parts(parts) as whole:
        yield whole.checkpoint


def left_out(*parts: str | os.PathLike[str]) -> list[str]:
    """Return the paths of what parts hold that no whole has."""
    with open_parts(parts) as whole:
        return [one.path for one in whole.dropped]


def limit_rows(patch: pytest.MonkeyPatch, *, at_once: int | None = None, in_all: int | None = None) -> None:
    """Let only so many rows of a lookup table be compared at once, or be compared at all."""
    if at_once is not None:
        patch.setattr(fluid, "ROWS_AT_ONCE", at_once)
    if in_all is not None:
        patch.setattr(fluid_serial, "MAX_ROWS", in_all)


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the digests of all tensors by name."""
    return {tensor.name: digest(tensor) for tensor in checkpoint.tensors}


def true_digests(fixture: Path) -> dict[str, str]:
    """Return the digests that the framework which wrote a fixture tells, by name."""
    return {".".join(map(str, path)): one for path, one in expected_digests(read_truth(fixture)).items()}


def spoil_target(patch: pytest.MonkeyPatch, spoil: Callable[[Path], object]) -> None:
    """Have something done to each target once it is written, before it is compared and has its name."""
    settle = StagedOutput.settle

    def settled(self: StagedOutput) -> None:
        settle(self)
        spoil(Path(self.path))

    patch.setattr(StagedOutput, "settle", settled)


def mismatches_of(source: Path, **changes: Any) -> list[str]:
    """Return what is said of a target that is the same file but for what is changed.

    ``tensors`` is a function that makes other ones of those of the target.
    """
    with open_checkpoint(source) as opened, open_checkpoint(source) as target:
        if "tensors" in changes:
            changes["tensors"] = changes["tensors"](target.tensors)
        for name, value in changes.items():
            setattr(target, name, value)
        written = content_of(opened), target, writer_of("safetensors")
        return list(mismatches(*written, (), jobs=1, advance=lambda nbytes: None))

"""Checkpoints of distributed jobs, exported programs and NumPy files, under the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpttool import Checkpoint
from ckpttool.core.tensor import Extent
from tests.support.contracts import Contract

FILES = Path(__file__).parents[2] / "fixtures" / "files"


def directories(path: Path) -> tuple[Path, ...]:
    return tuple(sorted(entry for entry in path.iterdir() if entry.is_dir()))


class TestTorchDcp(Contract):
    format = "torch-dcp"
    fixtures = directories(FILES / "torch-dcp")


class TestDeepSpeed(Contract):
    format = "pytorch"
    damages = min(80, Contract.damages)
    fixtures = tuple(sorted(FILES.glob("deepspeed/*/global_step2")))


class TestTorchExport(Contract):
    format = "torch-export"
    fixtures = tuple(sorted(FILES.glob("torch-export/*.pt2")))


class TestNumpy(Contract):
    format = "numpy"
    fixtures = tuple(sorted(FILES.glob("numpy/*.np[yz]")))

    @staticmethod
    def covered(checkpoint: Checkpoint) -> Iterator[Extent]:
        """Leave out what is compressed: the last bits of its stream can change, and its content doesn't."""
        return (span.extent for span in checkpoint.spans() if span.crc32 is not None and not span.inflated)

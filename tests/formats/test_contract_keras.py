"""Keras and plain HDF5 under the contract suite."""

from __future__ import annotations

import random
from pathlib import Path

from ckpttool.testing import FormatContract

FILES = Path(__file__).parents[2] / "fixtures" / "files"


class Sampled(FormatContract):
    """Damage a third of the places, whichever: each is read by a child process."""

    def _places(self, path: Path) -> list[tuple[Path, list[int]]]:
        chance = random.Random(path.name)
        return [
            (file, sorted(chance.sample(offsets, -(-len(offsets) // 3))))
            for file, offsets in super()._places(path)
        ]


class TestKerasZip(Sampled):
    format = "keras"
    fixtures = tuple(sorted(FILES.glob("keras/*.keras")))


class TestKerasH5(Sampled):
    format = "keras-h5"
    fixtures = tuple(sorted(FILES.glob("keras/*.h5")))


class TestKerasSharded(Sampled):
    format = "keras-h5"
    fixtures = (FILES / "keras" / "sharded",)


class TestHdf5(Sampled):
    format = "hdf5"
    fixtures = tuple(sorted(FILES.glob("hdf5/*.h5")))

"""Keras and plain HDF5 under the contract suite."""

from __future__ import annotations

from pathlib import Path

from ckpttool.testing import FormatContract

FILES = Path(__file__).parents[2] / "fixtures" / "files"


class Sampled(FormatContract):
    """Damage every fourth of the places: each is read by a child process."""

    def _places(self, path: Path) -> list[tuple[Path, list[int]]]:
        return [(file, offsets[::4]) for file, offsets in super()._places(path)]


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

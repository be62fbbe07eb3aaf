"""Keras and plain HDF5 under the contract suite."""

from __future__ import annotations

from pathlib import Path

from tests.support.contracts import Contract

FILES = Path(__file__).parents[2] / "fixtures" / "files"


class KerasContract(Contract):
    """Damage fewer places: each is read by a child process."""

    damages = min(40, Contract.damages)


class TestKerasZip(KerasContract):
    format = "keras"
    fixtures = tuple(sorted(FILES.glob("keras/*.keras")))


class TestKerasH5(KerasContract):
    format = "keras-h5"
    fixtures = tuple(sorted(FILES.glob("keras/*.h5")))


class TestKerasSharded(KerasContract):
    format = "keras-h5"
    fixtures = (FILES / "keras" / "sharded",)


class TestHdf5(KerasContract):
    format = "hdf5"
    fixtures = tuple(sorted(FILES.glob("hdf5/*.h5")))

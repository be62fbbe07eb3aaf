"""Every format under the contract suite once more, with its checkpoints in a store."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest

from ckpttool import CheckpointError
from ckpttool.io import remote
from ckpttool.testing import FormatContract, Outcome, files_of, outcome_of, read_truth
from tests.support.stores import Bucket, client_of, environment, new_bucket

FORMATS = Path(__file__).parents[1] / "formats"
DAMAGED_FILES = 4


class InStore(FormatContract):
    """What a format promises of its checkpoints in a bucket.

    All fixtures are read. Each damaged file is uploaded, and the store asked again; so one fixture of each
    variant is damaged, at few places of some of its files.
    """

    damages = 2
    bucket: Bucket
    uploaded: ClassVar[dict[str, bytes]] = {}
    """What the bucket holds, by key."""

    @pytest.fixture(scope="session")
    @staticmethod
    def only_bucket(s3_endpoint: str) -> Bucket:
        return new_bucket(client_of(s3_endpoint))

    @pytest.fixture(autouse=True)
    def _reach_the_bucket(
        self, only_bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in environment(s3_endpoint).items():
            monkeypatch.setenv(name, value)
        self.bucket = only_bucket

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "tmp_path" in metafunc.fixturenames:  # a copy is damaged there
            fixtures = one_of_each_variant(self.fixtures)
            metafunc.parametrize("path", fixtures, ids=[path.name for path in fixtures])
        else:
            super().pytest_generate_tests(metafunc)

    def place(self, path: Path) -> str:
        """Upload the files that aren't there as they are now, to a directory that holds nothing else."""
        key = f"{path.as_posix().replace('/', '_')}/{path.name}"
        contents = {f"{key}{str(file).removeprefix(str(path))}": file.read_bytes() for file in files_of(path)}
        changed = {one: data for one, data in contents.items() if self.uploaded.get(one) != data}
        for one, data in changed.items():
            self.bucket.put(one, data)
            remote.forget_at(self.bucket.url(one))
        self.uploaded.update(changed)
        return self.bucket.url(key)

    def content(self, file: str) -> bytes:
        return self.bucket.get(file.removeprefix(f"{self.bucket.url()}/"))

    def _outcome(self, path: Path, damage: str) -> Outcome:
        """Require that the outcome is that on the disk: that a store doesn't answer is an error, too."""
        outcome = super()._outcome(path, damage)
        assert text_of(outcome, self.place(path)) == text_of(outcome_of(path, damage), str(path)), damage
        return outcome

    def _places(self, path: Path) -> list[tuple[Path, list[int]]]:
        places = super()._places(path)
        return places[:: math.ceil(len(places) / DAMAGED_FILES)]


def text_of(outcome: Outcome, place: str) -> str:
    """Return what an outcome says, wherever the checkpoint is."""
    text = str(outcome) if isinstance(outcome, CheckpointError) else json.dumps(outcome.to_dict())
    return text.replace(os.path.dirname(place), "PLACE")


def one_of_each_variant(fixtures: Iterable[Path]) -> list[Path]:
    """Return of each variant the fixture of medium size."""
    variants: dict[str | None, list[Path]] = {}
    for path in sorted(fixtures, key=lambda path: sum(file.stat().st_size for file in files_of(path))):
        variants.setdefault(read_truth(path).get("variant"), []).append(path)
    return [paths[len(paths) // 2] for paths in variants.values()]


def contracts() -> Iterator[type[FormatContract]]:
    """Yield the suites of all formats."""
    for path in sorted(FORMATS.glob("test_contract*.py")):
        module = import_module(f"tests.formats.{path.stem}")
        for name, value in vars(module).items():
            if name.startswith("Test") and issubclass(value, FormatContract):
                yield value


for contract in contracts():
    name = f"{contract.__name__}InStore"
    assert name not in globals(), name
    globals()[name] = type(name, (InStore, contract), {"__doc__": contract.__doc__})

"""Honest files raise no alarm: plain data is safe, and objects of classes are unknown."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from tests.security.honest import partial_values, write
from tests.security.test_hostile_corpus import lines
from tests.support.commands import run_redirected

OBJECTS = {"module", "modules", "optimizers", "schedulers", "scaler", "attributes", "initialisers"} | {
    "rng", "generators", "masked", "records", "objects", "frames",
}  # fmt: skip
"""The honest files that hold objects of classes, functions, or structures of objects, whose code runs."""


@pytest.mark.framework
def test_no_honest_file_raises_an_alarm(tmp_path: Path) -> None:
    paths = {str(path): path.name.partition("-")[0] in OBJECTS for path in write(tmp_path / "honest")}
    assert len(paths) >= 300
    _, out, err = run_redirected("verify", "--json", *paths)
    found = json.loads(out)["checkpoints"]
    assert ([one["path"] for one in found], err) == (list(paths), "")
    wrong = [
        f"{one['path']}: {one['findings']}"[:300]
        for one in found
        if one["safety"] != ("unknown" if paths[one["path"]] else "safe")
    ]
    assert not wrong, lines(wrong)


@pytest.mark.framework
def test_partials_are_unknown_and_no_alarm(tmp_path: Path) -> None:
    import torch

    for name, value in partial_values().items():
        for protocol in (2, 4):
            torch.save(value, tmp_path / f"{name}-{protocol}.pth", pickle_protocol=protocol)
            for at in (0, 2):
                (tmp_path / f"{name}-{at}.pkl").write_bytes(pickle.dumps(value, at))
    assert safeties(tmp_path) == {"unknown"}


def test_samples_of_packages_are_unknown_and_no_alarm() -> None:
    """They were written by scikit-learn 1.9.1, gymnasium 1.4.0, gym 0.23.1 and torchao 0.18.0."""
    samples = Path(__file__).with_name("samples")
    assert len(list(samples.iterdir())) == 24
    assert safeties(samples) == {"unknown"}


def safeties(directory: Path) -> set[str]:
    files = sorted(directory.iterdir())
    _, out, _ = run_redirected("verify", "--json", *files)
    found = json.loads(out)["checkpoints"]
    assert len(found) == len(files)
    alarms = [f"{one['path']}: {one['findings']}"[:300] for one in found if one["safety"] == "unsafe"]
    assert not alarms, lines(alarms)
    return {one["safety"] for one in found}


UNSAFE_FIXTURES = {"hostile", "hdf5-hostile", "keras-unsafe"}


def test_no_fixture_of_a_framework_raises_an_alarm(files: Path) -> None:
    wrong = []
    for directory in sorted(files.iterdir()):
        if directory.name in UNSAFE_FIXTURES or not directory.is_dir():
            continue
        _, out, err = run_redirected("verify", "--quick", "--json", directory)
        for one in json.loads(out)["checkpoints"] if out else []:
            if one["safety"] == "unsafe" and "unsafe" not in one["path"]:
                wrong.append(f"{one['path']}: {one['findings']}"[:300])
        assert "internal error" not in err
    assert not wrong, lines(wrong)

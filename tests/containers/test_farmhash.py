"""FarmHash, with which TensorFlow says what a SavedModel's index of variables was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpttool.containers.farmhash import fingerprint64
from ckpttool.testing import read_truth
from tests.support.frameworks import python_with_frameworks


def test_fingerprint_is_tensorflows(files: Path) -> None:
    models = files / "savedmodel"
    truths = {path: read_truth(path)["values"]["fingerprint"] for path in models.iterdir() if path.is_dir()}
    stated = {path: told["checkpoint_hash"] for path, told in truths.items() if told}
    assert len(stated) > 2
    for path, told in stated.items():
        index = (path / "variables" / "variables.index").read_bytes()
        assert f"{fingerprint64(index):016x}" == told


HASHES = """
import json, random, sys
import tensorflow as tf
chance = random.Random(1)
data = [chance.randbytes(size) for size in [*range(0, 140), 1000, 4096]]
hashes = tf.raw_ops.Fingerprint(data=tf.constant(data), method="farmhash64").numpy()
told = {one.hex(): int.from_bytes(bytes(row), "little") for one, row in zip(data, hashes)}
print(json.dumps(told))
"""


@pytest.mark.framework
def test_fingerprints_of_any_length_are_tensorflows() -> None:
    told = python_with_frameworks("-c", HASHES)
    for data, expected in json.loads(told.splitlines()[-1]).items():
        assert fingerprint64(bytes.fromhex(data)) == expected, len(data) // 2

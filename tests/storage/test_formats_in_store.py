"""Every format's checkpoints in a store: read, described and judged as on the disk, where contracts hold."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from ckpttool import CheckpointError, inspect, open_checkpoint
from ckpttool.storage import remote
from ckpttool.testing import copied, described, digest, files_of, flipped, outcome_of, read_truth
from tests.support.memory import MemoryBucket

FILES = Path(__file__).parents[2] / "fixtures" / "files"
TRUTHS = sorted(FILES.glob("*/*.expected.json"))
FIXTURES = [path for truth in TRUTHS if (path := Path(str(truth).removesuffix(".expected.json"))).exists()]
FORMATS = sorted({path.parent.name for path in FIXTURES})
DAMAGED_FILES = 4


def placed(bucket: MemoryBucket, path: Path) -> str:
    """Upload the files of a checkpoint as they are now, and return its URL."""
    for key in bucket.keys("here/"):
        bucket.remove(key)
    for file in files_of(path):
        bucket.put(f"here/{file.relative_to(path.parent).as_posix()}", file.read_bytes())
    remote.forget()
    return bucket.url(f"here/{path.name}")


def verdict_on(place: str, damage: str) -> str:
    """Return what a verification says, wherever the checkpoint is: that a store fails is an error, too."""
    outcome = outcome_of(place, damage)
    text = (
        str(outcome)
        if isinstance(outcome, CheckpointError)
        else json.dumps(outcome.to_dict(), ensure_ascii=False)
    )
    # HDF5 has words of its own for each of its drivers.
    return re.sub(r" object \([^)]*\)", " object", text).replace(os.path.dirname(place), "PLACE")


def content_of(place: str) -> tuple[object, ...]:
    """Return all that a checkpoint holds, wherever it is."""
    above = os.path.dirname(place)
    try:
        opened = open_checkpoint(place)
    except CheckpointError as error:
        return (str(error).replace(above, "PLACE"),)
    with opened as checkpoint:
        tensors = [(digest(tensor), tensor.tobytes()) for tensor in checkpoint.tensors]
        spans = [
            (span.where, span.extent._replace(file=span.extent.file.removeprefix(above)), span.crc32)
            for span in checkpoint.spans()
        ]
        found = described(checkpoint)
    document = json.dumps(inspect(place).document(), ensure_ascii=False).replace(above, "PLACE")
    return tensors, spans, found, document


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_are_read_as_on_the_disk(
    bucket: MemoryBucket, name: str, every: bool, tmp_path: Path
) -> None:
    paths = [path for path in FIXTURES if path.parent.name == name] if every else one_of_each_variant(name)
    for path in paths:
        alone = tmp_path / f"{path.name} alone"
        alone.mkdir()
        here, there = str(copied(path, alone)), placed(bucket, path)
        assert verdict_on(there, "none") == verdict_on(here, "none"), path
        assert content_of(there) == content_of(here), path


def one_of_each_variant(name: str) -> list[Path]:
    """Return of each variant of a format the fixture of medium size."""
    variants: dict[str | None, list[Path]] = defaultdict(list)
    fixtures = (path for path in FIXTURES if path.parent.name == name)
    for path in sorted(fixtures, key=lambda path: sum(file.stat().st_size for file in files_of(path))):
        variants[read_truth(path).get("variant")].append(path)
    return [paths[len(paths) // 2] for paths in variants.values()]


def damages(path: Path, count: int) -> Iterator[str]:
    """Cut some files of a checkpoint, and flip bits in them, one damage at a time; yield what it is."""
    files = files_of(path)
    for file in files[:: math.ceil(len(files) / DAMAGED_FILES)]:
        whole = file.read_bytes()
        offsets = Random(f"{file.name} {len(whole)}").sample(range(len(whole)), min(len(whole), count))
        for offset in offsets:
            with flipped(file, offset, offset % 8):
                yield f"{file.name} with a bit of byte {offset} flipped"
        for nbytes in sorted(offsets, reverse=True):
            os.truncate(file, nbytes)
            yield f"{file.name} cut to {nbytes} of {len(whole)} bytes"
        file.write_bytes(whole)


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_judged_as_on_the_disk(bucket: MemoryBucket, name: str, count: int, tmp_path: Path) -> None:
    for path in one_of_each_variant(name):
        copy = copied(path, tmp_path)
        for damage in damages(copy, count):
            assert verdict_on(placed(bucket, copy), damage) == verdict_on(str(copy), damage), damage

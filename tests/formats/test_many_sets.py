"""Many checkpoints of several files in one directory: twice as many take twice the work, not four times."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool import list_checkpoints, verify
from ckpttool.formats import sharded
from tests.support.opening import checkpoints_in, only_checkpoint

FEW = 8
"""Enough for what grows with the square to be seen, as what is counted depends on nothing else."""
GROWTH = 2.2

Layout = Callable[[Path, Path, int], None]


def _index(path: Path, *shards: str) -> None:
    names = {f"tensor_{number}": shard for number, shard in enumerate(shards)}
    path.write_text(json.dumps({"metadata": {}, "weight_map": names}))


def own_shards(files: Path, place: Path, count: int) -> None:
    source = files / "safetensors" / "sharded"
    for number in range(count):
        for file in source.glob("model*"):
            name = file.name.replace("model", f"set-{number}")
            if file.suffix == ".json":
                (place / name).write_text(file.read_text().replace('"model-', f'"set-{number}-'))
            else:
                shutil.copy(file, place / name)


def one_family(files: Path, place: Path, count: int) -> None:
    """Each index names one of the shards, all of which are named like those of one set."""
    (shard, *_) = sorted((files / "safetensors" / "sharded").glob("*.safetensors"))
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        shutil.copy(shard, place / name)
        _index(place / f"index-{number}.safetensors.index.json", name)


def one_shard(files: Path, place: Path, count: int) -> None:
    (shard, *_) = sorted((files / "safetensors" / "sharded").glob("*.safetensors"))
    shutil.copy(shard, place / "model-00001-of-00001.safetensors")
    for number in range(count):
        _index(place / f"index-{number}.safetensors.index.json", "model-00001-of-00001.safetensors")


def keras_shards(files: Path, place: Path, count: int) -> None:
    source = files / "keras" / "sharded"
    (index,) = source.glob("*.weights.json")
    stem = index.name.removesuffix(".weights.json")
    for number in range(count):
        told = index.read_text().replace(f'"{stem}_', f'"set{number}_')
        (place / f"set{number}.weights.json").write_text(told)
        for name in ("00000", "00001"):  # what they hold takes a child to read, and isn't what is counted
            (place / f"set{number}_{name}.weights.h5").write_bytes(b"damaged")


def prefixes(files: Path, place: Path, count: int) -> None:
    index = min((files / "tensorflow").rglob("*.index"))
    for number in range(count):
        for file in index.parent.glob(f"{index.stem}.*"):
            shutil.copy(file, place / file.name.replace(index.stem, f"ckpt-{number}"))


def _directories(source: str) -> Layout:
    def lay_out(files: Path, place: Path, count: int) -> None:
        for number in range(count):
            shutil.copytree(files / source, place / f"step_{number}")

    return lay_out


def serials(files: Path, place: Path, count: int) -> None:
    for number in range(count):
        shutil.copytree(files / "fluid" / "root" / "checkpoint_0", place / f"checkpoint_{number}")


LAYOUTS: dict[str, Layout] = {
    "shards of their own": own_shards,
    "shards of one family": one_family,
    "one shard": one_shard,
    "shards of Keras": keras_shards,
    "prefixes": prefixes,
    "DCP": _directories("torch-dcp/fabric"),
    "DeepSpeed": _directories("deepspeed/zero-1"),
    "serials": serials,
}


class Counted:
    """Counts the calls that are made, and the names that are listed in directories."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.calls = self.names = 0
        listdir, scandir = os.listdir, os.scandir

        def listing(*arguments: Any) -> list[Any]:
            found = listdir(*arguments)
            self.names += len(found)
            return found

        class Scanning:
            """Counts what it yields."""

            def __init__(scanning, *arguments: Any) -> None:  # noqa: N805
                scanning.entries = scandir(*arguments)

            def __enter__(scanning) -> Any:  # noqa: N805
                return scanning

            def __exit__(scanning, *failure: object) -> None:  # noqa: N805
                scanning.entries.close()

            def __iter__(scanning) -> Iterator[Any]:  # noqa: N805
                for entry in scanning.entries:
                    self.names += 1
                    yield entry

            def __next__(scanning) -> Any:  # noqa: N805
                self.names += 1
                return next(scanning.entries)

            def close(scanning) -> None:  # noqa: N805
                scanning.entries.close()

        patched.setattr(os, "listdir", listing)
        patched.setattr(os, "scandir", Scanning)

    def count(self, frame: object, event: str, argument: object) -> None:
        """Count what is called, by Python or in C."""
        self.calls += event in ("call", "c_call")


def verify_all(place: Path) -> None:
    for unit in checkpoints_in(place):
        verify(unit, jobs=1)


def work_of(work: Callable[[Path], object], place: Path) -> Counted:
    with pytest.MonkeyPatch.context() as patched:
        counted = Counted(patched)
        before = sys.getprofile()
        sys.setprofile(counted.count)
        try:
            work(place)
        finally:
            sys.setprofile(before)
    return counted


@pytest.mark.parametrize("work", [verify_all, list_checkpoints], ids=["verify", "list"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_twice_as_many_take_twice_the_work(
    layout: Layout,
    work: Callable[[Path], object],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharded, "_MOST_EXTRA", FEW // 3)
    found = []
    for count in (2, FEW, 2 * FEW):  # the first imports what is needed
        place = tmp_path / f"{len(found)}"
        place.mkdir()
        layout(files, place, count)
        found.append(work_of(work, place))
    _, few, many = found
    assert many.names <= GROWTH * few.names
    assert many.calls <= GROWTH * few.calls


def test_what_several_indexes_could_claim_stays_no_ones(files: Path, tmp_path: Path) -> None:
    one_family(files, tmp_path, 5)
    shutil.copy(tmp_path / "model-00001-of-00005.safetensors", tmp_path / "model-00009-of-00005.safetensors")
    units = checkpoints_in(tmp_path)
    assert [os.path.basename(unit.path) for unit in units] == [
        f"index-{number}.safetensors.index.json" for number in range(5)
    ]
    own = [name for unit in units for name in unit.members if name.endswith(".safetensors")]
    assert len(own) == len(set(own))
    assert "model-00009-of-00005.safetensors" not in own
    assert {name for unit in units for name in (*unit.members, *unit.shared)} == set(os.listdir(tmp_path))


def test_what_lies_beside_a_set_is_named_up_to_a_hundred(files: Path, tmp_path: Path) -> None:
    own_shards(files, tmp_path, 1)
    (shard, *_) = sorted(tmp_path.glob("*.safetensors"))
    for number in range(150):
        shutil.copy(shard, tmp_path / f"set-0-{number + 10:05}-of-00999.safetensors")
    verification = verify(only_checkpoint(tmp_path), jobs=1)
    extra = [one for one in verification.findings if one.code == "shard-extra"]
    assert len(extra) == 101
    assert (extra[-1].where, extra[-1].message) == (
        "set-0.safetensors.index.json",
        "more than 100 files are named like a shard, but not in the index",
    )

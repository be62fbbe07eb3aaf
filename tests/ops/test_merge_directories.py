"""Merging directories: Fluid's trainers and servers, distributed checkpoints, TensorFlow's shards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpttool import (
    CheckpointError,
    ConvertOptions,
    DamagedCheckpoint,
    UsageError,
    merge,
    open_checkpoint,
)
from tests.support.conversions import digests, limit_rows, true_digests, whole_of

SERIAL = "checkpoint_0"
TABLE = "embedding_0.w_0"
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def refused(*sources: Path, kind: type[Exception] = DamagedCheckpoint) -> str:
    with pytest.raises(kind) as told, whole_of(*sources):
        pass
    return str(told.value)


def apart(source: Path, into: Path, groups: Sequence[Sequence[str]]) -> list[Path]:
    """Copy entries of a directory to directories of the same name on several machines."""
    made = []
    for at, names in enumerate(groups):
        target = into / f"node{at}" / source.name
        for name in names:
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (source / name).is_dir() else shutil.copy
            copy(source / name, place)
        made.append(target)
    return made


# Fluid ------------------------------------------------------------------------------------------------


@pytest.fixture
def machines(files: Path, tmp_path: Path) -> list[Path]:
    """Return the directories of two trainers and two parameter servers that share no file system."""
    groups = [
        ["__model__", "trainer_0"],
        ["trainer_1"],
        [f"__lookup_table__/{TABLE}_0"],
        [f"__lookup_table__/{TABLE}_1"],
    ]
    return apart(files / "fluid" / "generation-c" / SERIAL, tmp_path, groups)


def rows_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and values of the rows in a SelectedRows of float32 with four columns, by hand."""
    data = path.read_bytes()
    count = int.from_bytes(data[4:12], "little")
    rows = np.frombuffer(data, "<i8", count, 12)
    start = 12 + 8 * count + 8 + 4
    start += 4 + int.from_bytes(data[start : start + 4], "little")
    return rows, np.frombuffer(data, "<f4", 4 * count, start).reshape(count, 4)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (2, 3, 0, 1)])
def test_trainers_and_parameter_servers(machines: list[Path], tmp_path: Path, order: tuple[int, ...]) -> None:
    merged = merge([machines[at] for at in order], tmp_path / "whole", ConvertOptions(to="fluid"))
    assert merged.verified
    assert merged.notes == (f"{TABLE}: 5 rows of 2 parameter servers",)
    made = tmp_path / "whole" / SERIAL
    for trainer, step in (("trainer_0", "7"), ("trainer_1", "8")):
        assert (made / trainer / "step_id").read_text() == step
        assert (made / trainer / "epoch_id").read_text() == "1"
        assert (made / trainer / "_SUCCESS").is_file()
    model = machines[0] / "__model__"
    for name in os.listdir(model):
        if name != "_SUCCESS":
            assert (made / "__model__" / name).read_bytes() == (model / name).read_bytes()
    assert os.listdir(made / "__lookup_table__") == [f"{TABLE}_0"]
    parts = [rows_of(machines[2 + at] / "__lookup_table__" / f"{TABLE}_{at}") for at in (0, 1)]
    if order[0] == 3:
        parts.sort(key=lambda part: part[0][0])
    rows, values = rows_of(made / "__lookup_table__" / f"{TABLE}_0")
    assert rows.tolist() == [*parts[0][0], *parts[1][0]]
    assert np.array_equal(values, np.concatenate([part[1] for part in parts]))


def test_a_serial_in_one_directory(files: Path, tmp_path: Path) -> None:
    source = files / "fluid" / "guide" / SERIAL
    merge([source], tmp_path / "whole.npz")
    with np.load(tmp_path / "whole.npz") as found:
        rows, values = rows_of(source / "__lockup_table__" / "table_pserver_0")
        more, others = rows_of(source / "__lockup_table__" / "table_pserver_1")
        key = "__lookup_table__.table_pserver_0"
        assert found[f"{key}.rows"].tolist() == [*rows, *more]
        assert np.array_equal(found[f"{key}.values"], np.concatenate([values, others]))


def test_serials_of_two_saves(machines: list[Path]) -> None:
    other = machines[1].rename(machines[1].with_name("checkpoint_3"))
    assert refused(machines[0], other) == (
        f"{other}: serial 3, but {machines[0]} is serial 0 (parts of one save)"
    )


@pytest.mark.parametrize("lacking", [0, 2])
def test_a_machine_that_is_missing(machines: list[Path], lacking: int) -> None:
    told = refused(*(path for at, path in enumerate(machines) if at != lacking))
    assert told.startswith(str(machines[1] if lacking == 0 else machines[0]))
    assert ("__model__" in told) if lacking == 0 else ("parameter server 0 is missing" in told)


def test_a_trainer_that_is_missing(machines: list[Path]) -> None:
    (machines[1] / "trainer_1").rename(machines[1] / "trainer_2")
    assert refused(*machines) == f"{machines[0]}[trainer_1]: it is missing, but trainer_2 exists"


def test_a_trainer_twice(machines: list[Path]) -> None:
    shutil.copytree(machines[0] / "trainer_0", machines[1] / "trainer_0")
    told = refused(*machines)
    assert told == (
        f"{machines[1] / 'trainer_0'}: {machines[0] / 'trainer_0'} is the same part (each part once)"
    )


def test_two_models(machines: list[Path]) -> None:
    shutil.copytree(machines[0] / "__model__", machines[1] / "__model__")
    assert "__model__ is the same part" in refused(*machines)


def test_a_shard_of_a_table_twice(machines: list[Path]) -> None:
    table = machines[2] / "__lookup_table__" / f"{TABLE}_0"
    shutil.copy(table, machines[3] / "__lookup_table__")
    assert "two files of parameter server 0" in refused(*machines)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_rows_that_two_servers_have(
    machines: list[Path], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    limit_rows(monkeypatch, at_once=at_once)
    one, two = (machines[2 + at] / "__lookup_table__" / f"{TABLE}_{at}" for at in (0, 1))
    shutil.copy(one, two)
    assert "rows of earlier shards" in refused(*machines)
    limit_rows(monkeypatch, in_all=0)
    told = refused(*machines)
    assert f"{TABLE}_0 and in {TABLE}_1" in told
    assert told.endswith("(each row once)")


def test_an_unfinished_save(machines: list[Path]) -> None:
    os.truncate(machines[0] / "__model__" / "fc_0.w_0", 30)
    assert refused(*machines).startswith(f"{machines[0]}[__model__/fc_0.w_0]: ")


# Distributed checkpoints ------------------------------------------------------------------------------


@ALONE
def test_ranks_that_share_a_directory(files: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = files / "torch-dcp" / "two-ranks"
    merge([source], tmp_path / "whole.pth")
    dcp_to_torch_save(source, tmp_path / "expected.pth")
    found, expected = (
        torch.load(tmp_path / name, weights_only=False) for name in ("whole.pth", "expected.pth")
    )
    assert_same(found, expected)


def assert_same(found: object, expected: object) -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert {*found} == {*expected}
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("two-ranks", [[".metadata", "__0_0.distcp"], ["__1_0.distcp"]]),
        ("two-ranks", [["__1_0.distcp"], ["__0_0.distcp", ".metadata"]]),
        ("rank-metadata", [["__0.metadata", "__0_0.distcp"], ["__1.metadata", "__1_0.distcp"]]),
        (
            "in-safetensors",
            [[f"shard-0000{rank}-model-0000{at}-of-00002.safetensors" for at in (1, 2)] for rank in (1, 2)],
        ),
    ],
)
def test_ranks_on_several_machines(files: Path, tmp_path: Path, name: str, groups: list[list[str]]) -> None:
    source = files / "torch-dcp" / name
    with whole_of(*apart(source, tmp_path, groups)) as whole:
        assert digests(whole) == true_digests(source)


@pytest.mark.parametrize("name", ["two-ranks", "rank-metadata", "in-safetensors"])
def test_files_of_ranks_one_by_one(files: Path, name: str) -> None:
    source = files / "torch-dcp" / name
    paths = [path for path in sorted(source.iterdir()) if "metadata" not in path.name]
    with whole_of(*paths) as whole:
        assert digests(whole) == true_digests(source)
    assert paths[1].name in refused(paths[0], *paths[2:])


def test_a_rank_that_is_missing(files: Path, tmp_path: Path) -> None:
    (whole,) = apart(files / "torch-dcp" / "two-ranks", tmp_path, [[".metadata", "__0_0.distcp"]])
    assert refused(whole) == f"{whole}[__1_0.distcp]: no such file"


def test_a_rank_twice(files: Path, tmp_path: Path) -> None:
    groups = [[".metadata", "__0_0.distcp"], ["__0_0.distcp", "__1_0.distcp"]]
    told = refused(*apart(files / "torch-dcp" / "two-ranks", tmp_path, groups))
    assert "__0_0.distcp: " in told
    assert "is the same part" in told


def test_directories_of_two_steps(files: Path, tmp_path: Path) -> None:
    groups = [[".metadata", "__0_0.distcp"], ["__1_0.distcp"]]
    one, two = apart(files / "torch-dcp" / "two-ranks", tmp_path, groups)
    one, two = one.rename(one.with_name("step_100")), two.rename(two.with_name("step_200"))
    assert refused(one, two) == f"{two}: step 200, but {one} is step 100 (parts of one save)"


@ALONE
def test_model_and_optimizer_in_directories_of_their_own(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    state = {"model": {"fc.weight": torch.randn(4, 3)}, "optimizer": {"exp_avg": torch.randn(4, 3)}}
    for key, part in state.items():
        dcp.save({key: part}, checkpoint_id=tmp_path / key, no_dist=True)
    merge([tmp_path / "model", tmp_path / "optimizer"], tmp_path / "whole.pth")
    assert_same(torch.load(tmp_path / "whole.pth", weights_only=True), state)


# TensorFlow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("sharded", "model-8"), ("partitioned", "parts"), ("v1-sharded", "model.ckpt-7")],
)
def test_bundles_and_partitioned_variables(files: Path, tmp_path: Path, name: str, prefix: str) -> None:
    source = files / "tensorflow" / name
    merge([source / prefix], tmp_path / "whole.npz")
    told = true_digests(source)
    with open_checkpoint(tmp_path / "whole.npz") as opened:
        assert digests(opened) == told
    parts = [path for path in source.iterdir() if path.name.startswith(f"{prefix}-") or "data" in path.name]
    with whole_of(*parts) as whole:
        assert digests(whole) == told


@pytest.mark.parametrize(
    ("name", "prefix", "part"),
    [
        ("sharded", "model-8", "model-8.data-00001-of-00002"),
        ("v1-sharded", "model.ckpt-7", "model.ckpt-7-00001-of-00003"),
    ],
)
def test_a_missing_shard_of_a_bundle(files: Path, tmp_path: Path, name: str, prefix: str, part: str) -> None:
    shutil.copytree(files / "tensorflow" / name, tmp_path / name)
    (tmp_path / name / part).unlink()
    assert part in refused(tmp_path / name / prefix, kind=CheckpointError)


# Keras ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["list", "shards"])
def test_the_shards_of_a_keras_model(files: Path, given: str) -> None:
    source = files / "keras" / "sharded"
    paths = sorted(source.glob("*.json")) if given == "list" else sorted(source.glob("*.weights.h5"))
    with whole_of(*paths) as whole:
        assert digests(whole) == true_digests(source)


def test_a_shard_of_a_keras_model_that_is_missing(files: Path) -> None:
    first, *others = sorted((files / "keras" / "sharded").glob("*.weights.h5"))
    assert first.name in refused(*others)


# What is no part ----------------------------------------------------------------------------------------


def test_directories_of_no_job(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert "no checkpoint in this directory" in refused(tmp_path / "a", tmp_path / "b", kind=CheckpointError)
    assert "given twice" in refused(tmp_path / "a", tmp_path / "b" / ".." / "a", kind=UsageError)


def test_texts_that_lie_on_each_machine(files: Path, tmp_path: Path) -> None:
    groups = [[".metadata", "__0_0.distcp"], ["__1_0.distcp"]]
    one, two = apart(files / "torch-dcp" / "two-ranks", tmp_path, groups)
    for path in (one, two):
        (path / "config.json").write_text("{}")
    with whole_of(one, two) as whole:
        assert whole.complete
    (two / "config.json").write_text("[]")
    assert "config.json is the same part" in refused(one, two)

"""TensorFlow checkpoints: by any of their names, whole, in parts, and damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ckpttool import (
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    NotDownloaded,
    Role,
    open_checkpoint,
    verify,
)
from ckpttool.formats.tensorflow.bundle import read_header
from tests.support.commands import Run
from tests.support.frameworks import python_with_frameworks
from tests.support.opening import checkpoint_at, checkpoints_in, only_checkpoint, open_found, paths_in
from tests.support.state_files import read_state, write_state
from tests.support.thorough import spread

DATA = "data-00000-of-00001"
FLIPS = len(spread(range(1000), 150))


@pytest.fixture
def keras(files: Path, tmp_path: Path) -> Path:
    """Return a directory with one checkpoint, ckpt-1."""
    return Path(shutil.copytree(files / "tensorflow" / "keras3", tmp_path / "run"))


Bundle = Callable[..., Path]


@pytest.fixture
def bundle(raw: ModuleType, tmp_path: Path) -> Bundle:
    """Return what writes a bundle of entries, with a header and shards, and returns its prefix."""

    def make(entries: dict[bytes, bytes], *shards: bytes, **header: int) -> Path:
        prefix = tmp_path / "hand"
        told = raw.header(**({"shards": len(shards)} | header))
        (tmp_path / "hand.index").write_bytes(raw.table({b"": told} | entries))
        for number, data in enumerate(shards):
            (tmp_path / f"hand.data-{number:05d}-of-{len(shards):05d}").write_bytes(data)
        return prefix

    return make


def codes(path: Path) -> set[str]:
    return {finding.code for finding in verify(path).findings}


# By which names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "ckpt-1", "ckpt-1.index", f"ckpt-1.{DATA}"])
def test_every_name_leads_to_the_prefix(keras: Path, name: str) -> None:
    with open_checkpoint(keras / name) as checkpoint:
        assert checkpoint.path == str(keras / "ckpt-1")
        assert len(checkpoint) == 17
        assert sorted(os.path.basename(entry.path) for entry in checkpoint.files) == [
            f"ckpt-1.{DATA}",
            "ckpt-1.index",
        ]
    unit = checkpoint_at(keras / name)
    if name:
        assert unit is not None
        assert set(unit.members) == {"ckpt-1.index", f"ckpt-1.{DATA}"}
    else:
        assert unit is None  # a run's directory is no checkpoint, even if it holds just one
        assert paths_in(keras) == [keras / "ckpt-1"]


def test_a_directory_of_several_is_not_one(files: Path) -> None:
    with pytest.raises(NotACheckpoint):
        open_checkpoint(files / "tensorflow" / "manager")
    found = paths_in(files / "tensorflow" / "manager")
    assert [path.name for path in found] == [f"ckpt-{step}" for step in range(1, 11)]


def test_human_names_and_keys(keras: Path) -> None:
    with open_checkpoint(keras) as checkpoint:
        kernel = checkpoint["model._functional._operations.1._kernel"]
        assert kernel.key == "optimizer/_trainable_variables/0/.ATTRIBUTES/VARIABLE_VALUE"
        assert kernel.role is Role.WEIGHTS
        assert checkpoint["optimizer._momentums.0"].role is Role.OPTIMIZER
        assert checkpoint["save_counter"].role is Role.TRAINING
        assert not any("OBJECT_GRAPH" in name for name in checkpoint)


def test_slots_of_a_legacy_optimizer(files: Path) -> None:
    with open_checkpoint(files / "tensorflow" / "keras2") as checkpoint:
        slot = checkpoint["optimizer.m.layer-0.kernel"]
        assert slot.role is Role.OPTIMIZER
        assert slot.key is not None
        assert slot.key.startswith("layer_with_weights-0/kernel/.OPTIMIZER_SLOT/optimizer/m")


def test_graphs_beside_it_go_with_it(files: Path) -> None:
    for name in ("v1", "saver"):
        unit = only_checkpoint(files / "tensorflow" / name)
        assert Path(unit.path).name == "model.ckpt-12"
        assert "model.ckpt-12.meta" in unit.members


# The first version in shards -------------------------------------------------------------------------

OLD = "model.ckpt-7-?????-of-00003"


@pytest.fixture
def first_version(files: Path, tmp_path: Path) -> Path:
    """Return a run with two checkpoints of the first version, both in its state file."""
    run = tmp_path / "run"
    run.mkdir()
    source = next(path for path in (files / "tensorflow" / "v1").glob("*.meta")).with_suffix("")
    for step in (100, 200):
        shutil.copy(source, run / f"model.ckpt-{step}")
        shutil.copy(f"{source}.meta", run / f"model.ckpt-{step}.meta")
    paths = [f"model.ckpt-{step}" for step in (100, 200)]
    listed = "".join(f'all_model_checkpoint_paths: "/moved/{path}"\n' for path in paths)
    (run / "checkpoint").write_text(f'model_checkpoint_path: "/moved/{paths[-1]}"\n{listed}')
    return run


@pytest.mark.parametrize("kept", [0, 1, 3, 48, 500, -1])
@pytest.mark.parametrize("witness", ["state", "graph"])
def test_first_version_cut_short_is_still_one(first_version: Path, kept: int, witness: str) -> None:
    newest = first_version / "model.ckpt-200"
    newest.write_bytes(newest.read_bytes()[:kept])
    (first_version / ("checkpoint" if witness == "graph" else "model.ckpt-200.meta")).unlink()
    units = {Path(unit.path).name: unit for unit in checkpoints_in(first_version)}
    assert set(units) == {"model.ckpt-100", "model.ckpt-200"}
    assert not verify(units["model.ckpt-200"], jobs=1).is_valid
    assert not verify(newest, jobs=1).is_valid
    assert verify(units["model.ckpt-100"], jobs=1).is_valid


@pytest.mark.parametrize("content", [b"PK\3\4", b"\x80\2}q\0.", b"{}"])
def test_another_file_that_the_state_file_names_is_none(first_version: Path, content: bytes) -> None:
    (first_version / "model.ckpt-200").write_bytes(content)
    tables = [unit for unit in checkpoints_in(first_version) if unit.members[-1].endswith(".meta")]
    assert [Path(unit.path).name for unit in tables] == ["model.ckpt-100"]


@pytest.mark.parametrize("is_alone", [False, True])
def test_empty_index_that_the_state_file_names(keras: Path, is_alone: bool) -> None:
    (keras / "ckpt-1.index").write_bytes(b"")
    if is_alone:
        (keras / f"ckpt-1.{DATA}").unlink()
    unit = only_checkpoint(keras)
    assert Path(unit.path).name == "ckpt-1"
    assert not verify(unit, jobs=1).is_valid


OPTIMIZERS = """
import sys
import keras, numpy, tensorflow as tf
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
rule = keras.optimizers.Adam(0.25)
model.compile(rule, "mse")
model.fit(numpy.zeros((4, 8)), numpy.zeros((4, 1)), verbose=0)
tf.train.Checkpoint(opt=rule, net=model).write(sys.argv[1])
print(model.count_params())
"""


@pytest.mark.framework
def test_optimizer_under_any_name(tmp_path: Path) -> None:
    told = python_with_frameworks("-c", OPTIMIZERS, tmp_path / "saved")
    with open_checkpoint(tmp_path / "saved") as checkpoint:
        assert checkpoint.parameters == int(told.splitlines()[-1])
        assert checkpoint.training.learning_rate == 0.25
        roles = {tensor.path[0]: tensor.role for tensor in checkpoint.tensors}
    assert roles["opt"] is Role.OPTIMIZER


def test_variables_of_an_export_are_counted_once(files: Path) -> None:
    model = files / "savedmodel" / "keras_export"
    with open_checkpoint(model) as whole, open_checkpoint(model / "variables") as bare:
        assert (bare.format, bare.parameters) == ("tensorflow", whole.parameters)


@pytest.fixture
def old_shards(files: Path, tmp_path: Path) -> Path:
    """Return a directory with a checkpoint of the first version in three shards."""
    return Path(shutil.copytree(files / "tensorflow" / "v1-sharded", tmp_path / "old"))


@pytest.mark.parametrize("name", ["", "model.ckpt-7", OLD, "model.ckpt-7-00000-of-00003"])
def test_shards_of_the_first_version_are_one(old_shards: Path, name: str) -> None:
    with open_checkpoint(old_shards / name) as checkpoint:
        assert checkpoint.path == str(old_shards / OLD)
        assert set(checkpoint) == {"first/weight", "global_step", "second/count", "table/rows"}
        assert (len(checkpoint.files), checkpoint.training.step) == (4, 7)  # three shards, and the graph
    assert verify(old_shards / name).is_valid
    unit = only_checkpoint(old_shards / name)
    shards = [f"model.ckpt-7-{at:05d}-of-00003" for at in range(3)]
    assert (unit.path, list(unit.members)) == (str(old_shards / OLD), [*shards, "model.ckpt-7.meta"])


def test_a_missing_shard_of_the_first_version(old_shards: Path) -> None:
    (old_shards / "model.ckpt-7-00001-of-00003").unlink()
    verification = verify(old_shards / "model.ckpt-7")
    assert [(f.code, f.where) for f in verification.findings] == [
        ("shard-missing", "model.ckpt-7-00001-of-00003")
    ]
    with open_checkpoint(old_shards) as checkpoint:
        assert not checkpoint.complete
        assert checkpoint["table/rows"].values is None or len(checkpoint["table/rows"].tobytes()) == 60


def test_shards_of_two_saves_contradict_each_other(old_shards: Path, raw: ModuleType) -> None:
    shard = old_shards / "model.ckpt-7-00002-of-00003"
    shard.write_bytes((old_shards / "model.ckpt-7-00001-of-00003").read_bytes())
    assert codes(old_shards / "model.ckpt-7") == {"bundle-entry"}


def test_a_shard_that_is_cut_short_is_the_checkpoint_damaged(old_shards: Path) -> None:
    shard = old_shards / "model.ckpt-7-00000-of-00003"
    shard.write_bytes(shard.read_bytes()[:-10])
    for name in ("model.ckpt-7", OLD, shard.name):
        verification = verify(old_shards / name)
        assert (verification.format, verification.is_valid) == ("tensorflow", False)


def test_all_shards_leave_the_state_file_together(old_shards: Path, run: Run) -> None:
    for path in list(old_shards.glob("model.ckpt-7*")):
        shutil.copy(path, path.with_name(path.name.replace("ckpt-7", "ckpt-9")))
    new = "model.ckpt-9-?????-of-00003"
    state = read_state(old_shards)
    write_state(old_shards, state._replace(latest=new, paths=(*state.paths, new)))
    assert run("prune", old_shards, "--keep-last", "1", "--series", "model.ckpt-*").status == 0
    assert "ckpt-7" not in (old_shards / "checkpoint").read_text()
    assert read_state(old_shards).paths == (new,)


# Parts that are missing -----------------------------------------------------------------------------


def test_an_index_without_data(keras: Path) -> None:
    (keras / f"ckpt-1.{DATA}").unlink()
    with open_checkpoint(keras / "ckpt-1") as checkpoint:
        assert not checkpoint.complete
        (finding,) = checkpoint.findings
        assert (finding.code, finding.where) == ("shard-missing", f"ckpt-1.{DATA}")
        assert all(tensor.values is None for tensor in checkpoint.tensors)


def test_data_without_an_index(keras: Path) -> None:
    (keras / "ckpt-1.index").unlink()
    unit = only_checkpoint(keras)
    assert Path(unit.path).name == "ckpt-1"
    assert unit.format is not None
    with open_found(unit) as checkpoint:
        assert not checkpoint.complete
        assert [finding.code for finding in checkpoint.findings] == ["index-missing"]
    assert not verify(keras / f"ckpt-1.{DATA}").is_valid


def test_a_missing_shard_is_named(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "tensorflow" / "sharded", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-8.data-00001-of-00002").unlink()
    with open_checkpoint(tmp_path / "model-8") as checkpoint:
        assert not checkpoint.complete
        assert [finding.where for finding in checkpoint.findings] == ["model-8.data-00001-of-00002"]
        assert checkpoint["shard0/b"].array().tolist() == [[1.5, 1.5]] * 3
        assert checkpoint["shard1/b"].values is None


@pytest.mark.parametrize("name", ["ckpt-2_temp", "ckpt-2_temp_0123456789abcdef0123456789abcdef"])
def test_a_save_that_was_never_finished(keras: Path, name: str, run: Run) -> None:
    stage = keras / name
    stage.mkdir()
    shutil.copy(keras / "ckpt-1.index", stage / "part-00000-of-00002.index")
    shutil.copy(keras / f"ckpt-1.{DATA}", stage / f"part-00000-of-00002.{DATA}")
    assert paths_in(keras) == [keras / "ckpt-1", stage]
    verification = verify(stage)
    assert not verification.is_valid
    assert {finding.code for finding in verification.findings} == {"save-unfinished"}
    assert not verify(stage / "part-00000-of-00002").is_valid
    assert verify(keras).is_valid
    assert run("latest", keras).out == f"{keras}/ckpt-1\n"


def test_files_that_were_never_renamed(keras: Path, run: Run) -> None:
    (keras / "ckpt-2.index.tempstate1234").write_bytes(b"")
    (keras / f"ckpt-2.{DATA}.tempstate99").write_bytes(b"\0" * 9)
    units = {Path(unit.path).name: unit for unit in checkpoints_in(keras)}
    assert set(units) == {"ckpt-1", "ckpt-2"}
    assert not verify(units["ckpt-2"]).is_valid
    assert run("latest", keras).out == f"{keras}/ckpt-1\n"


def test_shards_of_another_save_beside_it(keras: Path) -> None:
    shutil.copy(keras / f"ckpt-1.{DATA}", keras / "ckpt-1.data-00000-of-00002")
    verification = verify(keras / "ckpt-1")
    assert verification.is_valid
    assert {finding.code for finding in verification.findings} == {"shard-extra"}


def test_a_pointer_of_git_lfs(keras: Path) -> None:
    (keras / "ckpt-1.index").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    with pytest.raises(NotDownloaded):
        open_checkpoint(keras / "ckpt-1")


# Flipped bytes --------------------------------------------------------------------------------------


def test_every_flipped_byte_of_data_names_its_tensor(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "tensorflow" / "dtypes", tmp_path, dirs_exist_ok=True)
    path, prefix = tmp_path / f"all.{DATA}", tmp_path / "all"
    with open_checkpoint(prefix) as checkpoint:
        places = {tensor.name: tensor.extent for tensor in checkpoint.tensors if tensor.extent is not None}
    whole, chance, found = path.read_bytes(), random.Random(7), 0
    for _ in range(FLIPS):
        at = chance.randrange(len(whole))
        broken = bytearray(whole)
        broken[at] ^= chance.randrange(1, 256)
        path.write_bytes(broken)
        verification = verify(prefix, jobs=1)
        owner = next(name for name, place in places.items() if place.offset <= at < place.end)
        told = {f.where for f in verification.findings if f.code == "checksum-mismatch"}
        found += not verification.is_valid and told == {owner}
    assert found == FLIPS


def test_every_flipped_byte_of_an_index_is_found(keras: Path) -> None:
    path, prefix = keras / "ckpt-1.index", keras / "ckpt-1"
    whole, chance, found = path.read_bytes(), random.Random(8), 0
    for _ in range(FLIPS):
        broken = bytearray(whole)
        broken[chance.randrange(len(whole))] ^= chance.randrange(1, 256)
        path.write_bytes(broken)
        found += not verify(prefix, jobs=1).is_valid
    assert found == FLIPS


@pytest.mark.parametrize("first", [0x80, ord("{"), ord("P"), 0x93, 0x89])
def test_an_index_stays_one_whatever_its_first_byte_looks_like(keras: Path, first: int) -> None:
    path = keras / "ckpt-1.index"
    path.write_bytes(bytes([first]) + path.read_bytes()[1:])
    for name in (path, keras / "ckpt-1"):
        verification = verify(name, jobs=1)
        assert (verification.format, verification.is_valid) == ("tensorflow", False)


def test_a_damaged_graph_leaves_the_tensors_with_their_keys(keras: Path) -> None:
    path = keras / f"ckpt-1.{DATA}"
    data = bytearray(path.read_bytes())
    data[data.index(b"save_counter")] ^= 1
    path.write_bytes(data)
    verification = verify(keras)
    (finding,) = verification.findings
    assert (finding.code, finding.where) == ("checksum-mismatch", "_CHECKPOINTABLE_OBJECT_GRAPH")
    with open_checkpoint(keras) as checkpoint:
        assert "save_counter/.ATTRIBUTES/VARIABLE_VALUE" in checkpoint


def test_metrics_and_tables_are_no_weights(bundle: Bundle, raw: ModuleType) -> None:
    names = (b"keras_api/metrics/0/total", b"w")
    keys = [name + b"/.ATTRIBUTES/VARIABLE_VALUE" for name in names] + [b"t/.ATTRIBUTES/table-values"]
    entries = {key: raw.tensor(4, (1,), b"a", at) for at, key in enumerate(sorted(keys))}
    with open_checkpoint(bundle(dict(sorted(entries.items())), b"aaa")) as checkpoint:
        weights = [one.name for one in checkpoint.tensors if one.role is Role.WEIGHTS]
        assert weights == ["w/.ATTRIBUTES/VARIABLE_VALUE"]


def test_every_flipped_byte_of_the_first_version_is_found(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-12"
    whole = (files / "tensorflow" / "v1" / "model.ckpt-12").read_bytes()
    chance = random.Random(9)
    for _ in spread(range(200), 60):
        broken = bytearray(whole)
        broken[chance.randrange(len(whole))] ^= chance.randrange(1, 256)
        path.write_bytes(broken)
        try:
            assert not verify(path, jobs=1).is_valid
        except NotACheckpoint:
            continue


# What TensorFlow lets pass --------------------------------------------------------------------------


def test_truncated_data(keras: Path) -> None:
    path = keras / f"ckpt-1.{DATA}"
    path.write_bytes(path.read_bytes()[:100])
    verification = verify(keras)
    assert not verification.is_valid
    assert "truncated" in {finding.code for finding in verification.findings}


def test_extra_bytes_are_a_warning(keras: Path) -> None:
    with (keras / f"ckpt-1.{DATA}").open("ab") as file:
        file.write(b"more")
    assert verify(keras).is_valid
    assert codes(keras) == {"trailing-bytes"}
    assert not verify(keras, strict=True).is_valid


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:100],
        lambda data: b"garbage" + data,
        lambda data: b"",
        lambda data: data[:300] + bytes([data[300] ^ 4]) + data[301:],
    ],
)
def test_a_damaged_index(keras: Path, damage: Callable[[bytes], bytes]) -> None:
    path = keras / "ckpt-1.index"
    path.write_bytes(damage(path.read_bytes()))
    for name in ("", "ckpt-1", "ckpt-1.index"):
        verification = verify(keras / name)
        assert not verification.is_valid
        assert verification.format == "tensorflow"


def test_a_later_producer_is_a_warning(bundle: Bundle, raw: ModuleType) -> None:
    prefix = bundle({b"a": raw.tensor(4, (3,), b"abc")}, b"abc", producer=2)
    assert verify(prefix).is_valid
    assert codes(prefix) == {"bundle-version"}
    prefix = bundle({b"a": raw.tensor(4, (3,), b"abc")}, b"abc", producer=2, minimum=2)
    assert not verify(prefix).is_valid


def test_more_shards_than_files(bundle: Bundle, raw: ModuleType) -> None:
    prefix = bundle({b"a": raw.tensor(4, (3,), b"abc")}, b"abc", shards=7)
    verification = verify(prefix)
    assert not verification.is_valid
    missing = {finding.where for finding in verification.findings if finding.code == "shard-missing"}
    assert {f"hand.data-{number:05d}-of-00007" for number in range(1, 7)} <= missing


def test_hostile_entries(bundle: Bundle, raw: ModuleType) -> None:
    good = raw.tensor(4, (3,), b"abc")
    refused = {
        "type": raw.tensor(99, (3,), b"abc"),
        "size": raw.tensor(1, (3,), b"abc"),
        "shape": raw.tensor(4, (1 << 62, 1 << 62), b"abc"),
        "negative": raw.tensor(4, (-3,), b"abc"),
        "offset": raw.tensor(4, (3,), b"abc", offset=-1),
        "shard": raw.tensor(4, (3,), b"abc", shard=1),
        "slices": raw.field(1, 4) + raw.field(2, raw.field(2, raw.field(1, 3))) + raw.field(7, b""),
        "message": b"\xff",
        "unknown rank": raw.field(1, 4) + raw.field(2, raw.field(3, 1)),
    }
    for name, entry in refused.items():
        prefix = bundle({b"a": good, b"b": entry}, b"abcabc")
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(prefix).close()
        assert not verify(prefix).is_valid, name


def test_places_outside_a_shard(bundle: Bundle, raw: ModuleType) -> None:
    prefix = bundle({b"a": raw.tensor(4, (3,), b"abc", offset=1 << 60)}, b"abc")
    assert "truncated" in codes(prefix)


@pytest.mark.parametrize(
    ("shards", "is_possible"), [(0, False), (1, True), (100_000, True), (100_001, False)]
)
def test_how_many_shards_there_may_be(shards: int, is_possible: bool, raw: ModuleType) -> None:
    message = raw.header(shards=shards)
    if is_possible:
        assert read_header("ckpt.index", message).shards == shards
    else:
        with pytest.raises(DamagedCheckpoint, match="shards, byte order"):
            read_header("ckpt.index", message)


def test_tensors_that_overlap(bundle: Bundle, raw: ModuleType) -> None:
    entries = {b"a": raw.tensor(4, (3,), b"abc"), b"b": raw.tensor(4, (2,), b"cd", offset=2)}
    assert codes(bundle(entries, b"abcd")) == {"extents-overlap"}


def test_bytes_between_tensors(bundle: Bundle, raw: ModuleType) -> None:
    """A writer that aligns its data leaves them."""
    entries = {b"a": raw.tensor(4, (3,), b"abc"), b"b": raw.tensor(4, (2,), b"de", offset=8)}
    prefix = bundle(entries, b"abc\0\0\0\0\0de")
    assert verify(prefix).is_valid
    assert codes(prefix) == {"bytes-unused"}


@pytest.mark.parametrize(
    ("payload", "shape"),
    [(b"\x05\x01\0\0\0\0abcdef", (2,)), (b"\x80" * 12, (1,)), (b"\x01\x01", (3,)), (b"", (1 << 40,))],
)
def test_strings_that_do_not_fit(
    bundle: Bundle, raw: ModuleType, payload: bytes, shape: tuple[int, ...]
) -> None:
    prefix = bundle({b"s": raw.tensor(7, shape, payload)}, payload)
    verification = verify(prefix)
    assert not verification.is_valid
    assert {finding.where for finding in verification.findings} == {"s"}


@pytest.mark.parametrize("graph", [b"\x0a\x04\x0a\x02\x08\x09", b"\xff\xff", b"\x0a\x04\x0a\x02\x08\x00"])
def test_hostile_graphs(bundle: Bundle, raw: ModuleType, graph: bytes) -> None:
    """A child that isn't there, no message at all, an object that is its own child."""
    import struct

    size = struct.pack("<I", len(graph))
    stored = struct.pack("<I", raw.masked(size))
    entry = raw.tensor(7, (), size + stored + graph)
    payload = raw.varint(len(graph)) + stored + graph
    entry = entry.replace(raw.field(5, len(size + stored + graph)), raw.field(5, len(payload)))
    prefix = bundle({b"_CHECKPOINTABLE_OBJECT_GRAPH": entry}, payload)
    try:
        verification = verify(prefix)
    except CheckpointError:
        return
    assert verification.is_valid == (graph[-1] == 0)


# The framework --------------------------------------------------------------------------------------

_CONTINUES = """
import json, sys
import tensorflow as tf
place = sys.argv[1]
weight, step = tf.Variable(tf.zeros([3, 2])), tf.Variable(0, dtype=tf.int64)
saved = tf.train.Checkpoint(weight=weight, step=step)
latest = tf.train.latest_checkpoint(place)
saved.restore(latest).assert_consumed()
manager = tf.train.CheckpointManager(saved, place, max_to_keep=3)
known = list(manager.checkpoints)
step.assign_add(1)
new = manager.save()
print(json.dumps([latest, known, new, list(manager.checkpoints), tf.train.latest_checkpoint(place)]))
"""


@pytest.mark.framework
def test_the_manager_continues_where_prune_has_been(files: Path, tmp_path: Path, run: Run) -> None:
    place = Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "run"))
    assert run("prune", place, "--keep", "3").status == 0
    told = python_with_frameworks("-c", _CONTINUES, place)
    latest, known, new, after, newest = json.loads(told.splitlines()[-1])
    at = [str(place / f"ckpt-{step}") for step in range(12)]
    assert latest == at[10]
    assert known == at[8:11]
    assert new == newest == at[11]
    assert after == at[9:12]
    assert {path.stem for path in place.glob("*.index")} == {"ckpt-9", "ckpt-10", "ckpt-11"}
    assert run("latest", place).out == f"{place}/ckpt-11\n"
    assert verify(place / "ckpt-11").is_valid

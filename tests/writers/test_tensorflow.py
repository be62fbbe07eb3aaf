"""TensorFlow checkpoints that are written: TensorFlow lists them, and restores them into matching objects."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Role, open_checkpoint, verify
from ckpttool.core.dtypes import BY_NAME
from ckpttool.formats.safetensors.writer import SafetensorsWriter
from ckpttool.formats.tensorflow.bundle import DTYPES
from ckpttool.formats.tensorflow.object_graph import key_of
from ckpttool.formats.tensorflow.writer import TensorFlowWriter
from ckpttool.formats.writer import Content
from tests.support.writing import OPTIONS, array_record, content_of, require_same, tensor, write
from tests.writers.conftest import Oracle

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
NUMERIC = [dtype for dtype in DTYPES.values() if dtype.kind != "string"]
NAMES = (
    "fc.weight",
    "model_state_dict.fc.bias",
    "layers.10.w",
    "layers.2.w",
    "dense/kernel:0",
    "a/b.c",
    "uni.ключ.💥",
    "null.a\0b",
    "two..dots",
    ".first",
    "last.",
    "blank. x",
    "back.\\x41",
    "_private.w",
)
AWKWARD = (
    *NAMES,
    "",
    "save_counter.deep",
    "deep." + ".".join(map(str, range(100))),
    "node",
    "node.inner",
    "x/.ATTRIBUTES/VARIABLE_VALUE",
    "x/.OPTIMIZER_SLOT/y",
    "optimizer.w",
    "_CHECKPOINTABLE_OBJECT_GRAPH",
    "k-v",
)


def numbers(size: int) -> np.ndarray[Any, Any]:
    return np.arange(size, dtype=np.float32) + 0.5


@pytest.mark.framework
def test_every_type(tensorflow: Oracle, tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 2, (len(NUMERIC), 6 * 16), dtype=np.uint8)
    made = [
        tensor(f"types.{dtype.name}", row[: 6 * dtype.bits // 8], dtype)
        for dtype, row in zip(NUMERIC, raw, strict=True)
    ]
    made = [replace(one, shape=(2, 3)) for one in made]
    content = Content(tuple(made))
    target = write(TensorFlowWriter(), content, tmp_path / "c")
    found = tensorflow("listed", target)
    assert {key: (shape, data) for key, (_, shape, data) in found.items()} == {
        key_of(one.name): ([2, 3], one.tobytes().hex()) for one in made
    }
    shown = {key.split("/")[1]: dtype for key, (dtype, _, _) in found.items()}
    bare = {f"q{kind}": kind for kind in ("int8", "uint8", "int16", "uint16", "int32")}
    assert shown == {dtype.name: bare.get(dtype.name, dtype.name) for dtype in NUMERIC}
    require_same(target, content)
    assert TensorFlowWriter.dtypes == {dtype.name for dtype in DTYPES.values()}


@pytest.mark.framework
def test_every_shape(tensorflow: Oracle, tmp_path: Path) -> None:
    arrays = {
        "scalar": np.float64(3).reshape(()),
        "empty": np.zeros((0, 3), np.int16),
        "none": np.zeros((4, 0, 2), np.float32),
        "large": np.random.default_rng(2).standard_normal((300, 401)),
        "nan": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "half": np.arange(5).astype(ml_dtypes.bfloat16),
    }
    target = write(
        TensorFlowWriter(), Content(tuple(tensor(*item) for item in arrays.items())), tmp_path / "c"
    )
    assert tensorflow("listed", target) == {
        name + VALUE: array_record(array) for name, array in arrays.items()
    }


@pytest.mark.framework
@pytest.mark.parametrize("how", ["read", "restore"])
def test_names_are_paths_through_objects(tensorflow: Oracle, tmp_path: Path, how: str) -> None:
    """All is restored, and nothing is left over, on either side."""
    arrays = {name: numbers(3) + at for at, name in enumerate(NAMES)}
    owner = tensor("fc.weight", arrays["fc.weight"])
    tied = replace(owner, path=("a", "tied", "weight"), shares_with="fc.weight")
    content = Content((*(tensor(*item) for item in arrays.items()), tied))
    target = write(TensorFlowWriter(), content, tmp_path / "c")
    names = {name: ("float32", [3]) for name in NAMES}
    found = tensorflow("restored", target, names, {"a.tied.weight": "fc.weight"}, how)
    assert found == {
        name: array_record(array) for name, array in (*arrays.items(), ("a.tied.weight", arrays["fc.weight"]))
    }
    require_same(target, content)


@pytest.mark.framework
def test_names_lead_through_lists_and_dictionaries(tensorflow: Oracle, tmp_path: Path) -> None:
    arrays = {
        name: numbers(2) + at for at, name in enumerate(["fc.weight", "blocks.0", "blocks.1", "table.a b"])
    }
    target = write(
        TensorFlowWriter(), Content(tuple(tensor(*item) for item in arrays.items())), tmp_path / "c"
    )
    expected = {name: array_record(array) for name, array in arrays.items()}
    assert tensorflow("restored_containers", target) == expected


@pytest.mark.framework
def test_ties_anywhere(tensorflow: Oracle, tmp_path: Path) -> None:
    """One may be the object that the other lies in, or lie in it."""
    owner = tensor("b.c.d", numbers(2))
    ties = [
        replace(owner, path=tuple(name.split(".")), shares_with="b.c.d") for name in ("a", "b.c", "b.c.d.e")
    ]
    content = Content((owner, *ties))
    target = write(TensorFlowWriter(), content, tmp_path / "c")
    require_same(target, content)
    assert tensorflow("listed", target) == {"b/c/d" + VALUE: array_record(numbers(2))}
    with open_checkpoint(target) as opened:
        assert opened.native == {}


@pytest.mark.framework
def test_what_was_tied_is_not_restored_into_two(tensorflow: Oracle, tmp_path: Path) -> None:
    owner = tensor("b", numbers(2))
    content = Content((owner, replace(owner, path=("a",), shares_with="b")))
    target = write(TensorFlowWriter(), content, tmp_path / "c")
    names = {name: ("float32", [2]) for name in ("a", "b")}
    with pytest.raises(AssertionError, match="not bound to checkpointed values"):
        tensorflow("restored", target, names, {}, "read")


@pytest.mark.framework
def test_a_run_of_tensorflow_goes_on(tensorflow: Oracle, tmp_path: Path) -> None:
    """Lists, dictionaries, counters, strings and the state of the data come back; the keys stay."""
    source = tensorflow("training", tmp_path)
    target = tmp_path / "again"
    with open_checkpoint(source) as opened:
        content = content_of(opened)
        assert {one.dtype.name for one in content.tensors} >= {"string", "variant"}
        write(TensorFlowWriter(), content, target)
        require_same(target, content)
    assert tensorflow("listed", target) == tensorflow("listed", source)
    assert tensorflow("graph", target) == tensorflow("graph", source)
    assert tensorflow("continued", target) == tensorflow("continued", source)
    values, following, saves = tensorflow("continued", target)
    assert (values["kernel"], following, saves) == (array_record(np.array([[5, 6]], np.float32)), 3, 1)


@pytest.mark.framework
def test_by_way_of_another_format(tensorflow: Oracle, tmp_path: Path) -> None:
    source, between, target = tmp_path / "adam", tmp_path / "x.safetensors", tmp_path / "back"
    tensorflow("optimized", source)
    with open_checkpoint(source) as opened:
        write(SafetensorsWriter(), content_of(opened), between)
    with open_checkpoint(between) as opened:
        write(TensorFlowWriter(), content_of(opened), target)
    assert tensorflow("listed", target) == tensorflow("listed", source)
    assert tensorflow("graph", target) == tensorflow("graph", source)
    assert any("/.OPTIMIZER_SLOT/" in key for key in tensorflow("listed", target))
    assert verify(target).is_valid


@pytest.mark.framework
def test_a_part_of_a_run(tensorflow: Oracle, tmp_path: Path) -> None:
    """Without its optimizer a model is restored, and nothing of the graph asks for what is gone."""
    source, target = tmp_path / "adam", tmp_path / "weights"
    tensorflow("optimized", source)
    with open_checkpoint(source) as opened:
        content = content_of(opened)
        weights = tuple(one for one in content.tensors if one.role is Role.WEIGHTS)
        assert [one.name for one in weights] == ["model.weight"]
        write(TensorFlowWriter(), replace(content, tensors=weights), target)
    found = tensorflow("weights_alone", target)
    assert found == tensorflow("listed", source)["model/weight" + VALUE]
    assert list(tensorflow("listed", target)) == ["model/weight" + VALUE]


@pytest.mark.framework
def test_strings_are_copied(tensorflow: Oracle, tmp_path: Path) -> None:
    source, target = tmp_path / "strings", tmp_path / "again"
    tensorflow("strings", source)
    with open_checkpoint(source) as opened:
        content = content_of(opened)
        write(TensorFlowWriter(), content, target)
        require_same(target, content)
    assert tensorflow("listed", target) == tensorflow("listed", source)
    assert Path(f"{target}.data-00000-of-00001").stat().st_size == sum(one.nbytes for one in content.tensors)


@pytest.mark.framework
@pytest.mark.parametrize(
    "name", ["saver", "partitioned", "sharded", "v1-sharded", "big-endian", "mirrored", "keras3"]
)
def test_the_keys_stay(tensorflow: Oracle, files: Path, tmp_path: Path, name: str) -> None:
    with open_checkpoint(files / "tensorflow" / name) as opened:
        keys = {one.key or one.name for one in opened.tensors}
        content = content_of(opened)
        write(TensorFlowWriter(), content, tmp_path / "c")
        require_same(tmp_path / "c", content)
        values = {one.key or one.name: one.tobytes().hex() for one in opened.tensors}
    found = tensorflow("listed", tmp_path / "c")
    assert set(found) == keys
    assert all(data == values[key] for key, (dtype, _, data) in found.items() if dtype != "string")


@pytest.mark.framework
def test_awkward_names_are_listed(tensorflow: Oracle, tmp_path: Path) -> None:
    content = Content(tuple(tensor(name, numbers(2) + at) for at, name in enumerate(AWKWARD)))
    target = write(TensorFlowWriter(), content, tmp_path / "c")
    found = tensorflow("listed", target)
    assert found == {key_of(name): array_record(numbers(2) + at) for at, name in enumerate(AWKWARD)}
    require_same(target, content)


# Without the framework ------------------------------------------------------------------------------


def test_renamed_tensors_get_keys_by_their_names(files: Path, tmp_path: Path) -> None:
    with open_checkpoint(files / "tensorflow" / "keras3") as opened:
        content = content_of(opened)
        tensors = tuple(replace(one, path=("new", *one.path)) for one in content.tensors)
        renamed = replace(content, tensors=tensors)
        write(TensorFlowWriter(), renamed, tmp_path / "c")
        require_same(tmp_path / "c", renamed)
    with open_checkpoint(tmp_path / "c") as opened:
        assert {one.key for one in opened.tensors} == {key_of(one.name) for one in tensors}
        assert opened.native == {}


def test_two_tensors_of_one_key_get_others(tmp_path: Path) -> None:
    native = {"tensorflow.keys": b'{"a": "same", "b": "same"}'}
    content = Content((tensor("a", numbers(1)), tensor("b", numbers(2))), native=native)
    require_same(write(TensorFlowWriter(), content, tmp_path / "c"), content)


@pytest.mark.parametrize(
    "native", [b"", b"[]", b"{", b'{"a": "\\u0000a"}', b'{"a": ""}', b'{"a": "b"}', b"[" * 10**5]
)
def test_keys_that_lead_nowhere_are_not_used(native: bytes, tmp_path: Path) -> None:
    content = Content((tensor("a", numbers(1)),), native={"tensorflow.keys": native})
    require_same(write(TensorFlowWriter(), content, tmp_path / "c"), content)


def test_a_graph_that_is_none_is_not_used(tmp_path: Path) -> None:
    native = {"tensorflow.keys": b"{}", "tensorflow.object_graph": b"\xff\xff"}
    content = Content((tensor("a", numbers(1)),), native=native)
    require_same(write(TensorFlowWriter(), content, tmp_path / "c"), content)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("\0a", "float32", "\0a: a name in a TensorFlow checkpoint can't begin with NUL (use --map)"),
        ("x.\ud800", "float32", "x.\ud800: its name is not valid text (use --map)"),
        ("a" * 70_000, "float32", "its key would have 70,027 bytes; at most 65,536 are allowed (use --map)"),
        ("a", "float4_e2m1fn", "a: float4_e2m1fn takes 4 bits here, but 8 in TensorFlow"),
    ],
)
def test_what_is_refused(name: str, dtype: str, expected: str) -> None:
    made = tensor(name, np.zeros(2, np.uint8), BY_NAME[dtype])
    (found,) = TensorFlowWriter().refusals(Content((made,)), OPTIONS)
    assert found.endswith(expected)


def test_more_objects_than_a_graph_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.formats.tensorflow.writer.MAX_NODES", 10)
    made = tuple(tensor(f"a.{at}", numbers(1)) for at in range(8))
    (found,) = TensorFlowWriter().refusals(Content(made), OPTIONS)
    assert found == "its names describe 11 objects; an object graph may have 10"
    assert [*TensorFlowWriter().refusals(Content(made[1:]), OPTIONS)] == []


def test_what_a_savedmodel_computes_is_not_told(files: Path, tmp_path: Path) -> None:
    with open_checkpoint(files / "savedmodel" / "module") as opened:
        assert "meta_graphs" in opened.metadata
        content = content_of(opened)
        require_same(write(TensorFlowWriter(), content, tmp_path / "c"), content)
    with open_checkpoint(tmp_path / "c") as again:
        assert again.metadata == {}


def test_the_tree_comes_back(files: Path, tmp_path: Path) -> None:
    with open_checkpoint(files / "pytorch" / "guide.pth") as opened:
        content = content_of(opened)
        require_same(write(TensorFlowWriter(), content, tmp_path / "c"), content)
        with open_checkpoint(tmp_path / "c") as again:
            assert again.metadata == opened.metadata
            assert again.training.epoch == opened.training.epoch is not None
            assert repr(again.tree).count("<Tensor ") == repr(opened.tree).count("<Tensor ") > 0


def test_a_damaged_entry_is_told(files: Path, tmp_path: Path) -> None:
    with open_checkpoint(files / "pytorch" / "guide.pth") as opened:
        write(TensorFlowWriter(), content_of(opened), tmp_path / "c")
    data = tmp_path / "c.data-00000-of-00001"
    raw = data.read_bytes()
    data.write_bytes(raw.replace(b'"schema"', b'"sChema"'))
    assert data.read_bytes() != raw
    with open_checkpoint(tmp_path / "c") as opened:
        assert [(one.code, one.where) for one in opened.findings] == [
            ("checksum-mismatch", "ckpttool.content")
        ]
    assert not verify(tmp_path / "c").is_valid


def test_many_tensors(tmp_path: Path) -> None:
    names = [f"block.{at // 8}.part{at % 8}.weight" for at in range(600)]
    random.Random(1).shuffle(names)
    content = Content(tuple(tensor(name, np.array([at])) for at, name in enumerate(names)))
    target = write(TensorFlowWriter(), content, tmp_path / "c")
    with open_checkpoint(target) as opened:
        assert (opened.findings, opened.complete, len(opened.tensors)) == ((), True, 600)
        assert all(opened[name].tobytes() == at.to_bytes(8, "little") for at, name in enumerate(names))


PARTS = st.text(st.characters(codec="utf-8"), max_size=4)


@given(st.sets(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8))
def test_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    kept = [name for name in sorted(names) if not name.startswith("\0")]
    content = Content(tuple(tensor(name, numbers(2) + at) for at, name in enumerate(kept)))
    target = write(TensorFlowWriter(), content, tmp_path_factory.mktemp("any") / "c")
    with open_checkpoint(target) as opened:
        assert opened.findings == ()
        assert {one.name: one.tobytes() for one in opened.tensors} == {
            one.name: one.tobytes() for one in content.tensors
        }

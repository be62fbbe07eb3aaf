"""SavedModels that are written: TensorFlow loads them, with variables along the parts of their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import Role, open_checkpoint
from ckpttool.formats.savedmodel.writer import NO_VARIABLES, OWN_ATTRIBUTES, SavedModelWriter
from ckpttool.formats.tensorflow.bundle import DTYPES
from ckpttool.formats.tensorflow.writer import TensorFlowWriter
from ckpttool.formats.writer import Content
from tests.support.writing import OPTIONS, array_record, content_of, require_same, tensor, write
from tests.writers.conftest import Oracle

NUMERIC = [dtype for dtype in DTYPES.values() if dtype.kind != "string" and dtype.name not in NO_VARIABLES]
NAMES = (
    "fc.weight",
    "layers.0.w",
    "layers.10.w",
    "a/b.0",
    "uni.ключ.💥",
    "null.a\0b",
    "two..dots",
    ".first",
    "last.",
    "blank. x",
    "signatures.w",
    "_private.w",
    "t.variables",
    "t.shape",
    "optimizer.state.0.exp_avg",
)


def numbers(size: int) -> np.ndarray[Any, Any]:
    return np.arange(size, dtype=np.float32) + 0.5


@pytest.mark.framework
def test_every_type(tensorflow: Oracle, tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 2, (len(NUMERIC), 6 * 16), dtype=np.uint8)
    made = [
        replace(tensor(f"types.{dtype.name}", row[: 6 * dtype.bits // 8], dtype), shape=(2, 3))
        for dtype, row in zip(NUMERIC, raw, strict=True)
    ]
    content = Content(tuple(made))
    target = write(SavedModelWriter(), content, tmp_path / "saved")
    found = tensorflow("loaded", target, [one.name for one in made])
    assert {name: (shape, data) for name, ((_, shape, data), _) in found.items()} == {
        one.name: ([2, 3], one.tobytes().hex()) for one in made
    }
    require_same(target, content)


@pytest.mark.framework
def test_every_shape(tensorflow: Oracle, tmp_path: Path) -> None:
    arrays = {
        "scalar": np.float64(3).reshape(()),
        "empty": np.zeros((0, 3), np.int16),
        "large": np.random.default_rng(2).standard_normal((300, 401)),
        "nan": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
    }
    content = Content(tuple(tensor(*item) for item in arrays.items()))
    found = tensorflow("loaded", write(SavedModelWriter(), content, tmp_path / "saved"), list(arrays))
    assert {name: value for name, (value, _) in found.items()} == {
        name: array_record(array) for name, array in arrays.items()
    }


@pytest.mark.framework
def test_names_are_paths_of_attributes(tensorflow: Oracle, tmp_path: Path) -> None:
    arrays = {name: numbers(3) + at for at, name in enumerate(NAMES)}
    owner = tensor("fc.weight", arrays["fc.weight"])
    tied = replace(owner, path=("a", "tied"), shares_with="fc.weight")
    content = Content((*(tensor(*item) for item in arrays.items()), tied))
    target = write(SavedModelWriter(), content, tmp_path / "saved")
    found = tensorflow("loaded", target, [*NAMES, "a.tied"])
    assert {name: value for name, (value, _) in found.items()} == {
        name: array_record(array) for name, array in (*arrays.items(), ("a.tied", arrays["fc.weight"]))
    }
    numbered = {name: number for name, (_, number) in found.items()}
    assert numbered["a.tied"] == numbered["fc.weight"]
    assert len(set(numbered.values())) == len(NAMES)
    require_same(target, content)
    with open_checkpoint(target) as opened:
        assert (opened.format, opened.variant, opened.native) == ("savedmodel", "v2", {})


@pytest.mark.framework
def test_strings_are_variables(tensorflow: Oracle, tmp_path: Path) -> None:
    tensorflow("strings", tmp_path / "strings")
    with open_checkpoint(tmp_path / "strings") as opened:
        content = content_of(opened)
        target = write(SavedModelWriter(), content, tmp_path / "saved")
        require_same(target, content)
    found = tensorflow("loaded", target, ["none", "one", "some"])
    assert {name: value for name, (value, _) in found.items()} == tensorflow("listed", tmp_path / "strings")


@pytest.mark.framework
def test_what_tensorflow_had_comes_back_from_it(tensorflow: Oracle, tmp_path: Path) -> None:
    """The keys and the graph of objects travel through a SavedModel, which has others."""
    source, between, target = tmp_path / "adam", tmp_path / "saved", tmp_path / "back"
    tensorflow("optimized", source)
    with open_checkpoint(source) as opened:
        content = content_of(opened)
        require_same(write(SavedModelWriter(), content, between), content)
    with open_checkpoint(between) as opened:
        write(TensorFlowWriter(), replace(content_of(opened), source_format=""), target)
    assert tensorflow("listed", target) == tensorflow("listed", source)
    assert tensorflow("graph", target) == tensorflow("graph", source)


@pytest.mark.framework
def test_attributes_that_objects_need(tensorflow: Oracle) -> None:
    own = {name for name in tensorflow("attributes") if not (name.startswith("__") and name.endswith("__"))}
    assert own <= OWN_ATTRIBUTES


# Without the framework ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["a", "a.b"],
            "a: it is a tensor that contains a.b, but a variable of a SavedModel has no attributes "
            "(use --map)",
        ),
        (
            ["a.__class__.b"],
            "a.__class__.b: an object of TensorFlow needs its attribute __class__ itself (use --map)",
        ),
        (
            ["a._update_uid"],
            "a._update_uid: an object of TensorFlow needs its attribute _update_uid itself (use --map)",
        ),
        (
            ["tensorflow_version.a"],
            "tensorflow_version.a: loading a SavedModel sets tensorflow_version (use --map)",
        ),
        (["\0a"], "\0a: a name in a TensorFlow checkpoint can't begin with NUL (use --map)"),
        (["a.\udfff"], "a.\udfff: its name is not valid text (use --map)"),
    ],
)
def test_what_is_refused(names: list[str], expected: str) -> None:
    content = Content(tuple(tensor(name, numbers(1)) for name in names))
    assert [*SavedModelWriter().refusals(content, OPTIONS)] == [expected]


def test_the_tree_comes_back(files: Path, tmp_path: Path) -> None:
    with open_checkpoint(files / "pytorch" / "guide.pth") as opened:
        content = content_of(opened)
        target = write(SavedModelWriter(), content, tmp_path / "saved")
        require_same(target, content)
        with open_checkpoint(target) as again:
            assert again.metadata == opened.metadata
            assert {one.role for one in again.tensors} == {Role.WEIGHTS, Role.OPTIMIZER}
    assert [str(path.relative_to(target)) for path in sorted(target.rglob("*")) if path.is_file()] == [
        "assets.extra/ckpttool.content",
        "saved_model.pb",
        "variables/variables.data-00000-of-00001",
        "variables/variables.index",
    ]


def test_an_entry_that_does_not_fit_is_told(tmp_path: Path) -> None:
    content = Content((tensor("a.b", numbers(1)),))
    target = write(SavedModelWriter(), content, tmp_path / "saved")
    (target / "assets.extra" / "ckpttool.content").write_bytes(b"{}")
    with open_checkpoint(target) as opened:
        assert [one.code for one in opened.findings] == ["content-entry"]
        assert opened["a.b"].tobytes() == numbers(1).tobytes()


def test_no_link_leads_to_the_entry(tmp_path: Path) -> None:
    target = write(SavedModelWriter(), Content((tensor("a.b", numbers(1)),)), tmp_path / "saved")
    entry = target / "assets.extra" / "ckpttool.content"
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    with open_checkpoint(target) as opened:
        assert opened.native == {}
        assert list(opened) == ["a.b"]


@pytest.mark.parametrize("name", ["module", "text", "tf1", "keras2", "keras_export"])
def test_savedmodels_keep_their_variables(files: Path, tmp_path: Path, name: str) -> None:
    with open_checkpoint(files / "savedmodel" / name) as opened:
        content = content_of(opened)
        target = write(SavedModelWriter(), content, tmp_path / "saved")
        require_same(target, content)
    with open_checkpoint(target) as again:
        (graph,) = again.metadata["meta_graphs"]
        assert (graph["tags"], graph["signatures"], graph["nodes"]) == (["serve"], {}, 0)


def test_a_model_without_variables(tmp_path: Path) -> None:
    target = write(SavedModelWriter(), Content(()), tmp_path / "saved")
    require_same(target, Content(()))

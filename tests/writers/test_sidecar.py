"""The entry of what is to be written: what it holds, and where there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool import LimitExceeded, Role, TrainingState, open_checkpoint
from ckpttool.formats import sidecar as module
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.sidecar import sidecar_of
from ckpttool.formats.torch.writer import PyTorchWriter
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.writing import tensor

ONE = tensor("model.a", np.ones(2, np.float32))
TIED = replace(ONE, path=("model", "b"), shares_with="model.a")
BARE = replace(ONE, path=("a",))


def test_the_document_in_full() -> None:
    tree = {"model": {"a": ONE, "b": TIED}, "epoch": 3}
    content = Content((ONE, TIED), tree, {"x": 1.5}, {"keras.config": b"{}"}, "pytorch")
    written = sidecar_of(content)
    assert written is not None
    assert json.loads(written) == {
        "schema": "ckpttool.content/1",
        "source": "pytorch",
        "tensors": {
            "model.a": {"path": ["model", "a"], "role": "weights"},
            "model.b": {"path": ["model", "b"], "role": "weights", "shares_with": "model.a"},
        },
        "shared": [],
        "content": {
            "tree": {"model": {"a": {"$tensor": "model.a"}, "b": {"$tensor": "model.b"}}, "epoch": 3},
            "metadata": {"x": 1.5},
            "native": {"keras.config": {"$bytes": "e30="}},
        },
    }


def test_it_is_ascii() -> None:
    written = sidecar_of(Content((BARE,), {"ü": BARE}))
    assert written is not None and written.isascii()


def test_there_is_none_where_names_say_it_all() -> None:
    assert sidecar_of(Content((BARE,))) is None
    assert b'"role":"other"' in (sidecar_of(Content((replace(BARE, role=Role.OTHER),))) or b"")


@pytest.mark.parametrize(
    "content",
    [Content((ONE,)), Content((BARE, replace(BARE, path=("b",), shares_with="a"))), Content((), {})],
)
def test_paths_ties_and_trees_are_told(content: Content) -> None:
    assert sidecar_of(content) is not None


def test_a_format_with_a_tree_of_its_own_is_told_of_the_rest_alone() -> None:
    content = Content((ONE, TIED), {"model": {"a": ONE, "b": TIED}})
    assert sidecar_of(content, tree=False) is None
    written = sidecar_of(replace(content, native={"x": b"y"}), tree=False)
    assert written is not None
    told = json.loads(written)
    assert "tensors" not in told
    assert list(told["content"]) == ["native"]


def test_roles_and_training_are_told_where_the_tree_alone_would_not_tell_them() -> None:
    one = replace(ONE, role=Role.OPTIMIZER)
    content = Content((one,), {"model": {"a": one}, "epoch": 3}, training=TrainingState(epoch=3))
    written = sidecar_of(content, tree=False)
    assert written is not None
    told = json.loads(written)
    assert (told["roles"], told["content"]) == ({"model.a": "optimizer"}, {})
    content = replace(
        content, training=TrainingState(epoch=3, learning_rate=0.5, origin={"epoch": "key epoch"})
    )
    written = sidecar_of(content, tree=False)
    assert written is not None
    assert json.loads(written)["content"] == {
        "training": {"epoch": 3, "learning_rate": 0.5, "origin": {"epoch": "key epoch"}}
    }


@pytest.mark.parametrize("name", ["adam.pdopt", "nested.pdparams", "static.pdopt", "evaluated.pd"])
def test_roles_training_and_ties_of_paddle_come_back_out_of_pytorchs_file(
    files: Path, tmp_path: Path, name: str
) -> None:
    with open_checkpoint(files / "paddle" / name) as source:
        content = Content(source.tensors, source.tree, {}, source.native, "paddle", source.training)
        with StagedOutput(tmp_path / "a.pt", PyTorchWriter.shape) as staged:
            PyTorchWriter().write(content, staged, WriteOptions(name="a.pt"))
            staged.settle()
            staged.commit()
        with open_checkpoint(tmp_path / "a.pt") as opened:
            assert not opened.findings
            assert opened.training == source.training
            assert [(one.path, one.role, one.shares_with) for one in opened.tensors] == [
                (one.path, one.role, one.shares_with) for one in source.tensors
            ]
            assert encode_tree(opened.tree) == encode_tree(source.tree)


def test_paths_are_told_to_it_where_there_was_no_tree() -> None:
    written = sidecar_of(Content((ONE,)), tree=False)
    assert written is not None
    assert json.loads(written)["tensors"] == {"model.a": {"path": ["model", "a"], "role": "weights"}}


def test_what_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT", 1000)
    with pytest.raises(LimitExceeded):
        sidecar_of(Content((), {"x": "y" * 1000}))


@pytest.mark.framework
def test_the_example_of_the_documentation_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "sidecar.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    with open_checkpoint("model.pth") as opened:
        content = Content(opened.tensors, opened.tree, source_format=opened.format)
        written = sidecar_of(content)
        assert [one.name for one in content.owned] == ["model.weight", "optimizer.state.0.step"]
    assert written is not None
    assert json.loads(written) == json.loads(shown)
    assert list(json.loads(written)["tensors"]) == list(json.loads(shown)["tensors"])

"""The entry of what is to be written: what it holds, and where there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.checkpoint import Role
from ckpttool.errors import LimitExceeded
from ckpttool.formats import open_checkpoint
from ckpttool.writing import document as module
from ckpttool.writing.content import Content
from ckpttool.writing.document import document
from tests.writing.contents import tensor

ONE = tensor("model.a", np.ones(2, np.float32))
TIED = replace(ONE, path=("model", "b"), shares_with="model.a")
BARE = replace(ONE, path=("a",))


def test_the_document_in_full() -> None:
    tree = {"model": {"a": ONE, "b": TIED}, "epoch": 3}
    content = Content((ONE, TIED), tree, {"x": 1.5}, {"keras.config": b"{}"}, "pytorch")
    written = document(content)
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
    written = document(Content((BARE,), {"ü": BARE}))
    assert written is not None and written.isascii()


def test_there_is_none_where_names_say_it_all() -> None:
    assert document(Content((BARE,))) is None
    assert document(Content((replace(BARE, role=Role.OTHER),))) is None


@pytest.mark.parametrize(
    "content",
    [Content((ONE,)), Content((BARE, replace(BARE, path=("b",), shares_with="a"))), Content((), {})],
)
def test_paths_ties_and_trees_are_told(content: Content) -> None:
    assert document(content) is not None


def test_a_format_with_a_tree_of_its_own_is_told_of_the_rest_alone() -> None:
    content = Content((ONE, TIED), {"model": {"a": ONE, "b": TIED}})
    assert document(content, tree=False) is None
    written = document(replace(content, native={"x": b"y"}), tree=False)
    assert written is not None
    told = json.loads(written)
    assert "tensors" not in told
    assert list(told["content"]) == ["native"]


def test_paths_are_told_to_it_where_there_was_no_tree() -> None:
    written = document(Content((ONE,)), tree=False)
    assert written is not None
    assert json.loads(written)["tensors"] == {"model.a": {"path": ["model", "a"], "role": "weights"}}


def test_what_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT", 1000)
    with pytest.raises(LimitExceeded):
        document(Content((), {"x": "y" * 1000}))


@pytest.mark.framework
def test_the_example_of_the_documentation_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "entry.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    with open_checkpoint("model.pth") as opened:
        content = Content(opened.tensors, opened.tree, source_format=opened.format)
        written = document(content)
        assert [one.name for one in content.owned] == ["model.weight", "optimizer.state.0.step"]
    assert written is not None
    assert json.loads(written) == json.loads(shown)
    assert list(json.loads(written)["tensors"]) == list(json.loads(shown)["tensors"])

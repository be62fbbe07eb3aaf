"""Files and groups that a source tells of a model and no file can have: refused, and never written."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.keras.writer import KerasH5Writer, KerasWriter
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.writing import tensor

NAME = "layers/dense/vars/0"
CONFIG = {"keras.config": b'{"class_name": "Sequential", "config": {}, "module": "keras"}'}
LEADS_OUT = "its name is empty or points outside the directory where it is unpacked"


def model(**native: bytes) -> Content:
    one = tensor("x", np.zeros(2, np.float32))
    return Content(
        (tensor(NAME.replace("/", "."), np.frombuffer(one.tobytes(), np.float32)),), None, {}, native
    )


def refusals_of_files(*names: str) -> list[str]:
    content = model(**CONFIG, **{f"keras.asset:{name}": b"x" for name in names})
    return [*KerasWriter().refusals(content, WriteOptions(name="x.keras"))]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["../../evil"], LEADS_OUT),
        (["assets/../../evil"], LEADS_OUT),
        (["/etc/passwd"], LEADS_OUT),
        (["assets//x"], LEADS_OUT),
        (["assets/./x"], LEADS_OUT),
        (["assets/x/"], LEADS_OUT),
        (["assets\\..\\x"], LEADS_OUT),
        (["assets/a\0b"], LEADS_OUT),
        ([""], LEADS_OUT),
        (["assets/\ud800"], "not valid text"),
        (["C:x"], "Keras keeps such files in assets/"),
        (["assets"], "Keras keeps such files in assets/"),
        (["config.json"], "Keras keeps such files in assets/"),
        ([ENTRY], "Keras keeps such files in assets/"),
        (["assets/" + "x" * 70_000], "70,007 bytes, and at most 65,535 fit"),
        (["assets/Stra\u00dfe", "assets/STRASSE"], "don't distinguish its name from 'assets/Stra\u00dfe'"),
        (["assets/e\u0301", "assets/\u00e9"], "don't distinguish its name from 'assets/e\u0301'"),
        (["assets/a", "assets/A/b"], "'assets/a' is a file and no directory"),
    ],
)
def test_files_that_cannot_lie_beside_a_model_are_refused(names: list[str], why: str) -> None:
    (found,) = refusals_of_files(*names)
    assert found.startswith("the file ") and why in found


@given(st.lists(st.text("aA./\\é", max_size=6), unique=True, max_size=4))
def test_what_is_not_refused_is_unpacked_below_assets(names: list[str]) -> None:
    names = [f"assets/{name}" for name in names]
    if refusals_of_files(*names):
        return
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        # What Python's own unpacking makes of a name, which cleans it, is the name itself.
        assert "/".join(part for part in name.split("/") if part not in ("", ".", "..")) == name


def test_files_that_are_not_refused_are_written(tmp_path: Path) -> None:
    content = model(**CONFIG, **{"keras.asset:assets/layers/lookup/vocabulary.txt": b"a\nb"})
    assert not [*KerasWriter().refusals(content, WriteOptions(name="x.keras"))]
    with StagedOutput(tmp_path / "x.keras") as staged:
        KerasWriter().write(content, staged, WriteOptions(name="x.keras"))
        staged.settle()
        staged.commit()
    with zipfile.ZipFile(tmp_path / "x.keras") as archive:
        assert archive.read("assets/layers/lookup/vocabulary.txt") == b"a\nb"


def refusals_of_groups(groups: list[Any], name: str = "x.weights.h5") -> list[str]:
    stored = {"groups": groups, "datasets": {NAME.replace("/", "."): NAME.split("/")}}
    content = model(**{"keras.stored": json.dumps(stored).encode()})
    return [*KerasH5Writer().refusals(content, WriteOptions(name=name))]


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ([["a", ""], {}], "a part of its path is empty"),
        ([["a", "."], {}], "'.' means the group itself"),
        ([["a/b"], {}], "'/' separates groups"),
        ([["a\0b"], {}], "a NUL ends a name"),
        ([NAME.split("/"), {}], "a dataset has this path"),
        ([[*NAME.split("/"), "below"], {}], "a dataset has this path"),
        ([[ENTRY], {}], "a dataset has this path"),
        ([["g"], {"": 1}], "it is empty, contains a NUL, or isn't valid text"),
        ([["g"], {"a": "\0"}], "it is empty, contains a NUL"),
        ([["g"], {"a": ["b\0"]}], "it is empty, contains a NUL"),
        ([["g"], {"a": 10**20 - 1}], "a number of more than 64 bits"),
        ([["g"], {"a": [-1, 1 << 63]}], "both the lowest and the highest"),
        ([["g"], {"a": ["b" * 1000] * 100}], "100,001 bytes, and at most 64,512 fit"),
        ([["g"], {"a": [0.5] * 9000}], "72,001 bytes"),
        ([["g"], {str(at): 1 for at in range(5000)}], "5,000 attributes"),
    ],
)
def test_groups_that_hdf5_cannot_hold_are_refused(group: list[Any], why: str) -> None:
    (found,) = refusals_of_groups([group])
    assert found.startswith("the group /") and why in found


@pytest.mark.parametrize("text", ['{"groups": [[["\\ud800"], {}]], "datasets": {}}', "[" * 500, '{"groups":'])
def test_what_is_no_valid_text_tells_nothing(text: str) -> None:
    content = model(**{"keras.stored": text.encode()})
    assert [*KerasH5Writer().refusals(content, WriteOptions(name="x.weights.h5"))] == []


def test_two_tensors_in_one_listed_place_are_refused() -> None:
    two = [tensor(name, np.zeros(2, np.float32)) for name in ("a", "b")]
    stored = {"groups": [[[], {"layer_names": ["d"]}]], "datasets": {"a": ["d", "k"], "b": ["d", "k"]}}
    content = Content(tuple(two), None, {}, {**CONFIG, "keras.stored": json.dumps(stored).encode()})
    assert [*KerasH5Writer().refusals(content, WriteOptions(name="x.h5"))] == ["b: same place as 'a', /d/k"]

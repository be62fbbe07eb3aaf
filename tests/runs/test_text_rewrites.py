"""Small texts that name checkpoints: what they say of others, and how they are written, stays."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.runs.renaming.scene import PathRenames
from ckpttool.runs.renaming.text_rewrites import (
    FileChange,
    best_text,
    digests_text,
    index_text,
    line_text,
    state_file_text,
    sums_text,
)

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.just("old"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("old"), inner, max_size=4)
    ),
    max_leaves=12,
)


def swap(path: str) -> str | None:
    return {"old": "new", "dir/old": "dir/new"}.get(path)


def test_lines() -> None:
    assert line_text("old", swap) == "new"
    assert line_text(" \told\r\n", swap) == " \tnew\r\n"
    assert line_text("older\n", swap) == "older\n"
    assert line_text("\n", swap) == "\n"


def test_states_stay_parallel() -> None:
    text = (
        'model_checkpoint_path: "old"\nall_model_checkpoint_paths: "a"\nall_model_checkpoint_paths: "old"\n'
    )
    times = "all_model_checkpoint_timestamps: 1.5\nall_model_checkpoint_timestamps: 2.5\n"
    assert state_file_text(text + times, swap) == (text + times).replace("old", "new")
    assert state_file_text("# mine\n" + text.replace("old", "b"), swap).startswith("# mine\n")
    with pytest.raises(ValueError, match="names no checkpoint"):
        state_file_text("", swap)


@given(TREES, st.integers(0, 4) | st.none())
def test_the_best_is_all_that_changes(tree: object, indent: int | None) -> None:
    told = {"a": tree, "best_model_checkpoint": "old", "z": [tree]}
    text = json.dumps(told, indent=indent)
    assert json.loads(best_text(text, swap)) == told | {"best_model_checkpoint": "new"}
    assert best_text(json.dumps(told | {"best_model_checkpoint": None}), swap) == json.dumps(
        told | {"best_model_checkpoint": None}
    )


def test_how_a_state_is_written_stays() -> None:
    text = '{\n  "best_model_checkpoint" :  "old",\n "x": [NaN, 1e-05, 0.10]\n}\n'
    assert best_text(text, swap) == text.replace("old", "new")
    twice = '{"best_model_checkpoint": "old", "log": {"best_model_checkpoint": "old"}}'
    assert json.loads(best_text(twice, swap)) == {
        "best_model_checkpoint": "new",
        "log": {"best_model_checkpoint": "old"},
    }
    nan = json.loads(best_text('{"loss": NaN, "best_model_checkpoint": "old"}', swap))
    assert nan["best_model_checkpoint"] == "new" and math.isnan(nan["loss"])
    for wrong in (
        '["best_model_checkpoint"]',
        '{"best_model_checkpoint": "old"',
        "[" * 100_000 + '"best_model_checkpoint"',
    ):
        with pytest.raises(ValueError, match=r"."):
            best_text(wrong, swap)


@given(
    st.dictionaries(
        st.text(max_size=8) | st.just("old"), st.sampled_from(["old", "other", "old.x"]), max_size=6
    ),
    TREES,
)
def test_an_index_maps_the_same_to_new_names(mapped: dict[str, str], metadata: object) -> None:
    told = {"metadata": {"m": metadata, "old": "x"}, "weight_map": mapped}
    now = json.loads(index_text(json.dumps(told, indent=2), {"old": "new"}))
    assert now["metadata"] == told["metadata"]
    assert now["weight_map"] == {key: "new" if name == "old" else name for key, name in mapped.items()}


def test_an_index_of_keras_has_lists() -> None:
    text = '{"weight_map": {"/a": ["old", "b"]}}'
    assert index_text(text, {"old": "new"}) == text.replace("old", "new")


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    for name in ("old", "a b", "c\nd", "back\\slash"):
        (tmp_path / name).write_text(name)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "state").write_text("before")
    files = ["old", "a b", "c\nd", "back\\slash", "dir/state"]
    text = subprocess.run(
        ["sha256sum", *files], cwd=tmp_path, capture_output=True, check=True, text=True
    ).stdout
    tagged = subprocess.run(
        ["sha256sum", "--tag", *files], cwd=tmp_path, capture_output=True, check=True, text=True
    ).stdout
    for name in ("old", "c\nd"):
        (tmp_path / name).rename(tmp_path / f"new {name}")
    (tmp_path / "dir").rename(tmp_path / "place")
    (tmp_path / "place" / "state").write_text("after")
    moved = PathRenames({str(tmp_path): {"old": "new old", "c\nd": "new c\nd", "dir": "place"}})
    before, after = (hashlib.sha256(word).hexdigest() for word in (b"before", b"after"))
    edits = {"dir/state": FileChange(before, after, 5)}
    for told in (text, tagged):
        (tmp_path / "SUMS").write_text(sums_text(told, moved.renamer(str(tmp_path)), edits))
        subprocess.run(["sha256sum", "--strict", "-c", "SUMS"], cwd=tmp_path, capture_output=True, check=True)
    wrong = text.replace(before, "0" * 64)
    assert "0" * 64 in sums_text(wrong, moved.renamer(str(tmp_path)), edits)
    assert sums_text("# note\nno line\r\n", swap, {}) == "# note\nno line\r\n"


def test_digests_of_tensors_stay() -> None:
    tensors = '{\n  "old": {"sha256": "y"}\n }'
    text = f'{{\n "schema": "x",\n "files": {{"old": {{"bytes": 3}}}},\n "tensors": {tensors}\n}}\n'
    assert digests_text(text, swap, {}) == text.replace('{"old": {"b', '{"new": {"b')
    now = json.loads(digests_text(text, swap, {"old": FileChange("", "", 7)}))
    assert now["files"] == {"new": {"bytes": 7}} and now["tensors"] == {"old": {"sha256": "y"}}


@given(NAMES, NAMES)
def test_paths_keep_their_form(old: str, new: str) -> None:
    if old in (".", ".."):
        return
    moved = PathRenames({"/run/x": {old: new}})
    assert moved.new_path(old, "/run/x") == new
    assert moved.new_path(f"/run/x/{old}/inner", "/elsewhere") == f"/run/x/{new}/inner"
    assert moved.new_path(f"../x//{old}", "/run/y") == f"../x//{new}"
    assert moved.new_path(old, "/run") is None
    assert moved.new_path("", "/run/x") is moved.new_path("a\0b", "/run/x") is None

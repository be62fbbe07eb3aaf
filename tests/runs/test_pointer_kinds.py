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

from ckpttool.formats.pointer_kind import NO_CHANGES, Changes, FileChange, PointerKind, Renamer, StalePaths
from ckpttool.formats.tensorflow.checkpoint_list import TensorFlowState
from ckpttool.runs.pointers import kinds
from ckpttool.runs.pointers.kinds import (
    DIGESTS,
    KINDS,
    LINE,
    MEMBERS,
    TRAINER_STATE,
    IterationTracker,
    ShardIndex,
    TensorDigests,
)
from ckpttool.runs.renaming.scene import PathRenames
from tests.support.commands import Run

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
    assert LINE.reworded("old", swap) == "new"
    assert LINE.reworded(" \told\r\n", swap) == " \tnew\r\n"
    assert LINE.reworded("older\n", swap) == "older\n"
    assert LINE.reworded("\n", swap) == "\n"


def test_states_stay_parallel() -> None:
    text = (
        'model_checkpoint_path: "old"\nall_model_checkpoint_paths: "a"\nall_model_checkpoint_paths: "old"\n'
    )
    times = "all_model_checkpoint_timestamps: 1.5\nall_model_checkpoint_timestamps: 2.5\n"
    assert TensorFlowState().reworded(text + times, swap) == (text + times).replace("old", "new")
    assert TensorFlowState().reworded("# mine\n" + text.replace("old", "b"), swap).startswith("# mine\n")
    assert TensorFlowState().reworded("another file", swap) == "another file"
    with pytest.raises(ValueError, match="names no checkpoint"):
        TensorFlowState().names("")


@given(TREES, st.integers(0, 4) | st.none())
def test_the_best_is_all_that_changes(tree: object, indent: int | None) -> None:
    told = {"a": tree, "best_model_checkpoint": "old", "z": [tree]}
    text = json.dumps(told, indent=indent)
    assert json.loads(TRAINER_STATE.reworded(text, swap)) == told | {"best_model_checkpoint": "new"}
    assert TRAINER_STATE.reworded(json.dumps(told | {"best_model_checkpoint": None}), swap) == json.dumps(
        told | {"best_model_checkpoint": None}
    )


def test_how_a_state_is_written_stays() -> None:
    text = '{\n  "best_model_checkpoint" :  "old",\n "x": [NaN, 1e-05, 0.10]\n}\n'
    assert TRAINER_STATE.reworded(text, swap) == text.replace("old", "new")
    twice = '{"best_model_checkpoint": "old", "log": {"best_model_checkpoint": "old"}}'
    assert json.loads(TRAINER_STATE.reworded(twice, swap)) == {
        "best_model_checkpoint": "new",
        "log": {"best_model_checkpoint": "old"},
    }
    nan = json.loads(TRAINER_STATE.reworded('{"loss": NaN, "best_model_checkpoint": "old"}', swap))
    assert nan["best_model_checkpoint"] == "new" and math.isnan(nan["loss"])
    for wrong in (
        '["best_model_checkpoint"]',
        '{"best_model_checkpoint": "old"',
        "[" * 100_000 + '"best_model_checkpoint"',
    ):
        with pytest.raises(ValueError, match=r"."):
            TRAINER_STATE.reworded(wrong, swap)


@given(
    st.dictionaries(
        st.text(max_size=8) | st.just("old"), st.sampled_from(["old", "other", "old.x"]), max_size=6
    ),
    TREES,
)
def test_an_index_maps_the_same_to_new_names(mapped: dict[str, str], metadata: object) -> None:
    told = {"metadata": {"m": metadata, "old": "x"}, "weight_map": mapped}
    now = json.loads(ShardIndex().reworded(json.dumps(told, indent=2), {"old": "new"}.get))
    assert now["metadata"] == told["metadata"]
    assert now["weight_map"] == {key: "new" if name == "old" else name for key, name in mapped.items()}


def test_an_index_of_keras_has_lists() -> None:
    text = '{"weight_map": {"/a": ["old", "b"]}}'
    assert ShardIndex().reworded(text, {"old": "new"}.get) == text.replace("old", "new")


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
        (tmp_path / "SUMS").write_text(DIGESTS.reworded(told, moved.renamer(str(tmp_path)), edits))
        subprocess.run(["sha256sum", "--strict", "-c", "SUMS"], cwd=tmp_path, capture_output=True, check=True)
    wrong = text.replace(before, "0" * 64)
    assert "0" * 64 in DIGESTS.reworded(wrong, moved.renamer(str(tmp_path)), edits)
    assert DIGESTS.reworded("# note\nno line\r\n", swap, {}) == "# note\nno line\r\n"


def test_digests_of_tensors_stay() -> None:
    tensors = '{\n  "old": {"sha256": "y"}\n }'
    text = f'{{\n "schema": "x",\n "files": {{"old": {{"bytes": 3}}}},\n "tensors": {tensors}\n}}\n'
    assert TensorDigests().reworded(text, swap, {}) == text.replace('{"old": {"b', '{"new": {"b')
    now = json.loads(TensorDigests().reworded(text, swap, {"old": FileChange("", "", 7)}))
    assert now["files"] == {"new": {"bytes": 7}} and now["tensors"] == {"old": {"sha256": "y"}}


TEXTS = {
    "LineFile": ["a/old\n", " b ", "", "two\nlines"],
    "IterationTracker": ["100\n", "", "release"],
    "TrainerState": ['{"best_model_checkpoint": "a/old", "log": ["old"]}', '{"best_model_checkpoint": null}'],
    "TensorFlowState": ['model_checkpoint_path: "old"\nall_model_checkpoint_paths: "a"  # mine\n'],
    "PinList": ['pinned = ["old", "a/b"]\n\n[about.old]\nnote = "mine"\n', "", "# nothing\n"],
    "DigestList": [f"{'0' * 64}  old\n{'1' * 32} *a/b\nSHA256 (c) = {'2' * 64}\n", "no list\n"],
    "ShardIndex": ['{"metadata": {"old": 1}, "weight_map": {"old": "old", "y": "b", "z": "old"}}'],
    "TensorDigests": ['{\n "files": {"old": {"bytes": 1}, "b": {"bytes": 2}},\n "x": 1\n}\n'],
}
"""What files of each kind say; a new kind has to be added."""


@pytest.mark.parametrize("kind", dict.fromkeys([*KINDS, *MEMBERS]), ids=lambda kind: type(kind).__name__)
@given(st.dictionaries(st.sampled_from(["old", "a/old", "a", "b", "a/b", "c"]), st.uuids().map(str)))
def test_what_a_file_names_gets_the_new_names(kind: PointerKind, renamed: dict[str, str]) -> None:
    for text in TEXTS[type(kind).__name__]:
        expected = tuple(renamed.get(name, name) for name in kind.names(text))
        assert kind.names(kind.reworded(text, renamed.get)) == expected
        assert kind.reworded(text, {}.get) == text


def test_a_number_alone_stays() -> None:
    with pytest.raises(ValueError, match="only hold the number"):
        IterationTracker().reworded("100\n", {"iter_0000100": "step_100"}.get)


class Favourite(PointerKind):
    """A kind of file that no framework writes: a name behind a heart."""

    files = ("favourite.♥",)
    protects = True
    stale_paths = StalePaths.PATH

    def names(self, text: str) -> tuple[str, ...]:
        return (text.removeprefix("♥ ").strip(),)

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        (name,) = self.names(text)
        return f"♥ {new(name) or name}\n"


def test_a_new_kind_is_a_class_and_a_row(run: Run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*KINDS, Favourite()))
    file = series / "favourite.♥"
    file.write_text("♥ model_epoch_2.pth\n", "utf-8")
    assert run("prune", series, "--keep", "1", "--yes", "--trash").status == 0
    assert {path.name for path in series.glob("*.pth")} == {"model_epoch_2.pth", "model_epoch_10.pth"}
    assert run("rename", series, "--template", "e{epoch}", "--yes").status == 0
    assert file.read_text("utf-8") == "♥ e2.pth\n"
    assert run("undo", series).status == 0
    assert file.read_text("utf-8") == "♥ model_epoch_2.pth\n"


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

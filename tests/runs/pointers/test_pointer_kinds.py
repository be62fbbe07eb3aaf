"""Kinds of pointers: their texts get new names and keep all else, and a new kind is one class."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import formats
from ckpttool.formats.pointer_kind import (
    NO_CHANGES,
    Changes,
    CheckpointList,
    FileChange,
    Renamer,
    StalePaths,
    TextKind,
)
from ckpttool.formats.tensorflow.checkpoint_list import TensorFlowState
from ckpttool.formats.traits import Traits
from ckpttool.runs.pointers import kinds
from ckpttool.runs.pointers.kinds import KINDS
from ckpttool.runs.pointers.notes import Note
from ckpttool.runs.pointers.programs import (
    DIGESTS,
    LINE,
    TRAINER_STATE,
    IterationTracker,
    ShardIndex,
    TensorDigests,
)
from ckpttool.runs.pointers.search import PointerProtections, Search, SearchedKind
from ckpttool.runs.renaming.pointer_updates import PathRenames
from ckpttool.storage.fs import Snapshot
from tests.support.commands import Run
from tests.support.saves import protected_in

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
    moved = PathRenames({str(tmp_path): {"old": "new old", "c\nd": "new c\nd", "dir": "place"}}, Snapshot())
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


# Any text that programs write ----------------------------------------------------------------------


class Written(NamedTuple):
    """Texts of a kind, as its program writes them.

    Attributes:
        text: Returns the text with some names.
        names: Names that it can have.
        most: Limit on their count.
    """

    text: Callable[[Sequence[str]], str]
    names: st.SearchStrategy[str]
    most: int = 5


def state_text(names: Sequence[str]) -> str:
    first, *others = names
    paths = (f'all_model_checkpoint_paths: "{name}"\n' for name in others)
    return f'model_checkpoint_path: "{first}"\n' + "".join(paths)


def digest_line(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != name else ""
    return f"{mark}{'0' * 64}  {escaped}\n"


def index_text(names: Sequence[str]) -> str:
    return json.dumps({"metadata": {}, "weight_map": {f"k{at}": name for at, name in enumerate(names)}})


def json_text(names: Sequence[str]) -> str:
    return json.dumps({"BEST": names[0], "ALL": names[1:]}, indent=1)


def lines(names: Sequence[str]) -> str:
    forms = ("BEST: {}\n", "- {}\n", '  "{}",\n', "{}  # LAST\n", "KEY = '{}'\n")
    return "".join(form.format(name) for form, name in zip(forms, names, strict=False))


PLAIN = st.from_regex(r"[a-zé0-9][a-zé0-9.-]{0,8}[a-zé0-9](/[a-z0-9]{1,4})?", fullmatch=True)
ANY = NAMES | st.tuples(NAMES, NAMES).map("/".join)
WRITTEN = {
    "LineFile": Written(lambda names: f"{names[0]}\n", PLAIN, most=1),
    "TrainerState": Written(
        lambda names: json.dumps({"log": [*names], "best_model_checkpoint": names[0]}, indent=2), ANY, most=1
    ),
    "TensorFlowState": Written(state_text, PLAIN),
    "PinList": Written(lambda names: f"# mine\npinned = {json.dumps([*names], ensure_ascii=False)}\n", PLAIN),
    "DigestList": Written(lambda names: "".join(map(digest_line, names)), ANY),
    "ShardIndex": Written(index_text, ANY),
    "TensorDigests": Written(
        lambda names: f'{{\n "files": {json.dumps({one: {"bytes": 1} for one in names})},\n "x": 1\n}}\n', ANY
    ),
    "Symlink": Written(lambda names: names[0], ANY, most=1),
    "JsonNote": Written(json_text, PLAIN),
    "DataNote": Written(lines, PLAIN),
}
"""A new kind has to be added, but for those that can't be reworded."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@given(st.data())
def test_a_text_gets_the_new_names(kind: object, data: st.DataObject) -> None:
    if not isinstance(kind, TextKind) or isinstance(kind, IterationTracker) or type(kind) is Note:
        return
    written = WRITTEN[type(kind).__name__]
    names = data.draw(st.lists(written.names, min_size=1, max_size=written.most, unique=True))
    renamed = {name: f"n{at}" * 8 for at, name in enumerate(names) if data.draw(st.booleans())}
    text, expected = written.text(names), [renamed.get(name, name) for name in names]
    reworded = kind.reworded(text, renamed.get)
    if isinstance(kind, Note):  # any word may be a name
        assert {*names} <= {*kind.names(text)}
        assert {*expected} == {*kind.names(reworded)} & {*names, *renamed.values()}
    else:
        assert (kind.names(text), kind.names(reworded)) == (tuple(names), tuple(expected))
    assert kind.reworded(text, {}.get) == text


@given(st.text(max_size=40), st.text(max_size=5))
def test_prose_stays(text: str, word: str) -> None:
    assert Note().reworded(text, {word: "new"}.get) == text


def test_a_number_alone_stays() -> None:
    with pytest.raises(ValueError, match="hold only the number"):
        IterationTracker().reworded("100\n", {"iter_0000100": "step_100"}.get)


class Favourite(TextKind):
    """A kind of file that no framework writes: a name behind a heart, in files of whatever name."""

    protects = True
    stale_paths = StalePaths.PATH

    def matches(self, name: str) -> bool:
        return name.endswith(".♥")

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


class Starred(SearchedKind):
    """A kind that is no file: a star in a checkpoint's name."""

    def find(self, search: Search, found: PointerProtections) -> None:
        for entry in search.entries:
            if "★" in entry.name:
                found.protect(entry, "starred")


def test_a_kind_with_a_search_is_a_class_and_a_row(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (series / "model_epoch_2.pth").rename(series / "model★_epoch_2.pth")
    assert protected_in(series) == {}
    monkeypatch.setattr(kinds, "KINDS", (*KINDS, Starred()))
    assert protected_in(series) == {"model★_epoch_2.pth": ["starred"]}


class Roster(CheckpointList):
    """A kind of list that no framework keeps: a name a line."""

    files = ("roster.♥",)

    def names(self, text: str) -> tuple[str, ...]:
        return tuple(text.splitlines())

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        return "".join(f"{new(name) or name}\n" for name in self.names(text))

    def without(self, text: str, directory: str, removed: Collection[str]) -> str:
        return "".join(f"{name}\n" for name in self.names(text) if name not in removed)

    def merged(self, now: str, wrote: str, was: str, restored: Collection[str]) -> str:
        return now + "".join(f"{name}\n" for name in self.names(was) if name in restored)


@pytest.fixture
def roster(series: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the list of a toy format, in a series of which it names all."""
    monkeypatch.setitem(sys.modules, "ckpttool.formats.roster", sys.modules[__name__])
    traits = {**formats.TRAITS, "roster": Traits(checkpoint_list="roster:Roster")}
    monkeypatch.setattr(formats, "TRAITS", traits)
    formats.checkpoint_lists.cache_clear()
    monkeypatch.setattr(kinds, "KINDS", (*KINDS, Roster()))
    file = series / "roster.♥"
    file.write_text("".join(f"model_epoch_{epoch}.pth\n" for epoch in range(1, 11)))
    yield file
    formats.checkpoint_lists.cache_clear()


def test_a_new_list_is_a_class_and_a_trait(run: Run, roster: Path) -> None:
    assert run("prune", roster.parent, "--keep", "1", "--yes", "--trash").status == 0
    assert roster.read_text() == "model_epoch_10.pth\n"
    roster.write_text("model_epoch_10.pth\nmine\n")
    assert run("undo", roster.parent).status == 0
    before = [f"model_epoch_{epoch}.pth" for epoch in range(1, 10)]
    assert roster.read_text().splitlines() == ["model_epoch_10.pth", "mine", *before]
    assert run("rename", roster.parent, "--template", "e{epoch}", "--yes").status == 0
    assert roster.read_text().splitlines() == [
        "e10.pth",
        "mine",
        *(f"e{epoch}.pth" for epoch in range(1, 10)),
    ]


@given(NAMES, NAMES)
def test_paths_keep_their_form(old: str, new: str) -> None:
    if old in (".", ".."):
        return
    moved = PathRenames({"/run/x": {old: new}}, Snapshot())
    assert moved.new_path(old, "/run/x") == new
    assert moved.new_path(f"/run/x/{old}/inner", "/elsewhere") == f"/run/x/{new}/inner"
    assert moved.new_path(f"../x//{old}", "/run/y") == f"../x//{new}"
    assert moved.new_path(old, "/run") is None
    assert moved.new_path("", "/run/x") is moved.new_path("a\0b", "/run/x") is None

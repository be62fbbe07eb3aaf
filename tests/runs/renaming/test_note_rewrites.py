"""Notes that name checkpoints: they are written anew with the names, or it is told that they are not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import undo
from ckpttool.runs.entry import Entry
from ckpttool.runs.pointers.notes import DataNote, JsonNote, Mentions
from ckpttool.runs.pointers.search import CheckpointIndex
from ckpttool.runs.renaming.pointer_updates import NoteRewriter, NoteUpdate, PathRenames, Scene
from ckpttool.storage.fs import Snapshot
from tests.support.renamings import content, renamed
from tests.support.runs import make_run
from tests.support.saves import protected_in

OLD, NEW = "model_epoch_9.pth", "model-e0009.pth"

FOLLOWING = {
    "best.json": '{"best": "model_epoch_9.pth", "loss": 0.30}',
    "deep.json": '{\n  "best": {"path": "/elsewhere/run/model_epoch_9.pth"},\n  "x": [1e-05, "\\u00e9"]\n}\n',
    "windows.json": '{"best": "C:\\\\runs\\\\model_epoch_9.pth"}',
    "key.json": '{"model_epoch_9.pth": 0.3}',
    "best.yaml": "path: model_epoch_9.pth  # the best\nloss: 0.3\n",
    "tight.yaml": "path:model_epoch_9.pth",
    "list.yml": "best:\n  - model_epoch_9.pth\n  - './model_epoch_9.pth'\n",
    "best.toml": '[best]\nname = "model_epoch_9.pth" # 0.3\n',
    "best.ini": "[best]\nname=model_epoch_9\n",
    "two.txt": "model_epoch_9.pth\r\n# val_loss 0.3\r\n",
    "stem": "model_epoch_9\n",
    "absolute.txt": "best: {run}/model_epoch_9.pth\n",
    "bom.txt": "\ufeffmodel_epoch_9.pth\n",
    "mixed.txt": "Best: model_epoch_9.pth\nmodel_epoch_9.pth was good\n",
}
TOLD = {
    "README.md": "The paper uses model_epoch_9.pth.\n",
    "README": "best: model_epoch_9.pth\n",
    "eval.sh": "python eval.py --weights=model_epoch_9.pth --batch 3",
    "run": "#!/bin/sh\nBEST=model_epoch_9.pth\n",
    "said.txt": "The best one is model_epoch_9.pth.",
    "said.json": '{"note": "use model_epoch_9.pth"}',
    "remote.yaml": "best: s3://bucket/run/model_epoch_9.pth\n",
    "twice.yaml": "best: model_epoch_10.pth\nother: model_epoch_9.pth or so\n",
}
SCRIPTS = {"eval.sh", "run"}
SILENT = {
    "eval.py": 'PATH = "model_epoch_9.pth"\n',
    "train.log": "saved model_epoch_9.pth\n",
    "model_epoch_9.json": '{"weights": "model_epoch_9.pth"}',
    "other.json": '{"best": "xmodel_epoch_9.pth", "model_epoch_99.pth": 1}',
}


def _named_by(directory: Path) -> dict[str, set[str]]:
    """Return which checkpoints each note protects from prune."""
    named: dict[str, set[str]] = {}
    for name, reasons in protected_in(directory).items():
        for reason in reasons:
            named.setdefault(reason, set()).add(name)
    return named


def test_every_note_follows_or_is_told(short: Path) -> None:
    notes = {name: text.replace("{run}", str(short)) for name, text in (FOLLOWING | TOLD | SILENT).items()}
    for name, text in notes.items():
        (short / name).write_bytes(text.encode())
    (short / "wide.txt").write_bytes("\ufeffmodel_epoch_9.pth".encode("utf-16-le"))
    was, before = _named_by(short), content(short)
    assert {*FOLLOWING, *TOLD, "wide.txt"} - SCRIPTS <= was.keys()
    assert not SCRIPTS & was.keys()
    told = {os.path.basename(one.path): one.message for one in renamed(short, dry_run=True).problems}
    assert content(short) == before
    done = renamed(short)
    assert {os.path.basename(one.path): one.message for one in done.problems} == told
    assert told.keys() == {*TOLD, "wide.txt"}
    assert told["README.md"] == (
        "README.md names model_epoch_9.pth and isn't updated: prune will no longer keep it for this note"
    )
    assert told["run"] == "run names model_epoch_9.pth and isn't updated"
    now = _named_by(short)
    for name in FOLLOWING:
        assert now[name] == {NEW}, name
        changed = notes[name].replace("model_epoch_9", "model-e0009")
        wanted = changed if name != "mixed.txt" else notes[name].replace(OLD, NEW, 1)
        assert (short / name).read_bytes().decode() == wanted, name
    for name in (*TOLD, *SILENT):
        if name != "twice.yaml":
            assert (short / name).read_text() == notes[name]
            assert name not in now
    assert now["twice.yaml"] == {"model-e0010.pth"}
    assert undo(str(short)).problems == ()
    assert content(short) == before


def test_notes_elsewhere_in_the_tree_follow(short: Path) -> None:
    above = short.parent / "best.json"
    above.write_text('{"best": "run/model_epoch_9.pth"}')
    (short / "meta" / "deep").mkdir(parents=True)
    below = short / "meta" / "deep" / "best.yaml"
    below.write_text("best: ../../model_epoch_9.pth\n")
    before = content(short.parent)
    assert renamed(short).problems == ()
    assert above.read_text() == '{"best": "run/model-e0009.pth"}'
    assert below.read_text() == "best: ../../model-e0009.pth\n"
    assert undo(str(short)).problems == ()
    assert content(short.parent) == before


def test_notes_follow_in_each_of_several_steps(short: Path) -> None:
    for epoch in (9, 8, 7):
        (short / f"model_epoch_{epoch}.pth").rename(short / f"m_{epoch + 1}.pth")
    (short / "model_epoch_10.pth").rename(short / "m_7.pth")
    (short / "top.json").write_text('["m_10.pth", "m_9.pth", "m_8.pth", "m_7.pth"]')
    (short / "eval.sh").write_text("eval m_10.pth\n")
    done = renamed(short, "m_{epoch}")
    assert json.loads((short / "top.json").read_text()) == ["m_9.pth", "m_8.pth", "m_7.pth", "m_10.pth"]
    assert [one.message.partition(" and")[0] for one in done.problems] == ["eval.sh names m_10.pth"]


def test_a_note_that_would_be_too_long_is_told(short: Path) -> None:
    (short / "notes.json").write_text(json.dumps({"best": OLD, "why": "x" * 4050}))
    (told,) = renamed(short, "a-{run:_>60}-e{epoch:04d}").problems
    assert told.path.endswith("notes.json") and OLD in told.message


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10) | st.sampled_from(["old", "x/old"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("old"), inner, max_size=4)
    ),
    max_leaves=12,
)


def _swapped(tree: object) -> object:
    if isinstance(tree, str):
        return {"old": "new", "x/old": "x/new"}.get(tree, tree)
    if isinstance(tree, list):
        return [_swapped(one) for one in tree]
    if isinstance(tree, dict):
        return {_swapped(key): _swapped(value) for key, value in tree.items()}
    return tree


@given(TREES, st.integers(0, 4) | st.none(), st.booleans())
def test_of_json_strings_alone_change(tree: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    told = JsonNote().reworded(text, {"old": "new", "x/old": "x/new"}.get)
    assert json.loads(told) == _swapped(tree)


@given(st.text(alphabet="old \t\r\n:=#,-*\"'`x/", max_size=30))
def test_a_text_without_names_stays(text: str) -> None:
    assert DataNote().reworded(text, lambda word: None) == text


@pytest.mark.parametrize("text", ['"old"', "'old'", "- old", "* 'old',", "key = old # x", "a: b: c", "a=old"])
def test_the_form_of_a_line_stays(text: str) -> None:
    told = DataNote().reworded(f"{text}\r\nother\n", {"old": "new"}.get)
    assert told == f"{text}\r\nother\n".replace("old", "new")


def test_lists_of_digests_follow(short: Path) -> None:
    names = sorted(path.name for path in short.glob("*.pth"))
    lists = {
        "MD5SUMS": ["md5sum"],
        "model_epoch_9.pth.md5": ["md5sum"],
        "sums.txt": ["sha1sum", "--tag"],
        "checksums.sha256": ["sha256sum"],
        "B2SUMS": ["b2sum"],
    }
    for name, command in lists.items():
        told = subprocess.run([*command, *names], cwd=short, capture_output=True, check=True)
        (short / name).write_bytes(told.stdout)
    (short / "best.json").write_text('{"best": "model_epoch_9.pth"}')
    told = subprocess.run(["sha256sum", "best.json", *names], cwd=short, capture_output=True, check=True)
    (short / "SHA256SUMS").write_bytes(told.stdout)
    before = content(short)
    assert renamed(short).problems == ()
    for name, command in [*lists.items(), ("SHA256SUMS", ["sha256sum"])]:
        subprocess.run([command[0], "--strict", "-c", name], cwd=short, capture_output=True, check=True)
    assert undo(str(short)).problems == ()
    assert content(short) == before


def test_what_is_called_after_a_checkpoint_is_told(short: Path) -> None:
    for name in ("model_epoch_9.json", "model_epoch_9.pth.yaml", "model_epoch_8_val.csv", "model_epoch_7.x"):
        (short / name).write_text("{}")
    (short / "model_epoch_99.json").write_text("{}")
    (short / "model_epoch.json").write_text("{}")
    assert list(renamed(short).planned.warnings) == [
        f"{short}/: 4 files start with an old name and aren't renamed: model_epoch_7.x, "
        "model_epoch_8_val.csv, model_epoch_9.json and 1 more"
    ]


@pytest.mark.parametrize("recursive", [False, True])
def test_a_name_that_other_runs_have_too_is_told(tmp_path: Path, recursive: bool) -> None:
    runs = tmp_path / "runs"
    for run in ("a", "b"):
        make_run(runs / run, 9)
    (runs / "bare.yaml").write_text("best: model_epoch_9.pth\n")
    (runs / "path.yaml").write_text("best: a/model_epoch_9.pth\n")
    done = renamed(runs, recursive=True, exclude=["b"]) if recursive else renamed(runs / "a")
    assert [os.path.basename(one.path) for one in done.problems] == ["bare.yaml"]
    assert (runs / "bare.yaml").read_text() == "best: model_epoch_9.pth\n"
    assert (runs / "path.yaml").read_text() == "best: a/model-e0009.pth\n"


NAMED = ("m_1.pt", "m_2.pt", "m_1", "m_12.pt", "run/", "/a/run/", "x/", "://", "best: ", "k=", "- ")
SIGNS = ('"', "'", ", ", "\n", "\r\n", " ", "the ", ".", "{", "}", "[", "]", "#", "\\")
WORDS = st.sampled_from((*NAMED, *SIGNS))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=12), name=st.sampled_from(["n.json", "n.yaml", "n.txt", "n", "n.md"]))
def test_names_are_all_that_changes_in_a_note(
    entry: Callable[..., Entry], words: list[str], name: str
) -> None:
    text = "".join(words)
    new = {"m_1.pt": "q-1.pt", "m_2.pt": "q-2.pt"}
    notes = NoteRewriter(Scene("run", tuple(map(entry, new)), {}), PathRenames({"run": new}, Snapshot()))
    try:
        told = notes.rewrite(text, "run", name)
    except ValueError:
        told = text
    assert told.replace("q-", "m_") == text
    assert name != "n.md" or told == text
    before, after = (
        Mentions(CheckpointIndex([entry(one) for one in names], Snapshot())) for names in (new, new.values())
    )
    meant = {one.name for one in before.of(text, "run", name)}
    still = {one.name.replace("q-", "m_") for one in after.of(told, "run", name)}
    assert still <= meant
    assert set(notes.lost(NoteUpdate("run", name, text, told))) == meant - still


def test_a_note_where_nobody_may_write_is_told(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = short.parent / "best.json"
    above.write_text('{"best": "run/model_epoch_9.pth"}')
    real = os.access

    def access(path: str, mode: int) -> bool:
        return real(path, mode) and not (os.path.samefile(path, short.parent) and mode & os.W_OK)

    monkeypatch.setattr(os, "access", access)
    done = renamed(short)
    assert len(done.renames) == 4
    assert [os.path.basename(one.path) for one in done.problems] == ["best.json"]

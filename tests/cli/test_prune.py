"""``ckpttool prune``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from ckpttool import open_checkpoint
from ckpttool.runs.pruning.protections import foreign_files
from tests.support.commands import Terminal, run_here
from tests.support.directories import survey
from tests.support.faults import is_killed_at
from tests.support.moments import wait_for_no_answer


@pytest.fixture
def series(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of ten epochs, below the working directory."""
    shutil.copytree(files / "series", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def _flip(path: Path) -> None:
    """Change a byte of a tensor: only its checksum tells."""
    with open_checkpoint(path) as checkpoint:
        storage = checkpoint.tensors[0].storage
    assert storage is not None
    content = bytearray(path.read_bytes())
    content[storage.offset] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:900])


def _epochs(directory: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in directory.glob("*.pth"))


PLAN = """\
run/model_epoch_*.pth
  keep    model_epoch_10.pth  newest, last 7
  keep    model_epoch_9.pth   last 7
  keep    model_epoch_8.pth   last 7
  keep    model_epoch_7.pth   last 7
  keep    model_epoch_6.pth   last 7
  keep    model_epoch_5.pth   last 7
  keep    model_epoch_4.pth   last 7
  remove  model_epoch_3.pth   4.1 kB
  remove  model_epoch_2.pth   4.1 kB
  remove  model_epoch_1.pth   4.1 kB

"""


def test_text(run, series: Path) -> None:
    would = PLAN + "would remove 3 of 10 checkpoints and free 12 kB\n"
    assert run("prune", series, "--keep", 7, "--dry-run") == (0, would, "")
    assert run("prune", series, "--keep", 7, "--check") == (1, would, "")
    assert len(_epochs(series)) == 10
    assert run("prune", series, "--keep", 7) == (0, PLAN + "removed 3 of 10 checkpoints, 12 kB freed\n", "")
    assert _epochs(series) == [4, 5, 6, 7, 8, 9, 10]
    assert sorted(os.listdir(series)) == sorted(f"model_epoch_{epoch}.pth" for epoch in range(4, 11))
    assert run("prune", series, "--keep-last", 7, "--check").status == 0
    assert run("prune", series, "--keep", 7).out.endswith("nothing to remove (7 checkpoints, all kept)\n")


def test_json(run, series: Path) -> None:
    documents = [json.loads(run("prune", series, "--keep", 9, "--json", *dry).out) for dry in (["-n"], [])]
    assert documents[0] == documents[1] | {"dry_run": True}
    document = documents[1]
    assert document == {
        "schema": "ckpttool.prune/1",
        "dry_run": False,
        "declined": False,
        "policy": {"keep_last": 9},
        "freed_bytes": 4065,
        "trash": None,
        "trashed_bytes": 0,
        "excess_bytes": 0,
        "groups": document["groups"],
        "errors": [],
        "settled": {"finished": [], "put_back": []},
    }
    (group,) = document["groups"]
    assert list(group) == [
        "key",
        "keep",
        "remove",
        "slim",
        "whole",
        "skipped",
        "policy",
        "failed",
        "run",
        "excess",
        "excess_bytes",
    ]
    assert (group["policy"], group["failed"], group["excess"]) == ({"keep_last": 9}, None, None)
    assert group["key"] == "run/model_epoch_*.pth"
    assert group["keep"][:2] == [
        {"path": "run/model_epoch_10.pth", "reasons": ["newest", "last 9"], "safety": "safe"},
        {"path": "run/model_epoch_9.pth", "reasons": ["last 9"], "safety": "safe"},
    ]
    assert (group["remove"], group["skipped"]) == (
        [
            {
                "path": "run/model_epoch_1.pth",
                "bytes": 4065,
                "unfitting": None,
                "safety": "safe",
                "strangers": [],
            }
        ],
        None,
    )


@pytest.mark.parametrize(("harm", "word"), [(_cut, "incomplete"), (_flip, "damaged")])
def test_a_damaged_newest_one_is_kept_told_and_replaced(run, series: Path, harm, word: str) -> None:
    harm(series / "model_epoch_10.pth")
    before = sum(path.stat().st_size for path in series.iterdir())
    status, out, err = run("prune", series, "--keep", 3, "--json")
    document = json.loads(out)
    assert (status, _epochs(series)) == (1, [7, 8, 9, 10])
    assert document["freed_bytes"] == before - sum(path.stat().st_size for path in series.iterdir())
    (group,) = document["groups"]
    assert [one["path"] for one in group["keep"]] == [f"run/model_epoch_{n}.pth" for n in (10, 9, 8, 7)]
    assert group["keep"][0]["reasons"][0].startswith(f"{word}: ")
    assert group["keep"][1]["reasons"] == ["newest", "last 3"]
    assert err.startswith(f"ckpttool: error: run/model_epoch_10.pth: {word}: ")
    assert err.endswith("; it is kept\n")
    assert err.count("\n") == 1


def test_quick_looks_at_the_structure_alone(run, series: Path) -> None:
    _flip(series / "model_epoch_10.pth")
    assert run("prune", series, "--keep", 3, "--verify", "quick").status == 0
    assert _epochs(series) == [8, 9, 10]


def test_damage_among_what_goes_is_kept_too(run, series: Path) -> None:
    _cut(series / "model_epoch_2.pth")
    assert run("prune", series, "--keep", 3).status == 1
    assert _epochs(series) == [2, 8, 9, 10]


def test_damage_is_told_where_nothing_goes(run, series: Path) -> None:
    _cut(series / "model_epoch_2.pth")
    status, _, err = run("prune", series, "--keep", 20)
    assert (status, err.count("\n")) == (1, 1)


def test_a_symlink_protects(run, series: Path) -> None:
    (series / "best.pth").symlink_to("model_epoch_4.pth")
    status, out, err = run("prune", series, "--keep", 2)
    assert (status, err) == (0, "")
    assert "keep    model_epoch_4.pth   symlink best.pth" in out
    names = ["best.pth", "model_epoch_10.pth", "model_epoch_4.pth", "model_epoch_9.pth"]
    assert sorted(os.listdir(series)) == names


def test_a_series_whose_pointer_leads_nowhere_is_left_alone(run, series: Path) -> None:
    (series / "latest").write_text("model_epoch_99.pth")
    status, out, err = run("prune", series, "--keep", 2)
    assert (status, len(_epochs(series))) == (1, 10)
    why = "left alone: run/latest: latest is model_epoch_99.pth, which doesn't exist"
    assert out.splitlines()[1] == f"  {why}"
    assert err == f"ckpttool: error: run/model_epoch_*.pth: {why}\n"


def test_series_are_pruned_each_for_itself(run, series: Path) -> None:
    for epoch in range(1, 6):
        shutil.copy(series / f"model_epoch_{epoch}.pth", series / f"other_epoch_{epoch}.pth")
    (series / "notes.txt").write_text("precious")
    assert run("prune", series, "--keep", 1).status == 0
    assert sorted(os.listdir(series)) == ["model_epoch_10.pth", "notes.txt", "other_epoch_5.pth"]


def test_it_descends_unless_it_is_told_not_to(run, series: Path) -> None:
    assert run("prune", ".", "--no-recursive", "--keep", 2) == (
        1,
        "",
        "ckpttool: error: .: no checkpoint directly in it, but 10 in subdirectories (omit --no-recursive)\n",
    )
    assert run("prune", ".", "--keep", 2, "--exclude", "*_1.pth").status == 0
    assert _epochs(series) == [1, 9, 10]


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_it_is_never_quiet_about_what_lies_below(run, series: Path, option: str) -> None:
    answer = run("prune", ".", "--no-recursive", "--keep", 2, option)
    said = "no checkpoint directly in it, but 10 in subdirectories (omit --no-recursive)"
    assert (answer.status, answer.err) == (1, f"ckpttool: error: .: {said}\n")
    if option == "--json":
        (told,) = json.loads(answer.out)["errors"]
        assert told == {"path": ".", "message": said}
    Path("empty").mkdir()
    answer = run("prune", "empty", "--keep", 2, option)
    assert (answer.status, answer.err) == (0, "")


def test_a_trainer_s_run(run, files: Path, tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    shutil.copytree(files / "safetensors" / "trainer", trainer, ignore=shutil.ignore_patterns("*.expected*"))
    shutil.copytree(trainer / "checkpoint-2", trainer / "checkpoint-1")
    assert run("prune", trainer, "--keep", 1).status == 0
    assert os.listdir(trainer) == ["checkpoint-4"]


def test_what_is_somebody_s_in_a_trainer_s_directory_is_named_before_it_goes(
    run, files: Path, tmp_path: Path
) -> None:
    trainer = tmp_path / "trainer"
    shutil.copytree(files / "safetensors" / "trainer", trainer, ignore=shutil.ignore_patterns("*.expected*"))
    assert " in it" not in run("prune", trainer, "--keep", 1, "-n").out
    (trainer / "checkpoint-2" / "figures").mkdir()
    for name in ("figures/loss.png", "figures/acc.png", "notes.txt", "tokenizer.json", "README.md"):
        (trainer / "checkpoint-2" / name).write_text("…")
        shutil.copystat(trainer / "checkpoint-2" / "model.safetensors", trainer / "checkpoint-2" / name)
    status, out, _ = run("prune", trainer, "--keep", 1, "-n")
    (line,) = (line for line in out.splitlines() if "remove  " in line and "would" not in line)
    assert (status, line.partition(", ")[2]) == (0, "with figures/, notes.txt in it")
    (group,) = json.loads(run("prune", trainer, "--keep", 1, "-n", "--json").out)["groups"]
    assert group["remove"][0]["strangers"] == ["figures/", "notes.txt"]


@pytest.fixture
def annotated(files: Path, tmp_path: Path) -> Path:
    """Return a trainer's run of three steps, in the second of which somebody has put predictions."""
    trainer = tmp_path / "trainer"
    for step in (1, 2, 4):
        shutil.copytree(
            files / "safetensors" / "trainer" / f"checkpoint-{max(step, 2)}", trainer / f"checkpoint-{step}"
        )
    predictions = trainer / "checkpoint-2" / "predictions.csv"
    predictions.write_text("1,0.3\n")
    shutil.copystat(trainer / "checkpoint-2" / "model.safetensors", predictions)
    return trainer


@pytest.mark.parametrize("answer", [None, b"", b"y\n", b"--yes", b"n\n"])
@pytest.mark.parametrize("trash", [False, True])
def test_what_is_somebody_s_goes_only_with_an_answer(
    run, annotated: Path, piped, answer: bytes | None, trash: bool
) -> None:
    if answer is not None:
        piped(b"" if answer == b"--yes" else answer)
    options = [*(["--yes"] if answer == b"--yes" else []), *(["--trash"] if trash else [])]
    status, out, err = run("prune", annotated, "--keep", 1, *options)
    assert "with predictions.csv in it" in out
    left = {path.name for path in annotated.iterdir() if not path.name.startswith(".")}
    if answer in (b"y\n", b"--yes"):
        assert (status, err, left) == (0, "", {"checkpoint-4"})
    elif answer == b"n\n":
        assert (status, err, left) == (1, "", {"checkpoint-1", "checkpoint-2", "checkpoint-4"})
    else:
        why = "predictions.csv in it is not the checkpoint's own (--yes removes it)"
        assert (status, left) == (1, {"checkpoint-2", "checkpoint-4"})
        assert err == f"ckpttool: error: {annotated}/checkpoint-2: not removed: {why}\n"
        assert (annotated / "checkpoint-2" / "predictions.csv").read_text() == "1,0.3\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("safetensors/sharded", "step_{}"),
        ("pytorch/minimal.pth", "step_{}/model.pt"),
        ("ranks/verl-2", "global_step_{}"),
        ("torch-dcp/one-rank", "step_{}"),
    ],
)
@pytest.mark.parametrize("foreign", ["predictions.csv", "figures/loss.png"])
def test_results_are_somebody_s_in_any_directory(
    run, files: Path, tmp_path: Path, source: str, name: str, foreign: str
) -> None:
    for step in (100, 200, 300):
        place = tmp_path / "run" / name.format(step)
        place.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (files / source).is_dir() else shutil.copy2
        copy(files / source, place)
        top = tmp_path / "run" / name.format(step).split("/")[0]
        if step == 100:
            (top / foreign).parent.mkdir(exist_ok=True)
            (top / foreign).write_text("…")
        for path in top.rglob("*"):
            os.utime(path, (step, step))
    answer = run("prune", tmp_path / "run", "--keep", 1, "--series", f"{name.split('/')[0].format('*')}")
    assert f"with {foreign.partition('/')[0]}" in answer.out
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert (answer.status, left) == (1, [name.split("/")[0].format(step) for step in (100, 300)])


def test_what_is_somebody_s_counts_for_check(run, annotated: Path) -> None:
    shutil.rmtree(annotated / "checkpoint-1")
    status, out, _ = run("prune", annotated, "--keep", 1, "--check")
    assert (status, "with predictions.csv in it" in out) == (1, True)


def test_what_frameworks_wrote_is_their_own(files: Path) -> None:
    found = {}
    for place in (
        "safetensors",
        "pytorch",
        "metrics",
        "torch-dcp",
        "deepspeed",
        "ranks",
        "fluid",
        "savedmodel",
    ):
        for entry in survey(files / place).entries:
            if entry.contents.directories:
                found[entry.path] = foreign_files(entry)
    assert len(found) > 20
    assert set(found.values()) == {()}, found


def test_what_somebody_says_is_a_series(run, series: Path) -> None:
    for epoch in (1, 2, 10):
        (series / f"model_epoch_{epoch}.pth").rename(series / f"digit_{epoch}.pth")
        (series / f"digit_{epoch}.pth").write_bytes((series / "model_epoch_3.pth").read_bytes())
    why = "nothing says that its numbers count saves: could be different models"
    status, out, err = run("prune", series, "--keep", 1, "--dry-run")
    assert status == 1
    assert f"left alone: {why} (if they are one series, say --series 'digit_*.pth')" in out
    assert why in err
    status, out, err = run("prune", series, "--keep", 1, "--series", "digit_*.pth")
    assert (status, err) == (0, "")
    assert sorted(path.name for path in series.iterdir()) == ["digit_10.pth", "model_epoch_9.pth"]


def test_names_that_count_nothing_are_a_series_where_somebody_says_so(run, series: Path) -> None:
    for epoch in range(1, 11):
        (series / f"model_epoch_{epoch}.pth").rename(series / f"run.v{epoch}.pth")
    assert run("prune", series, "--keep", 2, "--dry-run").out.startswith("10 single checkpoints kept")
    assert run("prune", series, "--keep", 2, "--series", "run.v*.pth").status == 0
    assert sorted(path.name for path in series.iterdir()) == ["run.v10.pth", "run.v9.pth"]


def test_models_that_were_trained_equally_long_stay(run, series: Path) -> None:
    for number in (1, 2, 4, 8):
        shutil.copy(series / "model_epoch_10.pth", series / f"model_{number}.pth")
    for path in series.glob("model_epoch_*.pth"):
        path.unlink()
    status, out, err = run("prune", series, "--keep", 1)
    assert (status, len(_epochs(series))) == (1, 4)
    assert "left alone: the epochs or steps inside don't grow with its numbers" in out
    assert "could be different models" in err


def test_kinds_of_one_name_are_told_in_words(run, series: Path, files: Path) -> None:
    shutil.copy(series / "model_epoch_10.pth", series / "model_epoch_11.pth")
    other = pickle.dumps({"state_dict": {"w": [1.0]}, "epoch": 3})
    (series / "model_epoch_3.pth").write_bytes(other)
    out = run("prune", series, "--keep", 8, "-v", "--dry-run").out
    keys = [line for line in out.splitlines() if line.startswith("run/")]
    assert len(keys) == 2
    assert all(line.startswith("run/model_epoch_*.pth (") and "tensor" in line for line in keys)


def test_what_is_no_series_is_counted(run, series: Path) -> None:
    for name in ("final", "first"):
        shutil.copy(series / "model_epoch_3.pth", series / f"{name}.pth")
    answer = run("prune", series, "--keep", 10)
    told = "2 single checkpoints kept (-v shows them; --series GLOB makes some of them one series)"
    tail = f"\n\n{told}\n\nnothing to remove (12 checkpoints, all kept)\n"
    assert answer.out.endswith(tail)
    assert "run/final.pth\n  keep    final.pth  newest" in run("prune", series, "--keep", 10, "-v").out


def test_what_lies_in_a_directory_each_is_made_one_series_of_by_its_name(run, series: Path) -> None:
    """What the directories are called doesn't say that they are saves."""
    for epoch in range(1, 11):
        (series / f"lenet_at_{epoch}").mkdir()
        (series / f"model_epoch_{epoch}.pth").rename(series / f"lenet_at_{epoch}" / "model.pth")
    told = "-v shows them; --series GLOB makes some of them one series)"
    assert told in run("prune", series, "-r", "--keep", 2).out
    assert run("prune", series, "-r", "--keep", 2, "--series", "model.pth").status == 0
    assert sorted(path.parent.name for path in series.glob("*/*.pth")) == ["lenet_at_10", "lenet_at_9"]


def test_quiet(run, series: Path) -> None:
    assert run("prune", series, "--keep", 9, "-q") == (0, "", "")
    assert _epochs(series) == list(range(2, 11))


def test_failures_are_counted_and_told_once(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    status, out, err = run("prune", series, "--keep", 6)
    assert (status, len(_epochs(series))) == (1, 10)
    assert out.endswith("\nremoved 0 of 4, 0 B freed; 4 failed: permission denied\n")
    assert err == ("ckpttool: error: run/model_epoch_1.pth: not removed: permission denied (and 3 more)\n")


def test_a_series_that_may_be_none_is_left_alone(run, series: Path) -> None:
    for epoch in range(1, 11):
        content = (series / f"model_epoch_{epoch}.pth").read_bytes().replace(b"epoch", b"digit")
        (series / f"model_epoch_{epoch}.pth").unlink()
        (series / f"user_{epoch}.pth").write_bytes(content)
    status, _, err = run("prune", series, "--keep", 3, "--verify", "quick")
    assert (status, len(_epochs(series))) == (1, 10)
    assert "left alone: nothing says that its numbers count saves" in err
    assert run("prune", series, "--keep", 10).status == 0


def test_what_a_restarted_run_has_just_written_stays(run, series: Path) -> None:
    for epoch in range(1, 11):
        when = 1_700_000_000 + epoch * 100 + (epoch <= 3) * 86_400
        os.utime(series / f"model_epoch_{epoch}.pth", (when, when))
    status, _, err = run("prune", series, "--keep", 3)
    assert (status, _epochs(series)) == (0, [1, 2, 3, 8, 9, 10])
    assert "was the run restarted?" in err


def test_paths_below_the_working_directory_have_one_spelling(
    run, series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(series)
    Path("latest").write_text("model_epoch_12.pth")
    _cut(Path("model_epoch_3.pth"))
    stage = Path(".ckpttool-0123abcd")
    stage.mkdir()
    (stage / "journal.json").write_text('{"schema": "ckpttool.journal/1", "rewrites": [], "removals": []}')
    (Path("loose_epoch_1.pth")).symlink_to("loose_epoch_2.pth")
    for command in (["prune", "--keep", 2, "-n"], ["list"], ["latest"]):
        answer = run(*command)
        assert "./" not in answer.out + answer.err
        assert "model_epoch_3.pth" in answer.err or command == ["latest"]


def test_names_are_escaped(run, series: Path) -> None:
    os.rename(series / "model_epoch_3.pth", series / "model_epoch_3\n\x1b[31m.pth")
    answer = run("prune", series, "--keep", 2)
    assert "\x1b" not in answer.out + answer.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no rule says which checkpoints to keep (--keep N keeps the newest N)"),
        (["--keep", 0], "--keep 0 would keep nothing (at least 1)"),
        (["--keep", 2, "--min-age", "soon"], "--min-age: no duration: 'soon' (such as 7d12h, 90min or 2w)"),
    ],
)
def test_usage(run, series: Path, options: list[object], said: str) -> None:
    assert run("prune", series, *options) == (2, "", f"ckpttool: error: {said}\n")
    assert len(_epochs(series)) == 10


def test_what_is_no_directory_of_checkpoints(run, series: Path, files: Path, tmp_path: Path) -> None:
    path = series / "model_epoch_3.pth"
    said = f"ckpttool: error: {path} is a file (name the directory that it is in)\n"
    assert run("prune", path, "--keep", 1) == (2, "", said)
    one = tmp_path / "checkpoint-2"
    shutil.copytree(files / "safetensors" / "trainer" / "checkpoint-2", one)
    said = f"ckpttool: error: {one} is a checkpoint itself (name the directory that it is in)\n"
    assert run("prune", one, "--keep", 1) == (2, "", said)
    missing = tmp_path / "missing"
    said = f"ckpttool: error: {missing}: no such file or directory\n"
    assert run("prune", missing, "--keep", 1) == (2, "", said)


def test_a_set_of_shards_that_is_alone_in_a_directory_is_the_first_of_its_series(
    run, files: Path, tmp_path: Path
) -> None:
    source = files / "safetensors" / "sharded"
    total = "nothing to remove (1 checkpoint, kept)\n"
    status, out, err = run("prune", source, "--keep", 1)
    assert (status, out.splitlines(keepends=True)[-1], err) == (0, total, "")
    assert run("list", source, "--keep", 1).status == 0
    for path in source.iterdir():
        for epoch in (1, 2):
            name = path.name.replace("model", f"model_epoch_{epoch}")
            text = path.read_bytes()
            if path.suffix == ".json":
                text = text.replace(b"model-", f"model_epoch_{epoch}-".encode())
            (tmp_path / name).write_bytes(text)
    os.unlink(tmp_path / "config.json")
    assert run("prune", tmp_path, "--keep", 1).status == 0
    assert {path.name.partition(".")[0].partition("-")[0] for path in tmp_path.iterdir()} == {"model_epoch_2"}
    assert run("prune", tmp_path, "--keep", 1)[:2] == (
        0,
        "1 single checkpoint kept (-v shows it)\n\n" + total,
    )


def test_an_interrupted_prune_is_settled_and_told(run, series: Path) -> None:
    assert is_killed_at(4, lambda: run_here("prune", series, "--keep", 9), ("fsync",))
    status, _, err = run("prune", series, "--keep", 9, "-n")
    assert (status, err.count("a command was interrupted here")) == (0, 1)
    status, _, err = run("prune", series, "--keep", 9)
    assert status == 0
    assert err == (
        "ckpttool: warning: run/model_epoch_1.pth: an interrupted prune had begun to remove it; "
        "that is finished now\n"
    )


# Asking ---------------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, run):
    """Return what puts somebody before a terminal who types an answer; stderr may lead elsewhere."""

    def put(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text))

    return put


@pytest.mark.parametrize(
    ("text", "status", "left"), [("y\n", 0, 7), ("n\n", 1, 10), ("\n", 1, 10), ("", 1, 10)]
)
def test_it_asks_on_a_terminal(run, series: Path, typed, text: str, status: int, left: int) -> None:
    typed(text)
    answer = run("prune", series, "--keep", 7)
    assert (answer.status, len(_epochs(series))) == (status, left)
    assert answer.out.startswith(PLAN)
    assert "Remove 3 checkpoints (12 kB)? [y/N]" in answer.err
    last = (
        "removed 3 of 10 checkpoints, 12 kB freed"
        if left == 7
        else "nothing removed (10 checkpoints, all kept)"
    )
    assert answer.out.splitlines()[-1] == last
    assert answer.err.endswith("[y/N] " if text else "[y/N] \n")


def test_who_interrupts_a_question_gets_a_line_of_his_own(run, series: Path, typed) -> None:
    typed("")
    sys.stdin.readline = interrupting  # type: ignore[method-assign]
    answer = run("prune", series, "--keep", 7)
    assert (answer.status, len(_epochs(series))) == (130, 10)
    assert (
        answer.err.removesuffix("ckpttool: error: interrupted\n") == "Remove 3 checkpoints (12 kB)? [y/N] \n"
    )


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch):
    """Return what gives a command an stdin that is no terminal, with a text in it."""
    readers = []

    def put(text: bytes) -> int:
        reader, writer = os.pipe()
        os.write(writer, text)
        os.close(writer)
        readers.append(open(reader))  # noqa: SIM115 - closed below
        monkeypatch.setattr(sys, "stdin", readers[-1])
        return reader

    yield put
    for reader in readers:
        reader.close()


NO_ANSWER = (
    "ckpttool: error: stdin says 'runs/b', which is not an answer; nothing was changed "
    "(y or n; --yes leaves stdin alone)\n"
)


@pytest.mark.parametrize(
    ("text", "status", "left", "err"),
    [
        (b"", 0, 7, ""),
        (b"y\n", 0, 7, ""),
        (b"YES\nrest\n", 0, 7, ""),
        (b"n\n", 1, 10, ""),
        (b"n", 1, 10, ""),
        (b"\n", 1, 10, ""),
        (b"runs/b\nruns/c\n", 1, 10, NO_ANSWER),
    ],
)
def test_an_answer_in_stdin_is_obeyed(
    run, series: Path, piped, text: bytes, status: int, left: int, err: str
) -> None:
    stdin = piped(text)
    answer = run("prune", series, "--keep", 7)
    assert (answer.status, len(_epochs(series)), answer.err) == (status, left, err)
    total = (
        "removed 3 of 10 checkpoints, 12 kB freed"
        if left == 7
        else "nothing removed (10 checkpoints, all kept)"
    )
    assert answer.out == PLAN + total + "\n"
    assert os.read(stdin, 100) == text.partition(b"\n")[2]  # what follows is somebody else's


def test_yes_leaves_stdin_alone(run, series: Path, piped) -> None:
    stdin = piped(b"runs/b\n")
    assert run("prune", series, "--keep", 7, "--yes").status == 0
    assert (len(_epochs(series)), os.read(stdin, 100)) == (7, b"runs/b\n")


def test_a_pipe_that_nobody_writes_to_is_no_answer(
    run, series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_no_answer(monkeypatch)
    reader, writer = os.pipe()
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("prune", series, "--keep", 7).status == 0
    os.close(writer)
    assert len(_epochs(series)) == 7


def test_the_plan_is_printed_before_anything_goes(
    run, series: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def carried_out(*arguments: object) -> None:
        seen.append((capsys.readouterr().out, len(_epochs(series))))
        raise KeyboardInterrupt

    monkeypatch.setattr("ckpttool.runs.pruning.prune.remove", carried_out)
    assert run("prune", series, "--keep", 7).status == 130
    assert seen == [(PLAN, 10)]


def test_an_answer_in_stdin_is_obeyed_before_the_trash_is_emptied(run, series: Path, piped) -> None:
    assert run("prune", series, "--keep", 7, "--trash", "-q").status == 0
    piped(b"n\n")
    told = "would remove 3 checkpoints from the trash and free 12 kB\n"
    assert run("prune", series, "--empty-trash") == (1, told, "")
    piped(b"y\n")
    told = "removed 3 checkpoints from the trash, 12 kB freed\n"
    assert run("prune", series, "--empty-trash") == (0, told, "")


def interrupting() -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [["--yes"], ["--dry-run"], ["--check"], ["--keep", 10]])
def test_it_does_not_ask_needlessly(run, series: Path, typed, options: list[object]) -> None:
    typed("")
    assert "Remove" not in run("prune", series, "--keep", 7, *options).err


def test_json_stays_one_document_where_it_asks(run, series: Path, typed) -> None:
    typed("y\n")
    answer = run("prune", series, "--keep", 7, "--json")
    assert json.loads(answer.out)["dry_run"] is False
    assert answer.err.startswith(PLAN)
    assert "Remove 3 checkpoints (12 kB)?" in answer.err

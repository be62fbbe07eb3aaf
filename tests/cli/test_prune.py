"""``ckpttool prune``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.changes import file_bytes
from tests.support.commands import Run, Terminal, refusals, run_here, transcript
from tests.support.directories import survey
from tests.support.faults import hit_call, is_killed_at
from tests.support.golden import Golden
from tests.support.moments import wait_for_no_answer
from tests.support.runs import flip_value


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:900])


def _epochs(directory: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in directory.glob("*.pth"))


def test_text(run: Run, series: Path, golden: Golden) -> None:
    golden(transcript(run, (0, "prune run --keep 7 --dry-run"), (1, "prune run --keep 7 --check")))
    assert len(_epochs(series)) == 10
    golden(transcript(run, (0, "prune run --keep 7"), (0, "prune run --keep 7 --check")))
    assert sorted(os.listdir(series)) == sorted(f"model_epoch_{epoch}.pth" for epoch in range(4, 11))


def test_json(run: Run, series: Path, golden: Golden) -> None:
    documents = [json.loads(run("prune", series, "--keep", 9, "--json", *dry).out) for dry in (["-n"], [])]
    assert documents[0] == documents[1] | {"dry_run": True}
    golden(json.dumps(documents[1], indent=1))


@pytest.mark.parametrize(("harm", "word"), [(_cut, "incomplete"), (flip_value, "damaged")])
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
    flip_value(series / "model_epoch_10.pth")
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


def test_a_series_whose_pointer_leads_nowhere_is_left_alone(run: Run, series: Path, golden: Golden) -> None:
    (series / "latest").write_text("model_epoch_99.pth")
    golden(transcript(run, (1, "prune run --keep 2")))
    assert len(_epochs(series)) == 10


def test_series_are_pruned_each_for_itself(run, series: Path) -> None:
    for epoch in range(1, 6):
        shutil.copy(series / f"model_epoch_{epoch}.pth", series / f"other_epoch_{epoch}.pth")
    (series / "notes.txt").write_text("precious")
    assert run("prune", series, "--keep", 1).status == 0
    assert sorted(os.listdir(series)) == ["model_epoch_10.pth", "notes.txt", "other_epoch_5.pth"]


def test_it_descends_unless_it_is_told_not_to(run: Run, series: Path, golden: Golden) -> None:
    """It is never quiet about what lies below."""
    Path("empty").mkdir()
    below = "prune . --no-recursive --keep 2"
    golden(
        transcript(
            run, (1, below), (1, f"{below} -q"), (1, f"{below} --json"), (0, "prune empty --keep 2 -q")
        )
    )
    assert run("prune", ".", "--keep", 2, "--exclude", "*_1.pth").status == 0
    assert _epochs(series) == [1, 9, 10]


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


@pytest.mark.parametrize("trash", ["", " --trash"])
def test_what_is_somebody_s_goes_only_with_an_answer(
    run: Run, annotated: Path, piped, golden: Golden, trash: str
) -> None:
    shutil.copytree(annotated, annotated.with_name("again"))
    command = f"prune {annotated} --keep 1{trash}"
    steps = (1, 2, 4)
    for answer, options, status, left in (
        (None, "", 1, {2, 4}),
        (b"", "", 1, {2, 4}),
        (b"y\n", "", 0, {4}),
        (b"", " --yes", 0, {4}),
        (b"n\n", "", 1, {1, 2, 4}),
    ):
        shutil.rmtree(annotated)
        shutil.copytree(annotated.with_name("again"), annotated)
        if answer is not None:
            piped(answer)
        told = transcript(run, (status, command + options))
        assert {step for step in steps if (annotated / f"checkpoint-{step}").exists()} == left, answer
        assert "with predictions.csv in it" in told
        golden(told)
        if 2 in left:
            assert (annotated / "checkpoint-2" / "predictions.csv").read_text() == "1,0.3\n"


@pytest.mark.parametrize("foreign", ["predictions.csv", "figures/loss.png"])
def test_results_are_somebody_s_in_any_directory(run: Run, files: Path, tmp_path: Path, foreign: str) -> None:
    for source, name in (
        ("safetensors/sharded", "step_{}"),
        ("pytorch/minimal.pth", "step_{}/model.pt"),
        ("ranks/verl-2", "global_step_{}"),
        ("torch-dcp/one-rank", "step_{}"),
    ):
        root = tmp_path / source.replace("/", "-")
        first, *_ = name.split("/")
        for step in (100, 200, 300):
            place = root / name.format(step)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (files / source).is_dir() else shutil.copy2
            copy(files / source, place)
            top = root / first.format(step)
            if step == 100:
                (top / foreign).parent.mkdir(exist_ok=True)
                (top / foreign).write_text("…")
            for path in top.rglob("*"):
                os.utime(path, (step, step))
        answer = run("prune", root, "--keep", 1, "--series", first.format("*"))
        assert f"with {foreign.partition('/')[0]}" in answer.out, source
        left = sorted(path.name for path in root.iterdir())
        assert (answer.status, left) == (1, [first.format(step) for step in (100, 300)]), source


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
                found[entry.path] = entry.foreign_files
    assert len(found) > 20
    assert set(found.values()) == {()}, found


def test_what_somebody_says_is_a_series(run, series: Path) -> None:
    for epoch in (1, 2, 10):
        (series / f"model_epoch_{epoch}.pth").rename(series / f"digit_{epoch}.pth")
        (series / f"digit_{epoch}.pth").write_bytes((series / "model_epoch_3.pth").read_bytes())
    why = "nothing says that its numbers count saves: could be different models"
    status, out, err = run("prune", series, "--keep", 1, "--dry-run")
    assert status == 1
    assert f"left alone: {why} (if they are one series, use --series 'digit_*.pth')" in out
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


def test_what_is_no_series_is_counted(run: Run, series: Path, golden: Golden) -> None:
    for name in ("final", "first"):
        shutil.copy(series / "model_epoch_3.pth", series / f"{name}.pth")
    golden(transcript(run, (0, "prune run --keep 10"), (0, "prune run --keep 10 -v")))


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


def test_failures_are_counted_and_told_once(
    run: Run, series: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        golden(transcript(run, (1, "prune run --keep 6")))
    assert len(_epochs(series)) == 10


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


def test_what_is_no_directory_of_checkpoints(
    run: Run, series: Path, files: Path, tmp_path: Path, golden: Golden
) -> None:
    shutil.copytree(files / "safetensors" / "trainer" / "checkpoint-2", tmp_path / "checkpoint-2")
    places = ("run/model_epoch_3.pth", "checkpoint-2", "missing")
    golden(refusals(run, *(f"prune {place} --keep 1" for place in places)))


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


def test_an_interrupted_prune_is_settled_and_told(run: Run, series: Path, golden: Golden) -> None:
    assert is_killed_at(1, lambda: run_here("prune", series, "--keep", 9), ("unlink",))
    status, _, err = run("prune", series, "--keep", 9, "-n")
    assert (status, err.count("a command was interrupted here")) == (0, 1)
    golden(transcript(run, (0, "prune run --keep 9")))


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
def test_it_asks_on_a_terminal(
    run: Run, series: Path, typed, golden: Golden, text: str, status: int, left: int
) -> None:
    typed(text)
    answer = run("prune", series, "--keep", 7)
    assert (answer.status, len(_epochs(series))) == (status, left)
    golden(answer.out + answer.err)


def test_who_declines_keeps_all_whole(run: Run, series: Path, typed) -> None:
    before = file_bytes(series)
    rules = ("--keep", 3, "--keep-every-epochs", 5, "--full", 1)
    typed("n\n")
    answer = run("prune", series, *rules, "--json")
    document = json.loads(answer.out)
    (group,) = document["groups"]
    assert (answer.status, document["declined"], document["freed_bytes"]) == (1, True, 0)
    assert "Remove 5 and slim 4 checkpoints" in answer.err
    assert (group["slim"], group["remove"], len(group["keep"])) == ([], [], 10)
    declined = [one["path"] for one in group["keep"] if one["reasons"] == ["declined"]]
    assert [Path(path).name for path in declined] == [f"model_epoch_{at}.pth" for at in (7, 6, 4, 3, 2)]
    typed("n\n")
    answer = run("prune", series, *rules)
    assert answer.out.splitlines()[-1] == "nothing removed (10 checkpoints, all kept)"
    assert file_bytes(series) == before


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


def test_an_answer_in_stdin_is_obeyed(run: Run, series: Path, piped, golden: Golden) -> None:
    """What follows the line is somebody else's."""
    shutil.copytree(series, "kept")
    for text, status, left in (
        (b"", 0, 7),
        (b"y\n", 0, 7),
        (b"YES\nrest\n", 0, 7),
        (b"n\n", 1, 10),
        (b"n", 1, 10),
        (b"\n", 1, 10),
        (b"runs/b\nruns/c\n", 1, 10),
    ):
        shutil.rmtree(series)
        shutil.copytree("kept", series)
        stdin = piped(text)
        golden(f"stdin: {text!r}\n" + transcript(run, (status, "prune run --keep 7")))
        assert len(_epochs(series)) == left, text
        assert os.read(stdin, 100) == text.partition(b"\n")[2]


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

    def interrupt() -> None:
        seen.append((capsys.readouterr().out, len(_epochs(series))))
        raise KeyboardInterrupt

    hit_call(1, interrupt, ("rename", "unlink"), monkeypatch.setattr)
    assert run("prune", series, "--keep", 7).status == 130
    ((plan, count),) = seen
    assert (plan.count("\n  remove  "), count, "removed" in plan) == (3, 10, False)


def test_an_answer_in_stdin_is_obeyed_before_the_trash_is_emptied(
    run: Run, series: Path, piped, golden: Golden
) -> None:
    assert run("prune", series, "--keep", 7, "--trash", "-q").status == 0
    for status, text in ((1, b"n\n"), (0, b"y\n")):
        piped(text)
        golden(transcript(run, (status, "prune run --empty-trash")))


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
    assert answer.err.startswith("run/model_epoch_*.pth\n  keep ")
    assert "Remove 3 checkpoints (12 kB)?" in answer.err

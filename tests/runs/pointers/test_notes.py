"""Small texts that name checkpoints, however they are written and wherever they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from ckpttool.formats.pointer_kind import FilePlace, TextKind
from ckpttool.runs.pointers.kinds import searched_kinds, text_kinds
from ckpttool.runs.pointers.notes import IGNORED_TEXTS
from tests.support.commands import Run
from tests.support.runs import make_run
from tests.support.saves import protected_in


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory of two runs of two epochs with the same names."""
    place = tmp_path / "all" / "runs"
    for run in ("exp1", "exp2"):
        make_run(place / run, 1, 2)
    return place


THIRD = "model_epoch_3.pth"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Return a directory of three epochs."""
    return make_run(tmp_path / "run", 3, 7, 10)


NOTES = (
    ("best.txt", THIRD.encode("utf-16")),
    ("best.txt", b"\xef\xbb\xbf" + THIRD.encode() + b"\r\n"),
    ("best.txt", b'"model_epoch_3.pth"\n'),
    ("best.txt", b"model_epoch_3.pth\n# val_loss 0.3\n"),
    ("best.txt", b"model_epoch_3.pth  val_loss=0.3"),
    ("best.txt", b"The best one is model_epoch_3.pth."),
    ("best.txt", b"model_epoch_3\n"),
    ("README.md", b"Take **model_epoch_3.pth**, not the last."),
    ("README.md", b"- _model_epoch_3.pth_: figure 2"),
    ("README.md", b"**model_epoch_3.pth is the best.**"),
    ("README.md", b"The paper has ***runs/model_epoch_3.pth.***"),
    ("README.md", b"best: **`model_epoch_3.pth`**"),
    ("README.md", b"~~model_epoch_3.pth~~"),
    ("best.txt", b"./model_epoch_3.pth"),
    ("best.json", b'{"best": "model_epoch_3.pth", "loss": 0.3}'),
    ("best.json", b'{"best":{"path":"/elsewhere/run/model_epoch_3.pth"}}'),
    ("best.yaml", b"path: model_epoch_3.pth\nloss: 0.3"),
    ("best.yaml", b"path:model_epoch_3.pth"),
    ("best.ini", b"[best]\nname=model_epoch_3"),
    ("best", b"C:\\runs\\model_epoch_3.pth"),
    ("eval.yaml", b"run: python eval.py --weights=model_epoch_3.pth --batch 3"),
    ("best.txt", b"model_epoch_30.pth/model_epoch_3.pth"),
    ("best.txt", b"/old/place/run/model_epoch_3.pth"),
    ("resume.json", b'{"schema": "ckpttool.latest/1", "path": "run/model_epoch_3.pth"}'),
    ("todo.txt", b"- keep  model_epoch_3.pth  (figure 2)"),
    ("todo.txt", b"  best  ->  model_epoch_3.pth"),
    ("todo.txt", b"12:31:05  model_epoch_3.pth  is the best"),
    ("blog", b"model_epoch_3.pth"),
    ("outcome.txt", b"model_epoch_3.pth"),
)


def test_however_it_is_written(few: Path) -> None:
    assert _misread(few, NOTES, {THIRD}) == []


def _misread(run: Path, cases: Iterable[tuple[str, bytes]], named: set[str]) -> list[tuple[str, bytes]]:
    """Return the files, each alone in a run, by which other checkpoints are named than are to be."""
    wrong = []
    for name, content in cases:
        (run / name).write_bytes(content)
        if protected_in(run) != {path: [name] for path in named}:
            wrong.append((name, content))
        (run / name).unlink()
    return wrong


def test_a_list_of_the_best(few: Path) -> None:
    (few / "top_k.txt").write_text("model_epoch_3.pth\nmodel_epoch_7.pth\n")
    assert protected_in(few) == {THIRD: ["top_k.txt"], "model_epoch_7.pth": ["top_k.txt"]}


NO_NOTES = (
    ("train.log", b"saved model_epoch_3.pth"),
    ("train.py", b'torch.save(state, "model_epoch_3.pth")'),
    *(
        (name, b"saved model_epoch_3.pth")
        for name in (
            *(
                "log",
                "log.txt",
                "train_log.txt",
                "train.log.1",
                "stdout",
                "stdout.txt",
                "stderr",
                "out",
                "output.txt",
            ),
            *(
                "nohup.out",
                "slurm-123.out",
                "job.o1234",
                "job.e1234",
                "job.o1234.5",
                "job.o1234-5",
                "train.err",
            ),
            *("cron.mail", "metrics.csv", "console", "logs"),
        )
    ),
    *(
        (name, b"python eval.py --weights=model_epoch_3.pth")
        for name in (
            *(
                "eval.sh",
                "job.sbatch",
                "job.slurm",
                "train.pbs",
                "eval.bat",
                "eval.ps1",
                "plot.R",
                "Makefile",
            ),
            *("Dockerfile", "Snakefile", "rules.mk", "eval.PY"),
        )
    ),
    ("evaluate", b"#!/bin/sh\npython eval.py model_epoch_3.pth"),
    ("Look.ipynb", b'{"source": ["load(\\"model_epoch_3.pth\\")"]}'),
    ("log.csv", b"epoch,path\n3,model_epoch_3.pth"),
    ("SHA256SUMS", b"00 model_epoch_3.pth"),
    ("MD5SUMS", b"00  model_epoch_3.pth"),
    ("sums.txt", b"MD5 (model_epoch_3.pth) = 00"),
    ("model_epoch_3.json", b'{"weights": "model_epoch_3.pth"}'),
    ("model_epoch_3_config.json", b'{"weights": "model_epoch_3.pth"}'),
    ("notes.txt", b"xmodel_epoch_3.pth model_epoch_3.pth.old"),
    ("notes.txt", b"**\n___\n* _ *\n"),
    ("notes.txt", b"other/place/model_epoch_33.pth"),
    ("notes.bin", b"\xff\xfemodel_epoch_3.pth\x00"),
    ("notes.txt", b"model_epoch_3.pth" + b" " * 5000),
    ("notes.txt", b"\x00 model_epoch_3.pth"),
)


def test_a_name_may_be_escaped_as_json(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1, 2, 3, 4, name="modèle_epoch_{}.pth")
    (run / "best.json").write_text(json.dumps({"best": "modèle_epoch_2.pth", "half": "\ud83d"}))
    assert protected_in(run) == {"modèle_epoch_2.pth": ["best.json"]}


def test_what_is_no_note(few: Path) -> None:
    assert _misread(few, NO_NOTES, set()) == []


def test_the_reference_has_all_that_protects_and_what_does_not() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "prune.md").read_text()
    files = [kind for kind in text_kinds(FilePlace.BESIDE) if kind.protects]
    rows = [(", ".join(kind.what for kind in files), TextKind.where)]
    rows += [(kind.what, kind.where) for kind in searched_kinds()]
    assert [row for row in rows if f"| {row[0]} | {row[1]} |\n" not in page] == []
    assert [one for one in IGNORED_TEXTS if f"| {one.what} | {one.why} |\n" not in page] == []


@pytest.mark.parametrize(
    "command",
    [
        *("verify", "verify --json", "prune --keep 2 -n", "prune --keep 2 -n --json", "list --json"),
        *("prune --keep-name model_epoch_3.pth -n", "watch --once", "watch --once --json", "copy ../other"),
        *("prune --full 1 -n", "watch --once --config ../full.toml"),
    ],
)
def test_own_output_is_no_note(few: Path, run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(few)
    (few.parent / "full.toml").write_text("[retention]\nfull = 1\n")
    name, *options = command.split()
    _, out, err = run(name, few, *options)
    assert "model_epoch_3.pth" in out
    assert len(out + err) <= 4096
    for where in (few, few.parent):
        (where / "files.txt").write_text(out + err)
        assert protected_in(few) == {}
        (where / "files.txt").write_text(f"{out}{err}The best is model_epoch_3.pth.\n")
        assert protected_in(few) == {THIRD: ["files.txt"]}
        (where / "files.txt").unlink()


def test_what_latest_says_is_a_note(few: Path, run: Run) -> None:
    (few / "model_epoch_10.pth").rename(few.parent / "model_epoch_10.pth")
    for options in ([], ["--json"]):
        out = run("latest", few, *options).out
        (few / "resume_from").write_text(out)
        assert protected_in(few) == {"model_epoch_7.pth": ["resume_from"]}


@pytest.mark.parametrize("name", ["best.txt", "plot.yaml", "README.md"])
def test_a_path_means_no_namesake_elsewhere(runs: Path, name: str) -> None:
    for text in (
        *("exp3/model_epoch_1.pth", "../exp3/model_epoch_1.pth", f"{runs}/exp3/model_epoch_1.pth"),
        *("/gone/exp3/model_epoch_1.pth", "exp3\\model_epoch_1.pth", "exp1/sub/model_epoch_1.pth"),
    ):
        (runs / name).write_text(f"see `{text}`\n")
        assert protected_in(runs, recursive=True) == {}
    (runs / name).write_text("see `exp2/model_epoch_1.pth`\n")
    assert protected_in(runs, recursive=True) == {"exp2/model_epoch_1.pth": [name]}


def test_a_path_that_is_gone_from_its_directory_means_nothing_else(runs: Path) -> None:
    (runs / "exp2" / "model_epoch_1.pth").unlink()
    (runs / "exp1" / "best.txt").write_text("../exp2/model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {}


def test_a_number_is_a_name_only_where_it_stands_alone(series: Path) -> None:
    os.rename(series / THIRD, series / "3.pth")
    (series / "config.yaml").write_text("layers: 3\nepochs: 10\n")
    assert protected_in(series) == {}
    (series / "best.txt").write_text("3\n")
    assert protected_in(series) == {"3.pth": ["best.txt"]}


def test_a_path_one_level_up(runs: Path) -> None:
    (runs / "best.txt").write_text("exp1/model_epoch_1.pth\n")
    assert protected_in(runs, recursive=True) == {"exp1/model_epoch_1.pth": ["best.txt"]}
    assert protected_in(runs / "exp1") == {"model_epoch_1.pth": ["best.txt"]}
    assert protected_in(runs / "exp2") == {}


def test_an_absolute_path_above_the_directory(runs: Path) -> None:
    (runs.parent / "best.txt").write_text(f"{runs}/exp1/model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {"exp1/model_epoch_1.pth": ["best.txt"]}


def test_a_path_into_another_run_means_no_namesake(runs: Path) -> None:
    (runs / "exp1" / "resume_from").write_text("exp2/model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {"exp2/model_epoch_1.pth": ["resume_from"]}
    assert protected_in(runs / "exp1") == {}
    (runs / "exp1" / "resume_from").write_text("../exp2/model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {"exp2/model_epoch_1.pth": ["resume_from"]}


def test_a_path_of_a_tree_that_was_moved(runs: Path) -> None:
    (runs / "exp1" / "resume_from").write_text("/old/place/exp2/model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {"exp2/model_epoch_1.pth": ["resume_from"]}
    (runs / "exp1" / "resume_from").write_text("/old/place/gone/model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {"exp1/model_epoch_1.pth": ["resume_from"]}


def test_a_name_alone_means_what_lies_beside_or_else_below(runs: Path) -> None:
    (runs / "exp1" / "best.txt").write_text("model_epoch_1.pth")
    assert protected_in(runs, recursive=True) == {"exp1/model_epoch_1.pth": ["best.txt"]}
    os.rename(runs / "exp1" / "best.txt", runs / "best.txt")
    told = {f"{run}/model_epoch_1.pth": ["best.txt"] for run in ("exp1", "exp2")}
    assert protected_in(runs, recursive=True) == told


def test_notes_in_a_directory_without_checkpoints(runs: Path) -> None:
    (runs / "notes").mkdir()
    (runs / "notes" / "best.txt").write_text("exp2/model_epoch_2.pth")
    assert protected_in(runs, recursive=True) == {"exp2/model_epoch_2.pth": ["best.txt"]}


def test_a_path_to_a_part_of_a_directory(trainer: Path) -> None:
    (trainer.parent / "best.txt").write_text("trainer/checkpoint-2/model.safetensors")
    assert protected_in(trainer)["checkpoint-2"] == ["best.txt"]


def test_notes_below_a_directory_of_one_run(runs: Path) -> None:
    """Where nothing else lies below, they count with ``-r`` all the same, and else only here and above."""
    (runs / "exp1" / "meta").mkdir()
    (runs / "exp1" / "meta" / "best.txt").write_text("../model_epoch_1.pth\n")
    assert protected_in(runs / "exp1", recursive=True) == {"model_epoch_1.pth": ["best.txt"]}
    assert protected_in(runs / "exp1") == {}
    os.rename(runs / "exp1" / "meta" / "best.txt", runs / "best.txt")
    (runs / "best.txt").write_text("exp1/model_epoch_1.pth\n")
    assert protected_in(runs / "exp1") == {"model_epoch_1.pth": ["best.txt"]}

"""``ckpttool rename``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import Terminal, ckpttool
from tests.support.configs import write

TEMPLATE = "{run}-e{epoch:04d}"


@pytest.fixture
def series(files: Path, tmp_path: Path, home: None) -> Path:
    """Return a directory of three epochs, below the working directory."""
    (tmp_path / "run").mkdir()
    for epoch in (8, 9, 10):
        shutil.copy2(files / "series" / f"model_epoch_{epoch}.pth", tmp_path / "run")
    return Path("run")


def names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith(".ckpttool"))


PLAN = """\
run
  model_epoch_8.pth   ->  model-e0008.pth
  model_epoch_9.pth   ->  model-e0009.pth
  model_epoch_10.pth  ->  model-e0010.pth

"""


def test_text(run, series: Path) -> None:
    (series / "last.pth").symlink_to("model_epoch_10.pth")
    would = PLAN + "would rename 3 checkpoints and update 1 reference\n"
    assert run("rename", series, "--template", TEMPLATE, "--dry-run") == (0, would, "")
    assert run("rename", series, "-t", TEMPLATE, "--check") == (1, would, "")
    assert names(series) == ["last.pth", "model_epoch_10.pth", "model_epoch_8.pth", "model_epoch_9.pth"]
    done = PLAN + "renamed 3 checkpoints and updated 1 reference\n"
    assert run("rename", series, "-t", TEMPLATE) == (0, done, "")
    assert names(series) == ["last.pth", "model-e0008.pth", "model-e0009.pth", "model-e0010.pth"]
    assert run("rename", series, "-t", TEMPLATE) == (0, "nothing to rename (3 checkpoints)\n", "")
    assert run("rename", series, "-t", TEMPLATE, "--check").status == 0
    assert run("rename", series, "-t", TEMPLATE, "-q") == (0, "", "")


def test_json(run, series: Path) -> None:
    answers = [run("rename", series, "-t", TEMPLATE, "--json", *dry) for dry in (["-n"], [])]
    documents = [json.loads(answer.out) for answer in answers]
    assert documents[0] == documents[1] | {"dry_run": True}
    assert documents[1] == {
        "schema": "ckpttool.rename/1",
        "dry_run": False,
        "declined": False,
        "renames": [
            {"from": f"run/model_epoch_{epoch}.pth", "to": f"run/model-e{epoch:04d}.pth"}
            for epoch in (8, 9, 10)
        ],
        "errors": [],
        "warnings": [],
    }


def test_what_cannot_be_named_is_named_and_nothing_is_renamed(run, series: Path) -> None:
    (series / "model_epoch_9.pth").rename(series / "a_epoch_9.pth")
    shutil.copy(series / "a_epoch_9.pth", series / "b_epoch_9.pth")
    before = names(series)
    told = (
        "ckpttool: error: run/a_epoch_9.pth: 2 checkpoints would be called e9.pth: "
        "a_epoch_9.pth, b_epoch_9.pth (and 1 more)\n"
    )
    end = "ckpttool: error: run: nothing was renamed (--exclude skips checkpoints that can't be named)\n"
    assert run("rename", series, "-t", "e{epoch}") == (2, "", told + end)
    assert names(series) == before
    dry = run("rename", series, "-t", "e{epoch}", "-n", "--json")
    assert (dry.status, dry.err, len(json.loads(dry.out)["errors"])) == (1, told, 2)
    answer = run("rename", series, "-t", "{run}-{val_loss?}-s{step}")
    assert answer.status == 2
    assert "run/a_epoch_9.pth: no step ({step?} leaves it out) (and 3 more)" in answer.err
    answer = run("rename", series, "-t", "e{epoch}", "-n")
    assert answer.out.endswith("would rename nothing (4 checkpoints): 2 names can't be used\n")
    assert "  b_epoch_9.pth       ->  e9.pth  can't be used\n" in answer.out
    assert "  model_epoch_8.pth   ->  e8.pth\n" in answer.out


def test_what_is_left_alone_is_told(run, series: Path) -> None:
    path = series / "model_epoch_9.pth"
    path.write_bytes(path.read_bytes()[:900])
    answer = run("rename", series, "-t", TEMPLATE)
    assert answer.status == 1
    assert answer.err.startswith("ckpttool: error: run/model_epoch_9.pth: left alone: incomplete: ")
    assert answer.out.endswith("renamed 2 of 3 checkpoints\n")


def test_warnings(run, series: Path) -> None:
    answer = run("rename", series, "-t", "{run}-{date:%Y}-x{epoch}y", "-n")
    assert answer.status == 0
    assert "warning: run/model_epoch_8.pth -> model-20" in answer.err
    assert "its epoch would not be read out of this name" in answer.err
    assert run("rename", series, "-t", "{run}-{date:%Y}-x{epoch}y", "-n", "-q") == (0, "", "")


def test_usage(run, series: Path) -> None:
    assert run("rename", series).err == (
        "ckpttool: error: no template says what the names are (--template '{run}-e{epoch:04d}')\n"
    )
    for template, told in {
        "model": "it has no field, and would give all the same name",
        "{epoch": "the brace at character 1 is never closed",
        "{val_los}": "no checkpoint has a field val_los (there are run, name, format, epoch, step, number",
    }.items():
        answer = run("rename", series, "-t", template)
        assert (answer.status, answer.out) == (2, "") and told in answer.err
    assert run("rename", series / "model_epoch_8.pth", "-t", TEMPLATE).status == 2
    assert run("rename", "nowhere", "-t", TEMPLATE).status == 2


def test_nothing_there(run, series: Path) -> None:
    assert run("rename", ".", "--no-recursive", "-t", TEMPLATE) == (
        1,
        "",
        "ckpttool: error: .: no checkpoint directly in it, but 3 in subdirectories (omit --no-recursive)\n",
    )
    answer = run("rename", ".", "-t", TEMPLATE)
    assert (answer.status, answer.out.splitlines()[0]) == (0, "run")


def test_a_check_of_nothing_finds_something(run, series: Path) -> None:
    lost = "ckpttool: error: .: no checkpoint directly in it, but 3 in subdirectories (omit --no-recursive)\n"
    assert run("rename", ".", "--no-recursive", "-t", TEMPLATE, "--check") == (1, "", lost)
    assert run("rename", ".", "--no-recursive", "-t", TEMPLATE, "--check", "-q") == (1, "", lost)
    Path("empty").mkdir()
    answer = run("rename", "empty", "-t", TEMPLATE, "--check", "--json")
    assert (answer.status, json.loads(answer.out)["renames"]) == (1, [])
    assert answer.err == "ckpttool: error: empty: no checkpoint\n"


def test_a_configuration_says_the_template(run, series: Path) -> None:
    write(Path("ckpttool.toml"), '[naming]\ntemplate = "{run}-x{epoch}-e{epoch:02d}"\n')
    assert "model-x8-e08.pth" in run("rename", series, "-n").out
    assert "model-e0008.pth" in run("rename", series, "-n", "-t", TEMPLATE).out
    write(Path("other.toml"), '[naming]\ntemplate = "o-e{epoch:02d}"\n')
    assert "o-e08.pth" in run("rename", series, "-n", "--config", "other.toml").out
    Path("ckpttool.toml").unlink()
    write(Path("pyproject.toml"), '[tool.ckpttool.naming]\ntemplate = "p-e{epoch:02d}"\n')
    assert "p-e08.pth" in run("rename", series, "-n").out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[verify]\n", "ckpttool.toml has no template in [naming]"),
        ("naming = 3\n", "ckpttool.toml[naming]: 3 (a table)"),
        (
            "[naming]\ntemplates = 1\n",
            "ckpttool.toml[naming]: unknown key templates (did you mean template?)",
        ),
        ("[naming]\ntemplate = 1\n", "ckpttool.toml[naming]: template is 1 (a text)"),
        ("[naming]\n", "ckpttool.toml has no template in [naming]"),
        ('[naming]\ntemplate = "{epoch"\n', "the brace at character 1 is never closed"),
    ],
)
def test_wrong_configurations(run, series: Path, text: str, told: str) -> None:
    write(Path("ckpttool.toml"), text)
    answer = run("rename", series)
    assert (answer.status, answer.out) == (2, "") and told in answer.err
    both = run("rename", series, "-t", TEMPLATE, "--config", "ckpttool.toml")
    assert both.status == 2 and "leave out one of them" in both.err


def test_a_narrow_terminal_gets_new_names_below_old_ones(
    run, series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = run("rename", series, "-t", "{run}-of-many-words-e{epoch:04d}", "-n").out
    assert out.startswith("run\n  model_epoch_8.pth\n    ->  model-of-many-words-e0008.pth\n")
    assert max(map(len, out.splitlines())) <= 40


@pytest.mark.parametrize("answer", ["y\n", "n\n", "\n"])
def test_it_asks(run, series: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    said = run("rename", series, "-t", TEMPLATE)
    assert said.out.startswith(PLAN)
    assert said.err.endswith("Rename 3 checkpoints? [y/N] ")
    if answer == "y\n":
        assert (said.status, said.out.splitlines()[-1]) == (0, "renamed 3 checkpoints")
    else:
        assert (said.status, said.out.splitlines()[-1]) == (1, "nothing renamed (3 checkpoints)")
        assert names(series) == ["model_epoch_10.pth", "model_epoch_8.pth", "model_epoch_9.pth"]


def test_an_answer_in_stdin_is_obeyed(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"n\ny\n")
    os.close(writer)
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("rename", series, "-t", TEMPLATE) == (1, PLAN + "nothing renamed (3 checkpoints)\n", "")
        assert names(series) == ["model_epoch_10.pth", "model_epoch_8.pth", "model_epoch_9.pth"]
        assert run("rename", series, "-t", TEMPLATE).status == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a full device")
def test_nothing_is_renamed_before_the_plan_is_printed(series: Path) -> None:
    with open("/dev/full", "w") as full:
        done = ckpttool("rename", series, "-t", TEMPLATE, capture_output=False, stdout=full)
    assert done.returncode == 2
    assert names(series) == ["model_epoch_10.pth", "model_epoch_8.pth", "model_epoch_9.pth"]


def test_names_are_escaped(run, series: Path) -> None:
    (series / "model_epoch_8.pth").rename(series / "a\x1b[31m\n_epoch_8.pth")
    answer = run("rename", series, "-t", TEMPLATE)
    assert "a\\x1b[31m\\n_epoch_8.pth" in answer.out and "\x1b" not in answer.out + answer.err
    assert "a\x1b[31m\n-e0008.pth" in names(series)


def test_what_a_note_will_not_name_is_told_before_it_asks(
    run, series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(series / "README.md", "model_epoch_9.pth is the one of the paper.\n")
    told = (
        "ckpttool: error: run/README.md: README.md names model_epoch_9.pth and isn't changed: "
        "prune won't keep that for it any more\n"
    )
    assert run("rename", series, "-t", TEMPLATE, "-n") == (
        1,
        PLAN + "would rename 3 checkpoints\n",
        told,
    )
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    said = run("rename", series, "-t", TEMPLATE, "--color", "never")
    assert (said.status, said.err) == (1, told + "Rename 3 checkpoints? [y/N] ")

"""``ckpttool rename``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import Run, Terminal, ckpttool, refusals, transcript
from tests.support.configs import write
from tests.support.golden import Golden

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


def test_text(run: Run, series: Path, golden: Golden) -> None:
    (series / "last.pth").symlink_to("model_epoch_10.pth")
    command = f"rename run -t '{TEMPLATE}'"
    golden(transcript(run, (0, f"{command} --dry-run"), (1, f"{command} --check")))
    assert names(series) == ["last.pth", "model_epoch_10.pth", "model_epoch_8.pth", "model_epoch_9.pth"]
    done = ((0, command), (0, command), (0, f"{command} --check"), (0, f"{command} -q"))
    golden(transcript(run, *done))
    assert names(series) == ["last.pth", "model-e0008.pth", "model-e0009.pth", "model-e0010.pth"]


def test_json(run: Run, series: Path, golden: Golden) -> None:
    answers = [run("rename", series, "-t", TEMPLATE, "--json", *dry) for dry in (["-n"], [])]
    documents = [json.loads(answer.out) for answer in answers]
    assert documents[0] == documents[1] | {"dry_run": True}
    golden(json.dumps(documents[1], indent=1))


def test_what_cannot_be_named_is_named_and_nothing_is_renamed(run: Run, series: Path, golden: Golden) -> None:
    (series / "model_epoch_9.pth").rename(series / "a_epoch_9.pth")
    shutil.copy(series / "a_epoch_9.pth", series / "b_epoch_9.pth")
    before = names(series)
    command = "rename run -t 'e{epoch}'"
    other = "rename run -t '{run}-{val_loss?}-s{step}'"
    golden(transcript(run, (2, command), (1, f"{command} -n"), (1, f"{command} -n --json"), (2, other)))
    assert names(series) == before


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
    assert "its epoch can't be read from this name" in answer.err
    assert run("rename", series, "-t", "{run}-{date:%Y}-x{epoch}y", "-n", "-q") == (0, "", "")


def test_usage(run: Run, series: Path, golden: Golden) -> None:
    templates = ("model", "{epoch", "{val_los}")
    places = (f"run/model_epoch_8.pth -t '{TEMPLATE}'", f"nowhere -t '{TEMPLATE}'")
    others = ("run", *(f"run -t '{template}'" for template in templates), *places)
    golden(refusals(run, *(f"rename {one}" for one in others)))


def test_nothing_there(run: Run, series: Path, golden: Golden) -> None:
    """A check of nothing finds something."""
    Path("empty").mkdir()
    options = ("", " --check", " --check -q")
    below = [(1, f"rename . --no-recursive -t '{TEMPLATE}'{one}") for one in options]
    golden(transcript(run, *below, (1, f"rename empty -t '{TEMPLATE}' --check --json")))
    answer = run("rename", ".", "-t", TEMPLATE)
    assert (answer.status, answer.out.splitlines()[0]) == (0, "run")


def test_a_configuration_says_the_template(run, series: Path) -> None:
    write(Path("ckpttool.toml"), '[naming]\ntemplate = "{run}-x{epoch}-e{epoch:02d}"\n')
    assert "model-x8-e08.pth" in run("rename", series, "-n").out
    assert "model-e0008.pth" in run("rename", series, "-n", "-t", TEMPLATE).out
    write(Path("other.toml"), '[naming]\ntemplate = "o-e{epoch:02d}"\n')
    assert "o-e08.pth" in run("rename", series, "-n", "--config", "other.toml").out
    Path("ckpttool.toml").unlink()
    write(Path("pyproject.toml"), '[tool.ckpttool.naming]\ntemplate = "p-e{epoch:02d}"\n')
    assert "p-e08.pth" in run("rename", series, "-n").out


def test_wrong_configurations(run: Run, series: Path, golden: Golden) -> None:
    said = {}
    for text in (
        "[verify]\n",
        "naming = 3\n",
        "[naming]\ntemplates = 1\n",
        "[naming]\ntemplate = 1\n",
        "[naming]\n",
        '[naming]\ntemplate = "{epoch"\n',
    ):
        write(Path("ckpttool.toml"), text)
        said[repr(text)] = refusals(run, "rename run").splitlines()[1]
        both = run("rename", series, "-t", TEMPLATE, "--config", "ckpttool.toml")
        assert both.status == 2 and "mutually exclusive" in both.err
    golden(said)


def test_a_narrow_terminal_gets_new_names_below_old_ones(
    run, series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = run("rename", series, "-t", "{run}-of-many-words-e{epoch:04d}", "-n").out
    assert out.startswith("run\n  model_epoch_8.pth\n    ->  model-of-many-words-e0008.pth\n")
    assert max(map(len, out.splitlines())) <= 40


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_it_asks(
    run: Run, series: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    said = run("rename", series, "-t", TEMPLATE)
    golden(said.out + said.err)
    assert (said.status, "model_epoch_8.pth" in names(series)) == (status, status == 1)


def test_an_answer_in_stdin_is_obeyed(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"n\ny\n")
    os.close(writer)
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("rename", series, "-t", TEMPLATE).status == 1
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
    run: Run, series: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(series / "README.md", "model_epoch_9.pth is the one of the paper.\n")
    golden(transcript(run, (1, f"rename run -t '{TEMPLATE}' -n")))
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    said = run("rename", series, "-t", TEMPLATE, "--color", "never")
    assert said.status == 1
    golden(said.err)

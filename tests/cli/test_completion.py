"""Completion, as the scripts of shells ask for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool.cli import completion
from ckpttool.cli.explanations import explanations
from ckpttool.formats.traits import TRAITS
from tests.support.commands import TIMEOUT, ckpttool, run_here


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return the lines that a shell is told, however busy the machine is; nothing is said on stderr."""
    monkeypatch.setattr(completion, "_WORK_SECONDS", TIMEOUT)
    monkeypatch.setattr(completion, "_WAIT_SECONDS", TIMEOUT)

    def lines(shell: str, **variables: str) -> list[str]:
        for name, value in {**variables, "_CKPTTOOL_COMPLETE": f"{shell}_complete"}.items():
            monkeypatch.setenv(name, value)
        with suppress(SystemExit):
            run_here()
        out, err = capsys.readouterr()
        assert err == ""
        return out.splitlines()

    return lines


@pytest.fixture
def completed(ask) -> Callable[..., list[str]]:
    """Return what bash is told for the last word of a command line."""

    def words(*given: object) -> list[str]:
        line = ["ckpttool", *map(str, given)]
        lines = ask("bash", COMP_WORDS=shlex.join(line), COMP_CWORD=str(len(line) - 1))
        return [one.removeprefix("plain,") for one in filter(None, lines)]

    return words


@pytest.fixture
def described(ask) -> Callable[[str], list[str]]:
    """Return the values that fish is told for a command line, each with its meaning behind a tab."""

    def lines(line: str) -> list[str]:
        told = ask("fish", COMP_WORDS=line, COMP_CWORD=line.rpartition(" ")[2])
        return [one.removeprefix("plain,") for one in told]

    return lines


def test_a_shell_asks_in_variables() -> None:
    line = {"COMP_WORDS": "ckpttool convert --to safe", "COMP_CWORD": "3"}
    done = ckpttool(env={**line, "_CKPTTOOL_COMPLETE": "bash_complete"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,safetensors\n", "")


def test_commands_are_described_as_in_the_help(described) -> None:
    assert described("ckpttool und") == ["undo\tUndo the last prune --trash or rename."]


def test_options_are_described_on_one_line(described) -> None:
    assert described("ckpttool list --max-d") == ["--max-depth\tDescend at most N levels"]
    assert all(line.startswith("--") for line in described("ckpttool prune --"))


def test_formats_are_those_that_can_be_written(completed, described) -> None:
    writable = [name for name, row in TRAITS.items() if row.writer]
    assert completed("convert", "a.pth", "b", "--to", "") == writable
    assert completed("merge", "--to", "safe") == ["safetensors"]
    assert "keras-h5\tKeras HDF5" in described("ckpttool convert --to k")


@pytest.mark.parametrize("option", ["--best", "--metric"])
def test_metrics_are_those_of_the_directory(
    completed, files: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed("list", files / "series", option, "") == ["loss"]
    monkeypatch.chdir(files / "series")
    assert completed("list", option, "l") == ["loss"]


def test_metrics_of_the_other_commands(completed, files: Path) -> None:
    assert completed("latest", files / "series", "--best", "") == ["loss"]
    assert completed("prune", files / "series", "--keep-best", 2, "--metric", "") == ["loss"]
    assert completed("list", files / "series", "--sort", "") == [
        *("epoch", "step", "age", "size", "name"),
        "loss",
    ]


def test_fields_are_those_of_the_checkpoint(completed, files: Path) -> None:
    fields = completed("inspect", files / "pytorch" / "guide.pth", "--field", "training.e")
    assert fields == ["training.epoch"]
    assert completed("inspect", "--field", "") == []


def test_findings_and_checks(completed, described) -> None:
    assert completed("explain", "") == [*explanations()]
    assert completed("verify", "--only", "val") == ["values"]
    assert completed("verify", "--only", "values,s") == ["values,structure", "values,safety"]
    assert all(len(line) < 100 for line in described("ckpttool explain "))


def test_words_of_an_enumeration(completed) -> None:
    assert completed("list", "--mode", "") == ["min", "max"]
    assert completed("convert", "--layout", "") == ["as-is", "torch", "keras"]


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "missing.pth", "--field", ""),
        ("inspect", ".", "--field", ""),
        ("latest", "missing", "--best", ""),
        ("no-such-command", "--to", ""),
        ("list", "--no-such-option", "--keep", ""),
        ("prune", "", "--keep", 3, "--keep", ""),
    ],
)
def test_nothing_to_complete_is_silence(
    completed, tmp_path: Path, words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert completed(*words) == []


def test_nothing_on_the_line_is_done(completed, tmp_path: Path) -> None:
    completed("help", "--man", tmp_path / "man", "")
    assert "ckpttool" not in completed("--version", "")
    assert [*tmp_path.iterdir()] == []


def test_names_that_a_shell_would_expand_are_left_out(completed, tmp_path: Path) -> None:
    names = ["fine", "a\\$(touch evil)", "`b`", "*", "c d", "e'f", 'g"h', "-i", "j\nk", "l;m", "n:o"]
    path = tmp_path / "m.safetensors"
    save_file({"w": np.zeros(1, np.float32)}, path, metadata=dict.fromkeys(names, "1"))
    assert {*completed("inspect", path, "--field", "values.")} == {"values.fine", "values.-i"}


def test_a_damaged_checkpoint_has_nothing_to_complete(completed, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "epoch_1.pth"
    path.write_bytes((files / "pytorch" / "guide.pth").read_bytes()[:500])
    assert completed("inspect", path, "--field", "") == []
    assert completed("list", tmp_path, "--best", "") == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_that_nobody_writes_is_not_waited_for(completed, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "epoch_1.pth")
    assert completed("inspect", tmp_path / "epoch_1.pth", "--field", "") == []
    assert completed("list", tmp_path, "--best", "") == []


def test_time_that_is_up_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_WORK_SECONDS", 0.01)
    endless = ((f"value{n % 3}", "") for n in count())
    monkeypatch.setitem(completion.COMPLETIONS, "endless", lambda context, incomplete: endless)
    found = completion.complete("endless", None, "value")
    assert {"value0", "value1", "value2"}.issuperset(name for name, _ in found)

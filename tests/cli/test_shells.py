"""Completion scripts, and where they are installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shellingham

from tests.support.commands import Run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def _started_from(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shellingham, "detect_shell", lambda: (shell, f"/bin/{shell}"))


@pytest.mark.parametrize(
    ("shell", "script", "profile", "line"),
    [
        ("bash", ".bash_completions/ckpttool.sh", ".bashrc", "source {path}"),
        ("zsh", ".zfunc/_ckpttool", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
        ("fish", ".config/fish/completions/ckpttool.fish", None, ""),
    ],
)
def test_installing_twice_is_installing_once(
    run: Run,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    shell: str,
    script: str,
    profile: str | None,
    line: str,
) -> None:
    _started_from(shell, monkeypatch)
    if profile is not None:
        (home / profile).write_text("alias l=ls")
    for _ in range(2):
        done = run("--install-completion")
        assert (done.status, str(home / script) in done.out, done.err) == (0, True, "")
    assert (home / script).read_text() == run("--show-completion").out.rstrip("\n") + "\n"
    assert f"_CKPTTOOL_COMPLETE={shell}_complete" in (home / script).read_text()
    if profile is not None:
        assert (
            home / profile
        ).read_text() == f"alias l=ls\n{line.format(path=shlex.quote(str(home / script)))}\n"


def test_another_shell_is_refused(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _started_from("tcsh", monkeypatch)
    done = run("--install-completion")
    assert (done.status, "tcsh" in done.err, "bash, zsh, fish" in done.err) == (2, True, True)
    assert os.listdir(home) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("name", ["home", "o'neill's home"])
def test_bash_completes_a_line(run: Run, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / name
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    _started_from("bash", monkeypatch)
    run("--install-completion")
    program = home / "ckpttool"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpttool "$@"\n')
    program.chmod(0o755)
    ask = "COMP_WORDS=(ckpttool convert --to safe); COMP_CWORD=3; _ckpttool_completion"
    line = f". ~/.bashrc; {ask} {shlex.quote(str(program))}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("safetensors\n", "")

"""Completion scripts of shells, and where each looks for them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from ckpttool.cli.output import COMPLETE_VARIABLE
from ckpttool.core.errors import UsageError

_PLACES = {
    "bash": ("~/.bash_completions/ckpttool.sh", "~/.bashrc", "source {script}"),
    "zsh": ("~/.zfunc/_ckpttool", "~/.zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": ("~/.config/fish/completions/ckpttool.fish", None, ""),
}
"""For each shell: the path of the script, the file that reads it at the start, and the line that does so."""


def completion_script(command: click.Command) -> str:
    """Return the completion script of the shell that this process was started from."""
    return _script_of(_shell(), command)


def install_completion(command: click.Command) -> str:
    """Install the completion script of the shell that this process was started from; return what was done."""
    from ckpttool.core.errors import from_os_error
    from ckpttool.storage.atomic import write_atomically

    shell = _shell()
    place, profile, line = _PLACES[shell]
    script = Path(place).expanduser()
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(script, _script_of(shell, command).encode())
        if profile is not None:
            _add_line(Path(profile).expanduser(), line.format(script=shlex.quote(str(script))))
    except OSError as error:
        raise from_os_error(error, script) from error
    return f"{shell} completion installed in {script}; it takes effect in the next shell"


def _script_of(shell: str, command: click.Command) -> str:
    kind = get_completion_class(shell)
    assert kind is not None  # click has all of these
    return kind(command, {}, "ckpttool", COMPLETE_VARIABLE).source()


def _shell() -> str:
    from shellingham import ShellDetectionFailure, detect_shell

    try:
        name = str(detect_shell()[0])
    except ShellDetectionFailure:
        name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in _PLACES:
        raise UsageError(
            f"no completion for the shell {name or 'of this terminal'!r}: there are {', '.join(_PLACES)}"
        )
    return name


def _add_line(profile: Path, line: str) -> None:
    text = profile.read_text("utf-8", "surrogateescape") if profile.exists() else ""
    if line not in text.splitlines():
        with profile.open("a", encoding="utf-8") as file:
            file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")

"""Completion in shells: values of options and arguments, and the installation of the scripts.

Shells run this while the user types: it prints nothing, is limited in time, and yields only words without
special characters of shells, whatever a checkpoint contains.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from ckpttool.cli.output import COMPLETE_VARIABLE
from ckpttool.core.errors import CheckpointError, UsageError, from_os_error

_WORK_SECONDS, _WAIT_SECONDS = 1.0, 5.0
"""Limits on computing and on waiting for a busy machine or a remote disk; later values are not shown."""
_MOST_LOOKED_AT = 100
_MOST_VALUES = 500
_WIDEST = 76
"""Characters of a description: shells show it on the row of the value."""
_WORD = re.compile(r"\w[\w./@%+,-]*")
"""Words without special characters of shells: zsh evaluates the values twice, so that ``$(…)`` would run."""

Value = tuple[str, str]
"""A value and its description, which may be empty."""


def complete(kind: str, context: Any, incomplete: str) -> list[Value]:
    """Return the values of a kind that begin with a text, for the command line of a context."""
    values: dict[str, str] = {}
    with _limited_time():
        for value, meaning in COMPLETIONS[kind](context, incomplete):
            if value.startswith(incomplete) and _WORD.fullmatch(value):
                values.setdefault(value, meaning)
            if len(values) >= _MOST_VALUES:
                break
    return [*values.items()]


_ALARMS = (signal.SIGPROF, signal.SIGALRM) if hasattr(signal, "setitimer") else ()


class _TimeIsUp(BaseException):
    """The time limit is reached. It isn't an Exception, so that no handler catches it."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """Stop after a time limit, or end the process if that fails; Windows has no such timer."""
    # Two timers: processor time for slow computing, and wall time for a disk that doesn't answer. The first
    # signal raises an exception, and the values found so far are shown. Compiled code or a ``finally`` may
    # hold it up; then the next signal, after the same time again, ends the process.
    if not _ALARMS:
        yield
        return
    timers = ((signal.ITIMER_PROF, _WORK_SECONDS), (signal.ITIMER_REAL, _WAIT_SECONDS))
    for number in _ALARMS:
        signal.signal(number, _leave)
    with suppress(_TimeIsUp):
        try:
            for timer, seconds in timers:
                signal.setitimer(timer, seconds, seconds)
            yield
        finally:
            for timer, _ in timers:
                signal.setitimer(timer, 0)


def _leave(*_: object) -> None:
    for number in _ALARMS:  # a second signal ends the process
        signal.signal(number, lambda *_: os._exit(1))
    raise _TimeIsUp


def brief(help: str) -> str:
    """Return the first sentence of a help text without its notes in brackets, cut to one line."""
    sentence = re.sub(r"\s*\[[^\]]*\]", "", help).partition(". ")[0].rstrip(".")
    sentence = sentence.replace("'", "’")  # zsh would drop it
    return sentence if len(sentence) <= _WIDEST else f"{sentence[: _WIDEST - 1].rstrip()}…"


def _formats(context: Any, incomplete: str) -> Iterator[Value]:
    from ckpttool.formats.traits import TRAITS

    yield from ((name, row.title) for name, row in TRAITS.items() if row.writer)


def _metrics(context: Any, incomplete: str) -> Iterator[Value]:
    """Yield the metrics of the first checkpoints in the directory that was named, or in the current one."""
    from ckpttool.formats.discovery import Walk, discover
    from ckpttool.runs.listing import known_metrics
    from ckpttool.runs.look import look_at

    walk = Walk(recursive=True, on_error=lambda error: None)
    with suppress(CheckpointError):
        for unit in islice(discover(next(_paths(context), os.curdir), walk), _MOST_LOOKED_AT):
            entry = look_at(unit)
            yield from ((name, "") for name in known_metrics([entry] if entry else []))


def _sort_keys(context: Any, incomplete: str) -> Iterator[Value]:
    from ckpttool.runs.listing import ORDERS

    yield from ((name, "") for name in ORDERS)
    yield from _metrics(context, incomplete)


def _fields(context: Any, incomplete: str) -> Iterator[Value]:
    from ckpttool.cli.inspect import fields_of

    for path in islice(_paths(context), 1):
        yield from ((name, "") for name in fields_of(path))


def _findings(context: Any, incomplete: str) -> Iterator[Value]:
    from ckpttool.cli.explanations import explanations, plain

    yield from ((code, brief(plain(row.meaning))) for code, row in explanations().items())


def _checks(context: Any, incomplete: str) -> Iterator[Value]:
    """Yield the given checks with one more, separated by commas."""
    from ckpttool.ops.verdict import CHECKS, PREDICTION

    given, comma, _ = incomplete.rpartition(",")
    yield from (
        (f"{given}{comma}{name}", "") for name in (*CHECKS, *PREDICTION) if name not in given.split(",")
    )


def _paths(context: Any) -> Iterator[str]:
    """Yield the paths on the command line."""
    name = next(one.name for one in context.command.params if one.param_type_name == "argument")
    given = context.params.get(name) or ()
    paths: Iterable[Any] = context.args or (given if isinstance(given, list | tuple) else (given,))
    yield from (os.path.expanduser(path) for path in paths)


COMPLETIONS: Mapping[str, Callable[[Any, str], Iterator[Value]]] = {
    "format": _formats,
    "metric": _metrics,
    "sort key": _sort_keys,
    "field": _fields,
    "finding": _findings,
    "check": _checks,
}
"""Functions that complete the values of options and arguments, by kind."""


# Scripts of shells ----------------------------------------------------------------------------------


# bash and fish read completions from the user's files at their start, and need no permission of an
# administrator. fish loads any file in its directory of completions; bash needs a line in its profile, and
# zsh a directory in ``fpath`` before ``compinit``.
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
    """Install the completion script of the shell that started this process; return the result in words."""
    from ckpttool.storage.directories import write_atomically

    shell = _shell()
    place, profile, line = _PLACES[shell]
    script = Path(place).expanduser()
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(script, _script_of(shell, command).encode())
        if profile is not None:
            line = line.format(script=shlex.quote(str(script)))
            profile_path = Path(profile).expanduser()
            text = profile_path.read_text("utf-8", "surrogateescape") if profile_path.exists() else ""
            if line not in text.splitlines():
                with profile_path.open("a", encoding="utf-8") as file:
                    file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
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
        problem = f"no completion for {name}" if name else "unknown shell"
        raise UsageError(f"{problem}; expected one of {', '.join(_PLACES)}")
    return name

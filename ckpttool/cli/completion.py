"""The values that a shell completes: formats, metrics, fields, findings, checks.

Shells run this while somebody types: nothing is said, nothing takes long, and what a checkpoint holds is no
text that a shell could take for anything but a word.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from ckpttool.core.errors import CheckpointError

_WORK_SECONDS, _WAIT_SECONDS = 1.0, 5.0
"""Of work, and of waiting for a busy machine or a remote disk; what was found until then is shown."""
_MOST_LOOKED_AT = 100
_MOST_VALUES = 500
_WIDEST = 76
"""Characters of a description: shells show it on the row of the value."""
_WORD = re.compile(r"\w[\w./@%+,-]*")
"""What no shell expands: zsh evaluates the values that it is given, twice."""

Value = tuple[str, str]
"""A value, and what it means; empty if there is nothing to say."""


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
    """It took too long; no error, which somebody might handle."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """Leave what is done after a while, or end the process if it can't be left; Windows has no such timer."""
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
    for number in _ALARMS:  # what doesn't end now is ended the next time
        signal.signal(number, lambda *_: os._exit(1))
    raise _TimeIsUp


def brief(help: str) -> str:
    """Return the first sentence of a help, without its notes in brackets, on one line."""
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
    from ckpttool.runs.members.look import look_at

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
    """Yield the checks that may follow those that were given, separated by commas."""
    from ckpttool.ops.verdict import CHECKS, PREDICTION

    given, comma, _ = incomplete.rpartition(",")
    yield from (
        (f"{given}{comma}{name}", "") for name in (*CHECKS, *PREDICTION) if name not in given.split(",")
    )


def _paths(context: Any) -> Iterator[str]:
    """Yield the paths on the command line; behind an option without its value, they are left over."""
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
"""What completes the values of an option or argument, by the kind that it names."""

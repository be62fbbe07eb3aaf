"""What frameworks raise, in one short line.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import re
import site
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ckpttool.predict.interface import CannotTrain, LoadFailed
from ckpttool.report import error

_TEXT = 300
"""Characters of a framework's error that are kept: what follows is the whole configuration."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_OPENING = re.compile(
    r"^(Exception encountered when calling|A total of \d+ objects could not be loaded|Graph execution error)"
)
"""First lines of errors that only say where; what went wrong is the next line."""
_ADVICE = re.compile(
    r"\s+(Full object config|If you trust|If they are already|Target variable|Make sure custom)\b.*"
)
"""What Keras adds to an error that says it all already."""


@contextmanager
def told(code: str) -> Iterator[None]:
    """Turn whatever a framework raises inside into one short finding.

    Raises:
        LoadFailed: Something was raised, with ``code``.
    """
    try:
        yield
    except (LoadFailed, CannotTrain, MemoryError):
        raise
    except Exception as failure:  # a framework runs other people's code, which may raise anything
        raise LoadFailed(error(code, first_line(failure), _place(failure))) from failure


def first_line(failure: BaseException) -> str:
    """Return what went wrong, without what Keras and TensorFlow say around it, in one line."""
    if isinstance(failure, ModuleNotFoundError) and failure.name:
        return lacking(failure.name)
    lines = [line.strip() for line in _ESCAPES.sub("", str(failure)).splitlines() if line.strip()]
    opening = lines[0] if lines and _OPENING.match(lines[0]) else ""
    named = [at for at, line in enumerate(lines) if line.startswith("[[{{node") and at]
    if named:
        lines = lines[named[0] - 1 :]  # a graph's error stands below the whole call stack, before the node
    elif opening and len(lines) > 1 and not lines[1].startswith("Arguments received"):
        lines = lines[1:]
    if not lines:
        return type(failure).__name__
    text = f"{type(failure).__name__}: {_ADVICE.sub('', lines[0])}"
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def lacking(module: str) -> str:
    """Return what to say of a module that other people's code imports, and that isn't there."""
    package = module.partition(".")[0]
    if package in sys.modules:
        return f"it needs the module {module}, which the installed {package} lacks"
    return f"it needs the package {package}, which is not installed"


def place_of_syntax(failure: BaseException) -> str | None:
    """Return the line that is no Python, or None where something else is wrong."""
    if not isinstance(failure, SyntaxError) or not failure.filename or failure.lineno is None:
        return None
    return f"{os.path.basename(failure.filename)}:{failure.lineno}"


def _place(failure: BaseException) -> str | None:
    """Return the line of the user's own file where something was raised, or None."""
    if place := place_of_syntax(failure):
        return place
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    foreign = (ours, sys.base_prefix, sys.prefix, *site.getsitepackages(), "<")
    frames = [
        one for one in traceback.extract_tb(failure.__traceback__) if not one.filename.startswith(foreign)
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else None

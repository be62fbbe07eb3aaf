"""What every framework's adapter shares: a loaded model, and the findings when it can't be loaded or run.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import re
import site
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.predict.request import InputSpec

if TYPE_CHECKING:
    import numpy as np


class LoadFailed(Exception):
    """A checkpoint could not be loaded; ``findings`` say why."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(*(finding.message for finding in findings))
        self.findings = findings


class CannotTrain(Exception):
    """There is nothing that could make a training step; the text says why."""


class Loaded(ABC):
    """A model in its framework's hands.

    Attributes:
        detail: What was loaded, in a few words.
        findings: What was remarkable.
        versions: Of the packages that loaded it.
    """

    detail: str
    versions: Mapping[str, str]
    findings: tuple[Finding, ...] = ()

    def inputs(self) -> tuple[InputSpec, ...]:
        """Return the inputs that the model itself knows, as far as it knows their sizes; none otherwise."""
        return ()

    def examples(self) -> Arrays:
        """Return example inputs that the checkpoint carries; none where it doesn't."""
        return {}

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs for some inputs, without training anything."""

    def train(self, inputs: Arrays) -> str:
        """Make one step forward, backward and with the optimizer, and return what it did, in a few words.

        Raises:
            CannotTrain: There is nothing to train.
        """
        raise CannotTrain("this kind of model is for inference")


# What frameworks raise, in one short line -----------------------------------------------------------


_HERE = os.path.dirname(os.path.abspath(__file__))
_LONGEST = 1 << 16
"""Characters of an error's text that are looked at."""
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
def findings_on_error(code: str) -> Iterator[None]:
    """Turn whatever a framework raises inside into one short finding.

    Raises:
        LoadFailed: Something was raised, with ``code``.
    """
    try:
        yield
    except (LoadFailed, CannotTrain, MemoryError):
        raise
    except Exception as failure:  # a framework runs other people's code, which may raise anything
        raise LoadFailed(error(code, first_line(failure), place_in_user_code(failure))) from failure


def error_finding(failure: BaseException, code: str) -> Finding:
    """Return what other people's code raised, in one line, with the place in it."""
    if isinstance(failure, MemoryError):
        return error("child-out-of-memory", "there was no memory left")
    codes = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(failure.__traceback__)]
    places = [(file, line) for file, line in codes if not file.startswith(_HERE)]
    last = f"{os.path.basename(places[-1][0])}:{places[-1][1]}" if places else None
    return error(code, error_message(failure), place_of_syntax(failure) or last)


def error_message(failure: BaseException) -> str:
    """Return what other people's code raised, in one line."""
    if isinstance(failure, ModuleNotFoundError) and failure.name:
        return missing_module_message(failure.name)
    text, name = error_text(failure), type(failure).__name__
    return f"{name}: {text}" if text else name


def error_text(failure: BaseException) -> str:
    try:
        text = str(failure.msg if isinstance(failure, SyntaxError) else failure)
        return " ".join(text[:_LONGEST].split())[:500]
    except BaseException as another:  # noqa: BLE001 - other people's code may raise anything
        return f"(its text raises {type(another).__name__})"


def first_line(failure: BaseException) -> str:
    """Return what went wrong, without what Keras and TensorFlow say around it, in one line."""
    if isinstance(failure, ModuleNotFoundError) and failure.name:
        return missing_module_message(failure.name)
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


def missing_module_message(module: str) -> str:
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


def place_in_user_code(failure: BaseException) -> str | None:
    """Return the line of the user's own file where something was raised, or None."""
    if place := place_of_syntax(failure):
        return place
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    foreign = (ours, sys.base_prefix, sys.prefix, *site.getsitepackages(), "<")
    frames = [
        one for one in traceback.extract_tb(failure.__traceback__) if not one.filename.startswith(foreign)
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


# What a checkpoint and its model do not share -------------------------------------------------------


Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"
"""Inputs or outputs by name; an input whose name is a number goes there by position."""
NAMED = 20
"""What is named one by one; a model of another kind differs in thousands."""


def missing_finding(key: str) -> Finding:
    """Return the finding for what only the model has."""
    return error("missing-key", "the model has it, the checkpoint doesn't", key)


def unexpected_finding(key: str) -> Finding:
    """Return the finding for what only the checkpoint has."""
    return error("unexpected-key", "the checkpoint has it, the model doesn't", key)


def not_consumed_finding(key: str) -> Finding:
    """Return the finding for what the checkpoint has, where the framework just leaves it."""
    return error("not-consumed", "the checkpoint has it, nothing in the model takes it", key)


def shape_finding(key: str, saved: Iterable[Any], own: Iterable[Any]) -> Finding:
    """Return the finding for what both have, in shapes that differ."""
    shapes = f"{shape_text(saved)} in the checkpoint, {shape_text(own)} in the model"
    return error("shape-mismatch", shapes, key)


def state_dict_findings(
    saved: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]]
) -> list[Finding]:
    """Return what keeps a state dict from a model; both are shapes by key."""
    findings = [missing_finding(key) for key in own if key not in saved]
    findings += [unexpected_finding(key) for key in saved if key not in own]
    shared = [key for key in saved if key in own and list(saved[key]) != list(own[key])]
    return findings + [shape_finding(key, saved[key], own[key]) for key in shared]


def first_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings about names, the first of them where they are many."""
    if len(findings) <= NAMED:
        return tuple(findings)
    more = counted(len(findings) - NAMED, "more name")
    return (*findings[:NAMED], error(findings[-1].code, f"… and {more} differ"))


def shape_text(shape: Iterable[Any]) -> str:
    """Return a shape as people write it."""
    return "×".join(map(str, shape)) or "scalar"

"""Interface of a framework's adapter, and the findings that adapters have in common.

An adapter is a module with a table ``LOADERS`` of functions ``load(job) -> Loaded``. A loader raises
``LoadFailed`` with findings if the checkpoint and the model don't fit.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import re
import site
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.predict.request import InputSpec

if TYPE_CHECKING:
    import numpy as np


Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"
"""Inputs or outputs by name; decimal names are positions of inputs."""


class LoadFailed(Exception):
    """A checkpoint could not be loaded or run; ``findings`` have the reasons.

    ``words`` are those of the framework, if a finding quotes it.
    """

    def __init__(self, *findings: Finding, words: str = "") -> None:
        super().__init__(*(finding.message for finding in findings))
        self.findings = findings
        self.words = words


class CannotTrain(Exception):
    """A training step is impossible; the text is the reason."""


def inference_only(reason: str) -> Callable[[Arrays], str]:
    """Return the ``train`` of a model that can't be trained."""

    def train(inputs: Arrays) -> str:
        raise CannotTrain(reason)

    return train


_INFERENCE_ONLY = inference_only("this kind of model is for inference")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that its framework loaded.

    Attributes:
        detail: Description of the model, for the user.
        versions: Versions of the packages that loaded it.
        run: Returns the outputs for some inputs, without training anything.
        inputs: Returns the inputs that the model declares; empty if it declares none.
        examples: Returns the example inputs of the checkpoint; empty if it has none. Raises ``LoadFailed`` if
            the model can't be run at all.
        train: Makes one training step (forward, backward, optimizer) and returns a summary of it; raises
            ``CannotTrain`` if there is nothing to train.
        findings: Remarks on the loaded model.
    """

    detail: str
    versions: Mapping[str, str]
    run: Callable[[Arrays], Arrays]
    inputs: Callable[[], tuple[InputSpec, ...]] = tuple
    examples: Callable[[], Arrays] = dict
    train: Callable[[Arrays], str] = _INFERENCE_ONLY
    findings: Sequence[Finding] = ()


# Containers of tensors ------------------------------------------------------------------------------


Members: TypeAlias = Iterable[tuple[object, object]] | None


def members(value: object) -> Members:
    """Return the items of a dictionary, list or tuple with their keys; None for anything else."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else None


def leaves(
    value: object, name: str = "", members: Callable[[object], Members] = members
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers, each with the keys that lead to it, joined by dots."""
    items = members(value)
    if items is None:
        yield name, value
    else:
        for key, inner in items:
            yield from leaves(inner, f"{name}.{key}" if name else str(key), members)


# Errors of frameworks and of the user's code, in one line --------------------------------------------


_PACKAGE_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
_SEARCHED_LENGTH = 1 << 16
"""Limit on the characters of an error's text that are searched."""
_WHOLE_TEXT, _FIRST_LINE = 500, 300
"""Limits on the characters of a message: an error's whole text, or its first line, which may be followed by
the configuration of the model."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PREAMBLE = re.compile(
    r"^(Exception encountered when calling|A total of \d+ objects could not be loaded|Graph execution error)"
)
"""First lines of errors of Keras and TensorFlow that name only the place; the cause is in the next line."""
_ADVICE = re.compile(
    r"\s+(Full object config|If you trust|If they are already|Target variable|Make sure custom)\b.*"
)
"""Text that Keras appends to the cause of an error."""


@contextmanager
def findings_on_error(code: str) -> Iterator[None]:
    """Turn any error that is raised inside into one finding, with the first line of its text.

    Raises:
        LoadFailed: With a finding of ``code``.
    """
    try:
        yield
    except (LoadFailed, CannotTrain, MemoryError):
        raise
    except Exception as failure:  # a framework runs other people's code, which may raise anything
        words = first_line(failure)
        raise LoadFailed(error(code, words, place_in_user_code(failure)), words=words) from failure


def error_finding(failure: BaseException, code: str) -> Finding:
    """Return a finding with the whole text of an error, and the last place outside this package."""
    if isinstance(failure, MemoryError):
        return error("child-out-of-memory", "out of memory")
    codes = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(failure.__traceback__)]
    places = [(file, line) for file, line in codes if not file.startswith(_PACKAGE_DIRECTORY)]
    last = f"{os.path.basename(places[-1][0])}:{places[-1][1]}" if places else None
    return error(code, error_message(failure), place_of_syntax(failure) or last)


def error_message(failure: BaseException) -> str:
    """Return the type and the whole text of an error, in one line."""
    if missing := _missing_module(failure):
        return missing
    text, name = error_text(failure), type(failure).__name__
    return f"{name}: {text}" if text else name


def error_text(failure: BaseException) -> str:
    """Return the text of an error, in one line."""
    try:
        text = str(failure.msg if isinstance(failure, SyntaxError) else failure)
        return " ".join(text[:_SEARCHED_LENGTH].split())[:_WHOLE_TEXT]
    except BaseException as another:  # noqa: BLE001 - other people's code may raise anything
        return f"(its text raises {type(another).__name__})"


def first_line(failure: BaseException) -> str:
    """Return the type and the cause of an error, without the text that Keras and TensorFlow put around it."""
    if missing := _missing_module(failure):
        return missing
    # Keras and TensorFlow put the cause of an error after the layer or node that failed, and before advice
    # and the arguments of the call. Only the line with the cause is kept.
    lines = [line.strip() for line in _ESCAPES.sub("", str(failure)).splitlines() if line.strip()]
    named = [at for at, line in enumerate(lines) if line.startswith("[[{{node") and at]
    if named:
        lines = lines[named[0] - 1 :]  # a graph's error follows the whole call stack, before the node
    elif len(lines) > 1 and _PREAMBLE.match(lines[0]) and not lines[1].startswith("Arguments received"):
        lines = lines[1:]
    if not lines:
        return type(failure).__name__
    return shortened(f"{type(failure).__name__}: {_ADVICE.sub('', lines[0])}")


def shortened(text: str) -> str:
    """Return a line with an ellipsis if it is too long for a message."""
    return text if len(text) <= _FIRST_LINE else f"{text[: _FIRST_LINE - 1]}…"


def _missing_module(failure: BaseException) -> str | None:
    """Return the message for a module that is not installed; None for any other error."""
    if not isinstance(failure, ModuleNotFoundError) or not failure.name:
        return None
    package = failure.name.partition(".")[0]
    if package in sys.modules:
        return f"it needs the module {failure.name}, which the installed {package} lacks"
    return f"it needs the package {package}, which is not installed"


def place_of_syntax(failure: BaseException) -> str | None:
    """Return the file and line of a syntax error; None for any other error."""
    if not isinstance(failure, SyntaxError) or not failure.filename or failure.lineno is None:
        return None
    return f"{os.path.basename(failure.filename)}:{failure.lineno}"


def place_in_user_code(failure: BaseException) -> str | None:
    """Return the last line of the user's own files in a traceback, or None."""
    if place := place_of_syntax(failure):
        return place
    # ckpttool, Python and installed packages are not the user's. Names in angle brackets are of code without
    # a file, such as ``<frozen importlib._bootstrap>``.
    ours = os.path.dirname(_PACKAGE_DIRECTORY)
    foreign = (ours, sys.base_prefix, sys.prefix, *site.getsitepackages(), "<")
    frames = [
        one for one in traceback.extract_tb(failure.__traceback__) if not one.filename.startswith(foreign)
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


# Differences between a checkpoint and a model ---------------------------------------------------------


_MAX_NAMED = 20
"""Limit on findings with a name; a model of another kind differs in thousands of names."""


def missing_finding(key: str) -> Finding:
    """Return the finding for a key that only the model has."""
    return error("missing-key", "in the model, but not in the checkpoint", key)


def unexpected_finding(key: str) -> Finding:
    """Return the finding for a key that only the checkpoint has, if the framework refuses it."""
    return error("unexpected-key", "in the checkpoint, but not in the model", key)


def not_consumed_finding(key: str) -> Finding:
    """Return the finding for a key that only the checkpoint has, if the framework ignores it."""
    return error("not-consumed", "in the checkpoint, but not used by the model", key)


def shape_finding(key: str, saved: Iterable[Any], own: Iterable[Any]) -> Finding:
    """Return the finding for a key with different shapes in the checkpoint and the model."""
    shapes = f"{shape_text(saved)} in the checkpoint, {shape_text(own)} in the model"
    return error("shape-mismatch", shapes, key)


def misfit_findings(
    saved: Mapping[str, Sequence[int]],
    own: Mapping[str, Sequence[int]],
    unused: Callable[[str], Finding] = unexpected_finding,
) -> Iterator[Finding]:
    """Yield the differences between the shapes in a checkpoint and in a model, by key."""
    yield from (missing_finding(key) for key in own if key not in saved)
    yield from (unused(key) for key in saved if key not in own)
    for key, shape in own.items():
        if key in saved and list(saved[key]) != list(shape):
            yield shape_finding(key, saved[key], shape)


def require_none(findings: Iterable[Finding]) -> None:
    """Require that there is no finding.

    Raises:
        LoadFailed: With the first findings, and the number of the others.
    """
    if found := first_findings([*findings]):
        raise LoadFailed(*found)


def first_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the first findings about names, and one that counts the rest."""
    if len(findings) <= _MAX_NAMED:
        return tuple(findings)
    more = counted(len(findings) - _MAX_NAMED, "more name")
    return (*findings[:_MAX_NAMED], error(findings[-1].code, f"… and {more} differ"))


def shape_text(shape: Iterable[Any]) -> str:
    """Return the sizes of a shape, joined by the multiplication sign."""
    return "×".join(map(str, shape)) or "scalar"

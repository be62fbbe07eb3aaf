"""Options of a prediction, and the job for the child process: plain data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.options import EXPECTATION_PANEL, PREDICTION_PANEL, Reach, option, options_of
from ckpttool.core.text import nbytes
from ckpttool.storage import fs

TIMEOUT = 300.0
"""Default limit on loading and running, in seconds."""

_SHAPE = re.compile(
    r"(?:(?P<name>[^=]+)=)?(?P<shape>(?:\d{1,18}(?:,\d{1,18})*)?)(?::(?P<dtype>[a-z][a-z0-9]*))?"
    r"(?::(?P<low>-?\d+(?:\.\d+)?)\.\.(?P<high>-?\d+(?:\.\d+)?))?"
)
DTYPES = frozenset(
    {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    | {"float16", "float32", "float64", "bfloat16", "complex64", "complex128", "bool", "string"}
)


class InputSpec(NamedTuple):
    """One input of a model.

    Attributes:
        name: Name in the model; None for an input by position.
        shape: Sizes, outermost axis first; None for an unknown size.
        dtype: Name of a NumPy dtype, ``bfloat16`` or ``string``.
        low: Lower bound of generated values, inclusive; None for the default of the dtype.
        high: Upper bound of generated values, exclusive; None for the default of the dtype.
        is_sequence: Whether an unknown first size is the length of a sequence, not the batch size.
    """

    name: str | None
    shape: tuple[int | None, ...]
    dtype: str = "float32"
    low: float | None = None
    high: float | None = None
    is_sequence: bool = False


def parse_input(text: str) -> InputSpec:
    """Parse an input of the command line: ``[NAME=]1,3,224,224[:float32][:0..1]``.

    Raises:
        UsageError: It is invalid.
    """
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"invalid input shape: {text!r} (like 1,3,224,224 or ids=1,16:int64 or ids=1,16:int64:0..100)"
        )
    dtype = found["dtype"] or "float32"
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} in {text!r}: choose from {', '.join(sorted(DTYPES))}")
    shape = tuple(int(size) for size in found["shape"].split(",") if size)
    low, high = (None if found[side] is None else float(found[side]) for side in ("low", "high"))
    if low is not None and high is not None and low >= high:
        raise UsageError(f"empty range {low:g}..{high:g} in {text!r}")
    _require_range(text, dtype, low, high)
    return InputSpec(found["name"], shape, dtype, low, high)


def _require_range(text: str, dtype: str, low: float | None, high: float | None) -> None:
    if low is None or high is None:
        return
    kind, bits = dtype.rstrip("0123456789"), int("0" + dtype.lstrip("abcdefghijklmnopqrstuvwxyz"))
    if kind not in ("int", "uint"):
        if dtype in ("bool", "string"):
            raise UsageError(f"a {dtype} has no range, as in {text!r}")
        return
    # The upper bound is exclusive, so it may be one more than the largest integer of the dtype.
    first = -(2 ** (bits - 1)) if kind == "int" else 0
    if low != int(low) or high != int(high) or low < first or high > first + 2**bits:
        raise UsageError(f"not a range of {dtype}: {text!r}")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"invalid JSON: {text!r:.80} ({failure})") from failure
    if not isinstance(value, dict):
        raise UsageError(f'{text!r:.80} is not a JSON object (like {{"depth": 18}})')
    return value


def _memory(text: str) -> int:
    size = nbytes(text) if text.endswith("B") else 0
    if not size:
        raise UsageError(f"invalid size: {text!r}")
    return size


def _absolute_reference(reference: str, directory: str) -> str:
    """Return ``file.py:Name`` with the file's absolute path; a module's name is unchanged."""
    place, separator, name = reference.rpartition(":")
    return f"{_absolute_path(place, directory)}{separator}{name}" if place.endswith(".py") else reference


def _absolute_path(path: str, directory: str) -> str:
    return os.path.abspath(os.path.join(directory, path))


_prediction = partial(option, panel=PREDICTION_PANEL)
_harmless = partial(_prediction, reach=Reach.HARMLESS)
_limit = partial(option, panel=EXPECTATION_PANEL, reach=Reach.HARMLESS, metavar="X", minimum=0)
_file = partial(option, panel=EXPECTATION_PANEL, reach=Reach.BELOW, metavar="FILE", resolve=_absolute_path)
_reference = partial(
    _prediction,
    reach=Reach.CODE,
    metavar="REF",
    expected="package.module:Name or file.py:Name",
    schema={"type": "string", "pattern": ".:[^:]+$"},
    resolve=_absolute_reference,
)
_arguments = partial(_prediction, reach=Reach.CODE, metavar="JSON", parse=_json_object, default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """Options of a prediction, one an attribute: the model, its inputs, and the expected outputs.

    ``memory`` is in bytes. The default tolerances depend on the dtype of each output.
    """

    model: str | None = _reference(
        "--model",
        help="Build the model with this class or function: pkg.module:Name or file.py:Name.",
        example="models.py:Net",
    )
    model_args: Mapping[str, Any] = _arguments(
        "--model-args", help="Pass these keyword arguments to --model.", example={"depth": 18}
    )
    optimizer: str | None = _reference(
        "--optimizer",
        help="Also load the state of this optimizer: torch.optim:Adam.",
        example="torch.optim:Adam",
    )
    optimizer_args: Mapping[str, Any] = _arguments(
        "--optimizer-args", help="Pass these keyword arguments to --optimizer.", example={"lr": 0.001}
    )
    state_key: str | None = _harmless(
        "--state-key",
        metavar="KEY",
        help="Load the state dict with this key, if there are several.",
        example="model",
        schema={"type": "string"},
    )
    input: str | None = _file(
        "--input",
        help="Run on these inputs: an .npz with named arrays, or an .npy.",
        example="inputs.npz",
        panel=PREDICTION_PANEL,
    )
    input_shapes: tuple[InputSpec, ...] = _harmless(
        "--input-shape",
        metavar="[NAME=]SHAPE",
        help="Generate an input: 1,3,224,224:float32.",
        parse=parse_input,
        example=["1,3,224,224"],
        default=(),
    )
    signature: str | None = _harmless(
        "--signature",
        metavar="NAME",
        help="Run this signature of a SavedModel. [default: serving_default]",
        example="serving_default",
    )
    batch_size: int | None = _harmless(
        "--batch-size",
        metavar="N",
        help="Generate N rows of each input. [default: 3 or fewer]",
        example=8,
        minimum=1,
    )
    seed: int = _harmless(
        "--seed", metavar="N", help="Seed the generated inputs with N. [default: 0]", minimum=0, default=0
    )
    record: str | None = _file(
        "--record", help="Record inputs and outputs in this .npz file.", reach=None, is_output=True
    )
    expect: str | None = _file(
        "--expect", help="Compare the outputs with this recording.", example="golden.npz"
    )
    rtol: float | None = _limit(
        "--rtol", help="Set the relative tolerance. [default: by dtype]", example=1e-4
    )
    atol: float | None = _limit(
        "--atol", help="Set the absolute tolerance. [default: by dtype and size]", example=1e-6
    )
    labels: str | None = _file(
        "--labels", help="Compare the first output for --input with these values.", example="labels.npy"
    )
    min_accuracy: float | None = _limit(
        "--min-accuracy",
        help="Require at least this share of correct answers, 0 to 1.",
        example=0.9,
        maximum=1,
    )
    max_error: float | None = _limit(
        "--max-error", help="Allow at most this mean absolute error.", example=0.1
    )
    resume_step: bool = _prediction(
        "--resume-step",
        help="Run one training step: forward, backward, optimizer.",
        reach=Reach.CODE,
        default=False,
    )
    trust: bool = _prediction("--trust", help="Allow code in the checkpoint to run.", default=False)
    timeout: float = _harmless(
        "--timeout",
        metavar="S",
        help="Stop after S seconds. [default: 300]",
        expected="a number of seconds above 0",
        schema={"type": "number", "exclusiveMinimum": 0},
        default=TIMEOUT,
    )
    memory: int | None = _harmless(
        "--memory",
        metavar="SIZE",
        help="Limit the memory to SIZE, such as 8GB.",
        parse=_memory,
        expected="a size like 512MB, 8GB or 8GiB",
        schema={"type": ["string", "integer"], "pattern": "B$", "minimum": 1},
        unit="B",
        example="8GB",
    )

    def __post_init__(self) -> None:
        """Require that the options are consistent.

        Raises:
            UsageError: They are not.
        """
        given = [name for name, value in (("input", self.input), ("input-shape", self.input_shapes)) if value]
        if len(given) > 1:
            raise UsageError("--input and --input-shape can't be combined")
        judged = self.min_accuracy is not None or self.max_error is not None
        if judged != (self.labels is not None):
            raise UsageError("--labels needs --min-accuracy or --max-error, and these need --labels")
        if self.labels is not None and self.input is None:
            raise UsageError("--labels requires --input")
        names = [spec.name for spec in self.input_shapes if spec.name is not None]
        if len(set(names)) < len(names):
            raise UsageError("--input-shape: two inputs have the same name")
        if not self.timeout > 0:
            raise UsageError("--timeout must be more than 0 seconds")
        if self.memory is not None and not Path("/proc/self/statm").exists():
            raise UsageError("--memory requires Linux: this system doesn't report the memory of a process")
        for name, row in options_of(PredictionRequest).items():
            value = getattr(self, name)
            if row.minimum is not None and value is not None and not value >= row.minimum:
                raise UsageError(f"{row.flags[0]} must not be below {row.minimum}")
        if self.min_accuracy is not None and self.min_accuracy > 1:
            raise UsageError("--min-accuracy is a share, 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionJob:
    """Order to the child: a path, and the loader of a framework.

    Attributes:
        path: File, directory or prefix to load.
        framework: Key of ``run.FRAMEWORKS``.
        loader: Key of the ``LOADERS`` of that framework's adapter.
        request: Options of the user.
        options: Arguments of the loader, from our own reading of the checkpoint.
    """

    path: str
    framework: str
    loader: str
    request: PredictionRequest
    options: Mapping[str, Any] = field(default_factory=dict)


_PATH_OPTIONS = ("directory", "file", "files", "optimizer_file", "program")
"""Options of a job that are paths or lists of paths."""


def with_absolute_paths(job: PredictionJob) -> PredictionJob:
    """Return a job with absolute paths, since the model's code may change the working directory."""
    request, options = job.request, dict(job.options)
    changed: dict[str, Any] = {
        name: row.resolve(path, os.curdir)
        for name, row in options_of(PredictionRequest).items()
        if row.resolve is not None and (path := getattr(request, name))
    }
    for name in _PATH_OPTIONS:
        if name in options:
            paths = options[name]
            options[name] = fs.abspath(paths) if isinstance(paths, str) else [*map(fs.abspath, paths)]
    return replace(job, path=fs.abspath(job.path), options=options, request=replace(request, **changed))


def to_json(job: PredictionJob) -> dict[str, Any]:
    """Return a job as a JSON object."""
    return asdict(job)


def from_json(data: Mapping[str, Any]) -> PredictionJob:
    """Return the job of a JSON object of ``to_json``."""
    request = dict(data["request"])
    request["input_shapes"] = tuple(
        InputSpec(name, tuple(shape), *rest) for name, shape, *rest in request["input_shapes"]
    )
    return PredictionJob(**{**data, "request": PredictionRequest(**request)})

"""The options of ``verify --predict``, and the wishes that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from ckpttool.cli.options import is_given


def _option(name: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, **more)


Predict = Annotated[
    bool, typer.Option("--predict", help="Load and run it with its framework, in a process of its own.")
]
Model = Annotated[
    str | None, _option("--model", "REF", "The model's class or factory: pkg.module:Name or file.py:Name.")
]
ModelArgs = Annotated[str | None, _option("--model-args", "JSON", "Keyword arguments for --model.")]
Optimizer = Annotated[
    str | None, _option("--optimizer", "REF", "Also load the state of this optimizer: torch.optim:Adam.")
]
OptimizerArgs = Annotated[
    str | None, _option("--optimizer-args", "JSON", "Keyword arguments for --optimizer.")
]
StateKey = Annotated[
    str | None, _option("--state-key", "KEY", "Key of the state dict, if there are several.")
]
Input = Annotated[
    str | None, _option("--input", "FILE", "Inputs to run on: an .npz with named arrays, or an .npy.")
]
InputShapes = Annotated[
    list[str] | None,
    _option("--input-shape", "[NAME=]SHAPE", "Generate an input: 1,3,224,224:float32. May be repeated."),
]
Signature = Annotated[
    str | None, _option("--signature", "NAME", "Signature of a SavedModel. [default: serving_default]")
]
BatchSize = Annotated[
    int | None, _option("--batch-size", "N", "Rows of a generated input. [default: 3 or fewer]", min=1)
]
Seed = Annotated[int | None, _option("--seed", "N", "Seed for generated inputs. [default: 0]", min=0)]
Expect = Annotated[str | None, _option("--expect", "FILE", "Compare the outputs with this recording.")]
Record = Annotated[str | None, _option("--record", "FILE", "Record inputs and outputs in this .npz file.")]
Rtol = Annotated[float | None, _option("--rtol", "X", "Relative tolerance. [default: by dtype]", min=0)]
Atol = Annotated[
    float | None, _option("--atol", "X", "Absolute tolerance. [default: by dtype and size]", min=0)
]
Labels = Annotated[
    str | None, _option("--labels", "FILE", "Expected values of the first output for --input.")
]
MinAccuracy = Annotated[
    float | None,
    _option("--min-accuracy", "X", "Require at least this share of correct answers.", min=0, max=1),
]
MaxError = Annotated[
    float | None, _option("--max-error", "X", "Allow at most this mean absolute error.", min=0)
]
ResumeStep = Annotated[
    bool, typer.Option("--resume-step", help="Run one training step: forward, backward, optimizer.")
]
Trust = Annotated[bool, typer.Option("--trust", help="Allow code in the checkpoint to run.")]
Timeout = Annotated[float | None, _option("--timeout", "S", "Time limit in seconds. [default: 300]")]
Memory = Annotated[str | None, _option("--memory", "SIZE", "Memory limit, such as 8GB.")]


def read_predict_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a ``PredictionRequest`` that the command line gave.

    Args:
        parameters: All options by name; those that were not given are None, False or empty.

    Raises:
        UsageError: A value is none that its option can have.
    """
    given = {name: parameters[name] for name in _WISHES if is_given(parameters.get(name))}
    return {name: _READ[name](value) if name in _READ else value for name, value in given.items()}


def flag_of(wish: str) -> str:
    """Return the option that gives an attribute of a ``PredictionRequest``."""
    return "--input-shape" if wish == "input_shapes" else f"--{wish.replace('_', '-')}"


def _object(text: str) -> dict[str, Any]:
    import json

    from ckpttool.core.errors import UsageError

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"no JSON: {text!r:.80} ({failure})") from failure
    if not isinstance(value, dict):
        raise UsageError(f'{text!r:.80} is no JSON object (like {{"depth": 18}})')
    return value


def _shapes(texts: list[str]) -> tuple[Any, ...]:
    from ckpttool.predict.request import parse_input

    return tuple(map(parse_input, texts))


def _bytes(text: str) -> int:
    from ckpttool.cli.config import WrongValue, parse_bytes
    from ckpttool.core.errors import UsageError

    try:
        return parse_bytes(text, "--memory")
    except WrongValue as failure:
        raise UsageError(str(failure)) from failure


_WISHES = (
    "model",
    "model_args",
    "optimizer",
    "optimizer_args",
    "state_key",
    "input",
    "input_shapes",
    "signature",
    "batch_size",
    "seed",
    "expect",
    "record",
    "rtol",
    "atol",
    "labels",
    "min_accuracy",
    "max_error",
    "resume_step",
    "trust",
    "timeout",
    "memory",
)
"""Options that are attributes of a ``PredictionRequest``, named alike; to import it would slow each start."""
_READ: Mapping[str, Callable[[Any], Any]] = {
    "model_args": _object,
    "optimizer_args": _object,
    "input_shapes": _shapes,
    "memory": _bytes,
}
"""What reads those whose text is not the value yet."""

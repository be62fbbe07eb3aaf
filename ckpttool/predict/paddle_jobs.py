"""What Paddle is told: the program and the files beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CheckpointError
from ckpttool.formats import open_checkpoint
from ckpttool.predict.jobs import NotPredictable, job, optimizer_path, require_model, state_path
from ckpttool.predict.request import Job, Request
from ckpttool.report import has_errors


def fluid_job(checkpoint: Checkpoint, request: Request) -> Job:
    if checkpoint.variant != "inference":
        raise NotPredictable("these are variables without a program; only a saved inference model can be run")
    program = os.path.join(checkpoint.path, "__model__")
    held = [file.path for file in checkpoint.files if os.path.basename(file.path) != "__model__"]
    names = {tensor.path[0] for tensor in checkpoint.tensors}
    combined = os.path.basename(held[0]) if len(held) == 1 else None
    combined = None if combined in names else combined  # a variable's own file has its name
    return job(
        checkpoint,
        request,
        "paddle",
        "inference",
        program=program,
        directory=checkpoint.path,
        combined=combined,
    )


def paddle_job(checkpoint: Checkpoint, request: Request) -> Job:
    if checkpoint.variant == "tensors":
        raise NotPredictable("there is no program that says what the tensors are for")
    if checkpoint.variant == "inference":
        return _paddle_inference(checkpoint, request)
    if checkpoint.variant == "training" and request.model is None:
        raise NotPredictable("a program that is trained doesn't say what it gives: save_inference_model does")
    require_model("a state dict", request)
    pickles = [
        file.path for file in checkpoint.files if not file.path.endswith((".pdmodel", ".json", ".pdopt"))
    ]
    if not pickles:
        raise NotPredictable("an optimizer's state can't be run; --predict goes with its .pdparams")
    options = _paddle_optimizer(checkpoint, os.path.splitext(pickles[0])[0] + ".pdopt", request)
    place = () if checkpoint.variant == "training" else state_path(checkpoint, request)
    return job(checkpoint, request, "paddle", "parameters", file=pickles[0], state_path=place, **options)


def _paddle_optimizer(checkpoint: Checkpoint, beside: str, request: Request) -> Mapping[str, Any]:
    """Return where the optimizer's state lies; a file beside was not checked yet."""
    if request.optimizer is None or not os.path.isfile(beside):
        return optimizer_path(checkpoint)
    name = os.path.basename(beside)
    try:
        with open_checkpoint(beside) as state:
            if has_errors(state.findings):
                raise NotPredictable(f"{name} is damaged")
            if has_errors(state.safety) and not request.trust:
                raise NotPredictable(f"loading {name} could run code: --trust allows it")
    except CheckpointError as failure:
        raise NotPredictable(f"{name} can't be read: {failure.reason}") from failure
    return {"optimizer_file": beside}


def _paddle_inference(checkpoint: Checkpoint, request: Request) -> Job:
    held = [file.path for file in checkpoint.files if file.path.endswith(".pdiparams")]
    program = next(file.path for file in checkpoint.files if file.path not in held)
    combined = os.path.basename(held[0]) if held else None
    directory = os.path.dirname(program) or os.curdir
    return job(
        checkpoint, request, "paddle", "inference", program=program, directory=directory, combined=combined
    )

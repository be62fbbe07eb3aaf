"""Which framework loads which checkpoint: one function a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpttool.checkpoint import Checkpoint
from ckpttool.predict.jobs import NotPredictable
from ckpttool.predict.paddle_jobs import fluid_job, paddle_job
from ckpttool.predict.request import Job, Request
from ckpttool.predict.tensorflow_jobs import keras_h5_job, keras_job, savedmodel_job, tensorflow_job
from ckpttool.predict.torch_jobs import export_job, torch_job, torchscript_job


def job_for(checkpoint: Checkpoint, request: Request) -> Job:
    """Return what the child is to do with a checkpoint.

    Raises:
        NotPredictable: A wish is missing, or this format can't be run.
    """
    choose = _CHOICES.get(checkpoint.format)
    if choose is None:
        raise NotPredictable(f"no framework runs {checkpoint.format}")
    return choose(checkpoint, request)


_CHOICES: Mapping[str, Callable[[Checkpoint, Request], Job]] = {
    "pytorch": torch_job,
    "pickle": torch_job,
    "torch-dcp": torch_job,
    "safetensors": torch_job,
    "torchscript": torchscript_job,
    "torch-export": export_job,
    "savedmodel": savedmodel_job,
    "tensorflow": tensorflow_job,
    "keras": keras_job,
    "keras-h5": keras_h5_job,
    "fluid": fluid_job,
    "paddle": paddle_job,
}

"""What TensorFlow and Keras are told."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.predict.jobs import job, require_model
from ckpttool.predict.request import Job, Request
from ckpttool.tensor import Role

_REFERENCES = frozenset({"Variable", "VariableV2"})
"""What makes variables that only a session of TensorFlow 1 has wherever they may be used."""


def savedmodel_job(checkpoint: Checkpoint, request: Request) -> Job:
    graphs: Any = checkpoint.metadata["meta_graphs"]
    to_serve = [one for one in graphs if len(graphs) == 1 or one["tags"] == ["serve"]]
    served: Mapping[str, Any] = to_serve[0] if to_serve else {}
    if _REFERENCES.isdisjoint(served.get("ops", ())):
        return job(checkpoint, request, "tensorflow", "savedmodel")
    options = {"tags": served["tags"], "has_init": served["init_op"]}
    return job(checkpoint, request, "tensorflow", "session", **options)


def tensorflow_job(checkpoint: Checkpoint, request: Request) -> Job:
    require_model("a checkpoint of variables", request)
    return job(checkpoint, request, "tensorflow", "variables", names=_tensorflow_names(checkpoint))


def _tensorflow_names(checkpoint: Checkpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Return readable names and roles by the raw names in the file."""
    keys = {tensor.key or "/".join(map(str, tensor.path)): tensor for tensor in checkpoint.tensors}
    return {key: one.name for key, one in keys.items()}, {key: one.role.value for key, one in keys.items()}


def keras_job(checkpoint: Checkpoint, request: Request) -> Job:
    return job(checkpoint, request, _keras_package(checkpoint), "model", **_keras_counts(checkpoint))


def keras_h5_job(checkpoint: Checkpoint, request: Request) -> Job:
    if checkpoint.variant == "model":
        return keras_job(checkpoint, request)
    require_model("a file of weights", request)
    return job(checkpoint, request, _keras_package(checkpoint), "weights", **_keras_counts(checkpoint))


def _keras_counts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return how many tensors are a model's, and how many an optimizer's."""
    roles = [tensor.role for tensor in checkpoint.tensors]
    return {"weights": roles.count(Role.WEIGHTS), "optimizer_tensors": roles.count(Role.OPTIMIZER)}


def _keras_package(checkpoint: Checkpoint) -> str:
    """Return which Keras wrote it: version 2 lives on as tf_keras."""
    version = checkpoint.producer.version or ""
    return "tf_keras" if version.startswith("2.") and find_spec("tf_keras") else "keras"

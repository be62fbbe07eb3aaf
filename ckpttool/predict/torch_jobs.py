"""What PyTorch and transformers are told: which reader, which files, and where the state dict lies."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.predict.jobs import NotPredictable, job, optimizer_path, require_model, state_path
from ckpttool.predict.request import Job, Request
from ckpttool.tensor import Path, Role

_MODEL_STATES = "_model_states.pt"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def torch_job(checkpoint: Checkpoint, request: Request) -> Job:
    """A state dict, alone or in a dict; whole modules run code and need trust."""
    if checkpoint.variant == "deepspeed":
        return _deepspeed(checkpoint, request)
    directory = _pretrained_directory(checkpoint)
    if request.model is None and directory is not None:
        return job(
            checkpoint,
            request,
            "transformers",
            "pretrained",
            directory=directory,
            **_files(checkpoint),
            **optimizer_path(checkpoint),
        )
    place = state_path(checkpoint, request)
    if _has_module_at(checkpoint.metadata, place):
        if not request.trust:
            raise NotPredictable("loading a whole-model pickle runs its code: --trust allows it")
        more = optimizer_path(checkpoint)
        return job(checkpoint, request, "torch", "module", state_path=place, **_files(checkpoint), **more)
    require_model("a state dict", request)
    options = {"state_path": place, "reader": _reader(checkpoint, request), **_files(checkpoint)}
    return job(checkpoint, request, "torch", "state", **options, **optimizer_path(checkpoint))


def _reader(checkpoint: Checkpoint, request: Request) -> str:
    """Return which reader of ``torch_content`` is for a checkpoint: ours where PyTorch can't or unpickles."""
    if checkpoint.format == "torch-dcp":
        is_dcp = checkpoint.variant is None and os.path.isfile(os.path.join(checkpoint.path, ".metadata"))
        return "dcp" if is_dcp and request.trust else "ckpttool"
    if checkpoint.format == "pickle" or checkpoint.variant == "tar":
        return "ckpttool"
    if any(path.endswith(".distcp") for path in _files(checkpoint)["files"]):  # inside a Trainer's directory
        return "ckpttool"
    return "torch"


def _files(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the files with the weights, and whether their values lie there as they are in memory."""
    weights = [tensor for tensor in checkpoint.tensors if tensor.role is Role.WEIGHTS] or checkpoint.tensors
    places = [tensor.storage or tensor.extent for tensor in weights]
    files = list(dict.fromkeys(place.file for place in places if place is not None))
    if not files:
        files = [one.path for one in checkpoint.files if one.path.endswith(_WEIGHTS)] or [checkpoint.path]
    in_place = checkpoint.variant not in ("legacy", "tar") and all(
        (tensor.storage or tensor.extent) is not None and tensor.byteorder == sys.byteorder
        for tensor in checkpoint.tensors
        if tensor.size
    )
    return {"files": files, "in_place": in_place}


def _deepspeed(checkpoint: Checkpoint, request: Request) -> Job:
    """What DeepSpeed wrote, where one file has the whole model."""
    names = {os.path.basename(one.path): one.path for one in checkpoint.files}
    if any(name.startswith("layer_") for name in names):
        raise NotPredictable(
            "each layer of the model has a file of its own: no module takes them as they are"
        )
    states = [
        path for name, path in names.items() if name.startswith("mp_rank_") and name.endswith(_MODEL_STATES)
    ]
    if len(states) != 1:
        told = "several ranks have parts of the model: zero_to_fp32.py of DeepSpeed makes one file of them"
        raise NotPredictable(told)
    require_model("a state dict", request)
    options = {"files": states, "in_place": _files(checkpoint)["in_place"], "reader": "torch"}
    if checkpoint.metadata.get("optimizer") is not None:
        options["optimizer_key"] = "optimizer"
    else:
        options["optimizer_lacking"] = "DeepSpeed divided the optimizer's state among its ranks"
    return job(checkpoint, request, "torch", "state", state_path=("module",), **options)


def _pretrained_directory(checkpoint: Checkpoint) -> str | None:
    """Return the directory that transformers could load, or None."""
    if checkpoint.format not in ("pytorch", "safetensors"):
        return None
    path = checkpoint.path
    directory = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
    names = [os.path.basename(one.path) for one in checkpoint.files]
    is_named = any(name.startswith(("model.safetensors", "model-", "pytorch_model")) for name in names)
    return directory if is_named and os.path.isfile(os.path.join(directory, "config.json")) else None


def _has_module_at(metadata: object, place: Path) -> bool:
    for key in place:
        metadata = metadata.get(str(key)) if isinstance(metadata, Mapping) else None
    return isinstance(metadata, Mapping) and {"<class>", "modules"} <= metadata.keys()


def torchscript_job(checkpoint: Checkpoint, request: Request) -> Job:
    if checkpoint.variant == "lite":
        raise NotPredictable("a lite interpreter's file runs on mobile runtimes alone")
    return job(checkpoint, request, "torch", "torchscript")


def export_job(checkpoint: Checkpoint, request: Request) -> Job:
    return job(checkpoint, request, "torch", "export")

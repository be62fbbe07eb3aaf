"""Choice of the framework and the loader for a checkpoint: one function a format.

It runs in the command's own process, and imports neither NumPy nor a framework.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import has_errors, is_safe
from ckpttool.core.tensor import Path, Role
from ckpttool.formats import open_checkpoint
from ckpttool.predict.request import PredictionJob, PredictionRequest, with_absolute_paths

Choice: TypeAlias = "tuple[str, str, Mapping[str, Any]]"
"""Name of the framework, name of the loader in its adapter, and arguments for it."""


class NotPredictable(Exception):
    """A checkpoint can't be run as requested; the text is the reason."""


def job_for(checkpoint: Checkpoint, request: PredictionRequest) -> PredictionJob:
    """Return the child's job for a checkpoint.

    Raises:
        NotPredictable: No framework can run it as requested.
    """
    choose = _CHOICES.get(checkpoint.format)
    if choose is None:
        raise NotPredictable(f"no framework runs {checkpoint.format}")
    framework, loader, options = choose(checkpoint, request)
    options = {**options, "format": checkpoint.format, "variant": checkpoint.variant}
    job = PredictionJob(
        path=checkpoint.path, framework=framework, loader=loader, options=options, request=request
    )
    return with_absolute_paths(job)


# PyTorch and transformers ---------------------------------------------------------------------------


_MODEL_STATES = "_model_states.pt"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def _torch_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    """Return the loader for a state dict, alone or in a dict, or for a whole module, which runs code."""
    if checkpoint.variant == "deepspeed":
        return _deepspeed(checkpoint, request)
    files = {**_files(checkpoint), **optimizer_path(checkpoint)}
    directory = _pretrained_directory(checkpoint)
    if request.model is None and directory is not None:
        return "transformers", "pretrained", {**files, "directory": directory}
    place = state_path(checkpoint, request)
    content: Any = checkpoint.metadata
    for key in place:
        content = content.get(str(key)) if isinstance(content, Mapping) else None
    if isinstance(content, Mapping) and {"<class>", "modules"} <= content.keys():  # a whole module
        if not request.trust:
            raise NotPredictable("loading a whole-model pickle runs its code: --trust allows it")
        return "torch", "module", {**files, "state_path": place}
    require_model("a state dict", request)
    return "torch", "state", {**files, "state_path": place, "reader": _reader(checkpoint, request)}


def _reader(checkpoint: Checkpoint, request: PredictionRequest) -> str:
    """Return the reader of ``torch_state`` for a checkpoint."""
    # ``torch.load`` doesn't read plain pickles, and reads tar files only by running their code. PyTorch
    # unpickles the ``.metadata`` of a distributed checkpoint, which takes ``--trust``. Otherwise our own
    # formats read these.
    if checkpoint.format == "torch-dcp":
        is_dcp = checkpoint.variant is None and os.path.isfile(os.path.join(checkpoint.path, ".metadata"))
        return "dcp" if is_dcp and request.trust else "ckpttool"
    if checkpoint.format == "pickle" or checkpoint.variant == "tar":
        return "ckpttool"
    if any(path.endswith(".distcp") for path in _files(checkpoint)["files"]):  # inside a Trainer's directory
        return "ckpttool"
    return "torch"


def _files(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the files with the weights, and whether they hold the values as in memory, to be mapped."""
    # Values can be mapped only if they are in the file as in memory: not compressed, and in the byte order of
    # this machine. The legacy and tar layouts can't be mapped at all.
    weights = [tensor for tensor in checkpoint.tensors if tensor.role is Role.WEIGHTS] or checkpoint.tensors
    places = [tensor.storage or tensor.extent for tensor in weights]
    files = list(dict.fromkeys(place.file for place in places if place is not None))
    if not files:
        files = [file.path for file in checkpoint.files if file.path.endswith(_WEIGHTS)] or [checkpoint.path]
    in_place = checkpoint.variant not in ("legacy", "tar") and all(
        (tensor.storage or tensor.extent) is not None and tensor.byteorder == sys.byteorder
        for tensor in checkpoint.tensors
        if tensor.size
    )
    return {"files": files, "in_place": in_place}


def _deepspeed(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    """Return the loader for a DeepSpeed checkpoint with the whole model in one file."""
    names = {os.path.basename(file.path): file.path for file in checkpoint.files}
    if any(name.startswith("layer_") for name in names):
        raise NotPredictable("each layer of the model is in a separate file, and no module loads such files")
    states = [
        path for name, path in names.items() if name.startswith("mp_rank_") and name.endswith(_MODEL_STATES)
    ]
    if len(states) != 1:
        raise NotPredictable(
            "the model is split across ranks: merge the files with DeepSpeed's zero_to_fp32.py"
        )
    require_model("a state dict", request)
    in_place = _files(checkpoint)["in_place"]
    options = {"files": states, "in_place": in_place, "reader": "torch", "state_path": ("module",)}
    if checkpoint.metadata.get("optimizer") is not None:
        options["optimizer_key"] = "optimizer"
    else:
        options["optimizer_lacking"] = "DeepSpeed split the optimizer's state across ranks"
    return "torch", "state", options


def _pretrained_directory(checkpoint: Checkpoint) -> str | None:
    """Return the directory if transformers can load it, or None."""
    if checkpoint.format not in ("pytorch", "safetensors"):
        return None
    path = checkpoint.path
    directory = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
    names = [os.path.basename(file.path) for file in checkpoint.files]
    is_named = any(name.startswith(("model.safetensors", "model-", "pytorch_model")) for name in names)
    return directory if is_named and os.path.isfile(os.path.join(directory, "config.json")) else None


def _torchscript_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    if checkpoint.variant == "lite":
        raise NotPredictable("a lite interpreter's file runs only on mobile runtimes")
    return "torch", "torchscript", {}


def _export_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    return "torch", "export", {}


# TensorFlow and Keras -------------------------------------------------------------------------------


_REFERENCE_VARIABLES = frozenset({"Variable", "VariableV2"})
"""Operations for reference variables, which work only in a session of TensorFlow 1."""


def _savedmodel_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    graphs: Any = checkpoint.metadata["meta_graphs"]
    to_serve = [one for one in graphs if len(graphs) == 1 or one["tags"] == ["serve"]]
    served: Mapping[str, Any] = to_serve[0] if to_serve else {}
    if _REFERENCE_VARIABLES.isdisjoint(served.get("ops", ())):
        return "tensorflow", "savedmodel", {}
    return "tensorflow", "session", {"tags": served["tags"], "has_init": served["init_op"]}


def _tensorflow_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    require_model("a checkpoint of variables", request)
    keys = {tensor.key or "/".join(map(str, tensor.path)): tensor for tensor in checkpoint.tensors}
    names = {key: tensor.name for key, tensor in keys.items()}
    roles = {key: tensor.role.value for key, tensor in keys.items()}
    return "tensorflow", "variables", {"names": (names, roles)}


def _keras_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    return _keras_package(checkpoint), "model", _keras_counts(checkpoint)


def _keras_h5_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    if checkpoint.variant == "model":
        return _keras_choice(checkpoint, request)
    require_model("a file of weights", request)
    return _keras_package(checkpoint), "weights", _keras_counts(checkpoint)


def _keras_counts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the numbers of weights and of an optimizer's tensors."""
    roles = [tensor.role for tensor in checkpoint.tensors]
    return {"weights": roles.count(Role.WEIGHTS), "optimizer_tensors": roles.count(Role.OPTIMIZER)}


def _keras_package(checkpoint: Checkpoint) -> str:
    """Return the Keras package for a checkpoint: tf_keras for files of version 2."""
    version = checkpoint.producer.version or ""
    return "tf_keras" if version.startswith("2.") and find_spec("tf_keras") else "keras"


# Paddle ---------------------------------------------------------------------------------------------


def _fluid_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    if checkpoint.variant != "inference":
        raise NotPredictable("it has variables, but no program; only a saved inference model can be run")
    program = os.path.join(checkpoint.path, "__model__")
    weight_files = [file.path for file in checkpoint.files if os.path.basename(file.path) != "__model__"]
    names = {tensor.path[0] for tensor in checkpoint.tensors}
    combined = os.path.basename(weight_files[0]) if len(weight_files) == 1 else None
    combined = None if combined in names else combined  # a variable's own file has its name
    options = {"program": program, "directory": checkpoint.path, "combined": combined}
    return "paddle", "inference", options


def _paddle_choice(checkpoint: Checkpoint, request: PredictionRequest) -> Choice:
    if checkpoint.variant == "tensors":
        raise NotPredictable("it has tensors, but no program")
    if checkpoint.variant == "inference":
        weight_files = [file.path for file in checkpoint.files if file.path.endswith(".pdiparams")]
        program = next(file.path for file in checkpoint.files if file.path not in weight_files)
        combined = os.path.basename(weight_files[0]) if weight_files else None
        directory = os.path.dirname(program) or os.curdir
        return "paddle", "inference", {"program": program, "directory": directory, "combined": combined}
    if checkpoint.variant == "training" and request.model is None:
        raise NotPredictable(
            "a training program doesn't declare its outputs: save it with save_inference_model"
        )
    require_model("a state dict", request)
    pickles = [
        file.path for file in checkpoint.files if not file.path.endswith((".pdmodel", ".json", ".pdopt"))
    ]
    if not pickles:
        raise NotPredictable("an optimizer's state can't be run; use --predict with its .pdparams")
    optimizer = _paddle_optimizer(checkpoint, os.path.splitext(pickles[0])[0] + ".pdopt", request)
    place = () if checkpoint.variant == "training" else state_path(checkpoint, request)
    return "paddle", "parameters", {**optimizer, "file": pickles[0], "state_path": place}


def _paddle_optimizer(checkpoint: Checkpoint, pdopt: str, request: PredictionRequest) -> Mapping[str, Any]:
    """Return the place of the optimizer's state; a separate file is checked first."""
    if request.optimizer is None or not os.path.isfile(pdopt):
        return optimizer_path(checkpoint)
    name = os.path.basename(pdopt)
    try:
        with open_checkpoint(pdopt) as state:
            if has_errors(state.findings):
                raise NotPredictable(f"{name} is damaged")
            if not (request.trust or is_safe(state.safety)):
                raise NotPredictable(f"loading {name} could run code: --trust allows it")
    except CheckpointError as failure:
        raise NotPredictable(f"{name} can't be read: {failure.reason}") from failure
    return {"optimizer_file": pdopt}


# Shared by all frameworks ---------------------------------------------------------------------------


def require_model(content: str, request: PredictionRequest) -> None:
    """Require an architecture from the user, since the checkpoint has none."""
    if request.model is None:
        raise NotPredictable(f"{content} doesn't contain its model; name the class with --model file.py:Name")


def state_path(checkpoint: Checkpoint, request: PredictionRequest) -> Path:
    """Return the keys of the model's state dict, which must be the only one or the user's choice."""
    if request.state_key is not None:
        return tuple(request.state_key.split(".")) if request.state_key else ()
    places = list(dict.fromkeys(_state_dict_of(t.path) for t in checkpoint.tensors if t.role is Role.WEIGHTS))
    if not places:
        others = (t for t in checkpoint.tensors if t.role is not Role.OPTIMIZER)
        places = list(dict.fromkeys(_state_dict_of(tensor.path) for tensor in others))
    if not places:
        raise NotPredictable("it has no weights")
    if len(places) > 1:
        names = ", ".join(".".join(map(str, place)) or "the root" for place in places[:5])
        raise NotPredictable(f"several state dicts: {names}; choose one with --state-key")
    return places[0]


def _state_dict_of(path: Path) -> Path:
    """Return the keys of the state dict of a tensor, which may be nested deeper in a module's extra state."""
    for at, key in enumerate(path[:-1]):
        if str(key).endswith(("_extra_state", "_packed_params")):
            return path[:at]
    return path[:-1]


def optimizer_path(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the key of the optimizer's state if there is only one, and its file if it has its own."""
    # The Trainer and Accelerate save the optimizer to its own file. In other checkpoints its tensors have a
    # top-level key; an optimizer without state has only ``param_groups`` there.
    if checkpoint.variant in ("trainer", "accelerate"):
        names = {os.path.basename(file.path): file.path for file in checkpoint.files}
        found = [names[name] for name in ("optimizer.pt", "optimizer.bin") if name in names]
        return {"optimizer_key": "optimizer", "optimizer_file": found[0]} if len(found) == 1 else {}
    states = [tensor.path for tensor in checkpoint.tensors if tensor.role is Role.OPTIMIZER]
    keys = {str(path[0]) for path in states if len(path) > 1}
    keys |= {k for k, v in checkpoint.metadata.items() if isinstance(v, Mapping) and "param_groups" in v}
    return {"optimizer_key": keys.pop()} if len(keys) == 1 else {}


# The table ------------------------------------------------------------------------------------------


_CHOICES: Mapping[str, Callable[[Checkpoint, PredictionRequest], Choice]] = {
    "pytorch": _torch_choice,
    "pickle": _torch_choice,
    "torch-dcp": _torch_choice,
    "safetensors": _torch_choice,
    "torchscript": _torchscript_choice,
    "torch-export": _export_choice,
    "savedmodel": _savedmodel_choice,
    "tensorflow": _tensorflow_choice,
    "keras": _keras_choice,
    "keras-h5": _keras_h5_choice,
    "fluid": _fluid_choice,
    "paddle": _paddle_choice,
}

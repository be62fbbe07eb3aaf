"""What the jobs of all frameworks say alike, and where a state dict lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.predict.request import Job, Request
from ckpttool.tensor import Path, Role


class NotPredictable(Exception):
    """There is no way to run a checkpoint as asked; the text says what is missing."""


def job(checkpoint: Checkpoint, request: Request, framework: str, loader: str, **options: Any) -> Job:
    """Return a job; ``options`` are what its loader needs to know besides."""
    options |= {"format": checkpoint.format, "variant": checkpoint.variant}
    return Job(path=checkpoint.path, framework=framework, loader=loader, options=options, request=request)


def require_model(what: str, request: Request) -> None:
    """Require that the user named the architecture of what has none.

    Raises:
        NotPredictable: He didn't.
    """
    if request.model is None:
        raise NotPredictable(f"{what} has no architecture: --model package.module:Factory or file.py:Factory")


def state_path(checkpoint: Checkpoint, request: Request) -> Path:
    """Return the keys to the model's state dict.

    Raises:
        NotPredictable: There is none, or there are several and the user didn't choose.
    """
    if request.state_key is not None:
        return tuple(request.state_key.split(".")) if request.state_key else ()
    places = list(dict.fromkeys(_state_dict_of(t.path) for t in checkpoint.tensors if t.role is Role.WEIGHTS))
    if not places:
        others = (t for t in checkpoint.tensors if t.role is not Role.OPTIMIZER)
        places = list(dict.fromkeys(_state_dict_of(tensor.path) for tensor in others))
    if not places:
        raise NotPredictable("no weights are in it")
    if len(places) > 1:
        names = ", ".join(".".join(map(str, place)) or "the root" for place in places[:5])
        raise NotPredictable(f"there are several state dicts: {names}; --state-key says which")
    return places[0]


def _state_dict_of(path: Path) -> Path:
    """Return the keys to the state dict in which a tensor lies: modules may store more than tensors."""
    for at, key in enumerate(path[:-1]):
        if str(key).endswith(("_extra_state", "_packed_params")):
            return path[:at]
    return path[:-1]


def optimizer_path(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the key of the optimizer's state, where there is just one, and its file where it has its own."""
    if checkpoint.variant in ("trainer", "accelerate"):
        names = {os.path.basename(one.path): one.path for one in checkpoint.files}
        found = [names[name] for name in ("optimizer.pt", "optimizer.bin") if name in names]
        return {"optimizer_key": "optimizer", "optimizer_file": found[0]} if len(found) == 1 else {}
    states = [tensor.path for tensor in checkpoint.tensors if tensor.role is Role.OPTIMIZER]
    keys = {str(path[0]) for path in states if len(path) > 1}
    keys |= {k for k, v in checkpoint.metadata.items() if isinstance(v, Mapping) and "param_groups" in v}
    return {"optimizer_key": keys.pop()} if len(keys) == 1 else {}

"""PyTorch's state dicts: read without unpickling where PyTorch can, and loaded strictly.

Our own formats read files that PyTorch can't read, or only by running their code: plain pickles, tar files,
distributed checkpoints. Each difference to the module or the optimizer is a finding.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from ckpttool.containers.pickle.pickle_nodes import Global
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.text import counted
from ckpttool.predict.interface import (
    LoadFailed,
    missing_finding,
    require_none,
    shape_finding,
    shape_text,
    unexpected_finding,
)
from ckpttool.predict.own_content import NotPlain, at_path, content_of, put, refused_global, require_plain
from ckpttool.predict.request import PredictionJob

Content = Mapping[str, Any]
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of DataParallel and torch.compile."""
_MISFIT = "optimizer-mismatch"
_ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"(?:GLOBAL|[Cc]lass|function) ([\w.]+\.[\w.]+)")
"""The name in an error of ``torch.load`` that refuses it."""


# Reading --------------------------------------------------------------------------------------------


def content(job: PredictionJob) -> Any:
    """Return the content of a checkpoint: nested containers with tensors."""
    return _READERS[job.options["reader"]](job)


def state_dict(job: PredictionJob, whole: Any) -> Any:
    """Return the model's state dict in the content of a checkpoint."""
    place = job.options["state_path"]
    return _require_plain_at(job, at_path(whole, place), place)


def _require_plain_at(job: PredictionJob, value: Any, place: Iterable[str | int]) -> Any:
    return require_plain(value, ".".join(map(str, place)), may_trust=job.options["format"] == "torch-dcp")


def optimizer_state(job: PredictionJob, whole: Any) -> Any:
    """Return the state of an optimizer, from the content of a checkpoint or a file of its own."""
    if path := job.options.get("optimizer_file"):
        return _load_file(job, path)
    key = job.options.get("optimizer_key")
    if key is None or not isinstance(whole, Mapping) or key not in whole:
        usual = "the checkpoint has no optimizer's state, or several"
        raise LoadFailed(error("optimizer-mismatch", job.options.get("optimizer_lacking", usual)))
    return _require_plain_at(job, at_path(whole, (key,)), (key,))


def load_pickle(path: str, *, is_trusted: bool, in_place: bool) -> Any:
    """Return the content of a file, read by ``torch.load``.

    Args:
        path: The file.
        is_trusted: Whether it may import and call the names in it; otherwise it must be plain data.
        in_place: Whether the values can be mapped; PyTorch maps compressed values as if they weren't.
    """
    # Only zip files can be mapped; those of old versions of PyTorch are read.
    with open(path, "rb") as file:
        in_place = in_place and file.read(len(_ZIP)) == _ZIP
    try:
        return torch.load(path, map_location="cpu", weights_only=not is_trusted, mmap=in_place)
    except pickle.UnpicklingError as failure:
        match = _REFUSED.search(str(failure))
        what = match[1] if match else "data that is not plain"
        problem = f"torch.load refuses {what}, whose code would run: --trust allows it"
        raise LoadFailed(error("load-refused", problem, os.path.basename(path))) from failure


def load_trusted(job: PredictionJob) -> Any:
    """Return the content of a pickle that the user trusts, and whose code runs."""
    if not job.request.trust:
        raise LoadFailed(error("load-refused", "loading a whole-model pickle runs its code"))
    (path,) = job.options["files"]
    if job.options["format"] != "pickle":
        return load_pickle(path, is_trusted=True, in_place=job.options["in_place"])
    with open(path, "rb") as file:
        return pickle.load(file)  # noqa: S301 - the user said so


def _read_by_torch(job: PredictionJob) -> Any:
    """Return the content of one file, or of shards as one dict."""
    files = [
        (_safetensors(path) if path.endswith(".safetensors") else _load_file(job, path))
        for path in job.options["files"]
    ]
    return files[0] if len(files) == 1 else {key: value for part in files for key, value in part.items()}


def _load_file(job: PredictionJob, path: str) -> Any:
    return load_pickle(path, is_trusted=job.request.trust, in_place=job.options["in_place"])


def _safetensors(path: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        return _read_own(path)
    return load_file(path)


def _read_by_ckpttool(job: PredictionJob) -> Any:
    needed_paths = [tuple(job.options["state_path"])]
    key = job.options.get("optimizer_key")
    if job.request.optimizer is not None and key is not None and "optimizer_file" not in job.options:
        needed_paths.append((key,))
    return _read_own(job.path, needed_paths)


def _read_own(path: str, needed_paths: Iterable[Path] = ((),)) -> Any:
    """Return the content of a checkpoint, read by our own formats; unwanted tensors have no values."""
    from ckpttool.formats import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return content_of(
            checkpoint,
            _torch_tensor,
            needed_paths=needed_paths,
            placeholder=_unread_tensor,
            resolve_global=_resolve_global,
        )


def _resolve_global(name: Global) -> Any:
    """Return an element type or a layout of PyTorch by its name."""
    value = getattr(torch, name.name, None) if name.module == "torch" else None
    is_data = isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
    return value if is_data else refused_global(name)


def _unread_tensor(tensor: Tensor) -> Any:
    """Return a tensor without values for one that is not needed."""
    dtype = _torch_dtype(tensor)
    if dtype is None:
        return NotPlain(f"a tensor of {tensor.dtype.name}")
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _torch_dtype(tensor: Tensor) -> torch.dtype | None:
    dtype = getattr(torch, tensor.dtype.name, None)
    return dtype if isinstance(dtype, torch.dtype) and tensor.dtype.bits >= 8 else None


def _torch_tensor(tensor: Tensor) -> torch.Tensor:
    """Return a tensor of PyTorch with the same bits."""
    dtype = _torch_dtype(tensor)
    if dtype is None:
        raise LoadFailed(
            error("unsupported", f"tensors of {tensor.dtype.name} can't be created", tensor.name)
        )
    if tensor.values is None:
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    data = bytearray(tensor.tobytes())
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(tensor.shape)


def _read_by_dcp(job: PredictionJob) -> Content:
    """Return the content of a distributed checkpoint that the user trusts, loaded in one process."""
    # ``dcp.load`` fills a flat dictionary, whose keys and shapes have to be known before. They are in
    # ``.metadata``; ``planner_data`` has the path of keys for each flat name. Only needed items are loaded,
    # since all others would be unpickled for nothing.
    import torch.distributed.checkpoint

    dcp: Any = torch.distributed.checkpoint

    metadata = dcp.FileSystemReader(job.path).read_metadata()
    paths = metadata.planner_data or {}
    needed = [tuple(map(str, job.options["state_path"]))]
    if job.request.optimizer is not None and "optimizer_key" in job.options:
        needed.append((str(job.options["optimizer_key"]),))
    flat: dict[str, Any] = {}
    for name, item in metadata.state_dict_metadata.items():
        path = tuple(map(str, paths.get(name, (name,))))
        if any(path[: len(outer)] == outer for outer in needed):
            is_tensor = hasattr(item, "size")
            flat[name] = torch.empty(item.size, dtype=item.properties.dtype) if is_tensor else None
    dcp.load(flat, checkpoint_id=job.path)
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        put(root, paths.get(name, (name,)), value)
    return root


_READERS: Mapping[str, Callable[[PredictionJob], Any]] = {
    "torch": _read_by_torch,
    "dcp": _read_by_dcp,
    "ckpttool": _read_by_ckpttool,
}


# Loading into a module ------------------------------------------------------------------------------


def load_strictly(module: Any, state: object) -> tuple[Finding, ...]:
    """Load a state dict into a module, and return remarks."""
    if not isinstance(state, Mapping):
        raise LoadFailed(error("no-state-dict", f"a {type(state).__name__}, not a state dict"))
    own = module.state_dict()
    # safetensors stores tied tensors once. A missing key takes the tensor of the key that shares its memory
    # in the module.
    known = {_memory(value): key for key, value in own.items() if key in state}
    tied = {key: known.get(_memory(value)) for key, value in own.items() if key not in state}
    ties = {key: other for key, other in tied.items() if other is not None}
    if ties:
        state = {**state, **{key: state[other] for key, other in ties.items()}}
    state, notes = _match_wrappers(state, own)
    for key, other in ties.items():
        notes += (note("tied-key", f"it is tied to {other!r}, and stored there", key),)
    no_values = "the checkpoint has no values for it: it was saved from the meta device"
    meta = (key for key, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta)
    require_none([*_misfit_findings(state, own), *(error("no-values", no_values, key) for key in meta)])
    # A module without values gets the tensors of the checkpoint themselves; all others keep their own dtype,
    # and tied tensors stay tied.
    is_meta = any(isinstance(one, torch.Tensor) and one.is_meta for one in own.values())
    module.load_state_dict(state, strict=True, assign=is_meta)
    return (*notes, *_dtype_findings(state, own))


def _memory(value: object) -> object:
    """Return the identity of a tensor's memory."""
    if not isinstance(value, torch.Tensor) or value.is_meta or not _has_shape(value) or not value.numel():
        return object()
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride()


def _misfit_findings(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    for key in own:
        if key not in state:
            yield missing_finding(key)
    for key, value in state.items():
        if key not in own:
            yield unexpected_finding(key)
        elif _has_shape(value) and _has_shape(own[key]) and value.shape != own[key].shape:
            yield shape_finding(key, value.shape, own[key].shape)
        elif isinstance(own[key], torch.Tensor) and not isinstance(value, torch.Tensor):
            yield error("shape-mismatch", f"a {type(value).__name__} in the checkpoint, not a tensor", key)


def _has_shape(value: object) -> bool:
    """Return whether a value is a tensor with a shape; a lazy module gets it from the checkpoint."""
    return isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)


def _dtype_findings(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    pairs = [(own[key], value) for key, value in state.items() if isinstance(value, torch.Tensor)]
    cast = [
        (mine, value) for mine, value in pairs if isinstance(mine, torch.Tensor) and mine.dtype != value.dtype
    ]
    if cast:
        mine, value = cast[0]
        dtypes = f"{_dtype_text(value.dtype)} in the checkpoint, {_dtype_text(mine.dtype)} in the model"
        count = f"{counted(len(cast), 'tensor')} {'was' if len(cast) == 1 else 'were'}"
        yield note("dtype-differs", f"{count} cast: {dtypes}")


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _match_wrappers(
    state: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[Finding, ...]]:
    """Return a state dict with the model's own names, if all names differ by one prefix, and remarks."""
    if not state or state.keys() == own.keys():
        return state, ()
    # DataParallel and ``torch.compile`` put a prefix before all keys, and either side may have been wrapped.
    # A known wrapper's prefix is removed even if other keys differ, which are then reported without it.
    for prefix in _prefixes(state):
        bare = _strip_prefix(state, prefix)
        if bare.keys() == own.keys() or (prefix in _WRAPPERS and not all(k.startswith(prefix) for k in own)):
            return bare, (note("wrapper-prefix", f"each key begins with {prefix!r}, which was removed"),)
    for prefix in _prefixes(own):
        if {f"{prefix}{key}" for key in state} == own.keys():
            text = f"each key of the model begins with {prefix!r}, which was added to the checkpoint's"
            return {f"{prefix}{key}": value for key, value in state.items()}, (note("wrapper-prefix", text),)
    return state, ()


def _prefixes(keys: Iterable[str]) -> Iterator[str]:
    """Yield the common prefixes of all keys that end in a dot, the shortest first."""
    names = [str(key) for key in keys]
    for dot in re.finditer(r"\.", names[0] if names else ""):
        prefix = names[0][: dot.end()]
        if not all(name.startswith(prefix) for name in names):
            return
        yield prefix


def _strip_prefix(state: Mapping[str, Any], prefix: str) -> Any:
    """Return a state dict without a prefix, and the versions of its modules without it, too."""
    bare: Any = type(state)() if isinstance(state, dict) else {}
    bare.update(state)
    if hasattr(state, "_metadata"):
        bare._metadata = dict(state._metadata)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(bare, prefix)
    return bare


# Loading into an optimizer --------------------------------------------------------------------------


def trainer_groups(module: Any) -> list[dict[str, Any]]:
    """Return the parameters in the two groups of the Hugging Face Trainer: with weight decay, and without.

    Biases and normalisation layers have none.
    """
    norms = {f"{name}." for name, one in module.named_modules() if "norm" in type(one).__name__.lower()}
    groups: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in module.named_parameters():
        is_exempt = "bias" in name or any(name.startswith(norm) for norm in norms)
        if parameter.requires_grad:
            groups[is_exempt].append(parameter)
    return [{"params": group} for group in groups]


def load_optimizer(optimizer: Any, module: Any, state: object, key: str) -> tuple[Finding, ...]:
    """Load an optimizer's state, and return remarks."""
    if isinstance(state, (list, tuple)) and len(state) == 1:  # Lightning's optimizer_states
        state = state[0]
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise LoadFailed(error(_MISFIT, "not an optimizer's state", key))
    state = _state_by_number(state, module)
    fresh = set(chain.from_iterable(group.keys() for group in optimizer.param_groups))
    known = set(chain.from_iterable(group["params"] for group in state["param_groups"]))
    strangers = [one for one in state["state"] if one not in known]
    if strangers:
        problem = f"state for {counted(len(strangers), 'parameter')} that no group of the checkpoint has"
        raise LoadFailed(error(_MISFIT, problem, key))
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as failure:
        hint = " (your own function can create the groups)" if "group" in str(failure) else ""
        raise LoadFailed(error(_MISFIT, f"its state doesn't load: {failure}{hint}", key)) from failure
    # ``load_state_dict`` compares only the numbers of groups and parameters, and replaces the options of each
    # group by the saved ones. An option that is missing now is one that the optimizer which saved it lacks.
    lacking = sorted(fresh - set.intersection(*(set(group) for group in optimizer.param_groups)))
    if lacking:
        problem = f"it was saved by another optimizer: {type(optimizer).__name__} needs {', '.join(lacking)}"
        raise LoadFailed(error(_MISFIT, problem, key))
    require_none(_slot_findings(optimizer, module))
    return tuple(_missing_state_findings(optimizer, key))


def _state_by_number(state: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """Return an optimizer's state with parameters by number, or by name in the module's order."""
    # A distributed checkpoint has numbers as texts, or names, and may have sorted them. PyTorch matches
    # parameters by their order in the groups, so names are put into the order of the module.
    groups = state["param_groups"]
    groups = [dict(one) for one in (groups.values() if isinstance(groups, Mapping) else groups)]
    names = [name for name, _ in module.named_parameters()]
    if len(groups) == 1 and sorted(map(str, groups[0]["params"])) == sorted(names):
        groups[0]["params"] = names
    if any(isinstance(one, int) for group in groups for one in group["params"]):
        merged: dict[Any, Any] = {}
        for key, slots in state["state"].items():
            merged.setdefault(int(key), {}).update(slots)
        return {**state, "state": merged, "param_groups": groups}
    return {**state, "param_groups": groups}


def _slot_findings(optimizer: Any, module: Any) -> Iterator[Finding]:
    """Yield a finding for each slot that doesn't fit its parameter, or that other parameters don't have."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    usual = next((slots.keys() for slots in optimizer.state.values()), ())
    for parameter, slots in optimizer.state.items():
        name = names.get(parameter, "?")
        for slot in sorted(usual ^ slots.keys()):
            yield error(_MISFIT, f"not all parameters have {slot!r}", name)
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                shapes = f"{slot} is {shape_text(value.shape)}, the parameter {shape_text(parameter.shape)}"
                yield error(_MISFIT, shapes, name)


def _missing_state_findings(optimizer: Any, key: str) -> Iterator[Finding]:
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    lacking = sum(one not in optimizer.state for one in parameters)
    if lacking == len(parameters):
        yield note(
            "optimizer-without-state",
            "it has no state: it was saved before its first step, or needs none",
            key,
        )
    elif lacking:
        count = f"{lacking:,} of {counted(len(parameters), 'parameter')} have no state"
        yield warning("optimizer-state-missing", count, key)

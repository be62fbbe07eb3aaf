"""What a checkpoint of PyTorch tensors holds, read by PyTorch itself wherever it can without unpickling.

What it can't read, or only by running it, is read by our own formats: plain pickles, tar files, distributed
checkpoints.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpttool.predict.interface import LoadFailed
from ckpttool.predict.own_content import NotPlain, at_path, content_of, put, require_plain
from ckpttool.predict.request import Job
from ckpttool.report import error
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickled import Global

Content = Mapping[str, Any]

_ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"(?:GLOBAL|[Cc]lass|function) ([\w.]+\.[\w.]+)")
"""How ``torch.load`` names what it will not call."""


def content(job: Job) -> Any:
    """Return what a checkpoint holds: nested containers with tensors.

    Raises:
        LoadFailed: PyTorch refuses to read it.
    """
    return _READERS[job.options["reader"]](job)


def state_dict(job: Job, found: Any) -> Any:
    """Return the model's state dict in what was read.

    Raises:
        LoadFailed: There is none, or it is not plain data.
    """
    place = job.options["state_path"]
    return _plain(job, at_path(found, place), place)


def _plain(job: Job, value: Any, place: Iterable[str | int]) -> Any:
    return require_plain(value, ".".join(map(str, place)), may_trust=job.options["format"] == "torch-dcp")


def optimizer_state(job: Job, found: Any) -> Any:
    """Return the state of an optimizer in what was read, or in a file of its own.

    Raises:
        LoadFailed: There is none, or it is not plain data.
    """
    if path := job.options.get("optimizer_file"):
        return _loaded(job, path)
    key = job.options.get("optimizer_key")
    if key is None or not isinstance(found, Mapping) or key not in found:
        lacking = job.options.get(
            "optimizer_lacking", "the checkpoint holds no optimizer's state, or several"
        )
        raise LoadFailed(error("optimizer-mismatch", lacking))
    return _plain(job, at_path(found, (key,)), (key,))


def load_pickle(path: str, *, is_trusted: bool, in_place: bool) -> Any:
    """Return what ``torch.load`` reads; only plain data unless it is trusted.

    Args:
        path: The file.
        is_trusted: Whether what it names may be imported and called.
        in_place: Whether the values can be mapped: where they lie compressed, PyTorch maps what they are not.

    Raises:
        LoadFailed: It names what is not plain data.
    """
    with open(path, "rb") as file:
        in_place = in_place and file.read(len(_ZIP)) == _ZIP
    try:
        return torch.load(path, map_location="cpu", weights_only=not is_trusted, mmap=in_place)
    except pickle.UnpicklingError as failure:
        found = _REFUSED.search(str(failure))
        what = found[1] if found else "what is not plain data"
        told = f"torch.load refuses {what}, whose code would run: --trust allows it"
        raise LoadFailed(error("load-refused", told, os.path.basename(path))) from failure


def trusted(job: Job) -> Any:
    """Return what a pickle holds that the user trusts, whatever it runs.

    Raises:
        LoadFailed: He doesn't.
    """
    if not job.request.trust:
        raise LoadFailed(error("load-refused", "loading a whole-model pickle runs its code"))
    (path,) = job.options["files"]
    if job.options["format"] != "pickle":
        return load_pickle(path, is_trusted=True, in_place=job.options["in_place"])
    with open(path, "rb") as file:
        return pickle.load(file)  # noqa: S301 - the user said so


# Readers --------------------------------------------------------------------------------------------


def _by_torch(job: Job) -> Any:
    """Return the content of one file, or of shards as one dict."""
    files = [_by_torch_or_safetensors(job, path) for path in job.options["files"]]
    return files[0] if len(files) == 1 else {key: value for part in files for key, value in part.items()}


def _by_torch_or_safetensors(job: Job, path: str) -> Any:
    return _safetensors(path) if path.endswith(".safetensors") else _loaded(job, path)


def _loaded(job: Job, path: str) -> Any:
    return load_pickle(path, is_trusted=job.request.trust, in_place=job.options["in_place"])


def _safetensors(path: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        return _own(path)
    return load_file(path)


def _by_ckpttool(job: Job) -> Any:
    wanted = [tuple(job.options["state_path"])]
    key = job.options.get("optimizer_key")
    if job.request.optimizer is not None and key is not None and "optimizer_file" not in job.options:
        wanted.append((key,))
    return _own(job.path, wanted)


def _own(path: str, wanted: Iterable[Path] = ((),)) -> Any:
    """Return what our own formats read; tensors that are not wanted are without values."""
    from ckpttool.formats import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return content_of(checkpoint, _tensor, wanted=wanted, stand_in=_unread, named=_named)


def _named(name: Global) -> Any:
    """Return an element type or a layout of PyTorch's by its name."""
    found = getattr(torch, name.name, None) if name.module == "torch" else None
    is_data = isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
    return found if is_data else NotPlain(f"the name {name}, which is no plain data")


def _unread(tensor: Tensor) -> Any:
    """Return what stands for a tensor that nobody needs."""
    dtype = _dtype(tensor)
    if dtype is None:
        return NotPlain(f"a tensor of {tensor.dtype.name}")
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _dtype(tensor: Tensor) -> torch.dtype | None:
    dtype = getattr(torch, tensor.dtype.name, None)
    return dtype if isinstance(dtype, torch.dtype) and tensor.dtype.bits >= 8 else None


def _tensor(tensor: Tensor) -> torch.Tensor:
    """Return one of our tensors as one of PyTorch's, bit by bit.

    Raises:
        LoadFailed: PyTorch has no such type.
    """
    dtype = _dtype(tensor)
    if dtype is None:
        raise LoadFailed(error("unsupported", f"no tensor of {tensor.dtype.name} can be made", tensor.name))
    if tensor.values is None:
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    data = bytearray(tensor.tobytes())
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(tensor.shape)


def _by_dcp(job: Job) -> Content:
    """Return what a distributed checkpoint holds that the user trusts, loaded in this one process.

    What is asked for is loaded, and nothing else: all other items would be unpickled for nothing.
    """
    import torch.distributed.checkpoint

    dcp: Any = torch.distributed.checkpoint

    metadata = dcp.FileSystemReader(job.path).read_metadata()
    paths = metadata.planner_data or {}
    wanted = [tuple(map(str, job.options["state_path"]))]
    if job.request.optimizer is not None and "optimizer_key" in job.options:
        wanted.append((str(job.options["optimizer_key"]),))
    flat: dict[str, Any] = {}
    for name, item in metadata.state_dict_metadata.items():
        if any(_is_below(paths.get(name, (name,)), path) for path in wanted):
            is_tensor = hasattr(item, "size")
            flat[name] = torch.empty(item.size, dtype=item.properties.dtype) if is_tensor else None
    dcp.load(flat, checkpoint_id=job.path)
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        put(root, paths.get(name, (name,)), value)
    return root


def _is_below(path: tuple[Any, ...], outer: tuple[str, ...]) -> bool:
    return tuple(map(str, path[: len(outer)])) == outer


_READERS: Mapping[str, Callable[[Job], Any]] = {
    "torch": _by_torch,
    "dcp": _by_dcp,
    "ckpttool": _by_ckpttool,
}

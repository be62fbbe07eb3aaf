"""The weights of a checkpoint as a framework takes them: read from the file, and nothing unpickled or run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import MissingPackage, Truncated, UsageError, from_os_error
from ckpttool.core.report import first_names
from ckpttool.core.suggest import did_you_mean
from ckpttool.core.tensor import Extent, Role, Tensor
from ckpttool.core.urls import is_url

if TYPE_CHECKING:
    import numpy as np


def state_dict(path: str, tensors: Sequence[Tensor], framework: str, key: str | None) -> dict[str, Any]:
    """Return new, writable tensors by name, of those of a checkpoint; see ``Checkpoint.state_dict``."""
    makers: dict[str, Callable[[str], Callable[[Tensor], Any]]] = {
        "numpy": lambda path: _as_numpy,
        "torch": _torch_maker,
        "tensorflow": _tensorflow_maker,
    }
    if framework not in makers:
        raise UsageError(f"no framework {framework!r}: there are {', '.join(makers)}")
    make = makers[framework](path)
    made: dict[str, Any] = {}
    result = {}
    for name, tensor in _names(tensors, key).items():
        tied = tensor.shares_with
        made[tensor.name] = result[name] = made[tied] if tied in made else make(tensor)
    return result


def _names(tensors: Sequence[Tensor], key: str | None) -> dict[str, Tensor]:
    """Return the weights by the names that they have inside of their state dict.

    A key that all of them are below, such as ``model_state_dict``, is left out.
    """
    if key is not None:
        below = {one.name[len(key) + 1 :]: one for one in tensors if one.name.startswith(f"{key}.")}
        if not below:
            parents = sorted({".".join(map(str, one.path[:-1])) for one in tensors if len(one.path) > 1})
            hint = did_you_mean(key, parents) or f"there are {first_names(parents) or 'none'}"
            raise KeyError(f"no tensors below {key!r} ({hint})")
        return below
    weights = [one for one in tensors if one.role is Role.WEIGHTS]
    parents_of = {one.path[:-1] for one in weights}
    start = len(parents_of.pop()) if len(parents_of) == 1 else 0
    return {".".join(map(str, one.path[start:])): one for one in weights}


def _as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.array(tensor.array())


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return all elements as new bytes, little-endian: from one piece of a file straight into their place."""
    import numpy as np

    content = np.empty(tensor.nbytes, np.uint8)
    extent = tensor.extent
    if extent is not None and tensor.byteorder == "little" and not is_url(extent.file):
        _read_into(content.data, extent)
        return content
    at = 0
    for block in tensor.blocks():
        content[at : at + len(block)] = np.frombuffer(block, np.uint8)
        at += len(block)
    return content


def _read_into(buffer: memoryview, extent: Extent) -> None:
    try:
        with open(extent.file, "rb", buffering=0) as file:
            file.seek(extent.offset)
            while len(buffer):
                count = file.readinto(buffer)
                if not count:
                    raise Truncated(extent.file, f"the file ends {len(buffer):,} bytes too early")
                buffer = buffer[count:]
    except OSError as error:
        raise from_os_error(error, extent.file) from error


def _torch_maker(path: str) -> Callable[[Tensor], Any]:
    torch = _framework(path, "torch", "torch")

    def make(tensor: Tensor) -> Any:
        dtype = getattr(torch, tensor.dtype.name, None)
        if tensor.values is None or tensor.dtype.bits < 8 or not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"{tensor.name}: PyTorch has no such type as {tensor.dtype.name}, or there are no values"
            )
        return torch.from_numpy(_bytes_of(tensor)).view(dtype).reshape(tensor.shape)

    return make


def _tensorflow_maker(path: str) -> Callable[[Tensor], Any]:
    tensorflow = _framework(path, "tensorflow", "TensorFlow")
    return lambda tensor: tensorflow.convert_to_tensor(tensor.array())


def _framework(path: str, module: str, name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackage(path, f"a state dict for it needs {name}") from error

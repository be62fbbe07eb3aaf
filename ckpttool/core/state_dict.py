"""State dicts of models and optimizers as new tensors of a framework; see ``Checkpoint.state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.core.errors import LimitExceeded, MissingPackage, Truncated, UsageError, from_os_error
from ckpttool.core.tensor import Extent, Path, Role, Tensor
from ckpttool.core.text import did_you_mean, first_names
from ckpttool.core.urls import is_url

if TYPE_CHECKING:
    import numpy as np

Framework = Literal["torch", "numpy", "tensorflow"]
OPTIMIZER = "optimizer"
"""Key of the one optimizer of a checkpoint, wherever its state dict is."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_DEEPEST = 100
_DEEPEST_OPTIMIZER = 6
"""Most keys above an optimizer's state dict."""


def state_dict(
    path: str,
    tensors: Sequence[Tensor],
    framework: str,
    key: str | None = None,
    tree: object = None,
    metadata: Callable[[], Mapping[str, object]] = dict,
) -> dict[str, Any]:
    """Return new, writable tensors by name, or the nested state dict of an optimizer in the tree."""
    makers: dict[str, Callable[[str], Callable[[Tensor], Any]]] = {
        "numpy": lambda path: _as_numpy,
        "torch": _torch_maker,
        "tensorflow": _tensorflow_maker,
    }
    if framework not in makers:
        raise UsageError(f"unknown framework {framework!r} (choose from {', '.join(makers)})")
    make = makers[framework](path)
    # Tied weights become one tensor, as in the model, if their owner was made before. A tie to a tensor
    # outside of the selection, such as an optimizer's, is read on its own.
    made: dict[str, Any] = {}

    def make_once(tensor: Tensor) -> Any:
        tied = tensor.shares_with
        made[tensor.name] = result = made[tied] if tied in made else make(tensor)
        return result

    if key is not None and (found := _optimizer_at(key, tree, tensors)) is not None:
        copied: dict[str, Any] = _Optimizer(path, metadata, make_once).copy(*found)
        return copied
    return {name: make_once(tensor) for name, tensor in _names(tensors, key).items()}


def _names(tensors: Sequence[Tensor], key: str | None) -> dict[str, Tensor]:
    """Return the weights by their names in the state dict.

    A common parent of all of them, such as ``model_state_dict``, is left out.
    """
    if key is not None:
        below = {one.name[len(key) + 1 :]: one for one in tensors if one.name.startswith(f"{key}.")}
        if not below:
            parents = sorted({".".join(map(str, one.path[:-1])) for one in tensors if len(one.path) > 1})
            hint = did_you_mean(key, parents) or f"available: {first_names(parents) or 'none'}"
            raise KeyError(f"no tensors below {key!r} ({hint})")
        return below
    # ``torch.save({"model": model.state_dict(), …})`` puts a key in front of all names, which a model doesn't
    # expect. It is cut only if all weights have the same parent: with two models in a file, it distinguishes
    # their weights.
    weights = [one for one in tensors if one.role is Role.WEIGHTS]
    parents_of = {one.path[:-1] for one in weights}
    start = len(parents_of.pop()) if len(parents_of) == 1 else 0
    return {".".join(map(str, one.path[start:])): one for one in weights}


# Optimizers -----------------------------------------------------------------------------------------


def _optimizer_at(key: str, tree: object, tensors: Sequence[Tensor]) -> tuple[Path, Mapping[Any, Any]] | None:
    """Return path and tree of the optimizer's state dict at a key; None if there is none."""
    found = {_dotted(path): (path, node) for path, node in _optimizers(tree)}
    if key in found or key != OPTIMIZER:
        return found.get(key)
    # Training scripts, Lightning and the Trainer each have another key for the optimizer, or none.
    if len(found) > 1 and not any(one.name.startswith(f"{key}.") for one in tensors):
        raise KeyError(f"{len(found)} optimizers (choose from {first_names([*found])})")
    return next(iter(found.values())) if len(found) == 1 else None


def _optimizers(tree: object) -> Iterator[tuple[Path, Mapping[Any, Any]]]:
    """Yield the results of ``Optimizer.state_dict``, with their paths."""
    # Each container is visited once: sharing could make exponentially many paths.
    pending: list[tuple[Path, object]] = [((), tree)]
    seen: set[int] = set()
    while pending:
        path, node = pending.pop()
        if id(node) in seen or not isinstance(node, Mapping | list | tuple):
            continue
        seen.add(id(node))
        items = [*(node.items() if isinstance(node, Mapping) else enumerate(node))]
        if isinstance(node, Mapping) and _is_optimizer(node):
            yield path, node
        elif len(path) < _DEEPEST_OPTIMIZER:
            pending += (((*path, key), part) for key, part in reversed(items) if isinstance(key, str | int))


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    return isinstance(node.get("state"), Mapping) and isinstance(node.get("param_groups"), list)


class _Optimizer:
    """Copies the state dict of an optimizer from the tree of a checkpoint, with new tensors."""

    def __init__(
        self, file: str, metadata: Callable[[], Mapping[str, object]], make: Callable[[Tensor], Any]
    ) -> None:
        self._file, self._metadata, self._make = file, metadata, make
        self._made: dict[int, Any] = {}

    def copy(self, path: Path, node: Any) -> Any:
        if id(node) not in self._made:
            self._made[id(node)] = self._new(path, node)
        return self._made[id(node)]

    def _new(self, path: Path, node: Any) -> Any:
        if len(path) > _DEEPEST:
            raise LimitExceeded(self._file, f"objects nested more than {_DEEPEST} deep")
        if isinstance(node, Tensor):
            return self._make(node)
        if isinstance(node, Mapping):
            return {key: self.copy((*path, key), part) for key, part in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self.copy((*path, at), part) for at, part in enumerate(node))
        if type(node) in _PLAIN:
            return node
        # NumPy's scalars are objects in a tree, but numbers in the metadata.
        number = self._plain_at(path)
        if isinstance(number, bool | int | float):
            return number
        raise TypeError(f"{_dotted(path)}: an object that can't be made without unpickling")

    def _plain_at(self, path: Path) -> object:
        plain: Any = self._metadata()
        for key in path:
            if isinstance(plain, Mapping):
                plain = plain.get(str(key))
            elif isinstance(plain, list) and isinstance(key, int) and key < len(plain):
                plain = plain[key]
            else:
                return None
        return plain


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


# Tensors --------------------------------------------------------------------------------------------


def _as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.array(tensor.array())


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return all elements as new bytes, little-endian."""
    import numpy as np

    # Contiguous elements of a local file are read directly into the result, by unbuffered reads: all others
    # pass through blocks in memory, which takes another copy.
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
            raise TypeError(f"{tensor.name}: no stored values, or PyTorch has no type {tensor.dtype.name}")
        if not tensor.size:  # no bytes can be viewed as another type
            return torch.empty(tensor.shape, dtype=dtype)
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
        raise MissingPackage(path, f"its state dict needs {name}") from error

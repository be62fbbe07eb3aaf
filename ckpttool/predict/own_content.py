"""Content of a checkpoint as Python objects for a framework, read by our own formats.

Nothing is unpickled: ``Checkpoint.tree`` has plain data, tensors, and inert nodes. Objects that only the
checkpoint's own code could create become ``NotPlain``, and are refused if they would be loaded.

Only the child process imports this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import (
    NDARRAY,
    NOTHING,
    REQUIRES_GRAD,
    Call,
    DictSubclass,
    Global,
    Opaque,
)
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.report import error
from ckpttool.core.tensor import Path, Tensor
from ckpttool.formats.arrays.objects import numpy_leaf
from ckpttool.formats.content.tree import NodeParts, fold, is_size, node_parts, tensors_in
from ckpttool.predict.interface import LoadFailed

_TENSOR_WRAPPERS = frozenset({NDARRAY, REQUIRES_GRAD, Global("torch._utils", "_rebuild_parameter")})
"""Calls whose first argument is a tensor, with no other information than for training."""


@dataclass(frozen=True, slots=True)
class NotPlain:
    """An object of the checkpoint's own code, with the part of it that is plain data."""

    description: str
    content: object = None


def refused_global(name: Global) -> NotPlain:
    return NotPlain(f"the name {name}, which is not plain data")


def content_of(
    checkpoint: Checkpoint,
    make: Callable[[Tensor], Any],
    *,
    needed_paths: Iterable[Path] = ((),),
    placeholder: Callable[[Tensor], Any] | None = None,
    resolve_global: Callable[[Global], Any] = refused_global,
) -> Any:
    """Return the content of an open checkpoint as nested containers with the framework's tensors.

    Args:
        checkpoint: An open checkpoint.
        make: Reads a tensor as one of the framework's.
        needed_paths: Keys of the needed parts; everything by default.
        placeholder: Makes a tensor without values for one that is not needed.
        resolve_global: Resolves a global name, such as ``torch.float32``."""
    # Needed tensors are known by identity, since one object may be reached by several keys. The others become
    # placeholders, so that an optimizer's state isn't read for a prediction without it.
    tree = checkpoint.tree
    if tree is None:  # the format has none: tensors by name, and plain data
        tree = _changeable(checkpoint.metadata)
        for tensor in checkpoint.tensors:
            put(tree, tensor.path, tensor)
    needed = {id(tensor) for path in needed_paths for tensor in tensors_in(at_path(tree, path))}

    def expand(node: object) -> object:
        if isinstance(node, Tensor):
            return make(node) if placeholder is None or id(node) in needed else placeholder(node)
        return _expand_container(node, resolve_global, checkpoint.path)

    content = fold(tree, expand, lambda node: NotPlain("a container that contains itself"), checkpoint.path)
    for tensor in checkpoint.tensors:
        if tensor.values is None:  # it is not in the tree
            put(content, tensor.path, make(tensor))
    return _plain_part(content)


def _changeable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _changeable(inner) for key, inner in value.items()}
    return [_changeable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def put(root: Any, path: Path, value: Any) -> None:
    """Set the value of a path of keys, if it leads through dictionaries."""
    here = root
    for key in path[:-1]:
        if not isinstance(here, dict):
            return
        if not isinstance(here.get(key), (dict, list)):
            here[key] = {}
        here = here[key]
    if isinstance(here, dict):
        here[path[-1]] = value


def _expand_container(node: object, resolve_global: Callable[[Global], Any], path: str) -> object:
    """Return the value of a node that is no tensor, or its parts, which are converted first."""
    if isinstance(node, DictSubclass):
        count = len(node)
        parts = [*node.keys(), *node.values(), node.state]
        return NodeParts(parts, lambda done: _make_dict(node.kind, done[:count], done[count:-1], done[-1]))
    if isinstance(node, Global):
        return resolve_global(node)
    if isinstance(node, Opaque):
        return NodeParts([node.content], lambda done: NotPlain(node.reason, done[0]))
    return _call_result(node, path) if isinstance(node, Call) else node_parts(node) or node


def _make_dict(kind: Global, keys: list[Any], values: list[Any], state: object) -> Any:
    """Return a dictionary; an ordered one may have the versions of a module's parts in an attribute."""
    # PyTorch's state dicts have the version of each module in the attribute ``_metadata``. By it,
    # ``load_state_dict`` converts layouts of older versions.
    if kind.name != "OrderedDict":
        return dict(zip(keys, values, strict=True))
    made: Any = OrderedDict(zip(keys, values, strict=True))
    if isinstance(state, dict) and isinstance(versions := state.get("_metadata"), dict):
        made._metadata = versions
    return made


def _call_result(call: Call, path: str) -> object:
    """Return the value of a call if it is plain data, or ``NotPlain``."""
    if call.function in _TENSOR_WRAPPERS and call.args:
        return NodeParts([call.args[0]], lambda done: done[0])
    if is_size(call):
        return tuple(call.args[0])
    if call.function == NOTHING:
        return None
    number = numpy_leaf(call, path, lambda *_: None)
    if number is not None and not number.tensors and isinstance(number.plain, (bool, int, float)):
        return number.plain
    return NotPlain(f"an object of {call.function}, which is not plain data")


# Access ---------------------------------------------------------------------------------------------


def at_path(content: Any, path: Iterable[str | int]) -> Any:
    """Return the value at a path of keys.

    Raises:
        LoadFailed: There is none.
    """
    content = _plain_part(content)
    for key in path:
        if isinstance(content, Mapping) and key not in content and str(key).isdecimal():
            key = int(key)
        try:
            content = _plain_part(content[int(key) if isinstance(content, (list, tuple)) else key])
        except (KeyError, IndexError, ValueError, TypeError) as failure:
            raise LoadFailed(error("no-such-key", f"the checkpoint has no {key!r}", str(key))) from failure
    return content


def _plain_part(content: Any) -> Any:
    """Return the plain data in an inert object, or any other value itself."""
    is_inert = isinstance(content, (NotPlain, Opaque)) and content.content is not None
    return content.content if is_inert else content


def require_plain(content: Any, place: str, *, may_trust: bool) -> Any:
    """Return content that is to be loaded, if it is plain data.

    Args:
        content: The content.
        place: Its keys, joined by dots.
        may_trust: Whether the framework's own loader reads it with ``--trust``.

    Raises:
        LoadFailed: It holds an object that is not plain data."""
    # Without recursion, and each container once: a pickle may nest deeply, and a container may hold itself.
    pending, seen = [(place, content)], set()
    while pending:
        path, node = pending.pop()
        if isinstance(node, NotPlain):
            hint = ": --trust allows it" if may_trust else ""
            raise LoadFailed(error("load-refused", f"{node.description}{hint}", path))
        if isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            below = node.items() if isinstance(node, Mapping) else enumerate(node)
            pending += [(f"{path}.{key}".lstrip("."), inner) for key, inner in below]
    return content

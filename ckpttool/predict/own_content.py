"""A checkpoint as our own formats read it, in the Python objects that a framework is handed.

Nothing is unpickled for it: ``Checkpoint.tree`` is plain data, tensors, and inert nodes for the rest. What
only the checkpoint's own code could make stays inert here, too, and is refused where it would be loaded.

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
    Global,
    Mapped,
    Opaque,
)
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.report import error
from ckpttool.core.tensor import Path, Tensor
from ckpttool.formats.arrays.objects import numpy_leaf
from ckpttool.formats.content.tree import NodeParts, fold, is_size, node_parts, tensors_in
from ckpttool.predict.interface import LoadFailed

_AROUND = frozenset({NDARRAY, REQUIRES_GRAD, Global("torch._utils", "_rebuild_parameter")})
"""Calls whose first argument is a tensor, and that say no more of it than how training goes on."""


@dataclass(frozen=True, slots=True)
class NotPlain:
    """Stands for what the checkpoint's own code would make; ``content`` is what of it is plain data."""

    what: str
    content: object = None


def content_of(
    checkpoint: Checkpoint,
    make: Callable[[Tensor], Any],
    *,
    wanted: Iterable[Path] = ((),),
    stand_in: Callable[[Tensor], Any] | None = None,
    named: Callable[[Global], Any] = lambda name: NotPlain(f"the name {name}, which is no plain data"),
) -> Any:
    """Return what a checkpoint holds.

    Args:
        checkpoint: An open one.
        make: Reads a tensor into one of the framework's.
        wanted: The keys to what is needed, all of it by default.
        stand_in: Makes one without values of each tensor that is not needed, so that it is not read.
        named: Says what a name is in the framework, such as ``torch.float32``."""
    tree = checkpoint.tree
    if tree is None:  # the format has none: tensors by name, and plain data
        tree = _changeable(checkpoint.metadata)
        for tensor in checkpoint.tensors:
            put(tree, tensor.path, tensor)
    needed = {id(tensor) for path in wanted for tensor in tensors_in(at_path(tree, path))}

    def expand(node: object) -> object:
        if isinstance(node, Tensor):
            return make(node) if stand_in is None or id(node) in needed else stand_in(node)
        return _expand_container(node, named, checkpoint.path)

    content = fold(tree, expand, lambda node: NotPlain("what holds itself"), checkpoint.path)
    for tensor in checkpoint.tensors:
        if tensor.values is None:  # it has no place in a tree
            put(content, tensor.path, make(tensor))
    return _plain_part(content)


def _changeable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _changeable(inner) for key, inner in value.items()}
    return [_changeable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def put(root: Any, path: Path, value: Any) -> None:
    """Put something under some keys, where dictionaries lead there."""
    here = root
    for key in path[:-1]:
        if not isinstance(here, dict):
            return
        if not isinstance(here.get(key), (dict, list)):
            here[key] = {}
        here = here[key]
    if isinstance(here, dict):
        here[path[-1]] = value


def _expand_container(node: object, named: Callable[[Global], Any], path: str) -> object:
    """Return what a node becomes that is no tensor, or its parts where these come first."""
    if isinstance(node, Mapped):
        count = len(node)
        parts = [*node.keys(), *node.values(), node.state]
        return NodeParts(parts, lambda done: _make_dict(node.kind, done[:count], done[count:-1], done[-1]))
    if isinstance(node, Global):
        return named(node)
    if isinstance(node, Opaque):
        return NodeParts([node.content], lambda done: NotPlain(node.what, done[0]))
    return _call_result(node, path) if isinstance(node, Call) else node_parts(node) or node


def _make_dict(kind: Global, keys: list[Any], values: list[Any], state: object) -> Any:
    """Return a dictionary of another class; a module's state dict has the versions of its parts beside it."""
    if kind.name != "OrderedDict":
        return dict(zip(keys, values, strict=True))
    made: Any = OrderedDict(zip(keys, values, strict=True))
    if isinstance(state, dict) and isinstance(versions := state.get("_metadata"), dict):
        made._metadata = versions
    return made


def _call_result(call: Call, path: str) -> object:
    """Return what a call stands for, where it is plain data."""
    if call.function in _AROUND and call.args:
        return NodeParts([call.args[0]], lambda done: done[0])
    if is_size(call):
        return tuple(call.args[0])
    if call.function == NOTHING:
        return None
    number = numpy_leaf(call, path, lambda *_: None)
    if number is not None and not number.tensors and isinstance(number.plain, (bool, int, float)):
        return number.plain
    return NotPlain(f"an object of {call.function}, which is no plain data")


# Ways into it ---------------------------------------------------------------------------------------


def at_path(content: Any, path: Iterable[str | int]) -> Any:
    """Return what lies under some keys."""
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
    """Return what of an object is plain data, where that leads on."""
    is_inert = isinstance(content, (NotPlain, Opaque)) and content.content is not None
    return content.content if is_inert else content


def require_plain(content: Any, place: str, *, may_trust: bool) -> Any:
    """Return what is to be loaded, if it is plain data.

    Args:
        content: What lies there.
        place: The keys that lead to it, in words.
        may_trust: Whether the framework's own loader is asked where the user trusts the checkpoint."""
    pending, seen = [(place, content)], set()
    while pending:
        path, node = pending.pop()
        if isinstance(node, NotPlain):
            hint = ": --trust allows it" if may_trust else ""
            raise LoadFailed(error("load-refused", f"{node.what}{hint}", path))
        if isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            below = node.items() if isinstance(node, Mapping) else enumerate(node)
            pending += [(f"{path}.{key}".lstrip("."), inner) for key, inner in below]
    return content

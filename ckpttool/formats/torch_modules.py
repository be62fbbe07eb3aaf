"""A pickled ``torch.nn.Module``, read as the state dict that it would give.

Source: PyTorch ``torch/nn/modules/module.py``, ``_save_to_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.checkpoint import Path, Role
from ckpttool.formats.trees import Leaf, plain
from ckpttool.wire.pickled import Call

if TYPE_CHECKING:
    from ckpttool.formats.torch_objects import TensorParts, TorchObjects

MAX_MODULE_NESTING = 500
MAX_MODULES = 1_000_000


def module_leaf(objects: TorchObjects, call: Call) -> Leaf[TensorParts] | None:
    """Return the tensors of a pickled ``torch.nn.Module`` under the names of its state dict, or None.

    Names are the dotted paths of ``_modules`` keys; buffers that are not persistent are left out. What the
    module refers to besides its state dict is checked all the same.

    Raises:
        LimitExceeded: Modules nest too deep, or hold themselves.
    """
    if not _is_module(call):
        return None
    tensors: list[tuple[Path, TensorParts]] = []
    classes: dict[str, str] = {}
    for prefix, module in _modules(objects, call):
        classes[prefix.rstrip(".")] = str(plain(module.function))
        for name, node in _state_items(module.state):
            found = objects.leaf(node)
            for path, parts in found.tensors if found else ():
                tensors.append(((prefix + name, *path), replace(parts, role=Role.WEIGHTS)))
    objects.check_references(call)
    return Leaf(tuple(tensors), {"<class>": classes[""], "modules": classes})


def _modules(objects: TorchObjects, root: Call) -> Iterator[tuple[str, Call]]:
    """Yield all modules with their dotted prefixes, parents first."""
    pending = [("", 0, root)]
    count = 0
    while pending:
        prefix, depth, module = pending.pop()
        count += 1
        if depth > MAX_MODULE_NESTING or count > MAX_MODULES:
            raise objects.exceeded(f"{count:,} modules, nested {depth} deep")
        yield prefix, module
        children = [
            (f"{prefix}{plain(name)}.", depth + 1, child)
            for name, child in module.state["_modules"].items()
            if isinstance(child, Call) and _is_module(child)
        ]
        pending += reversed(children)


def _state_items(state: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what a module's own part of the state dict holds: parameters, then persistent buffers."""
    for name, node in state["_parameters"].items():
        yield str(plain(name)), node
    hidden = state.get("_non_persistent_buffers_set")
    for name, node in state["_buffers"].items():
        if not isinstance(hidden, set | frozenset | list | tuple) or name not in hidden:
            yield str(plain(name)), node


def _is_module(call: Call) -> bool:
    state = call.state
    return isinstance(state, dict) and all(
        isinstance(state.get(key), dict) for key in ("_parameters", "_buffers", "_modules")
    )

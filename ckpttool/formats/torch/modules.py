"""A pickled ``torch.nn.Module``, read as the state dict that it would give.

Source: PyTorch ``torch/nn/modules/module.py``, ``_save_to_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.pickle.pickle_nodes import Call
from ckpttool.core.tensor import Path, Role
from ckpttool.formats.content.flattening import Leaf, flatten
from ckpttool.formats.content.plain_data import describe

if TYPE_CHECKING:
    from ckpttool.formats.content.flattening import TensorParts
    from ckpttool.formats.torch.objects import TorchObjects

MAX_MODULE_NESTING = 500
MAX_MODULES = 1_000_000

_TENSORS = ("_parameters", "_buffers", "_modules")
_ALWAYS_OWN = frozenset({*_TENSORS, "_non_persistent_buffers_set", "_flat_weights"})
"""Attributes whose content the state dict has, or says; an RNN lists its own parameters once more."""
_OF_EVERY_MODULE = frozenset(
    {
        "_backward_hooks",
        "_backward_pre_hooks",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_is_full_backward_hook",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    }
)
"""Attributes that every module has for itself, and that mean nothing where they are empty."""


def module_leaf(objects: TorchObjects, call: Call) -> Leaf[TensorParts] | None:
    """Return the tensors of a pickled ``torch.nn.Module`` under the names of its state dict, or None.

    Names are the dotted paths of ``_modules`` keys. All other attributes of the modules are plain data; the
    tensors among them, such as buffers that are not persistent, come behind those of the state dict. What
    the module refers to is checked.
    """
    if not is_module(call):
        return None
    tensors: list[tuple[Path, TensorParts]] = []
    classes: dict[str, str] = {}
    attributes: dict[str, object] = {}
    modules = list(_modules(objects, call))
    for prefix, module in modules:
        classes[prefix.rstrip(".")] = str(describe(module.function))
        for key, node in _attributes(module).items():
            name = f"{prefix}{describe(key)}"
            while name in attributes:  # attributes may have dots in their names
                name = f"<{name}>"
            attributes[name] = node
        # Its own part of the state dict: parameters, then persistent buffers.
        buffers = module.state["_buffers"].items()
        state_items = [*module.state["_parameters"].items()]
        state_items += (item for item in buffers if not _is_hidden(module.state, item[0]))
        for key, node in state_items:
            leaf = objects.leaf(node)
            for path, parts in leaf.tensors if leaf else ():
                name = f"{prefix}{describe(key)}"
                tensors.append(((name, *path), replace(parts, role=Role.WEIGHTS)))
    budget, spent = objects.budget, objects.budget.visits
    # A module that attributes refer to is told by its name; of several names, by the first.
    names = {id(module): f"<the module {prefix.rstrip('.')!r}>" for prefix, module in reversed(modules)}
    with objects.name_nodes(names):
        others = flatten(attributes, objects.leaf, objects.path, budget=budget)
    tensors += [(path, replace(parts, role=Role.OTHER)) for path, parts in others.tensors]
    objects.check_references(call)
    plain: dict[str, object] = {"<class>": classes[""], "modules": classes}
    plain |= {"attributes": others.plain} if others.plain else {}
    return Leaf(tuple(tensors), plain, budget.visits - spent)


def _attributes(module: Call) -> dict[Any, Any]:
    """Return what a module is besides its state dict."""
    state = module.state
    attributes = {name: node for name, node in state["_buffers"].items() if _is_hidden(state, name)}
    attributes |= {name: node for name, node in state["_modules"].items() if not _is_child(node)}
    attributes |= {
        key: node
        for key, node in state.items()
        if key not in _ALWAYS_OWN and (node or key not in _OF_EVERY_MODULE)
    }
    parts: list[tuple[str, object]] = [("<args>", module.args), ("<kwargs>", module.kwargs)]
    parts += [("<items>", module.items), ("<pairs>", module.pairs)]
    return attributes | {key: node for key, node in parts if node}


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
            (f"{prefix}{describe(name)}.", depth + 1, child)
            for name, child in module.state["_modules"].items()
            if _is_child(child)
        ]
        pending += reversed(children)


def _is_hidden(state: dict[str, Any], name: object) -> bool:
    """Tell whether a buffer is none of the state dict's."""
    hidden = state.get("_non_persistent_buffers_set")
    return isinstance(hidden, set | frozenset | list | tuple) and name in hidden


def _is_child(node: object) -> bool:
    return isinstance(node, Call) and is_module(node)


def is_module(call: Call) -> bool:
    state = call.state
    return isinstance(state, dict) and all(
        isinstance(state.get(key), dict) for key in ("_parameters", "_buffers", "_modules")
    )

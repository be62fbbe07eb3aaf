"""A content without what only a training that goes on needs: optimizer, scheduler, scaler, random states.

Epoch, step, metrics, settings and all else stay where they were, under their keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckpttool.core.roles import OPTIMIZER, role_below
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.writer import Content
from ckpttool.io.pickle_nodes import Call, Mapped, Opaque, make_mapped
from ckpttool.weights.converting.ties import carry_ties

_MACHINERY = re.compile(r"sched|scaler|scaling|^amp|rng|random|sampler|mixedprecision", re.IGNORECASE)
"""Keys of what makes a training go and tells nothing of it, as callbacks, loops and histories do."""
_HISTORY = re.compile(r"history", re.IGNORECASE)
_STATE = frozenset({Role.OPTIMIZER, Role.TRAINING})
_PARTS = (dict, list, tuple, bytes, Tensor, Call, Opaque)
"""What a state may be; a number or a text is a setting: ``optimizer: adam``, ``random_seed: 1``."""
_DEEPEST = 3
"""How many keys lead to a state at most."""


def is_state_tensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is of no use but to a training that goes on."""
    return tensor.role is Role.OPTIMIZER or (tensor.role is Role.TRAINING and is_state_key(tensor.path))


def is_state_key(keys: Path) -> bool:
    """Tell whether one of some keys is that of an optimizer's state, or of another one like it."""
    texts = [key for key in keys if isinstance(key, str)]
    return any(
        (OPTIMIZER.search(key) or _MACHINERY.search(key)) and not _HISTORY.search(key) for key in texts
    )


def without_training_state(content: Content) -> Content:
    """Return a content without the state of its training, under the names that it has."""
    if content.tree is None:
        kept = [tensor for tensor in content.tensors if not is_state_tensor(tensor)]
        return replace(content, tensors=_tied(kept))
    gone: set[Path] = set()
    tree = _without_state(content.tree, (), gone)
    kept = [one for one in content.tensors if not any(one.path[:end] in gone for end in range(_DEEPEST + 1))]
    tied = _tied(kept)
    # One object may lie in several places of a tree, also in one that has gone: each is as it is tied now.
    now = {id(old): new for old, new in zip(kept, tied, strict=True)}
    by_values = {id(tensor.values): tensor for tensor in reversed(tied)}
    objects = {id(one): now.get(id(one)) or by_values.get(id(one.values), one) for one in tensors_in(tree)}
    return replace(content, tensors=tied, tree=replace_tensors(tree, objects))


def _tied(kept: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return carry_ties((tensor, tensor) for tensor in kept)


def _without_state(node: object, keys: Path, gone: set[Path]) -> object:
    """Return a dictionary without the entries that are states, those in its dictionaries, too."""
    if not isinstance(node, dict) or len(keys) >= _DEEPEST or role_below(keys) is Role.WEIGHTS:
        return node
    gone.update((*keys, key) for key, value in node.items() if _is_state(key, value))
    entries = [
        (key, _without_state(value, (*keys, key), gone) if isinstance(key, str) else value)
        for key, value in node.items()
        if (*keys, key) not in gone
    ]
    if isinstance(node, Mapped):
        return make_mapped(node.kind, entries, node.state, node.factory)
    return dict(entries)


def _is_state(key: object, value: object) -> bool:
    if not isinstance(key, str) or not is_state_key((key,)) or not isinstance(value, _PARTS):
        return False
    roles = {tensor.role for tensor in tensors_in(value)}
    if OPTIMIZER.search(key) and not roles:  # settings may be called so: ``opt``
        return any("param_groups" in one for one in _states(value))
    return roles <= _STATE


def _states(value: object) -> Iterator[dict[object, object]]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, dict):
            yield one

"""A content without what only a training that goes on needs: optimizer, scheduler, scaler, random states.

Only what is proven to be one of them goes, not by its key alone: a ``scaler`` may be that of the inputs, a
``scheduler`` that of a diffusion's noise, and ``rng_embedding`` a layer. Epoch, step, metrics, settings and
all else keep their places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttool.containers.pickle.pickle_nodes import Mapped
from ckpttool.core.tensor import FLAT_OPTIMIZER, OPTIMIZER, Path, Role, Tensor, role_below
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.random_states import is_random_state, is_random_tensor
from ckpttool.weights.converting.ties import carry_ties

_RANDOM = re.compile(r"(^|_)rng(_|s?$)|(^|_)random_states?$", re.IGNORECASE)
_FLAT_OPTIMIZER = re.compile(r"(\w+_)?(optim|optimizer)(s|_states?|_state_dict)?", re.IGNORECASE)
"""What stands before the first dot of the names of an optimizer's tensors, where there is no tree."""
_SIGNS: Mapping[re.Pattern[str], frozenset[str]] = {
    OPTIMIZER: frozenset({"param_groups"}),
    re.compile(r"sched", re.IGNORECASE): frozenset({"last_epoch", "_step_count"}),
    re.compile(r"scaler|scaling|^amp|^MixedPrecision", re.IGNORECASE): frozenset(
        {"growth_factor", "growth_interval"}
    ),
}
"""Keys of states, and what PyTorch writes into each of them.

Source: PyTorch ``torch/optim/optimizer.py``, ``torch/optim/lr_scheduler.py`` and ``torch/amp/grad_scaler.py``
(``state_dict``).
"""
_STATE = frozenset({Role.OPTIMIZER, Role.TRAINING})
_DEEPEST = 3
"""How many keys lead to a state at most."""


def is_state_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor seems to be of no use but to a training that goes on."""
    if tensor.role is Role.TRAINING:
        is_named = any(isinstance(key, str) and _RANDOM.search(key) for key in tensor.path)
        return is_named and is_random_tensor(tensor)
    return tensor.role is Role.OPTIMIZER


def without_training_state(content: Content) -> Content:
    """Return a content without the state of its training, under the names that it has."""
    if content.tree is None:
        state = training_state_paths(content)
        return replace(content, tensors=_tied(one for one in content.tensors if one.path not in state))
    gone: set[Path] = set()
    tree = _without_state(content.tree, (), gone)
    kept = [one for one in content.tensors if not any(one.path[:end] in gone for end in range(_DEEPEST + 1))]
    tied = _tied(kept)
    # One object may lie in several places of a tree, also in one that has gone: each is as it is tied now.
    now = {id(old): new for old, new in zip(kept, tied, strict=True)}
    by_values = {id(tensor.values): tensor for tensor in reversed(tied)}
    objects = {id(one): now.get(id(one)) or by_values.get(id(one.values), one) for one in tensors_in(tree)}
    return replace(content, tensors=tied, tree=replace_tensors(tree, objects))


def training_state_paths(content: Content) -> set[Path]:
    """Return the keys below which nothing but state of the training lies, each as a path."""
    gone: set[Path] = set()
    if content.tree is not None:
        _without_state(content.tree, (), gone)
        return gone
    knows_optimizer = traits_of(content.source_format).holds_layers
    state = filter(is_state_tensor, content.tensors)
    return {one.path for one in state if knows_optimizer or _is_flat(one)}


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
        return Mapped(node.kind, entries, node.state, node.factory)
    return dict(entries)


def _is_flat(tensor: Tensor) -> bool:
    is_one = _FLAT_OPTIMIZER.fullmatch(tensor.name.partition(".")[0])
    return (is_one or FLAT_OPTIMIZER.match(tensor.name)) is not None


def _is_state(key: object, value: object) -> bool:
    """Return whether an entry is a state: all of what is there has the signs of one, and no weights."""
    if not isinstance(key, str):
        return False
    if isinstance(value, Tensor) and value.role is Role.OPTIMIZER:
        return FLAT_OPTIMIZER.match(key) is not None
    if _RANDOM.search(key):
        is_one = is_random_state(value)
    else:
        signs = next((signs for pattern, signs in _SIGNS.items() if pattern.search(key)), None)
        is_one = signs is not None and _has_signs(value, signs)
    return is_one and {tensor.role for tensor in tensors_in(value)} <= _STATE


def _has_signs(value: object, signs: frozenset[str]) -> bool:
    """Return whether a dictionary has some keys, or is a dictionary or list of such."""
    if isinstance(value, dict) and signs <= value.keys():
        return True
    inner: list[object] = list(value) if isinstance(value, list | tuple) else []
    inner += value.values() if isinstance(value, dict) else ()
    return bool(inner) and all(isinstance(one, dict) and signs <= one.keys() for one in inner)

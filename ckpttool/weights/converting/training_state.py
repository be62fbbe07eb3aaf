"""Removes the state that only resuming a training needs: optimizer, scheduler, scaler, random states.

A key alone proves nothing: a ``scaler`` may scale the inputs, a ``scheduler`` may be a diffusion's noise
schedule, and ``rng_embedding`` a layer. An entry is removed only if its content has the keys that PyTorch
writes. Epoch, step, metrics, settings and everything else are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttool.containers.pickle.pickle_nodes import DictSubclass
from ckpttool.core.tensor import FLAT_OPTIMIZER, OPTIMIZER, Path, Role, Tensor, role_below
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.random_states import is_random_state, is_random_tensor
from ckpttool.weights.converting.ties import carry_ties

_RANDOM = re.compile(r"(^|_)rng(_|s?$)|(^|_)random_states?$", re.IGNORECASE)
_FLAT_OPTIMIZER = re.compile(r"(\w+_)?(optim|optimizer)(s|_states?|_state_dict)?", re.IGNORECASE)
"""Name of a tensor up to the first dot if it belongs to an optimizer, for contents without a tree."""
_STATE_KEYS: Mapping[re.Pattern[str], frozenset[str]] = {
    OPTIMIZER: frozenset({"param_groups"}),
    re.compile(r"sched", re.IGNORECASE): frozenset({"last_epoch", "_step_count"}),
    re.compile(r"scaler|scaling|^amp|^MixedPrecision", re.IGNORECASE): frozenset(
        {"growth_factor", "growth_interval"}
    ),
}
"""Patterns of the keys of states, with keys that PyTorch writes into each of them.

Source: PyTorch ``torch/optim/optimizer.py``, ``torch/optim/lr_scheduler.py`` and ``torch/amp/grad_scaler.py``
(``state_dict``).
"""
_STATE_ROLES = frozenset({Role.OPTIMIZER, Role.TRAINING})
_MAX_DEPTH = 3
"""Maximum depth of a state in the tree."""


def is_state_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor seems to be needed only to resume a training."""
    if tensor.role is Role.TRAINING:
        is_named = any(isinstance(key, str) and _RANDOM.search(key) for key in tensor.path)
        return is_named and is_random_tensor(tensor)
    return tensor.role is Role.OPTIMIZER


def without_training_state(content: Content) -> Content:
    """Return a content without training state; names are kept."""
    # A tree has whole entries (a scheduler's dictionary, a list of random states), which go with all that is
    # in them. Flat files have tensors only, which are judged one by one.
    if content.tree is None:
        state = training_state_paths(content)
        return replace(content, tensors=_tied(one for one in content.tensors if one.path not in state))
    removed: set[Path] = set()
    tree = _without_state(content.tree, (), removed)
    kept = [
        one for one in content.tensors if not any(one.path[:end] in removed for end in range(_MAX_DEPTH + 1))
    ]
    tied = _tied(kept)
    # One tensor object may occur in several places of the tree, also in a removed one. Each remaining
    # occurrence is replaced by the tensor with the ties that are left.
    now = {id(old): new for old, new in zip(kept, tied, strict=True)}
    by_values = {id(tensor.values): tensor for tensor in reversed(tied)}
    objects = {id(one): now.get(id(one)) or by_values.get(id(one.values), one) for one in tensors_in(tree)}
    return replace(content, tensors=tied, tree=replace_tensors(tree, objects))


def training_state_paths(content: Content) -> set[Path]:
    """Return the paths of entries that hold only training state."""
    removed: set[Path] = set()
    if content.tree is not None:
        _without_state(content.tree, (), removed)
        return removed
    knows_optimizer = traits_of(content.source_format).holds_layers
    return {
        one.path
        for one in filter(is_state_tensor, content.tensors)
        if knows_optimizer
        or _FLAT_OPTIMIZER.fullmatch(one.name.partition(".")[0])
        or FLAT_OPTIMIZER.match(one.name)
    }


def _tied(kept: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return carry_ties((tensor, tensor) for tensor in kept)


def _without_state(node: object, keys: Path, removed: set[Path]) -> object:
    """Return a dictionary without training state, recursively; add the removed paths to ``removed``."""
    if not isinstance(node, dict) or len(keys) >= _MAX_DEPTH or role_below(keys) is Role.WEIGHTS:
        return node
    removed.update((*keys, key) for key, value in node.items() if _is_state(key, value))
    entries = [
        (key, _without_state(value, (*keys, key), removed) if isinstance(key, str) else value)
        for key, value in node.items()
        if (*keys, key) not in removed
    ]
    if isinstance(node, DictSubclass):
        return DictSubclass(node.kind, entries, node.state, node.factory)
    return dict(entries)


def _is_state(key: object, value: object) -> bool:
    """Return whether an entry is training state: its content has the expected keys, and no weights."""
    if not isinstance(key, str):
        return False
    if isinstance(value, Tensor) and value.role is Role.OPTIMIZER:
        return FLAT_OPTIMIZER.match(key) is not None
    if _RANDOM.search(key):
        is_one = is_random_state(value)
    else:
        expected = next((keys for pattern, keys in _STATE_KEYS.items() if pattern.search(key)), None)
        is_one = expected is not None and _has_keys(value, expected)
    return is_one and {tensor.role for tensor in tensors_in(value)} <= _STATE_ROLES


def _has_keys(value: object, keys: frozenset[str]) -> bool:
    """Return whether a value is a dictionary with some keys, or a non-empty container of such."""
    if isinstance(value, dict) and keys <= value.keys():
        return True
    inner: list[object] = list(value) if isinstance(value, list | tuple) else []
    inner += value.values() if isinstance(value, dict) else ()
    return bool(inner) and all(isinstance(one, dict) and keys <= one.keys() for one in inner)

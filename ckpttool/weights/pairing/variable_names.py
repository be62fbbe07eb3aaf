"""Normalises names of tensors: PyTorch's variable names, without wrappers; finds the word for a layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import lru_cache

from ckpttool.core.checkpoint import Checkpoint, own_names_of
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.formats.traits import Family, traits_of
from ckpttool.weights.pairing.layers import Steps, steps_of
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.pairs import Pair, Unpaired

WRAPPER_STEPS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_functional",
}
"""Steps that a wrapper adds at any depth; no module is named like that otherwise."""
_CONTAINERS = re.compile(
    r"_?(module|model|net|network)|(model_|module_|net_)?state(_dict)?|params|weights|variables|model_weights"
    r"|(sequential|functional|model)(_\d+)?"
)
"""Containers and wrappers at the front of a model's names."""
_OPTIMIZER = re.compile(r"(\w*_)?(optim|optimizer|opt)(izer)?s?(_states?|_state_dict|_weights)?")

LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "embeddings": "weight",
    "w_0": "weight",
    "beta": "bias",
    "b_0": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "_mean": "running_mean",
    "_variance": "running_var",
    "_kernel": "weight",
    "_embeddings": "weight",
}
"""PyTorch's names of variables by those in other frameworks."""
_RECURRENT = re.compile(r"((?:weight|bias)(?:_ih|_hh)?)_l0((?:_reverse)?)")
_SEED = re.compile(r"_?seed_generator(_\d+)?")
_SEEDED = {"seed_generator_state", "_state", "state", "0"}
"""Names of the state of a layer's random number generator in Keras."""
_SEED_SIZE = 2
_STEP_COUNTER = re.compile(r"^_?(iter|iterations?|step)$|beta_?[12]_pow")
VariableClass = tuple[Role, str, tuple[int, ...]]
"""Key of variables that may be paired."""
_RECURRENT_LAYER = re.compile(r"_l\d+")
_PROJECTION = re.compile(
    r"(?:(?:w|to|fc|linear|lin|dense)_?)?(?:(?P<q>q|query)|(?P<k>k|key)|(?P<v>v|value)"
    r"|(?P<out>o|out|output|attention_output))(?:_?(?:proj|projection|lin|linear|dense|layer|fc))?"
)
"""Common names of the four projections of an attention."""
_LISTS = ("_operations", "_layers", "layers")
_LAYER = re.compile(r"layer(_with_weights)?-\d+")


@lru_cache(maxsize=1 << 12)
def leaf_of(name: str) -> str:
    """Return PyTorch's name for a variable: ``kernel`` -> ``weight``, ``weight_ih_l0`` -> ``weight_ih``."""
    match = _RECURRENT.fullmatch(name)
    return match[1] + match[2] if match else LEAVES.get(name, name)


def torch_name(tensor: Tensor) -> Steps:
    """Return a tensor's path with PyTorch's variable name, wrappers included."""
    return _torch_name(tensor.path)


@lru_cache(maxsize=1 << 17)
def _torch_name(path: Path) -> Steps:
    steps = steps_of(path)
    return (*steps[:-1], leaf_of(steps[-1])) if steps else steps


def bare_name(tensor: Tensor) -> Steps:
    """Return a tensor's path with PyTorch's variable name, without wrappers of the model or the optimizer."""
    return _bare_name(tensor.path, tensor.role is Role.OPTIMIZER)


@lru_cache(maxsize=1 << 17)
def _bare_name(path: Path, is_optimizer: bool) -> Steps:
    steps = _torch_name(path)
    wrapper = _OPTIMIZER if is_optimizer else _CONTAINERS
    modules = tuple(step for step in steps[:-1] if step not in WRAPPER_STEPS)
    # Containers are removed at the front only: a module inside a model may well be called ``model``, or a
    # layer ``network``. The last step is the variable, which is kept whatever its name.
    depth = 0
    while depth < len(modules) and wrapper.fullmatch(modules[depth]):
        depth += 1
    return (*modules[depth:], *steps[-1:])


def is_bookkeeping(tensor: Tensor, format: str, *, families_differ: bool) -> bool:
    """Return whether only the framework that wrote a tensor needs it, by its name, size and dtype.

    Args:
        tensor: Unpaired tensor.
        format: Format or conventions of its checkpoint.
        families_differ: Whether the other side is of another family.
    """
    # A name alone proves little, so size and dtype or role must fit as well: counters have one element, and
    # the states of Keras's seed generators two. A weight that is called ``step`` is never ignored.
    steps = steps_of(tensor.path)
    if not steps or tensor.size > _SEED_SIZE:
        return False
    traits, is_integer = traits_of(format), tensor.dtype.kind == "integer"
    if steps[-1] == "num_batches_tracked":
        return traits.family is Family.TORCH and is_integer and not tensor.shape
    if steps[-1] == "save_counter":
        return traits.has_object_graph and is_integer and not tensor.shape
    if any(_SEED.fullmatch(step) for step in steps[:-1]):
        # Plain containers of named arrays (NumPy, safetensors …) may hold a Keras model, too.
        is_keras = traits.family is Family.KERAS or (traits.is_container and not traits.nests_state_dicts)
        return steps[-1] in _SEEDED and is_integer and is_keras
    if steps[:2] == ("keras_api", "metrics"):
        return traits.has_object_graph and tensor.role is Role.OTHER and not tensor.shape
    is_count = (
        tensor.role is Role.OPTIMIZER and tensor.size == 1 and _STEP_COUNTER.search(steps[-1]) is not None
    )
    return families_differ and is_count


def leaf_name(item: LayoutItem) -> str:
    """Return PyTorch's name of the variable, without the number of a stacked recurrent layer."""
    steps = bare_name(item.tensor)
    return _RECURRENT_LAYER.sub("", steps[-1]) if steps else ""


def layer_word(item: LayoutItem) -> str | None:
    """Return the name of a tensor's layer if it has no digits; those of an attention become q, k, v, out."""
    steps = bare_name(item.tensor)
    name = steps[-2].lstrip("_").lower() if len(steps) > 1 else ""
    if match := _PROJECTION.fullmatch(name):
        return match.lastgroup
    return name if name and not any(map(str.isdecimal, name)) else None


class LayerWords:
    """Words for layers that occur on both sides, per variable name and shape."""

    def __init__(self, unpaired: Unpaired) -> None:
        ours, theirs = ({_class_and_word(item) for item in side} for side in (unpaired.a, unpaired.b))
        self._shared = ours & theirs

    def shared_word(self, item: LayoutItem) -> str | None:
        """Return the word for a tensor's layer if the other side has it for an equal variable, else None."""
        key = _class_and_word(item)
        return key[1] if key in self._shared else None

    def contradict(self, a: LayoutItem, b: LayoutItem) -> bool:
        """Return whether both layers have words, and these differ."""
        ours, theirs = self.shared_word(a), self.shared_word(b)
        return ours is not None and theirs is not None and ours != theirs


def _class_and_word(item: LayoutItem) -> tuple[VariableClass, str | None]:
    return _class_of(item), layer_word(item)


def _class_of(item: LayoutItem) -> VariableClass:
    return item.tensor.role, leaf_name(item), item.tensor.shape


def crossed_pairs(pairs: Iterable[Pair], positions: tuple[dict[int, int], dict[int, int]]) -> list[Pair]:
    """Return the pairs whose order within their class differs between the sides.

    Args:
        pairs: Pairs made by content alone.
        positions: For each side, the position of each stored tensor by ``id``.
    """
    # Content pairs tensors whatever their order. Variables of one class normally have one order in both
    # files, so pairs out of this order are reported.
    classes: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        words = {layer_word(pair.a), layer_word(pair.b)}
        key = (_class_of(pair.a), _class_of(pair.b), words.pop() if len(words) == 1 else None)
        classes.setdefault(key, []).append(pair)
    crossed = []
    for alike in classes.values():
        ours = sorted(alike, key=lambda pair: positions[0][id(pair.a.sources[0])])
        theirs = sorted(alike, key=lambda pair: positions[1][id(pair.b.sources[0])])
        crossed += [pair for pair, other in zip(ours, theirs, strict=True) if pair is not other]
    return crossed


# Numbered layers --------------------------------------------------------------------------------------


def numbered_layer_names(checkpoint: Checkpoint) -> dict[Steps, Steps]:
    """Return the name that each numbered layer's variables were created with, if unambiguous.

    TensorFlow and ``.keras`` files number layers (``layers/3``, ``layer_with_weights-0``), but may store the
    original name of each variable.
    """
    own_names = own_names_of(checkpoint)
    # The own name of a variable ends like its path inside the layer, so the steps before that name the layer.
    # A layer is left out if its variables disagree, or if another layer has the same name.
    candidates: dict[Steps, set[Steps]] = {}
    for tensor in checkpoint.tensors if own_names else ():
        steps, own = steps_of(tensor.path), steps_of((own_names.get(tensor.name, ""),))
        depth = _numbered_depth(steps)
        inside = len(steps) - depth
        if depth and len(own) > inside:
            candidates.setdefault(steps[:depth], set()).add(own[: len(own) - inside])
    single = {place: next(iter(names)) for place, names in candidates.items() if len(names) == 1}
    count = Counter(single.values())
    return {place: name for place, name in single.items() if count[name] == 1}


def _numbered_depth(steps: Steps) -> int:
    """Return the depth of the innermost numbered layer in a path; 0 without one."""
    for depth in range(len(steps) - 1, 0, -1):
        is_item = depth > 1 and steps[depth - 1].isdecimal() and steps[depth - 2] in _LISTS
        if is_item or _LAYER.fullmatch(steps[depth - 1]):
            return depth
    return 0


def rename_numbered_layers(items: Iterable[LayoutItem], own_names: dict[Steps, Steps]) -> list[LayoutItem]:
    """Return items with paths of numbered layers replaced by the layers' own names."""
    renamed = []
    for item in items:
        steps = steps_of(item.tensor.path)
        depth = _numbered_depth(steps)
        own = own_names.get(steps[:depth])
        if own is not None:
            path = (*own, *steps[depth:])
            item = replace(item, name=".".join(path), tensor=replace(item.tensor, path=path))
        renamed.append(item)
    return renamed

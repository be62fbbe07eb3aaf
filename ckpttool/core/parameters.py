"""Number of a model's parameters, by the logical shapes of weights, and of its buffers.

A tensor may be stored as several: a sparse one as indices and values, a quantized one as integers and scales.
The metadata describes such a tensor at its own path. Quantized layers store their weights as words of one
tensor, with scales, zero points and indices in others; ``PACKINGS`` has a row for each packing. The shapes of
the others give the number of weights without the padding of the last word. Where they don't, the bits of a
weight come from ``config.json`` or from the layer's policy in a Keras configuration.

Sources: PyTorch ``torch/_utils.py``, ``torch/nn/utils/spectral_norm.py``, ``parametrizations.py``; AutoGPTQ
``qlinear_cuda.py``; AutoAWQ ``gemm.py``; mlx ``nn/layers/quantized.py``; bitsandbytes ``nn/modules.py``;
compressed-tensors ``pack_quantized.py``; Transformers ``integrations/mxfp4.py``; HQQ ``core/quantize.py``,
``core/bitpack.py``; Quanto ``tensor/packed.py``, ``tensor/grouped.py``, ``tensor/weights/qbits.py``; AQLM
``inference.py``; Keras ``layers/core/dense.py``, ``einsum_dense.py``, ``embedding.py``,
``reversible_embedding.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from ckpttool.core.tensor import Path, Role, Tensor

_BUFFER = re.compile(
    r"(running|moving)_(mean|var|variance)|num_batches_tracked|_mean|_variance|inv_freq|masked_bias|vector_u"
)
"""Names of floating buffers and of counters in the layers of PyTorch, Transformers, Keras and Paddle."""
_PARAMETRIZED_BUFFER = re.compile(r"(?:^|\.)parametrizations\.[^.]+\.[0-9]+\._[uv]$")
_REPARAMETRIZATION_BUFFER = re.compile(r"(.+)_(?:u|v|mask)$")
"""Buffers that spectral normalization and pruning add to a layer with ``weight_orig``."""
_NOT_TRAINED = ("integer", "boolean", "bits", "string")
"""Kinds of element types that PyTorch doesn't train."""


class Elements(NamedTuple):
    """Elements of a model's tensors by the type that stores them; tied tensors count once.

    Attributes:
        parameters: Elements of weights by their logical shapes.
        buffers: Elements that no optimizer changes.
        packed: Words with an unknown number of weights each.
    """

    parameters: Counter[str]
    buffers: Counter[str]
    packed: Counter[str]


class LogicalTensor(dict[str, object]):
    """Metadata of a tensor that is stored as several components, with their metadata by name.

    It is a separate type, since a user's dictionary may have the same keys.

    Attributes:
        shape: Its logical shape; None if that is the one of its elements.
        value_components: The components with the elements; empty if any of them may have some.
    """

    def __init__(
        self,
        plain: Mapping[str, object],
        *,
        shape: tuple[int, ...] | None = None,
        value_components: tuple[str, ...] = (),
    ) -> None:
        super().__init__(plain)
        self.shape = shape
        self.value_components = value_components


def logical_tensor_at(metadata: object, path: Path) -> tuple[Path, LogicalTensor] | None:
    """Return the tensor at a path, or the one with a component at the path, and its own path."""
    node = metadata
    for depth in range(len(path) + 1):
        if isinstance(node, LogicalTensor):
            return path[:depth], node
        if not isinstance(node, Mapping) or depth == len(path):
            return None
        node = node.get(str(path[depth]))
    return None


def count_elements(
    tensors: Sequence[Tensor], metadata: Mapping[str, object], config: Mapping[str, object]
) -> Elements:
    """Return the numbers of parameters and of buffers' elements among the weights.

    Args:
        tensors: All tensors of a checkpoint.
        metadata: Its metadata.
        config: Its parsed ``config.json``.
    """
    # A weight is counted by the first of these that knows it: the logical tensor that it is a component of
    # (sparse or quantized), the packing of its layer, the names of buffers; else by its own shape.
    weights = [*_untied_weights(tensors)]
    all_weights = [tensor for tensor in tensors if tensor.role is Role.WEIGHTS]
    packed_weights = PackedWeights(all_weights, metadata, config)
    names = {tensor.name for tensor in weights}
    found = Elements(Counter(), Counter(), Counter())
    counted: set[Path] = set()
    for tensor in weights:
        place, whole = logical_tensor_at(metadata, tensor.path) or ((), None)
        if whole is not None and (whole.shape is not None or whole.value_components):
            if (size := _size_in(whole, place, tensor, counted)) is not None:
                found.parameters[tensor.dtype.name] += size
        elif (contents := packed_weights.contents_of(tensor)) is not None:
            type_, number = contents
            if number is None:
                found.packed[type_] += tensor.size
            else:
                found.parameters[type_] += number
        elif _is_buffer(tensor, names):
            found.buffers[tensor.dtype.name] += tensor.size
        else:
            found.parameters[tensor.dtype.name] += tensor.size
    return Elements(*(+counts for counts in found))


def _untied_weights(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield weights but those that share the values of an earlier one; its owner may have another role."""
    others = {tensor.name for tensor in tensors if tensor.role is not Role.WEIGHTS}
    for tensor in tensors:
        if tensor.role is Role.WEIGHTS and (tensor.shares_with is None or tensor.shares_with in others):
            others.discard(tensor.shares_with or "")
            yield tensor


def _size_in(whole: LogicalTensor, place: Path, tensor: Tensor, counted: set[Path]) -> int | None:
    """Return the number of the tensor's elements in a component; None if it only describes their layout."""
    component = str(tensor.path[len(place)]) if len(tensor.path) > len(place) else ""
    if whole.value_components:
        if component not in whole.value_components:
            return None
        return tensor.size if whole.shape is None else math.prod(whole.shape)
    if place in counted:
        return None
    counted.add(place)
    return math.prod(whole.shape or ())


def _is_buffer(tensor: Tensor, names: set[str]) -> bool:
    """Return whether a tensor is state of a layer that no optimizer changes."""
    if tensor.dtype.kind in _NOT_TRAINED:
        return True
    name = tensor.name
    layer, _, leaf = name.rpartition(".")
    if _BUFFER.fullmatch(leaf) or _PARAMETRIZED_BUFFER.search(name):
        return True
    if leaf == "scale" and f"{layer}.zero_point" in names:  # of the outputs of a quantized layer
        return True
    buffer = _REPARAMETRIZATION_BUFFER.fullmatch(name)
    return buffer is not None and f"{buffer[1]}_orig" in names


# Packed weights -------------------------------------------------------------------------------------


_TRAINED = re.compile("bias|lora_.+")
"""Names, in a quantized layer, of tensors that are trained."""
_MOST_BITS = 8
"""Bits of the largest quantized weight."""
_DEEPEST = 4
"""Maximum depth of a name below its layer, as in ``weight.quant_state.bitsandbytes__nf4``."""


# Layouts --------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """One way of packing weights into words.

    Attributes:
        words: Suffix of the name of the packed tensor.
        companion: Suffix of the name of another tensor that the layer must have.
        number: Counts the weights, given both tensors; returns None if their shapes don't fit. Without it,
            the configuration has the bits of a weight.
        any_type: Whether words may have a type that plain weights have.
        is_dense: Whether a weight may be split between words; else words end with unused bits.
    """

    words: str
    companion: str = ""
    number: Callable[[Tensor, Tensor], int | None] | None = None
    any_type: bool = False
    is_dense: bool = False


def _along(axis: int, other: int) -> Callable[[Tensor, Tensor], int | None]:
    """Return a count for words packed along one axis, whose unpacked length is an axis of another tensor."""
    # The other tensor (scales or group indices) isn't packed, so its axis has the number of weights, without
    # the padding of the last word. It is plausible only if the words have room for that number: either dense
    # (3 bits across word borders), or with ``each`` weights per word and the last word partly used.

    def number(words: Tensor, companion: Tensor) -> int | None:
        if words.dtype.kind != "integer" or not words.size or len(words.shape) < 2 or not companion.shape:
            return None
        stored, length = words.shape[axis], companion.shape[other]
        each = -(-length // stored)
        fits = length and (stored * words.dtype.bits % length == 0 or -(-length // each) == stored)
        found = words.size // stored * length
        return found if fits and 1 <= _bits_of_each(words, found) <= _MOST_BITS else None

    return number


def _bits_of_each(words: Tensor, number: int) -> int:
    """Return the bits that a parameter has in words."""
    total = words.size * words.dtype.bits
    return total // number if total % number == 0 else words.dtype.bits // -(-number // words.size)


def _four_bits(words: Tensor, companion: Tensor) -> int | None:
    return words.size * words.dtype.bits // 4


def _blocks(words: Tensor, scales: Tensor) -> int | None:
    return _four_bits(words, scales) if words.shape[:-1] == scales.shape else None


def _decoded(codes: Tensor, codebooks: Tensor) -> int | None:
    """Count the weights that are encoded as entries of additive codebooks."""
    if len(codebooks.shape) != 4 or codes.shape[2:] != codebooks.shape[:1]:
        return None
    return math.prod(codes.shape[:2]) * math.prod(codebooks.shape[2:])


PACKINGS = (
    Packing(".qweight", ".g_idx", _along(0, 0)),  # GPTQ
    Packing(".qweight", ".scales", _along(-1, -1)),  # AWQ
    Packing(".qweight", is_dense=True),
    Packing(".weight_packed"),  # compressed-tensors
    Packing(".weight", ".weight.absmax", _four_bits, any_type=True),  # bitsandbytes
    Packing(".weight", is_dense=True),  # MLX, and whatever has 8 bits
    Packing("_blocks", "_scales", _blocks),  # MXFP4 in Transformers
    Packing(".blocks", ".scales", _blocks),  # MXFP4 of OpenAI
    Packing(".W_q", ".scale", _along(0, 0), any_type=True),  # HQQ
    Packing(".W_q", ".scale", any_type=True),
    Packing(".weight._data._data", ".weight._scale", _along(0, 0)),  # Quanto
    Packing(".weight._data._data", ".weight._scale"),
    Packing(".weight._data", ".weight._scale"),
    Packing(".codes", ".codebooks", _decoded),  # AQLM
    Packing(".kernel", ".kernel_scale", _along(-1, -1)),  # Keras
    Packing(".kernel", ".kernel_scale", _along(0, 0)),
    Packing(".kernel", ".kernel_scale"),
    Packing(".embeddings", ".g_idx", _along(-1, 0)),
    Packing(".embeddings", ".embeddings_scale"),
    Packing(".reverse_embeddings", ".g_idx", _along(0, 0)),
    Packing(".reverse_embeddings", ".reverse_embeddings_scale"),
)

_NUMBER = re.compile("/vars/([0-9]+)$")
_KERNEL, _EMBEDDINGS = ("kernel", "kernel_scale"), ("embeddings", "embeddings_scale")
_REVERSE = ("reverse_embeddings", "reverse_embeddings_scale")
_NUMBERED = {
    "if": _KERNEL,
    "iff": ("kernel", "bias", "kernel_scale"),
    "ifzf": (*_KERNEL, "kernel_zero", "g_idx"),
    "iffzf": ("kernel", "bias", "kernel_scale", "kernel_zero", "g_idx"),
    **{
        f"{bias}uf{zero}{more}": (*["bias"] * len(bias), *_KERNEL, *["kernel_zero"] * len(zero), *names)
        for bias in ("", "f")
        for zero in ("", "z")  # Keras 3.15 doesn't save it
        for more, names in {"f": ("g_idx",), "ff": ("awq_scales", "g_idx")}.items()
    },
}
"""Names of the numbered variables in Keras's quantized layers, by their types.

In a key, i and u are signed and unsigned integers, f floats, and z zero points: integers in the shape of the
floats before them. GPTQ and AWQ have unsigned words.
"""
_NUMBERED_BY_ROW = {
    "if": _EMBEDDINGS,
    "ifif": (*_EMBEDDINGS, *_REVERSE),
    "ifzf": (*_EMBEDDINGS, "embeddings_zero", "g_idx"),
    "ifzfiff": (*_EMBEDDINGS, "embeddings_zero", "g_idx", *_REVERSE, "reverse_embeddings_zero"),
}
"""The same for layers with one scale per row."""


# Layers ---------------------------------------------------------------------------------------------


_ENDS = tuple({packing.words for packing in PACKINGS})


class PackedWeights:
    """The quantized layers among some weights."""

    def __init__(
        self, weights: Sequence[Tensor], metadata: Mapping[str, object], config: Mapping[str, object]
    ) -> None:
        self._settings = _quantization_settings(config)
        self._policies = dict(_keras_policies(metadata.get("model_config")))
        known = dict(_keras_names(weights))
        self._names = {tensor.name: f".{known.get(tensor.name, tensor.name)}" for tensor in weights}
        self._tensors = {self._names[tensor.name]: tensor for tensor in weights}
        self._packings = {
            name: packings
            for name, tensor in self._tensors.items()
            if name.endswith(_ENDS) and (packings := [*self._packings_of(name, tensor)])
        }
        self._starts = {
            _layer_of(name, packings) + packings[0].words[0]: packings[0].words[1:].partition(".")[0] + "."
            for name, packings in self._packings.items()
        }
        self._companions = {name: start for name in self._tensors if (start := self._start_of(name))}
        self._starts_with_companions = {*self._companions.values()}

    def contents_of(self, tensor: Tensor) -> tuple[str, int | None] | None:
        """Return type and number of the parameters in a tensor of a quantized layer; None for others.

        The number is None if unknown.
        """
        name = self._names[tensor.name]
        if (packings := self._packings.get(name)) is None:
            return (tensor.dtype.name, 0) if name in self._companions else None
        # The shapes of the layer's other tensors are the best evidence, then the configured bits. Without
        # either, a word is one weight if its type is that narrow, or if the layer has no other tensors.
        layer = _layer_of(name, packings)
        bits = self._bits_in(layer)
        holds_several = bits > 0 and tensor.dtype.bits // bits > 1
        for packing in packings:
            number = self._number(packing, layer, tensor)
            # A scale for each word proves nothing where words are known to hold several weights.
            if number is not None and (number != tensor.size or not holds_several):
                each = _bits_of_each(tensor, number)
                is_packed = number > tensor.size and each
                return f"{each}-bit" if is_packed else tensor.dtype.name, number
        if holds_several and tensor.dtype.kind == "integer":
            total, each = tensor.size * tensor.dtype.bits, tensor.dtype.bits // bits
            return f"{bits}-bit", total // bits if packings[-1].is_dense else tensor.size * each
        is_alone = layer + packings[0].words[0] not in self._starts_with_companions
        is_whole = tensor.dtype.name == "int8" or _is_small_float(tensor) or (bits > 0 and not holds_several)
        return tensor.dtype.name, tensor.size if is_alone or is_whole else None

    def _packings_of(self, name: str, tensor: Tensor) -> Iterator[Packing]:
        """Yield the packings that fit a tensor as packed words."""
        for packing in PACKINGS:
            if not name.endswith(packing.words):
                continue
            layer = name.removesuffix(packing.words)
            is_possible = packing.any_type or _is_small_float(tensor) or tensor.dtype.kind == "integer"
            has_companion = not packing.companion or layer + packing.companion in self._tensors
            if is_possible and has_companion and (not packing.number or self._number(packing, layer, tensor)):
                yield packing

    def _number(self, packing: Packing, layer: str, words: Tensor) -> int | None:
        return packing.number(words, self._tensors[layer + packing.companion]) if packing.number else None

    def _start_of(self, name: str) -> str | None:
        """Return the name prefix of the quantized layer to which a scale, zero point or index belongs."""
        for start in _starts(name) if self._starts else ():
            if (inner := self._starts.get(start)) is not None:
                rest = name.removeprefix(start)
                is_companion = rest.startswith(inner) or "." not in rest
                if is_companion and name not in self._packings and not _TRAINED.fullmatch(rest):
                    return start
        return None

    def _bits_in(self, layer: str) -> int:
        """Return the configured bits of a layer's weights; 0 if unknown."""
        own = self._settings.get(layer.removeprefix("."))
        for settings in (own if isinstance(own, Mapping) else {}, self._settings):
            for key in ("bits", "w_bit", "num_bits"):
                if type(bits := settings.get(key)) is int:
                    return bits
        return self._policies.get(layer.rpartition(".")[2], 0)


def _is_small_float(tensor: Tensor) -> bool:
    return tensor.dtype.kind == "float" and tensor.dtype.bits <= _MOST_BITS


def _layer_of(name: str, packings: Sequence[Packing]) -> str:
    return name.removesuffix(packings[0].words)


def _starts(name: str) -> Iterator[str]:
    """Yield the prefixes of a name that may be a layer's, with their separator."""
    layer, mark, _ = name.rpartition("_")
    yield layer + mark
    layer = name
    for _ in range(_DEEPEST):
        layer, mark, _ = layer.rpartition(".")
        yield layer + mark


# Configuration --------------------------------------------------------------------------------------


_GROUPS = (
    ("config_groups", "weights", "num_bits"),
    ("quant_config", "weight_quant_params", "nbits"),
)
"""Keys of the bits per group of layers in compressed-tensors and HQQ; HQQ may have one group for all."""


def _quantization_settings(config: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the quantization settings in ``config.json``."""
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, Mapping):
        return {}
    bits = {*_bits_of_groups(settings)}
    return {"num_bits": bits.pop(), **settings} if len(bits) == 1 else settings


def _bits_of_groups(settings: Mapping[str, Any]) -> Iterator[int]:
    """Yield the bits of the weights in each group of layers."""
    for key, weights, name in _GROUPS:
        groups = settings.get(key)
        for group in (groups, *groups.values()) if isinstance(groups, Mapping) else ():
            of_weights = group.get(weights) if isinstance(group, Mapping) else None
            bits = of_weights.get(name) if isinstance(of_weights, Mapping) else None
            if type(bits) is int:
                yield bits


def _keras_policies(model: object) -> Iterator[tuple[str, int]]:
    """Yield the names of the quantized layers in a Keras configuration, with their bits."""
    nodes = [model]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            nodes += node.values()
            policy = node.get("dtype")
            inner = policy.get("config") if isinstance(policy, Mapping) else None
            mode = inner.get("mode") if isinstance(inner, Mapping) else None
            if isinstance(mode, str) and (found := re.match("int([48])(?:/|$)", mode)):
                yield str(node.get("name")), int(found[1])
        elif isinstance(node, list):
            nodes += node


def _keras_names(weights: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of numbered Keras variables, with their attribute names in the layer."""
    keys = ((one, _NUMBER.search(one.key or "/" + "/".join(map(str, one.path)))) for one in weights)
    numbered = [(one.name.rpartition(".")[0], int(number[1]), one) for one, number in keys if number]
    for layer, group in groupby(numbered, itemgetter(0)):
        variables = [one for _, _, one in sorted(group, key=itemgetter(1))]
        kinds = "".join(map(_letter, variables, [None, *variables]))
        by_row = len(variables) > 1 and variables[0].shape[:1] == variables[1].shape[:1]
        names = (_NUMBERED_BY_ROW.get(kinds) if by_row else None) or _NUMBERED.get(kinds, ())
        for variable, name in zip(variables, names, strict=False):
            yield variable.name, f"{layer}.{name}"


def _letter(variable: Tensor, before: Tensor | None) -> str:
    if variable.dtype.kind == "integer" and before is not None and variable.shape == before.shape:
        return "z"
    return "u" if variable.dtype.name.startswith("u") else variable.dtype.kind[0]

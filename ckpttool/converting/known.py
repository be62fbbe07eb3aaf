"""Of which tensors nothing says how they lie: whoever needs that to be known refuses them by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttool.checkpoint import Checkpoint, Tensor
from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import Layer, has_other_word, layers_of
from ckpttool.pairing.layouts import RULES, Item
from ckpttool.wire.jsontext import objects
from ckpttool.writing.content import Content

_AS_TORCH = frozenset(
    {
        *(f"{kind}{n}d" for kind in ("conv", "depthwise_conv") for n in (1, 2, 3)),
        *(f"{kind}{n}d_transpose" for kind in ("conv", "depthwise_conv") for n in (1, 2, 3)),
        *("embedding", "lookup_table", "lookup_table_v2", "lstm_cell", "gru_cell", "simple_rnn_cell"),
    }
)
"""What Paddle's files call layers whose weights lie as PyTorch's do."""
_CHANNELS = {"conv": (-1,), "transposed conv": (-2,), "depthwise": (-2, -1), "separable": (-1,)}
"""Which axes of a kernel say how many channels come out."""
_SHOWN = 3
_FLATTENING = ("Flatten", "Reshape")
_KERNELS = ("kernel", "pointwise_kernel", "depthwise_kernel")


def is_unknown(item: Item, checkpoint: Checkpoint) -> bool:
    """Tell whether a tensor may lie otherwise than PyTorch has it, as nothing says of what layer it is."""
    if item.rule is not None or len(item.tensor.shape) < 2:
        return False
    source = item.sources[0]
    if family_of(checkpoint.format) == "torch":
        return has_other_word(source)
    return checkpoint.layers.get(source.name) not in _AS_TORCH


def maybe_flattened(checkpoint: Checkpoint) -> list[Tensor]:
    """Return the kernels of Dense layers that may stand behind a Flatten, where nothing says of the wiring.

    Their inputs are then in another order than PyTorch's.
    """
    if _tells_wiring(checkpoint):
        return []
    layers = layers_of(checkpoint)
    channels = {count for layer in layers for count in _channels(layer)}
    kernels = [layer.variables["kernel"] for layer in layers if _is_dense(layer)]
    return behind_channels(channels, [(one, one.shape[0], one.shape[1]) for one in kernels])


def _tells_wiring(checkpoint: Checkpoint) -> bool:
    """Tell whether a configuration says of each Flatten what stands behind it."""
    config = checkpoint.metadata.get("model_config")
    if not config:
        return False
    flat = sum(one.get("class_name") in _FLATTENING for one in objects(config))
    told = sum("after Flatten" in kind for kind in checkpoint.layers.values())
    return flat <= told


def behind_channels(channels: set[int], layers: Iterable[tuple[Tensor, int, int]]) -> list[Tensor]:
    """Return the weights among whose inputs may be the channels of a convolution, each at several places.

    Those are not which take as many as a convolution or a linear layer before gives.

    Args:
        channels: How many come out of each convolution.
        layers: The weights of linear layers with their inputs and outputs, in the order of the model.
    """
    found, outputs = [], set(channels)
    for weight, inputs, units in layers:
        if channels and inputs > min(channels) and inputs not in outputs:
            found.append(weight)
        outputs.add(units)
    return found


def _is_dense(layer: Layer) -> bool:
    return layer.kind == "dense" and "kernel" in layer.variables and len(layer.variables["kernel"].shape) == 2


def _channels(layer: Layer) -> Iterator[int]:
    axes = _CHANNELS.get(layer.kind or "")
    kernel = next((layer.variables[name] for name in _KERNELS if name in layer.variables), None)
    if axes is None or kernel is None or len(kernel.shape) < 3:
        return
    if layer.kind == "separable" and "pointwise_kernel" in layer.variables:
        kernel = layer.variables["pointwise_kernel"]
    count = 1
    for axis in axes:
        count *= kernel.shape[axis]
    yield count


def listed(tensors: Iterable[Tensor]) -> str:
    """Return the names of some tensors, and how many more there are."""
    names = [tensor.name for tensor in tensors]
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def about_norms(rules: Iterable[str]) -> list[str]:
    """Return what weights don't say of norms, if the rules are of some."""
    norms = {RULES[kind].text for kind in ("batch norm", "norm", "rms norm")}
    if norms.isdisjoint(rules):
        return []
    return ["the eps of a norm is no weight: it is 1e-5 in PyTorch and 1e-3 in Keras, if nobody sets it"]


def left_behind(content: Content, checkpoint: Checkpoint) -> list[str]:
    """Return what does not go with weights that get the names of others: values, and an architecture."""
    values = list(checkpoint.metadata) if content.tree is not None else []
    more = f" and {len(values) - _SHOWN:,} more" if len(values) > _SHOWN else ""
    notes = [f"left out beside the tensors: {', '.join(values[:_SHOWN])}{more}"] if values else []
    if content.native:
        owners = sorted({name.partition(".")[0] for name in content.native})
        notes.append(f"left out, as names and layouts are others: what {' and '.join(owners)} alone needs")
    return notes

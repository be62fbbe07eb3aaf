"""The model of a checkpoint: its class, layers and signatures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, FileEntry
from ckpttool.core.errors import CheckpointError
from ckpttool.core.result import document_of

if TYPE_CHECKING:
    from ckpttool.formats.keras.layer_tree import Layer

_HUB_CONFIG = "config.json"
_HUB_WEIGHTS = (
    "model.",
    "model-",
    "pytorch_model.",
    "pytorch_model-",
    "gptq_model-",
    "diffusion_pytorch_model.",
    "diffusion_pytorch_model-",
)
_MAX_CONFIG_BYTES = 1 << 20
_CLASS = "<class>"


class Signature(NamedTuple):
    """Signature of a graph: the types and shapes of its inputs and outputs, by name."""

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Class, layers and signatures of a model, as recorded in its checkpoint.

    Attributes:
        model: Class of the model; empty if it isn't recorded.
        family: ``model_type`` of Hugging Face's configuration: ``gpt2``.
        layers: Classes of layers and modules, by the prefixes of the tensors' names.
        weights: Names such as ``kernel`` of numbered variables, by the names of their tensors.
        signatures: Signatures of the model's graphs.
    """

    model: str = ""
    family: str = ""
    layers: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    signatures: tuple[Signature, ...] = ()

    def document(self) -> dict[str, Any]:
        return {
            "class": self.model or None,
            "family": self.family or None,
            "layers": self.layers,
            "signatures": {one.name: document_of(one, "inputs", "outputs") for one in self.signatures},
        }


UNKNOWN = Architecture()


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """Return the model in the metadata of a checkpoint, or in the configuration next to it."""
    metadata = checkpoint.metadata
    if "model_config" in metadata:
        return _from_keras_config(metadata["model_config"], checkpoint)
    if isinstance(graphs := metadata.get("meta_graphs"), list):
        return Architecture(signatures=tuple(_signatures(graphs)))
    if isinstance(modules := metadata.get("modules"), Mapping):
        return _from_classes({name: kind for name, kind in modules.items() if isinstance(kind, str)})
    if isinstance(attributes := metadata.get("attributes"), Mapping):
        return _from_classes(dict(_module_classes(attributes)))
    return _from_hub_config(checkpoint)


# Keras ----------------------------------------------------------------------------------------------


def _from_keras_config(config: object, checkpoint: Checkpoint) -> Architecture:
    from ckpttool.formats.keras.layer_tree import layer_of
    from ckpttool.formats.keras.model import weight_names

    model = layer_of(config)
    if model is None:
        return UNKNOWN
    paths = {one.name: tuple(one.key.split("/")[1:]) for one in checkpoint.tensors if one.key}
    return Architecture(model.cls, layers=dict(_keras_layers(model)), weights=weight_names(model, paths))


def _keras_layers(model: Layer) -> Iterator[tuple[str, str]]:
    for layer in model.layers:
        yield ".".join(layer.path), layer.cls
        yield from _keras_layers(layer)


# Graphs ---------------------------------------------------------------------------------------------


def _signatures(graphs: list[Any]) -> Iterator[Signature]:
    for graph in graphs:
        for name, signature in graph["signatures"].items():
            yield Signature(name, *(_arguments(signature.get(side, {})) for side in ("inputs", "outputs")))


def _arguments(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: f"{one['dtype']} {_shape_text(one['shape'])}" for name, one in tensors.items()}


def _shape_text(shape: list[int | None] | None) -> str:
    if shape is None:
        return "of any shape"
    return "×".join("?" if length is None else str(length) for length in shape) or "scalar"


# Modules --------------------------------------------------------------------------------------------


def _from_classes(classes: Mapping[str, str]) -> Architecture:
    """Return the architecture of modules, given their classes by dotted name; ``""`` is the model."""
    short = {name: kind.rpartition(".")[2] for name, kind in classes.items()}
    return Architecture(short.pop("", ""), layers=short)


def _module_classes(attributes: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the class of each module of a TorchScript archive with its dotted name."""
    if not isinstance(kind := attributes.get(_CLASS), str):
        return
    yield above, kind
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            yield from _module_classes(value, f"{above}.{name}" if above else name)


# Hugging Face ---------------------------------------------------------------------------------------


def _from_hub_config(checkpoint: Checkpoint) -> Architecture:
    """Return the model in Transformers' ``config.json`` next to the weights."""
    config = checkpoint.config
    family, names = config.get("model_type"), config.get("architectures")
    model = names[0] if isinstance(names, list) and names else ""
    if not isinstance(family, str) or not isinstance(model, str):
        return UNKNOWN
    return Architecture(model, family)


def hub_config(files: Iterable[FileEntry]) -> Mapping[str, Any]:
    """Return the ``config.json`` next to weights that are named as by Hugging Face's libraries.

    Empty if there is none, or if it isn't valid or is larger than 1 MiB.
    """
    places = (os.path.split(one.path) for one in files)
    directory = next((directory for directory, name in places if name.startswith(_HUB_WEIGHTS)), None)
    if directory is None:
        return {}
    from ckpttool.containers.jsontext import parse_json
    from ckpttool.storage import fs

    path = os.path.join(directory, _HUB_CONFIG)
    try:
        with fs.open_regular(path) as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        content = parse_json(path, text, "config") if len(text) <= _MAX_CONFIG_BYTES else None
    except (OSError, CheckpointError):
        return {}
    return content if isinstance(content, Mapping) else {}

"""Parts of a Keras file besides tensors that are needed to write it again: ``Checkpoint.native``.

``keras.config``
    The architecture as its file has it: ``config.json`` of a ``.keras``, or ``model_config`` of an ``.h5``.
``keras.training_config``
    Losses, metrics and the optimizer of an ``.h5``; a ``.keras`` has them in the config.
``keras.metadata``
    ``metadata.json`` of a ``.keras``; of an ``.h5``, an object with the same keys.
``keras.stored``
    JSON: the groups of the HDF5 file with their attributes, and the dataset of each tensor by its name.
``keras.asset:NAME``
    A record of a ``.keras`` that holds no weights: a vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.tensor import Tensor
from ckpttool.formats.keras.layout import Groups, stored_path, top_of

if TYPE_CHECKING:
    from ckpttool.formats.keras.layer_tree import Steps

CONFIG, TRAINING_CONFIG, METADATA = "keras.config", "keras.training_config", "keras.metadata"
STORED, ASSET = "keras.stored", "keras.asset:"

CONFIGS = ("model_config", "training_config")
"""Attributes of an ``.h5`` that hold a configuration."""
_METADATA_KEYS = ("keras_version", "backend")


class Stored(NamedTuple):
    """The groups and datasets of a file.

    Attributes:
        groups: The attributes of all groups by path, without the configs.
        paths: The datasets by the names of their tensors.
    """

    groups: Groups
    paths: Mapping[str, Steps]

    @property
    def lists(self) -> bool:
        """Return whether attributes list the layers and weights, as in ``.h5``; else they are numbered."""
        return top_of(self.groups) is not None


def stored_native(groups: Groups, tensors: tuple[Tensor, ...]) -> bytes:
    """Return the ``keras.stored`` of a file."""
    return _stored_text(groups, {tensor.name: stored_path(tensor) for tensor in tensors})


def merged_native(parts: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the native content of a set of files: each has the groups of all, and some of the datasets."""
    groups: dict[Steps, Mapping[str, Any]] = {}
    paths: dict[str, Steps] = {}
    for native in parts:
        stored = stored_of(native)
        if stored is not None:
            groups |= stored.groups
            paths |= stored.paths
    return {STORED: _stored_text(groups, paths)} if paths else {}


def _stored_text(groups: Groups, paths: Mapping[str, Steps]) -> bytes:
    stored = {
        "groups": [[list(path), _plain(attributes)] for path, attributes in groups.items()],
        "datasets": {name: list(path) for name, path in paths.items()},
    }
    return json.dumps(stored, separators=(",", ":")).encode()


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that can be written again, without the configs."""
    plain = {}
    for key, value in attributes.items():
        if isinstance(value, list):
            is_plain = any(all(isinstance(one, kind) for one in value) for kind in (str, int | float))
        else:
            is_plain = isinstance(value, bool | int | float | str)
        if is_plain and key not in CONFIGS:
            plain[key] = value
    return plain


def stored_of(native: Mapping[str, bytes]) -> Stored | None:
    """Return the groups and datasets of the source, or None without a valid record of them."""
    # A sidecar may have brought this text, so nothing in it is trusted.
    stored = object_of(native.get(STORED, b""))
    groups, paths = stored.get("groups"), stored.get("datasets")
    if not isinstance(groups, list) or not isinstance(paths, dict):
        return None
    if not all(isinstance(one, list) and len(one) == 2 for one in groups):
        return None
    if not all(_is_path(path) and isinstance(attributes, dict) for path, attributes in groups):
        return None
    if not all(path and _is_path(path) for path in paths.values()):
        return None
    return Stored(
        {tuple(path): _plain(attributes) for path, attributes in groups},
        {name: tuple(path) for name, path in paths.items()},
    )


def _is_path(path: object) -> bool:
    return isinstance(path, list) and all(isinstance(part, str) for part in path)


def object_of(text: bytes) -> dict[str, Any]:
    """Return the object in a JSON text; an empty one if the text is no valid JSON, or no object."""
    try:
        tree = parse_json("", text, "native part", constants=True)
    except CheckpointError:
        return {}
    return tree if isinstance(tree, dict) else {}


def h5_native(groups: Groups, tensors: tuple[Tensor, ...]) -> dict[str, bytes]:
    """Return the native content of a whole model, or of weights, in HDF5."""
    root = groups.get((), {})
    found = {STORED: stored_native(groups, tensors)}
    for key, name in zip((CONFIG, TRAINING_CONFIG), CONFIGS, strict=True):
        text = root.get(name)
        if isinstance(text, str):
            found[key] = text.encode("utf-8", "surrogatepass")
    attributes = {**groups.get(("model_weights",), {}), **root}
    metadata = {key: attributes[key] for key in _METADATA_KEYS if isinstance(attributes.get(key), str)}
    if metadata:
        found[METADATA] = json.dumps(metadata).encode()
    return found

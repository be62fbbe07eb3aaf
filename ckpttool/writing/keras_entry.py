"""The entry of a Keras file: what of a content it does not hold in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.checkpoint import Path, TrainingState
from ckpttool.formats.digests import RECORDS
from ckpttool.formats.keras_native import ASSET, CONFIG, METADATA, STORED, TRAINING_CONFIG
from ckpttool.writing.content import Content
from ckpttool.writing.document import document
from ckpttool.writing.hdf5 import renamed

_OF_MODEL = (CONFIG, TRAINING_CONFIG, METADATA)
_SAID = frozenset({"keras_version", "backend", "date_saved", "model_config", "training_config", "name"})
"""What Keras files say in their own way."""


def entry_of(
    content: Content, paths: Mapping[str, Path], *, holds_model: bool, holds_assets: bool = False
) -> bytes | None:
    """Return the entry, or None where the file holds everything.

    Args:
        content: What is written.
        paths: The path under which the file's reader knows each tensor, by its name in the content.
        holds_model: Whether the file has the architecture.
        holds_assets: Whether the file has the assets.
    """
    native = {
        key: value
        for key, value in content.native.items()
        if key != STORED
        and not (holds_model and key in _OF_MODEL)
        and not (holds_assets and key.startswith(ASSET))
    }
    is_said = STORED in content.native and all(_is_said(key, content) for key in content.metadata)
    metadata = {} if is_said else content.metadata
    training = TrainingState() if is_said else content.training
    is_tied = any(tensor.shares_with is not None for tensor in content.tensors)
    if not native and not metadata and content.tree is None and not is_tied:
        return None
    left = replace(content, native=native, metadata=metadata, training=training)
    return document(renamed(left, paths))


def _is_said(key: str, content: Content) -> bool:
    """Tell whether Keras files say in their own way what the metadata have under a key."""
    records = content.metadata[key]
    if key == RECORDS and isinstance(records, Mapping):
        return all(ASSET + name in content.native for name in records)
    return key in _SAID

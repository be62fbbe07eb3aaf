"""The entry of a Keras file: what of a content it does not hold in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckpttool.checkpoint import TrainingState
from ckpttool.formats.content.digests import RECORDS
from ckpttool.formats.keras.native import ASSET, STORED
from ckpttool.tensor import Path
from ckpttool.training import is_told_by_name
from ckpttool.writing.content import Content
from ckpttool.writing.document import document
from ckpttool.writing.hdf5 import renamed


@dataclass(frozen=True, slots=True)
class Held:
    """What a file holds in its own way, as its reader will tell it.

    Attributes:
        metadata: But for its records.
        native: But for where the file has what.
    """

    metadata: Mapping[str, object] = field(default_factory=dict)
    native: Mapping[str, bytes] = field(default_factory=dict)


def entry_of(content: Content, paths: Mapping[str, Path], held: Held) -> bytes | None:
    """Return the entry, or None where the file holds everything; one that is there tells the training too.

    Args:
        content: What is written.
        paths: The path under which the file's reader knows each tensor, by its name in the content.
        held: What the file holds without it.
    """
    native = {
        key: value for key, value in content.native.items() if key != STORED and held.native.get(key) != value
    }
    is_said = STORED in content.native and all(_is_said(key, content, held) for key in content.metadata)
    metadata = {} if is_said else content.metadata
    is_known = content.training == TrainingState() or (is_said and not is_told_by_name(content.training))
    is_tied = any(tensor.shares_with is not None for tensor in content.tensors)
    is_known = is_known and not content.conventions
    if not native and not metadata and is_known and content.tree is None and not is_tied:
        return None
    left = replace(content, native=native, metadata=metadata)
    return document(renamed(left, paths))


def _is_said(key: str, content: Content, held: Held) -> bool:
    """Tell whether a file says in its own way what the metadata have under a key."""
    told = content.metadata[key]
    if key == RECORDS and isinstance(told, Mapping):
        return all(ASSET + name in held.native for name in told)
    return key in held.metadata and held.metadata[key] == told

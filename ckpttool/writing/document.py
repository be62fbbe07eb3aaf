"""The entry ``ckpttool.content`` of what is to be written."""

from __future__ import annotations

import json

from ckpttool.checkpoint import Tensor
from ckpttool.errors import LimitExceeded
from ckpttool.formats.carried import ENTRY, MAX_DOCUMENT, SCHEMA
from ckpttool.formats.carried_training import carried_training
from ckpttool.formats.tree_encoding import encoded
from ckpttool.wire.jsontext import MAX_VALUES
from ckpttool.writing.content import Content


def document(content: Content, *, tree: bool = True) -> bytes | None:
    """Return the entry of a content as JSON text in ASCII, or None where there is nothing to carry.

    Args:
        content: What is written; the reader of the target must give its tensors their own names.
        tree: False where the format holds the tree itself, and the ties: these are left out then.

    Raises:
        LimitExceeded: It would be too large to be read again.
    """
    own: dict[str, object] = {}
    if tree and content.tree is not None:
        own["tree"] = content.tree
    if content.metadata:
        own["metadata"] = dict(content.metadata)
    if content.native:
        own["native"] = dict(content.native)
    training = carried_training(content.training) if tree or content.tree is None else {}
    if training:
        own["training"] = training
    tells_names = tree or content.tree is None
    if not own and not (tells_names and any(map(_is_to_be_told, content.tensors))):
        return None
    form, shared = encoded(own)
    told: dict[str, object] = {"schema": SCHEMA, "source": content.source_format}
    if tells_names:
        told["tensors"] = {tensor.name: _told(tensor) for tensor in content.tensors}
    text = json.dumps({**told, "shared": shared, "content": form}, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT or sum(map(text.count, "[{,")) > MAX_VALUES:
        raise LimitExceeded(ENTRY, f"{len(text):,} bytes of JSON", expected=f"at most {MAX_DOCUMENT:,}")
    return text.encode("ascii")


def _is_to_be_told(tensor: Tensor) -> bool:
    """Tell whether something of a tensor is not in its name."""
    return len(tensor.path) != 1 or tensor.shares_with is not None


def _told(tensor: Tensor) -> dict[str, object]:
    told: dict[str, object] = {"path": list(tensor.path), "role": tensor.role.value}
    if tensor.shares_with is not None:
        told["shares_with"] = tensor.shares_with
    return told

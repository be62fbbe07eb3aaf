"""Contents to convert: of an open checkpoint, and of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool import Checkpoint
from ckpttool.formats.writer import Content
from tests.support.checkpoints import checkpoint
from tests.support.tensors import Array


def content_of(opened: Checkpoint) -> Content:
    """Return all that a checkpoint holds."""
    metadata = {} if opened.tree is not None else opened.metadata
    return Content(opened.tensors, opened.tree, metadata, opened.native, opened.format)


def made_of(weights: Mapping[Any, Array], family: str = "torch", **known: Any) -> tuple[Content, Checkpoint]:
    """Return arrays by name as a content, with the checkpoint that they are from."""
    opened = checkpoint(weights, family, **known)
    return content_of(opened), opened


def arrays(content: Content) -> dict[str, Array]:
    """Return the values of a content by name."""
    return {tensor.name: tensor.array() for tensor in content.tensors}

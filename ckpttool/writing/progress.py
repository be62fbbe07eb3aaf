"""Where in its training content was saved, for formats that have a place for it."""

from __future__ import annotations

from ckpttool.checkpoint import TrainingState
from ckpttool.formats.content.scalars import lazy_scalar
from ckpttool.training import training_state
from ckpttool.writing.content import Content

_DEEPEST = 6
"""How many levels of containers are looked into: what is told of a run lies in the first three."""


def progress(content: Content) -> TrainingState:
    """Return epoch, step and the like: what the source said, or else what its keys and scalar tensors say.

    Raises:
        CheckpointError: A tensor can't be read.
    """
    if content.training != TrainingState():
        return content.training
    told = _plain(content.tree, _DEEPEST) if content.tree is not None else content.metadata
    scalars = {one.path: lazy_scalar(one) for one in content.tensors if one.size == 1}
    return training_state(told if isinstance(told, dict) else dict(content.metadata), scalars)


def _plain(node: object, depth: int) -> object:
    """Return the plain values below a node of a tree, None for anything else."""
    if isinstance(node, str | int | float):
        return node
    if isinstance(node, dict) and depth:
        return {key: _plain(value, depth - 1) for key, value in node.items() if isinstance(key, str)}
    if isinstance(node, list | tuple) and depth:
        return [_plain(value, depth - 1) for value in node]
    return None

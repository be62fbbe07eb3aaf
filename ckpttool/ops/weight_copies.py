"""Whether the second copy of a model's weights beside it, in PyTorch's own format, has other values.

Hugging Face's directories may hold both, and each library loads the one that it prefers: a copy that was
saved again alone leaves the other one as it was.

Source: huggingface/transformers ``utils/__init__.py`` (``WEIGHTS_NAME``, ``SAFE_WEIGHTS_NAME``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, counted, first_names, warning
from ckpttool.core.tensor import Tensor
from ckpttool.formats import open_checkpoint
from ckpttool.io import fs

BLOCK = 1 << 16
MAX_COMPARED = 1 << 28
"""How much is compared of each tensor, and of all, in bytes: who trains on changes every one of them."""
_SAFE = re.compile(r"(?P<stem>(?!.*-\d+-of-\d+).+)\.safetensors(\.index\.json)?", re.DOTALL)


def weight_copy_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a warning for each copy of a checkpoint's weights beside it that has other values.

    One that can't be read is no copy; its own verdict tells why.
    """
    if fs.is_remote(checkpoint.path):
        return
    for path in dict.fromkeys((checkpoint.path, *(entry.path for entry in checkpoint.files))):
        match = _SAFE.fullmatch(os.path.basename(path))
        if match is not None and fs.isfile(path):
            for copy in _copies(os.path.dirname(path), match["stem"]):
                yield from _compare(path, copy)


def _copies(directory: str, stem: str) -> Iterator[str]:
    names = (f"{prefix}{stem}.bin{ending}" for prefix in ("pytorch_", "") for ending in ("", ".index.json"))
    paths = (os.path.join(directory, name) for name in names)
    return (path for path in paths if fs.isfile(path))


def _compare(path: str, copy: str) -> Iterator[Finding]:
    try:
        with open_checkpoint(path) as own, open_checkpoint(copy) as other:
            common = [(own[name], other[name]) for name in own if name in other]
            differing = list(_differing(common))
    except CheckpointError:
        return
    if differing:
        age = _age(path, copy)
        amount = f"{len(differing):,} of {counted(len(common), 'tensor')}"
        message = (
            f"{os.path.basename(copy)} beside it{age} has other values of {amount}: {first_names(differing)}"
        )
        yield warning("copies-differ", message, os.path.basename(path))


def _age(path: str, copy: str) -> str:
    own, other = (fs.stat(one).st_mtime_ns for one in (path, copy))
    return "" if own == other else ", which is newer," if other > own else ", which is older,"


def _differing(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Yield the names of tensors that begin with other values, as far as the limit reaches."""
    left = MAX_COMPARED
    for own, other in pairs:
        if own.values is None or other.values is None or own.dtype is not other.dtype or left <= 0:
            continue
        left -= min(own.nbytes, BLOCK)
        if own.shape != other.shape or _first_block(own) != _first_block(other):
            yield own.name


def _first_block(tensor: Tensor) -> bytes:
    assert tensor.values is not None  # the caller asked
    return bytes(next(iter(tensor.values.blocks(BLOCK)), b""))[:BLOCK]

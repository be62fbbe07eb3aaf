"""Whether the second copy of a model's weights beside it, in PyTorch's own format, has other values.

Hugging Face's directories may hold both, and each library loads the one that it prefers: a copy that was
saved again alone leaves the other one as it was.

Source: huggingface/transformers ``utils/__init__.py`` (``WEIGHTS_NAME``, ``SAFE_WEIGHTS_NAME``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import product

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, counted, first_names, warning
from ckpttool.core.tensor import Tensor
from ckpttool.formats import open_checkpoint
from ckpttool.io import fs
from ckpttool.io.work import Advance

_SAFE = re.compile(r"(?P<stem>(?!.*-\d+-of-\d+).+)\.safetensors(\.index\.json)?", re.DOTALL)


def weight_copy_findings(checkpoint: Checkpoint, jobs: int, advance: Advance) -> Iterator[Finding]:
    """Yield a warning for each copy of a checkpoint's weights beside it that has other values.

    One that can't be read is no copy; its own verdict tells why.
    """
    for path, copy in weight_copies((checkpoint.path, *(entry.path for entry in checkpoint.files))):
        yield from _compare(path, copy, jobs, advance)


def weight_copies(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield files of weights, or indices of them, on this machine with each copy beside them."""
    for path in dict.fromkeys(paths):
        match = None if fs.is_remote(path) else _SAFE.fullmatch(os.path.basename(path))
        if match is None or not fs.isfile(path):
            continue
        for prefix, ending in product(("pytorch_", ""), ("", ".index.json")):
            copy = os.path.join(os.path.dirname(path), f"{prefix}{match['stem']}.bin{ending}")
            if fs.isfile(copy):
                yield path, copy


def _compare(path: str, copy: str, jobs: int, advance: Advance) -> Iterator[Finding]:
    try:
        with open_checkpoint(path) as own, open_checkpoint(copy) as other:
            common = [(own[name], other[name]) for name in own if name in other]
            differing = _differing(common, jobs, advance)
    except CheckpointError:
        return
    if differing:
        amount = f"{len(differing):,} of {counted(len(common), 'tensor')}"
        message = (
            f"{os.path.basename(copy)} beside it{_age(path, copy)} has other values of {amount}: "
            f"{first_names(differing)}"
        )
        yield warning("copies-differ", message, os.path.basename(path))


def _age(path: str, copy: str) -> str:
    try:
        own, other = (fs.stat(one).st_mtime_ns for one in (path, copy))
    except OSError:  # removed since it was read
        return ""
    return "" if own == other else ", which is newer," if other > own else ", which is older,"


def _differing(pairs: list[tuple[Tensor, Tensor]], jobs: int, advance: Advance) -> list[str]:
    """Return the names of tensors of one type of which any bit differs; what can't be read is none."""
    from ckpttool.weights.comparing.compare import Comparison, compare_all

    of_one_type = [(own, other) for own, other in pairs if own.dtype is other.dtype]
    outcomes = compare_all(of_one_type, measures=False, jobs=jobs, advance=advance)
    return [
        own.name
        for (own, _), outcome in zip(of_one_type, outcomes, strict=True)
        if isinstance(outcome, Comparison) and not outcome.equal
    ]

"""Whether a second copy of a model's weights has other values.

Hugging Face's directories may hold one in PyTorch's own format, and each library loads the one that it
prefers: a copy that was saved again alone leaves the other one as it was. DeepSpeed's universal checkpoints
hold a rounded copy of each weight.

Source: huggingface/transformers ``utils/__init__.py`` (``WEIGHTS_NAME``, ``SAFE_WEIGHTS_NAME``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, warning
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.core.values import regroup
from ckpttool.formats import open_checkpoint
from ckpttool.formats.torch.deepspeed_universal import MODULE, is_full_precision
from ckpttool.formats.torch.deepspeed_universal import VARIANT as UNIVERSAL
from ckpttool.storage import fs
from ckpttool.storage.work import Advance

if TYPE_CHECKING:
    import numpy as np

_ELEMENTS = 1 << 20
"""Values of a weight that are rounded at once."""
_SAFE = re.compile(r"(?P<stem>(?!.*-\d+-of-\d+).+)\.safetensors(\.index\.json)?", re.DOTALL)


def weight_copy_findings(checkpoint: Checkpoint, jobs: int, advance: Advance) -> Iterator[Finding]:
    """Yield a warning for each copy of a checkpoint's weights beside it that has other values.

    One that can't be read is no copy; its own verdict tells why.
    """
    if checkpoint.variant == UNIVERSAL and checkpoint.complete:
        yield from _compare_rounded(checkpoint)
    for path, copy in weight_copies((checkpoint.path, *(entry.path for entry in checkpoint.files))):
        yield from _compare(path, copy, jobs, advance)


def weight_copies(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield files of weights, or indices of them, on this machine with each copy beside them."""
    for path in dict.fromkeys(paths):
        match = _SAFE.fullmatch(os.path.basename(path)) if fs.place_of(path).reads_are_free else None
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


def _compare_rounded(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a warning if weights aren't what the model states have of them, in the type of these."""
    copies = {one.path[1:]: one for one in checkpoint.tensors if one.path[1:2] == (MODULE,)}
    pairs = [
        (weight, copies[weight.path])
        for weight in checkpoint.tensors
        if weight.path in copies and weight.shares_with is None and is_full_precision(weight)
    ]
    whole = [(weight, copy) for weight, copy in pairs if weight.shape == copy.shape]
    differing = [weight.name for weight, copy in whole if not _is_rounded(weight, copy)]
    if differing:
        amount = f"{len(differing):,} of {counted(len(whole), 'tensor')}"
        message = f"the rounded copies in the model states have other values of {amount}"
        yield warning("copies-differ", message, first_names(differing))


def _is_rounded(weight: Tensor, copy: Tensor) -> bool:
    """Tell whether a copy has the values of a weight, each rounded to the copy's type."""
    import numpy as np

    if weight.values is None or copy.values is None or not copy.dtype.float_code:
        return True
    own, other = (_floats(one) for one in (weight, copy))
    try:
        with np.errstate(over="ignore"):  # float16 has no place for what is too large: it is infinite
            return all(
                np.array_equal(np.float64(one.astype(two.dtype)), np.float64(two), equal_nan=True)
                for one, two in zip(own, other, strict=True)
            )
    except CheckpointError:  # the checks of its file tell
        return True


def _floats(tensor: Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the values of a tensor in groups."""
    import numpy as np

    dtype = numpy_dtype(tensor.dtype)
    starts = range(0, tensor.size, _ELEMENTS)
    sizes = [min(_ELEMENTS, tensor.size - start) * dtype.itemsize for start in starts]
    return (np.frombuffer(block, dtype) for block in regroup(tensor, sizes))

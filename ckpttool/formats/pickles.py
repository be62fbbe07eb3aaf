"""Which pickle is which: PyTorch's from before the zip, Paddle's, and those without a framework.

How each is read lies in a module of its own, so that telling them apart imports none of it.

Source: PyTorch ``torch/serialization.py``; PaddlePaddle/Paddle ``python/paddle/framework/io.py``; CPython
``Lib/pickle.py``.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ckpttool.containers.compressed import compression_of, first_bytes
from ckpttool.containers.pickle.pickle_detection import begins_with_protocol, has_torch_magic, is_pickle
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.formats.interface import Format, Probe

MAX_TAIL = 1 << 22
"""The most bytes at a pickle's end that are searched for Paddle's own keys, which are written last."""

_JOBLIB = ".joblib"
_FIRST = 64
"""How many bytes of a compressed stream tell whether it is a pickle."""
_PADDLE_NAMES = re.compile(
    rb"StructuredToParameterName@@|UnpackBigParamInfor@@|LR_Scheduler|_(?:moment[12]?|velocity|beta1_pow_acc)_\d"
)
# Each tensor of an object that is no state dict is a call of tuple, or of eval from static graphs.
_PADDLE_CALLS = re.compile(rb"(?:builtins|__builtin__)(?:\n|\x94?\x8c.)(?:tuple|eval)", re.DOTALL)
_PADDLE_KEYS = (b"StructuredToParameterName@@", b"UnpackBigParamInfor@@", b"LR_Scheduler")


class PytorchLegacy(Format):
    """A file that ``torch.save`` wrote before 1.6, or was told to write like that."""

    name: ClassVar[str] = "pytorch"

    def matches(self, probe: Probe) -> bool:
        return has_torch_magic(probe.head)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.torch.legacy import open_legacy

        return open_legacy(probe, self.name)


class PlainPickle(Format):
    """A file that Python's ``pickle`` or joblib wrote, which may compress it."""

    name: ClassVar[str] = "pickle"
    suffixes = (".pkl", ".pickle")

    def matches(self, probe: Probe) -> bool:
        head = probe.head
        if not head or has_torch_magic(head):
            return False
        if (compression := compression_of(head)) is not None:
            begin = first_bytes(compression, probe.source, _FIRST)
            is_named = probe.name.lower().endswith((*self.suffixes, _JOBLIB))  # as of a damaged one
            return (is_named or begins_with_protocol(begin)) and not has_torch_magic(begin)
        return is_pickle(probe.source, 0, probe.source.size)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.plain_pickle import open_plain

        return open_plain(probe, self.name)


class PaddlePickle(Format):
    """A file that ``paddle.save`` pickled."""

    name: ClassVar[str] = "paddle"
    suffixes = (".pdparams", ".pdopt")
    specialises = (PlainPickle,)

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory or not PlainPickle().matches(probe):
            return False
        head = probe.head
        if b"numpy" not in head:
            return False
        if _PADDLE_CALLS.search(head) or _PADDLE_NAMES.search(head):
            return True
        length = min(MAX_TAIL, probe.source.size)
        tail = probe.source.read(probe.source.size - length, length)
        return any(name in tail for name in _PADDLE_KEYS)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.paddle.pickles import open_saved_pickle

        return open_saved_pickle(probe, self.name)

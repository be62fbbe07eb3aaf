"""Which pickle is which: PyTorch's from before the zip, Paddle's, and those without a framework.

How each is read lies in a module of its own, so that telling them apart imports none of it.

Source: PyTorch ``torch/serialization.py``; PaddlePaddle/Paddle ``python/paddle/framework/io.py``; CPython
``Lib/pickle.py``.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.readable import Readable
from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import Format, Probe
from ckpttool.wire.opcodes import TABLE

MAGIC = 0x1950A86A20F9469CFC6C
"""The first of the pickles that PyTorch wrote before the zip."""
MAX_TAIL = 1 << 22
"""The most bytes at a pickle's end that are searched for Paddle's own keys, which are written last."""

_BINARY_MAGIC = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")
_TEXT_MAGIC = f"L{MAGIC}L\n".encode()
_MAGIC_WITHIN = 32  # before it come a protocol and a frame at most

_HEADER = 16
_RUNNING = frozenset({"unsafe-import", "unsafe-call"})
_PROTO = 0x80
_PROTOCOLS = range(2, 6)

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
        return _has_legacy_magic(probe.head)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.torch.legacy import open_legacy

        return open_legacy(probe, self.name)


class PlainPickle(Format):
    """A file that Python's ``pickle`` wrote."""

    name: ClassVar[str] = "pickle"
    suffixes = (".pkl", ".pickle")

    def matches(self, probe: Probe) -> bool:
        head = probe.head
        if not head or _has_legacy_magic(head):
            return False
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


def _has_legacy_magic(head: bytes) -> bool:
    """Tell whether a file that starts like this is of PyTorch's old format, damaged or not."""
    return _BINARY_MAGIC in head[:_MAGIC_WITHIN] or head.startswith(_TEXT_MAGIC)


def is_pickle(source: Readable, start: int, end: int) -> bool:
    """Tell whether bytes between two offsets are pickles, or would run something before they break off."""
    head = source.read(start, min(_HEADER, end - start))
    begins_with_protocol = (
        len(head) >= 3 and head[0] == _PROTO and head[1] in _PROTOCOLS and TABLE[head[2]] is not None
    )
    # The length of a safetensors header may look like a protocol and an opcode, too.
    if begins_with_protocol and head[4:9] != b"\0\0\0\0{":
        return True
    return bool(head) and TABLE[head[0]] is not None and _runs(source, start, end)


def _runs(source: Readable, start: int, end: int) -> bool:
    """Tell whether bytes without a header are pickles of containers or objects, or call something.

    An unpickler carries out one opcode after the other: what is no pickle to its end may have run by then. In
    ordinary text an opcode may find a name, too, but none that is known.
    """
    from ckpttool.wire.interpreter import Interpreter, PickleBudget
    from ckpttool.wire.pickle_safety import judge

    budget = PickleBudget(source, end - start)
    while start < end:
        interpreter = Interpreter(source, start, end, budget=budget)
        try:
            pickle = interpreter.run()
        except CheckpointError:
            findings = judge(interpreter.pickle) if interpreter.pickle.calls else ()
            return any(finding.code in _RUNNING for finding in findings)
        if pickle.calls:
            return True
        if not isinstance(pickle.root, dict | list | tuple | set):
            return False
        start = pickle.end
    return True

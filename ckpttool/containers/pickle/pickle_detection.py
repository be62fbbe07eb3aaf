"""Recognises pickles, and bytes that would run something if they were read as pickles; imports little."""

from __future__ import annotations

from ckpttool.containers.pickle.opcodes import TABLE
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import Readable

_HEADER = 16
_RUNNING = frozenset({"unsafe-import", "unsafe-call"})
_PROTO = 0x80
_PROTOCOLS = range(2, 6)

TORCH_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle in a file of PyTorch's format before zips.

Source: PyTorch ``torch/serialization.py``.
"""
_BINARY_MAGIC = b"\x8a\x0a" + TORCH_MAGIC.to_bytes(10, "little")
_TEXT_MAGIC = f"L{TORCH_MAGIC}L\n".encode()
_MAGIC_WITHIN = 32  # bytes; a protocol and a frame may come first


def has_torch_magic(head: bytes) -> bool:
    """Return whether ``head`` begins a file of PyTorch's old format; the rest may be damaged."""
    return _BINARY_MAGIC in head[:_MAGIC_WITHIN] or head.startswith(_TEXT_MAGIC)


def begins_with_protocol(head: bytes) -> bool:
    """Return whether bytes begin with a protocol and an opcode, as binary pickles do."""
    return len(head) >= 3 and head[0] == _PROTO and head[1] in _PROTOCOLS and TABLE[head[2]] is not None


def is_pickle(source: Readable, start: int, end: int) -> bool:
    """Return whether the bytes between two offsets are pickles, or run something before they break off."""
    head = source.read(start, min(_HEADER, end - start))
    # The length of a safetensors header may look like a protocol and an opcode, too.
    if begins_with_protocol(head) and head[4:9] != b"\0\0\0\0{":
        return True
    return bool(head) and TABLE[head[0]] is not None and _calls_something(source, start, end)


def _calls_something(source: Readable, start: int, end: int) -> bool:
    """Return whether bytes without a protocol are pickles of containers or objects, or call something."""
    # An unpickler carries out one opcode after the other: by the time that bytes turn out to be no pickle,
    # they may have called something. But nearly any text begins with an opcode, and one that breaks off may
    # have imported a name by chance; so only names that are known to be dangerous make it a pickle.
    from ckpttool.containers.pickle.interpreter import Interpreter
    from ckpttool.containers.pickle.machine import PickleBudget
    from ckpttool.containers.pickle.pickle_safety import findings_of_pickle

    budget = PickleBudget(source, end - start)
    while start < end:
        interpreter = Interpreter(source, start, end, budget=budget)
        try:
            pickle = interpreter.run()
        except CheckpointError:
            findings = findings_of_pickle(interpreter.pickle) if interpreter.pickle.calls else ()
            return any(finding.code in _RUNNING for finding in findings)
        if pickle.calls:
            return True
        if not isinstance(pickle.root, dict | list | tuple | set):
            return False
        start = pickle.end
    return True

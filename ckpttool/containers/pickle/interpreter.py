"""The inert pickle interpreter: it builds plain data and inert nodes, and runs nothing.

Source: CPython ``Lib/pickle.py``; joblib ``joblib/numpy_pickle.py`` (``NumpyArrayWrapper.read_array``).
"""

from __future__ import annotations

import math
import struct
from typing import Any

from ckpttool.containers.pickle.constructors import EXACT_ONLY, NDARRAY_CLASS, is_shape
from ckpttool.containers.pickle.machine import PickleMachine
from ckpttool.containers.pickle.numpy_types import itemsize
from ckpttool.containers.pickle.opcodes import OPERATIONS
from ckpttool.containers.pickle.pickle_nodes import Call, Global, Payload, Pickle, children

_ALIGNMENT = 16
"""Alignment of joblib's arrays in bytes. The padding's length comes first, and is no opcode in ``pickle``."""
_RECONSTRUCT = Global("numpy._core.multiarray", "_reconstruct")


class Interpreter(PickleMachine):
    """Reader of one pickle: carries out its opcodes, and reads the arrays that joblib writes between them."""

    def run(self) -> Pickle:
        """Carry out the opcodes up to STOP, and return the pickle."""
        # The hot loop: a state dict of 1,700 tensors has 50,000 opcodes. Opcodes check neither the length of
        # the window nor that of the stack; an IndexError is one or the other, told apart by the position.
        operations, most = OPERATIONS, self.budget.opcodes
        count = 0
        self._refill()
        try:
            for count in range(1, most + 1):  # noqa: B007  # subtracted from the budget at the end
                at = self.at
                if at > self._stop_at:
                    if not self.leave_frame():
                        self.note_misuse("an opcode crosses the end of its frame")
                    if at > self._refill_at:
                        self._refill()
                        at = self.at
                operation = operations[self.data[at]]
                self.at = at + 1
                if operation(self):
                    return self._finish()
        except IndexError as error:
            if self.at >= len(self.data):
                raise self.truncation() from error
            raise self.damage("stack underflow") from error
        except struct.error as error:
            raise self.truncation() from error
        finally:
            self.budget.opcodes = most - count
        raise self.excess("more pickle opcodes than its size allows")

    def _finish(self) -> Pickle:
        self.charge(0)
        if self.frame_is_cut:
            raise self.damage("a frame that extends past the end")
        if not self.is_between_frames:
            self.note_misuse("a frame doesn't end with its pickle")
        self.pickle.root = self.stack.pop()
        if self.pushed_functions:
            self._note_stored()
        self.pickle.end = self.position
        return self.pickle

    def _note_stored(self) -> None:
        """Record functions and classes that are stored in the object, or in objects of unknown classes."""
        # Code of an unknown class may call whatever is stored in its objects. A name that is itself an
        # argument of a call isn't stored: it was judged with the call.
        pending, seen = [self.pickle.root, *self._objects], set[int]()
        while pending:
            node = pending.pop()
            if isinstance(node, Global) and id(node) in self.functions and node not in self.pickle.unknown:
                self.pickle.unknown[node] = "stores"
                if node in EXACT_ONLY:
                    self.note_misuse(f"{node} is stored instead of called")
            parts = children(node)
            if parts is None or id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, Call):
                _, _, *others = parts
                parts = [*(argument for argument in node.args if type(argument) is not Global), *others]
            pending.extend(parts)

    def joblib_array(self, state: Any) -> object:
        names = ("shape", "order", "dtype", "numpy_array_alignment_bytes")
        shape, order, dtype, padding = map(state.get if isinstance(state, dict) else lambda name: None, names)
        size = itemsize(dtype) if isinstance(dtype, Call) else None
        is_laid_out = isinstance(shape, tuple) and is_shape(shape) and min(shape, default=0) >= 0
        if not is_laid_out or order not in ("C", "F") or not isinstance(dtype, Call) or size is None:
            raise self.damage("a malformed joblib array: unknown shape, order or dtype")
        # joblib reads an array from the file, from which the unpickler has read the whole frame by then: the
        # array's bytes begin after the frame, and its pickler ends the frame before it writes them.
        if not self.is_between_frames:
            self.note_misuse("a joblib array is inside a frame")
        self.leave_frame()
        self.pickle.arrays += 1
        # An array of objects is another pickle, which shares the budget; its names and calls are added to
        # this pickle even if it breaks off. Other arrays are bytes, after padding since joblib 1.2.
        if dtype.kind == "object-dtype":
            inner = Interpreter(self.source, self.position, self.end, self.where, self.budget)
            try:
                root = inner.run().root
            finally:
                self.pickle.add(inner.pickle)
            self.skip(inner.pickle.end - self.position)
            return root
        if padding is not None:
            count = self.take(1)[0]
            if padding != _ALIGNMENT or not 1 <= count <= _ALIGNMENT:
                raise self.damage(
                    f"a malformed joblib array: {count} bytes of padding, not 1 to {_ALIGNMENT}"
                )
            self.skip(count)
        nbytes = size * math.prod(shape or ())
        elements = Payload(self.source, self.skip(nbytes), nbytes, "bytes")
        array = Call(
            _RECONSTRUCT, (NDARRAY_CLASS, (0,), b"b"), state=(1, shape, dtype, order == "F", elements)
        )
        array.kind = "ndarray"
        return array

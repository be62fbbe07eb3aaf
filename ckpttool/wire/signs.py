"""Elements whose lazy conjugation and negation is carried out as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckpttool.dtypes import DType
from ckpttool.tensor import Values


@dataclass(frozen=True, slots=True)
class SignFlipped:
    """Elements whose sign bits are flipped as they are read: conjugated, negated, or both."""

    values: Values
    dtype: DType
    conjugated: bool
    negated: bool

    def blocks(self, limit: int) -> Iterator[memoryview]:
        import numpy as np

        width = self.dtype.word_bytes
        for block in self.values.blocks(limit):
            words = np.frombuffer(block, f"<u{width}").copy()
            sign = words.dtype.type(1 << (8 * width - 1))
            if self.negated:
                words ^= sign
            if self.conjugated:
                words[1::2] ^= sign
            yield memoryview(words.view(np.uint8).data)

    def once(self) -> SignFlipped:
        return replace(self, values=self.values.once())

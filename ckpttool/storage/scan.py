"""Single pass over byte ranges that computes checksums and tests values, on several threads.

Ranges are cut into pieces, so that one large record keeps all threads busy; the checksums of its pieces
are combined. The threads run at memory speed because the checksum and NumPy release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from ckpttool.core.dtypes import DType
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import aligned_buffer
from ckpttool.core.tensor import Span, Values
from ckpttool.core.values import stored_once
from ckpttool.storage.checksums import combined_crc, crc32c
from ckpttool.storage.work import Pool, batches

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES = 1 << 25
CHUNK_BYTES = 1 << 20
"""Bytes read, summed and tested at once: with smaller ones, threads would wait for the interpreter's lock."""
_COUNTED_BYTES = 1 << 18
"""Bytes in which special values are counted at once: the temporary arrays should fit a processor's cache."""

_CHECKSUMS: dict[str, Callable[[memoryview, int], int]] = {"crc32": isal_zlib.crc32, "crc32c": crc32c}


@dataclass(slots=True)
class ScannedSpan:
    """Results of scanning one span.

    Attributes:
        crc32: Checksum of the bytes; None if reading them failed.
        is_suspicious: Whether any element of the span's type is NaN or infinite.
        element: Bytes of the element if all elements are the same; None otherwise.
        failure: The error if reading failed.
    """

    span: Span
    crc32: int | None = None
    is_suspicious: bool = False
    element: bytes | None = None
    failure: CheckpointError | None = None

    @property
    def matches(self) -> bool:
        """Whether the bytes have the checksum that the file states for them."""
        return self.span.crc32 is None or self.crc32 == self.span.crc32


@dataclass(slots=True)
class _Piece:
    scanned: ScannedSpan
    start: int
    nbytes: int
    crc32: int = 0
    element: bytes | None = None


def scan(
    spans: Iterable[Span],
    *,
    jobs: int,
    checksum: bool = True,
    values: bool = True,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> list[ScannedSpan]:
    """Read all spans once and return their results, in order.

    Args:
        spans: The byte ranges.
        jobs: Number of threads.
        checksum: Whether to compute the checksums of spans that have one.
        values: Whether to test the values of spans that have a type.
        advance: Called with the bytes done, from any thread.
    """
    results = [ScannedSpan(span) for span in spans]
    pieces = [piece for scanned in results for piece in _pieces(scanned)]

    @contextmanager
    def worker() -> Iterator[Callable[[list[_Piece]], None]]:
        # Each thread has one buffer, and its tests have arrays on that buffer, so that nothing
        # is allocated for a chunk.
        buffer = aligned_buffer(CHUNK_BYTES)
        tests: dict[tuple[str, str], Callable[[int], bool]] = {}

        def work(batch: list[_Piece]) -> None:
            for piece in batch:
                _scan_piece(piece, buffer, tests, checksum, values, pool.check)
                advance(piece.nbytes)

        yield work

    pool: Pool[list[_Piece]] = Pool()
    with pool:
        pool.recruit([worker] * (jobs - 1))
        for batch in batches(pieces, lambda piece: piece.nbytes):
            pool.add(batch)
        pool.work(worker)
    _combine(pieces)
    return results


def _pieces(scanned: ScannedSpan) -> Iterator[_Piece]:
    """Cut a span into pieces; each starts at a multiple of every element's size."""
    nbytes = scanned.span.nbytes
    # A compressed span can be read only from its start, so it is a single piece.
    length = PIECE_BYTES if scanned.span.inflated is None else max(nbytes, 1)
    for start in range(0, max(nbytes, 1), length):
        yield _Piece(scanned, start, min(length, nbytes - start))


def _scan_piece(
    piece: _Piece,
    buffer: memoryview,
    tests: dict[tuple[str, str], Callable[[int], bool]],
    checksum: bool,
    values: bool,
    check: Callable[[], None],
) -> None:
    scanned, span = piece.scanned, piece.scanned.span
    test = _special_test(span, buffer, tests) if values else None
    wants_checksum = checksum and span.crc32 is not None
    if test is None and not wants_checksum:
        return
    # The checksum, the test for NaN and infinities, and the comparison with the first element all look at a
    # chunk while it is in the processor's cache. A test that has found something isn't repeated.
    repetition = Repetition(span.dtype.itemsize) if test is not None and span.dtype is not None else None
    for start in range(piece.start, piece.start + piece.nbytes, CHUNK_BYTES):
        check()
        chunk = buffer[: min(CHUNK_BYTES, piece.start + piece.nbytes - start)]
        try:
            span.read(start, chunk)
        except CheckpointError as failure:
            scanned.failure = failure
            return
        if wants_checksum:
            piece.crc32 = _CHECKSUMS[span.algorithm](chunk, piece.crc32)
        if test is not None and not scanned.is_suspicious and test(len(chunk)):
            scanned.is_suspicious = True
        if repetition is not None and repetition.holds:
            repetition.add(chunk)
    piece.element = None if repetition is None else repetition.element


def _special_test(
    span: Span, buffer: memoryview, tests: dict[tuple[str, str], Callable[[int], bool]]
) -> Callable[[int], bool] | None:
    """Return a test of the buffer's first bytes for NaN and infinity; None if the type has neither."""
    if span.dtype is None or span.dtype.float_code is None or span.nbytes == 0:
        return None
    key = (span.dtype.name, span.byteorder)
    if key not in tests:
        tests[key] = _tester(span.dtype, span.byteorder, buffer)
    return tests[key]


def _tester(dtype: DType, byteorder: str, buffer: memoryview) -> Callable[[int], bool]:
    """Return a test of the buffer's first bytes that allocates nothing."""
    import numpy as np

    # Little-endian floats of 4 and 8 bytes are tested by NumPy's ``isfinite``. All others are compared as
    # integers. Without the sign, infinity and NaN are larger than all finite values. Types without infinity
    # have a single NaN, which isn't always the largest integer: in ``fnuz`` types it is that of -0.
    code = dtype.float_code
    assert code is not None  # checked by the caller
    width = code.word_bytes
    if width >= 4 and byteorder == "little":
        floats: np.ndarray[Any, Any] = np.frombuffer(buffer, f"<f{width}")
        finite = np.empty(len(floats), bool)

        def has_other_than_finite(nbytes: int) -> bool:
            count = nbytes // width
            return not np.logical_and.reduce(np.isfinite(floats[:count], out=finite[:count]))

        return has_other_than_finite
    order = "<" if byteorder == "little" else ">"
    words: np.ndarray[Any, Any] = np.frombuffer(buffer, f"{order}u{width}")
    masked = np.empty(len(words), f"u{width}")

    def has_code(nbytes: int) -> bool:
        count = nbytes // width
        codes = np.bitwise_and(words[:count], words.dtype.type(code.mask), out=masked[:count])
        if code.infinity is not None:
            return bool(codes.size and codes.max() >= code.infinity)
        return bool((codes == code.first_nan).any())

    return has_code


def _combine(pieces: list[_Piece]) -> None:
    """Set the checksum of each span from those of its pieces, which are one after the other."""
    for piece in pieces:
        scanned = piece.scanned
        if scanned.failure is not None or piece.element != scanned.element:
            scanned.element = None
        if scanned.failure is not None:
            scanned.crc32 = None
        elif piece.start == 0:
            scanned.crc32, scanned.element = piece.crc32, piece.element
        elif scanned.crc32 is not None:
            algorithm = scanned.span.algorithm
            scanned.crc32 = combined_crc(scanned.crc32, piece.crc32, piece.nbytes, algorithm)


class Repetition:
    """Test whether all elements are the same; it ends early if they aren't."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._first: bytes | None = None
        self.holds = True

    @property
    def element(self) -> bytes | None:
        """The element that all blocks so far consist of; None if they differ, or before the first block."""
        return self._first[: self._itemsize] if self.holds and self._first else None

    def add(self, block: memoryview) -> None:
        """Compare the next block, of whole elements."""
        # Bytes repeat with a period of ``width`` if they equal themselves shifted by it. Of most
        # blocks only the first element is compared. The first block is kept, so that further ones are
        # compared with it as a whole.
        width = self._itemsize
        if self._first is None:
            self.holds = block[:width] == block[width : 2 * width] or len(block) == width
            if self.holds:
                self._first = bytes(block)
                self.holds = self._first[width:] == self._first[:-width]
        elif block[:width] != self._first[:width]:
            self.holds = False
        elif len(block) > len(self._first):
            data = bytes(block)
            self.holds = data[width:] == data[:-width]
        else:
            self.holds = self._first.startswith(bytes(block))


def count_specials(
    values: Values, dtype: DType, advance: Callable[[int], None] = lambda nbytes: None
) -> tuple[int, int, bytes | None]:
    """Count the stored elements that are NaN, and those that are infinite; complex ones count by their parts.

    Also return the bytes of the element, little-endian, if all elements are the same, or None. ``advance`` is
    called with the size of each block before it is counted.
    """
    import numpy as np

    code = dtype.float_code
    if code is None:
        return 0, 0, None
    nan = infinite = 0
    repetition = Repetition(dtype.itemsize)
    for block in stored_once(values).blocks(_COUNTED_BYTES):
        advance(len(block))
        if repetition.holds:
            repetition.add(block)
        words: np.ndarray[Any, Any] = np.frombuffer(block, f"<u{code.word_bytes}") & np.array(
            code.mask, f"<u{code.word_bytes}"
        )
        nan += int(np.count_nonzero((words >= code.first_nan) & (words <= code.last_nan)))
        if code.infinity is not None:
            infinite += int(np.count_nonzero(words == code.infinity))
    return nan, infinite, repetition.element

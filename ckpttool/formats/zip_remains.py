"""The records of a zip that can't be opened, wherever they lie: other readers may take them all the same.

A zip states its records twice, and readers differ in what they believe. What is found here is judged, and
nothing else is made of it: records are looked for by their local headers, and sizes are believed if they fit.

Source: PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from ckpttool.containers.npy import MAGIC as NPY_MAGIC
from ckpttool.containers.pickle.pickle_detection import is_pickle
from ckpttool.containers.zip.zip_reader import LOCAL_MAGIC
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import Buffer, Readable
from ckpttool.core.report import Finding, warning

MAX_SEARCHED = 1 << 26
"""How many bytes of a file are searched for records, and how many may be inflated of them altogether."""
MAX_RECORDS = 10_000
_LOCAL = struct.Struct("<4s5H3I2H")
_STORED, _DEFLATED = 0, 8
_CONFIG = "config.json"


def judge_records(source: Readable) -> Iterator[Finding]:
    """Yield what loading any record of a damaged zip could run."""
    bytes_left = MAX_SEARCHED
    data = source.read(0, min(source.size, MAX_SEARCHED))
    start = data.find(LOCAL_MAGIC)
    for _ in range(MAX_RECORDS):
        if start < 0 or bytes_left <= 0:
            break
        following = data.find(LOCAL_MAGIC, start + 1)
        name, content = _record(data, start, following if following >= 0 else len(data), bytes_left)
        bytes_left -= len(content)
        yield from judge_record(name, content)
        start = following
    if start >= 0 or source.size > MAX_SEARCHED:
        yield warning("not-scanned", "more records than are searched in a damaged zip")


def _record(data: bytes, start: int, end: int, limit: int) -> tuple[str, bytes]:
    """Return the name and the content of the record at an offset, which the next one follows at ``end``."""
    if len(data) < start + _LOCAL.size:
        return "", b""
    _, _, _, method, _, _, _, nbytes, _, name_length, extra_length = _LOCAL.unpack_from(data, start)
    start += _LOCAL.size
    name = data[start : start + name_length].decode("utf-8", "replace")
    start += name_length + extra_length
    if method == _DEFLATED:
        try:
            return name, zlib.decompressobj(-zlib.MAX_WBITS).decompress(data[start:end], limit)
        except zlib.error:
            return name, b""
    return name, data[start : start + nbytes if 0 < nbytes <= end - start else end]


def judge_record(name: str, content: bytes) -> Iterator[Finding]:
    """Yield what loading a record could run: a pickle, an array of objects, a configuration of Keras."""
    source = Buffer(name, content)
    try:
        if is_pickle(source, 0, source.size):
            from ckpttool.containers.pickle.pickle_safety import read_pickles

            yield from read_pickles(source, 0, source.size, name).safety
        elif content.startswith(NPY_MAGIC):
            from ckpttool.formats.arrays.files import safety_of_array

            yield from safety_of_array(source, name)
        elif name.rpartition("/")[2] == _CONFIG:
            from ckpttool.formats.keras.config import judge, read_config

            yield from judge(read_config(name, content), name, len(content))
    except CheckpointError as failure:
        yield from getattr(failure, "safety", ())  # that the zip is damaged is told, and that it isn't safe

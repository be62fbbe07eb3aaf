"""The loop of the child: a request, its answer, until there are no more requests."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

if __name__ == "__main__" and not __package__:  # run by path: the package is what lies beside
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    __package__ = "h5child"

from .frames import flush, reason, send, tell
from .library import MAX_CHUNK, READABLE, Library
from .sums import total
from .walk import TreeWalk

MAX_CHUNKS = 1_000_000
EXTRA_MEMORY = 7 << 26
"""448 MiB beyond what Python and h5py take: a chunk, what it is inflated to, and a block."""


def block(library: Library, request: dict[str, Any]) -> None:
    """Send the elements of one block of a dataset, as they are stored, in C order."""
    h5 = library.h5
    dataset = library.dataset(request)
    creation, kind = dataset.get_create_plist(), dataset.get_type()
    if creation.get_external_count() or creation.get_layout() == h5.h5d.VIRTUAL:
        raise ValueError("the values lie elsewhere")
    for at in range(creation.get_nfilters()):
        if creation.get_filter(at)[0] not in READABLE:
            raise ValueError(f"filter {creation.get_filter(at)[0]} is not read")
    start, count = tuple(request["start"]), tuple(request["count"])
    nbytes = kind.get_size()
    for length in count:
        nbytes *= length
    if nbytes > 2 * MAX_CHUNK or (isinstance(kind, h5.h5t.TypeStringID) and kind.is_variable_str()):
        raise ValueError(f"a block of {nbytes:,} bytes")
    buffer = library.np.zeros(nbytes, library.np.uint8)
    if nbytes:
        space = dataset.get_space()
        if count:
            space.select_hyperslab(start, count)
            dataset.read(h5.h5s.create_simple(count), space, buffer, kind)
        else:
            dataset.read(h5.h5s.create(h5.h5s.SCALAR), space, buffer, kind)
    send(b"D", b"" if request["silent"] else buffer.tobytes())


def chunks(library: Library, request: dict[str, Any]) -> None:
    """Tell where each stored chunk of a dataset lies."""
    dataset = library.h5.h5d.open(library.file(request), request["dataset"].encode("latin-1"))
    count = dataset.get_num_chunks()
    if count > MAX_CHUNKS:
        raise ValueError(f"{count:,} chunks")
    rows: list[Any] = []
    dataset.chunk_iter(
        lambda chunk: rows.append((chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask))
    )
    tell(k="chunks", chunks=[row for row in rows if row[1] is not None])


def limit_memory() -> None:
    """Let the process take so much more memory and no more, where the system can."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as status:
            used = int(status.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return


def answer(library: Library, request: dict[str, Any]) -> None:
    """Answer one request, and end the answer."""
    try:
        if request["op"] == "forget":
            library.forget(request["number"])
        elif request["op"] == "walk":
            TreeWalk(library, library.h5.h5g.open(library.file(request), b"/")).run()
        elif request["op"] == "chunks":
            chunks(library, request)
        elif request["op"] == "sum":
            total(library, request)
        else:
            block(library, request)
    except library.errors as failure:
        tell(k="failed", message=reason(failure))
    send(b"E", b"")
    flush()


def main() -> None:
    """Answer requests until there are no more."""
    sys.path[:] = json.loads(sys.argv[1])
    gc.disable()  # what imports make stays: collecting while they run costs a tenth of the start
    library = Library()
    gc.freeze()
    gc.enable()
    limit_memory()
    for line in iter(sys.stdin.buffer.readline, b""):
        answer(library, json.loads(line))


if __name__ == "__main__":
    main()

"""HDF5 files, read by a child process: groups, datasets, links, and values in blocks.

libhdf5 crashes, hangs or runs out of memory on damaged files, so that it runs in a child (``hdf5_child``),
which ``hdf5_worker`` starts and replaces. Contiguous datasets are read from the file without it; only chunked
or compressed values come from the child.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpttool.containers.compressed import Budget
from ckpttool.containers.hdf5_worker import WORKER, Crashed
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated
from ckpttool.core.gather import copy
from ckpttool.core.readable import swap_bytes
from ckpttool.core.report import Finding, error
from ckpttool.storage import fs

if TYPE_CHECKING:
    import numpy as np

SIGNATURE = b"\x89HDF\r\n\x1a\n"
USER_BLOCKS = (0, 512, 1024, 2048)
"""Offsets at which the signature is searched: a user block may come before it."""
MAX_CHUNK = 1 << 27
"""Limit in bytes on a chunk, which is in memory as a whole if any of it is read."""
BLOCK_BYTES = 1 << 23
"""Size of the block of values in one request; more for a larger chunk."""

FLETCHER32 = 3
"""HDF5's number of the filter that adds a checksum to each chunk."""

_CUT = re.compile(r"truncated file: eof = (?P<found>\d+), .*stored_eof = (?P<stored>\d+)")
_REFUSED = re.compile(r"Unable to (?:synchronously )?open file \((?P<why>.*)\)", re.DOTALL)

_numbers = itertools.count()

Identity = tuple[int, int, int, int, int]
_hung: dict[Identity, str] = {}
"""Files on which libhdf5 hung, with the message: opening one again would take the time of the first hang."""

Attributes = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Location:
    """Location of an HDF5 file: a range of a file, or bytes in memory.

    Attributes:
        path: The file that is read; also for errors.
        offset: Offset of the first byte in the file.
        size: Size in bytes.
        inline: The bytes, if they are compressed in the file.
        where: Name of the record inside the file, for errors.
        number: The child's key for the open file.
        loaded_in: Generation of the child that last had it open; -1 before.
        death: Message if libhdf5 crashed or hung on it.
    """

    path: str
    offset: int
    size: int
    inline: bytes | None = None
    where: str | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    loaded_in: int = -1
    death: str | None = None

    def ask(self, op: str, **more: Any) -> list[tuple[bytes, bytes]]:
        """Send a request to the child, and return the frames of the answer.

        Raises:
            DamagedCheckpoint: libhdf5 refuses the file, or crashes or hangs on it.
        """
        # A file on which libhdf5 died isn't opened again. Bytes in memory are sent with the first request to
        # each child. A file that can't be opened by its path, as in a store, is read by this process for the
        # child, range by range; of other files the child checks device and inode, as the path may lead to
        # another file by now.
        death = self.death or (_hung.get(self._identity()) if _hung else None)
        if death is not None:
            raise DamagedCheckpoint(self.path, death, where=self.where, code="hdf5-crashed")
        request = {"op": op, "number": self.number, "path": fs.abspath(self.path), "offset": self.offset}
        is_relayed = self.inline is None and not fs.place_of(self.path).opens_by_path
        source = fs.open_source(self.path) if is_relayed else None
        with WORKER.lock:
            loads = WORKER.ready(self.path) != self.loaded_in and self.inline is not None
            request |= {"size": self.size, "inline": loads, "relayed": source is not None, **more}
            if self.inline is None and source is None:
                request["file"] = self._identity()[:2]
            try:
                frames = list(WORKER.ask(self.path, request, self.inline or b"" if loads else b"", source))
            except Crashed as failure:
                self.death = f"libhdf5 crashed while reading it ({failure})"
                if failure.hangs:
                    _hung[self._identity()] = self.death
                raise DamagedCheckpoint(
                    self.path, self.death, where=self.where, code="hdf5-crashed"
                ) from failure
            self.loaded_in = WORKER.generation
        for kind, payload in frames[-1:]:
            if kind == b"J" and b'"failed"' in payload and (answer := json.loads(payload))["k"] == "failed":
                raise self._refusal(answer["message"])
        return frames

    def _identity(self) -> Identity:
        """Return a key of the file's current content, for all locations that have the same bytes."""
        try:
            status = fs.stat(self.path)
        except OSError:
            return self.number, 0, 0, 0, 0
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, self.offset

    def _refusal(self, message: str) -> DamagedCheckpoint:
        """Return the error for a message of libhdf5, without the words that all its messages begin with."""
        if cut := _CUT.search(message):
            found = f"truncated: {int(cut['found']):,} bytes"
            return Truncated(self.path, found, expected=f"{int(cut['stored']):,} bytes", where=self.where)
        if "truncated file" in message:
            return Truncated(self.path, message, where=self.where)
        if "MemoryError" in message or "nable to allocate" in message:
            return LimitExceeded(self.path, message, where=self.where)
        if refused := _REFUSED.fullmatch(message):
            message = f"the HDF5 library refuses it: {refused['why']}"
        message = message or "the HDF5 library refuses it"
        return DamagedCheckpoint(self.path, message, where=self.where, code="hdf5-damaged")

    def close(self) -> None:
        """Close the file in the child."""
        if self.loaded_in == WORKER.generation:
            self.loaded_in = -1
            with WORKER.lock:
                try:
                    list(WORKER.ask(self.path, {"op": "forget", "number": self.number}))
                except Crashed:
                    return


class Kind(NamedTuple):
    """Element type of a dataset.

    Attributes:
        family: ``bool``, ``int``, ``float``, ``complex``, ``string``, ``opaque`` or ``other``.
        size: Size of an element in bytes; of the reference in the file if ``is_variable``.
        order: Byte order.
        signed: Whether integers are signed.
        fields: Layout of a float: positions and sizes of its bit fields, and the exponent's bias.
        what: HDF5's class of the type.
        members: Names of the members of a compound type.
        is_variable: Whether the values are elsewhere in the file: texts of any length, references.
    """

    family: str
    size: int
    order: Literal["little", "big"]
    signed: bool
    fields: tuple[int, ...]
    what: str
    members: tuple[str, ...]
    is_variable: bool = False


class Dataset(NamedTuple):
    """One dataset.

    Attributes:
        path: Names of the groups, and its own.
        raw: Path as the child has it: bytes as Latin-1 text.
        shape: None for a null dataspace, which has no shape.
        layout: ``compact``, ``contiguous``, ``chunked``, ``virtual`` or ``external``.
        offset: Offset of the elements of a contiguous dataset in the HDF5 file; None if not allocated.
        stored: Size of the elements in the file, in bytes.
        chunk: Shape of a chunk.
        filters: HDF5's numbers of the filters of a chunked dataset.
        target: File name of an external dataset.
        values: Texts of a small dataset of strings, which come with the walk.
    """

    path: tuple[str, ...]
    raw: str
    attributes: Attributes
    kind: Kind
    shape: tuple[int, ...] | None
    layout: str
    offset: int | None = None
    stored: int = 0
    chunk: tuple[int, ...] | None = None
    filters: tuple[int, ...] = ()
    target: str = ""
    values: Any = None

    @property
    def name(self) -> str:
        """Return its path in HDF5's notation."""
        return "/" + "/".join(self.path)

    @property
    def nbytes(self) -> int:
        """Return the size of all elements in bytes."""
        return math.prod(self.shape or ()) * self.kind.size if self.shape is not None else 0


class Link(NamedTuple):
    """Other entry of a group: a soft or external link, a further hard link, or a named type.

    Attributes:
        kind: ``soft``, ``external``, ``type``; ``again-group`` or ``again-dataset`` for a further hard link.
        target: Path of the target; for an external link the file and the path; empty for a type.
    """

    path: tuple[str, ...]
    kind: str
    target: str


@dataclass(slots=True)
class Tree:
    """Content of a file without values.

    Attributes:
        groups: Attributes of groups by path.
        datasets: Datasets by path.
        links: Other links.
        faults: Errors about objects that can't be read.
    """

    groups: dict[tuple[str, ...], Attributes] = field(default_factory=dict)
    datasets: dict[tuple[str, ...], Dataset] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    faults: list[Finding] = field(default_factory=list)


def walk(location: Location) -> Tree:
    """Return the datasets, groups and links of a file."""
    tree, budget = Tree(), Budget(location.path, location.size, "names")
    for _, payload in location.ask("walk"):
        item = json.loads(payload)
        try:
            budget.charge(len(item.get("path", "")))
        except LimitExceeded as failure:
            tree.faults.append(error("hdf5-limit", failure.reason, "/"))
            break
        _add(tree, item)
    return tree


def _name(raw: str) -> str:
    return raw.encode("latin-1").decode("utf-8", "backslashreplace")


def _add(tree: Tree, item: dict[str, Any]) -> None:
    path = tuple(map(_name, item.get("path", "").split("/")[1:]))
    if item["k"] == "group":
        tree.groups[path] = _attributes(item["attrs"])
    elif item["k"] == "dataset":
        tree.datasets[path] = _dataset(path, item)
    elif item["k"] == "link":
        tree.links.append(Link(path, item["kind"], _name(item["target"])))
    elif item["k"] == "again":
        tree.links.append(Link(path, f"again-{item['kind']}", _name(item["first"])))
    elif item["k"] == "type":
        tree.links.append(Link(path, "type", ""))
    elif item["k"] != "alive":
        tree.faults.append(error(item["code"], item["message"], "/" + "/".join(path)))


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_name(key): _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and "b" in value:
        return _name(value["b"]).rstrip("\0")
    return value


def _dataset(path: tuple[str, ...], item: dict[str, Any]) -> Dataset:
    dtype = item["dtype"]
    members = tuple(map(_name, dtype.get("members", ())))
    fields = tuple(dtype.get("fields", ()))
    kind = Kind(
        dtype["class"],
        dtype["size"],
        dtype["order"],
        dtype.get("signed", False),
        fields,
        dtype["what"],
        members,
        dtype.get("variable", False),
    )
    return Dataset(
        path,
        item["path"],
        _attributes(item["attrs"]),
        kind,
        None if item["shape"] is None else tuple(item["shape"]),
        item["layout"],
        item.get("offset"),
        item.get("stored", 0),
        tuple(item["chunk"]) if item.get("chunk") else None,
        tuple(item.get("filters", ())),
        _name(item.get("target", "")),
        _plain(item.get("values")),
    )


def stated_end(data: bytes) -> int | None:
    """Return the size in bytes that a superblock states, a user block included; None if it can't be read.

    ``data`` has at least 64 bytes, from the signature on.
    """
    # After the signature (8 bytes) and the version, superblocks have the width of addresses at byte 13 in
    # versions 0 and 1, at 9 in 2 and 3. The addresses begin at byte 24, 28 or 12: the base, one other, and
    # the end of the file.
    version, width = data[8], data[13] if data[8] < 2 else data[9]
    at = {0: 24, 1: 28}.get(version, 12)
    end = at + 2 * width
    if width != 8 or version > 3 or len(data) < end + width:
        return None
    return int.from_bytes(data[end : end + width], "little")


class Chunk(NamedTuple):
    """Stored chunk of a dataset.

    Attributes:
        start: Index of its first element in the dataset.
        offset: Offset in the file.
        nbytes: Stored size.
        skips_filters: Whether some filter wasn't applied to it.
    """

    start: tuple[int, ...]
    offset: int
    nbytes: int
    skips_filters: bool


def stored_chunks(location: Location, dataset: Dataset) -> tuple[Chunk, ...]:
    """Return the stored chunks of a dataset, in the order of the file."""
    if dataset.chunk is None or not dataset.stored:
        return ()
    frames = location.ask("chunks", dataset=dataset.raw)
    rows = (row for _, payload in frames for row in json.loads(payload)["chunks"])
    chunks = (Chunk(tuple(start), offset, nbytes, mask != 0) for start, offset, nbytes, mask in rows)
    return tuple(sorted(chunks, key=lambda chunk: chunk.offset))


def dataset_checksum(location: Location, dataset: Dataset, limit: int) -> tuple[int, int] | None:
    """Return the CRC-32 and size of all elements of a dataset; None if unreadable, or over the limit.

    Elements of fixed size are summed as stored; texts and arrays of variable length with their lengths;
    references by the paths of their targets.
    """
    try:
        frames = location.ask("sum", dataset=dataset.raw, limit=limit)
    except DamagedCheckpoint:
        return None
    for answer in (json.loads(payload) for _, payload in frames):
        if answer["k"] == "sum":
            return answer["crc32"], answer["nbytes"]
    return None


class LibraryValues(NamedTuple):
    """Elements that only libhdf5 can read, requested in blocks.

    ``swap``: size in bytes of words whose byte order is reversed; 1 for none.
    """

    location: Location
    dataset: Dataset
    swap: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dataset.shape or ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        limit = max(16, limit - limit % 16)
        for start, count in slabs(self.dataset.shape or (), self.dataset.kind.size, self.dataset.chunk):
            data = memoryview(self.read_block(start, count))
            for at in range(0, len(data), limit):
                yield swap_bytes(data[at : at + limit], self.swap)

    def fill(self, start: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        """Fill an array with the elements from index ``start`` on; only the chunks in that box are read."""
        import numpy as np

        for first, count in slabs(into.shape, into.itemsize, self.dataset.chunk):
            place = tuple(slice(at, at + length) for at, length in zip(first, count, strict=True))
            data = self.read_block(tuple(map(add, start, first)), count)
            copy(
                np.frombuffer(swap_bytes(memoryview(data), self.swap), into.dtype).reshape(count), into[place]
            )

    def read_block(self, start: tuple[int, ...], count: tuple[int, ...], silent: bool = False) -> bytes:
        """Return the elements of a block in the stored byte order; with ``silent`` only check them."""
        request = {"dataset": self.dataset.raw, "start": start, "count": count, "silent": silent}
        try:
            frames = self.location.ask("block", **request)
        except DamagedCheckpoint as failure:
            is_summed = FLETCHER32 in self.dataset.filters and "filter" in failure.found
            code = "checksum-mismatch" if is_summed else failure.code
            found = f"{self.dataset.name}: {failure.found}"
            raise DamagedCheckpoint(self.location.path, found, where=failure.where, code=code) from failure
        data = b"".join(payload for kind, payload in frames if kind == b"D")
        expected = 0 if silent else math.prod(count) * self.dataset.kind.size
        if len(data) != expected:
            raise DamagedCheckpoint(self.location.path, f"{len(data):,} bytes", expected=f"{expected:,}")
        return data


def slabs(
    shape: tuple[int, ...], itemsize: int, chunk: tuple[int, ...] | None, budget: int = BLOCK_BYTES
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and count of blocks that cover a dataset in C order, of whole chunks if they fit."""
    # A block is as many of the last axes as fit in the budget, and a step along the axis before them. A
    # multiple of the chunk's length along that axis keeps a chunk from being inflated twice.
    if not all(shape):
        return
    axis, inner = len(shape), itemsize
    while axis > 0 and inner * shape[axis - 1] <= budget:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    axis -= 1
    step = max(1, budget // inner)
    if chunk and step > chunk[axis]:
        step -= step % chunk[axis]
    rest = shape[axis + 1 :]
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            count = min(step, shape[axis] - start)
            yield (*outer, start, *(0,) * len(rest)), (*(1,) * axis, count, *rest)

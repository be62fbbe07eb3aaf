"""What an interpreted pickle consists of: plain data, and inert nodes for what would be run."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.readable import Readable

ENTRY = 64
"""About what an object, or an entry of a dictionary, takes in bytes; a set and a call take more."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a real unpickler would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """What a real unpickler would build by calling something: an inert record of it.

    Attributes:
        function: What would be called: a ``Global``, or any other object in a hostile file.
        args: The positional arguments.
        kwargs: The keyword arguments of NEWOBJ_EX.
        state: What BUILD would set on the result, None where it doesn't.
        items: What would be appended to the result, or added.
        pairs: What would be set by key.
        is_new: Whether the class's ``__new__`` would be called, and not the class, which runs ``__init__``.
    """

    __slots__ = ("args", "function", "is_new", "items", "kwargs", "pairs", "state")

    def __init__(self, function: object, args: tuple[Any, ...], kwargs: object = None) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []
        self.is_new = False

    def is_of(self, module: str, name: str) -> bool:
        """Tell whether the called function has this name."""
        function = self.function
        return isinstance(function, Global) and function.module == module and function.name == name


class Mapped(dict[Any, Any]):
    """A dictionary of another class: ``kind`` names it; ``state`` is what BUILD would set on it.

    ``factory`` is what a ``defaultdict`` would call for a missing key, None elsewhere.
    """

    __slots__ = ("factory", "kind", "state")

    def __init__(self, kind: Global) -> None:
        self.kind = kind
        self.state: Any = None
        self.factory: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """Something that can't be carried, in its place.

    Attributes:
        what: What it is and why, as a sentence without its period.
        content: What of it is carried all the same, and stands in for it: its tensors. None: nothing is.
    """

    what: str
    content: object = None


MAPPINGS = frozenset(Global("collections", name) for name in ("OrderedDict", "defaultdict", "Counter"))
"""The classes of dictionaries that a ``Mapped`` may stand for."""
NOTHING = Global("types", "NoneType")
"""``Call(NOTHING, ())`` is the tree of what holds None and nothing else; without a tree it is None itself."""
REQUIRES_GRAD = Global("torch.Tensor", "requires_grad_")
"""``Call(REQUIRES_GRAD, (tensor,))`` is a tensor with gradients that is no parameter."""
NDARRAY = Global("numpy", "asarray")
"""``Call(NDARRAY, (tensor,))`` is a NumPy array of these elements."""
QUANTIZED = Global("torch._utils", "_rebuild_qtensor")
FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
MASKED = Global("numpy.ma.core", "_mareconstruct")
"""What rebuilds a quantized tensor, one of a subclass, or a masked array: in a tree with fewer arguments."""


_MEMORY_VIEWS = frozenset({"__array_interface__", "__array_struct__"})


def views_memory(state: object) -> bool:
    """Tell whether attributes let NumPy view any memory as an array."""
    return isinstance(state, dict) and not state.keys().isdisjoint(_MEMORY_VIEWS)


def is_gone(node: object) -> bool:
    """Tell whether a node can't be carried, and nothing stands in for it."""
    return isinstance(node, Opaque) and node.content is None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference that the surrounding format resolves."""

    id: Any


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A long string of bytes or text that stays in the file, at ``offset`` in the pickle's source.

    ``kind`` is ``bytes``, ``text`` (UTF-8), or ``latin1``: bytes that protocol 2 stores as text, which
    take two bytes of the file each from 0x80 up.
    """

    source: Readable
    offset: int
    nbytes: int
    kind: str

    def blocks(self, limit: int) -> Iterator[bytes]:
        """Yield the content as bytes, at most ``limit`` at once."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        for start in range(self.offset, self.offset + self.nbytes, limit):
            data = self.source.read(start, min(limit, self.offset + self.nbytes - start))
            yield decode(data).encode("latin-1", "replace") if self.kind == "latin1" else data

    def read(self) -> bytes:
        """Return the whole content as bytes."""
        return b"".join(self.blocks(1 << 20))


@dataclass(slots=True)
class Pickle:
    """One interpreted pickle.

    Attributes:
        root: The object.
        end: Offset behind STOP, in the pickle's source.
        names: Every name that would be imported, with the offset where it first was.
        unsafe: Calls of what is not on the list, or with arguments that it should not have, with offsets.
        unknown: Every name with whose calls nobody knows what would run, with the offset where it last was.
        stored: Calls that load a storage out of the bytes that they are given.
        misuse: What no honest pickle does, as (offset, sentence).
        protocol: The highest protocol that it declares.
        calls: How many calls it makes.
    """

    root: object = None
    end: int = 0
    names: dict[Global, int] = field(default_factory=dict)
    unsafe: list[tuple[int, Call]] = field(default_factory=list)
    unknown: dict[Global, int] = field(default_factory=dict)
    stored: list[Call] = field(default_factory=list)
    misuse: list[tuple[int, str]] = field(default_factory=list)
    protocol: int = 0
    calls: int = 0

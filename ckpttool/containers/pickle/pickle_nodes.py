"""Nodes of an interpreted pickle: plain data, inert records of calls, and the trust in imported names.

``children`` and ``rebuild`` are the algebra of all trees of such nodes: code that walks, folds, compares,
encodes or edits one uses them to read a node's parts, and to make the same node with other parts.

The lists of names are in ``lists/``, with ``#`` before a comment. Only ``values.txt`` and
``constructors.txt`` make anything safe; the others separate known dangers from unknown names.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from ckpttool.core.name_lists import lines_of
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
        kind: The kind of data that it makes, as ``constructors.evaluate`` found it; empty before.
    """

    __slots__ = ("args", "function", "is_new", "items", "kind", "kwargs", "pairs", "state")

    def __init__(
        self,
        function: object,
        args: tuple[Any, ...],
        kwargs: object = None,
        state: Any = None,
        items: Iterable[Any] = (),
        pairs: Iterable[tuple[Any, Any]] = (),
        *,
        is_new: bool = False,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.state, self.items, self.pairs = state, list(items), list(pairs)
        self.is_new, self.kind = is_new, ""

    def is_of(self, module: str, name: str) -> bool:
        """Return whether the called function has this name."""
        function = self.function
        return isinstance(function, Global) and function.module == module and function.name == name


class Mapped(dict[Any, Any]):
    """A dictionary of another class: ``kind`` names it; ``state`` is what BUILD would set on it.

    ``factory`` is what a ``defaultdict`` would call for a missing key, None elsewhere.
    """

    __slots__ = ("factory", "kind", "state")

    def __init__(
        self, kind: Global, pairs: Iterable[tuple[Any, Any]] = (), state: Any = None, factory: Any = None
    ) -> None:
        super().__init__(pairs)
        self.kind, self.state, self.factory = kind, state, factory


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """Something that can't be carried, in its place.

    Attributes:
        what: What it is and why, as a sentence without its period.
        content: What of it is carried all the same, and stands in for it: its tensors. None: nothing is.
    """

    what: str
    content: object = None


ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""The types of plain values, which hold nothing."""
MAPPINGS = frozenset(Global("collections", name) for name in ("OrderedDict", "defaultdict", "Counter"))
"""The classes of dictionaries that a ``Mapped`` may represent."""
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


def is_gone(node: object) -> bool:
    """Return whether a node can't be carried, and nothing replaces it."""
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
        unsafe: Calls of dangerous functions, or of constructors that are given one, with offsets.
        unknown: Names that are called or stored, and whose own code would then run: the verb that says how.
        stored: Bytes that would be loaded as a storage, by their place, or by themselves.
        misuse: What no honest pickle does, as (offset, sentence).
        protocol: The highest protocol that it declares.
        calls: How many calls it makes.
        arrays: How many arrays of joblib are in it.
    """

    root: object = None
    end: int = 0
    names: dict[Global, int] = field(default_factory=dict)
    unsafe: list[tuple[int, Call]] = field(default_factory=list)
    unknown: dict[Global, str] = field(default_factory=dict)
    stored: dict[object, object] = field(default_factory=dict)
    misuse: list[tuple[int, str]] = field(default_factory=list)
    protocol: int = 0
    calls: int = 0
    arrays: int = 0

    def add(self, inner: Pickle) -> None:
        """Take over what was seen in a pickle that is in this one."""
        self.names |= {name: at for name, at in inner.names.items() if name not in self.names}
        self.unsafe += inner.unsafe
        self.unknown |= inner.unknown
        self.stored |= inner.stored
        self.misuse += inner.misuse
        self.calls += inner.calls


# The algebra ----------------------------------------------------------------------------------------


def children(node: object) -> Sequence[object] | None:
    """Return all that a node holds itself, as ``rebuild`` takes it; None where it can't hold anything."""
    if type(node) in ATOMS:
        return None
    if isinstance(node, list | tuple):
        return node
    if isinstance(node, Mapped):
        return [*node, *node.values(), node.state, node.factory]
    if isinstance(node, dict):
        return [*node, *node.values()]
    if isinstance(node, Call):
        rest = [*node.items, *chain.from_iterable(node.pairs)]
        return [node.function, node.args, node.kwargs, node.state, *rest]
    if isinstance(node, set | frozenset):
        return list(node)
    if isinstance(node, Persistent):
        return (node.id,)
    return (node.content,) if isinstance(node, Opaque) and node.content is not None else None


def rebuild(node: Any, parts: Sequence[Any]) -> Any:
    """Return the like of a node that has ``children``, with others in their places."""
    if isinstance(node, Call):
        function, args, kwargs, state, *rest = parts
        items, keys_and_values = rest[: len(node.items)], rest[len(node.items) :]
        pairs = zip(keys_and_values[::2], keys_and_values[1::2], strict=True)
        made = Call(function, args, kwargs, state, items, pairs, is_new=node.is_new)
        made.kind = node.kind
        return made
    if isinstance(node, dict):
        count = len(node)
        pairs = zip(parts[:count], parts[count : 2 * count], strict=True)
        return Mapped(node.kind, pairs, *parts[2 * count :]) if isinstance(node, Mapped) else dict(pairs)
    if isinstance(node, Persistent):
        return Persistent(parts[0])
    return Opaque(node.what, parts[0]) if isinstance(node, Opaque) else type(node)(parts)


def nodes(root: object, visited: set[int] | None = None) -> Iterator[object]:
    """Yield every node that can hold others, at any depth, each once.

    ``visited`` keeps the addresses of the nodes seen, for several walks over what one pickle holds.
    """
    seen = set() if visited is None else visited
    pending: list[object] = [root]
    while pending:
        node = pending.pop()
        parts = children(node)
        if parts is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            pending.extend(parts)


def references(root: object, visited: set[int] | None = None) -> Iterator[Persistent]:
    """Yield every reference in what the interpreter built, as ``nodes`` does."""
    return (node for node in nodes(root, visited) if isinstance(node, Persistent))


Name: TypeAlias = tuple[str, str]
"""A module and a name in it, as the pickle spells them."""


class Trust(enum.Enum):
    """What a name, or a call, of a pickle means to whoever loads it."""

    PLAIN = "plain"
    """Data, whatever the pickle does with it."""

    UNKNOWN = "unknown"
    """Nobody knows it: ``__main__``, or the user's own."""

    KNOWN = "known"
    """A name of a widely installed package that is on no list: to import it runs nothing that the pickle
    chose, to call it could do anything."""

    DANGEROUS = "dangerous"
    """Another name of the standard library, or one that is shaped to reach behind what it names."""


LISTS = Path(__file__).with_name("lists")
_SCRIPTS = frozenset({"__main__", "__mp_main__"})
_OWN_ROOTS = _SCRIPTS | {"__torch__"}
"""Modules of the user's whose names have underscores: scripts, and what TorchScript makes of classes."""
_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_PYTHON_2_GLOBALS: dict[Name, Name] = {
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"),
}


def modern(module: str, name: str) -> Name:
    """Return the global as Python 3 spells it; protocols up to 2 use the names of Python 2."""
    renamed = _PYTHON_2_GLOBALS.get((module, name))
    return renamed or (_PYTHON_2_MODULES.get(module, module), name)


def trust(module: str, name: str) -> Trust:
    """Return what the global `name` of `module` means where it is stored as data; any text will do.

    What it means to call it depends on the arguments: see ``constructors.evaluate``.
    """
    module, name = modern(module, name)
    return Trust.PLAIN if value_kind(module, name) is not None else stranger(module, name)


@lru_cache(1 << 12)
def value_kind(module: str, name: str) -> str | None:
    """Return the kind of data that a global is wherever it is stored, or None."""
    return _values().get((module, name))


def is_object(module: str, name: str) -> bool:
    """Return whether honest pickles are known to call a global whose own code then runs."""
    return (module, name) in globals_in("objects.txt")


@lru_cache(1 << 12)
def stranger(module: str, name: str) -> Trust:
    """Return what a global that is neither a value nor a constructor means."""
    if is_object(module, name):
        return Trust.KNOWN
    standard_library = words_in("stdlib.txt")
    package, *below = f"{module}.{name}".split(".")
    reaches = "." in name and (module in _SCRIPTS or not standard_library.isdisjoint(name.split(".")))
    # A part ``__so__`` leads to all that Python has.
    has_dunder = any(map(is_dunder, below)) or (is_dunder(package) and package not in _OWN_ROOTS)
    if reaches or has_dunder or package in standard_library:
        return Trust.DANGEROUS
    if package not in words_in("packages.txt"):
        return Trust.UNKNOWN
    return Trust.DANGEROUS if name in standard_library else Trust.KNOWN


def is_dunder(name: str) -> bool:
    """Return whether a name has two underscores on each side."""
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


@cache
def _values() -> dict[Name, str]:
    rows = (line.split() for line in lines_of(LISTS / "values.txt"))
    return {(module, name): kind for kind, module, *names in rows for name in names}


@cache
def globals_in(file: str) -> frozenset[Name]:
    """Return the globals of a list: in each line a module, and names in it."""
    rows = (line.split() for line in lines_of(LISTS / file))
    return frozenset((module, name) for module, *names in rows for name in names)


@cache
def words_in(file: str) -> frozenset[str]:
    """Return the words of a list, of which a line may hold several."""
    return frozenset(word for line in lines_of(LISTS / file) for word in line.split())

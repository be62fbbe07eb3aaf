"""Nodes of an interpreted pickle: plain data, inert records of calls, and the trust in imported names.

All code that walks, folds, compares, encodes or edits a tree of such nodes uses ``children`` to get a node's
parts, and ``rebuild`` to make the same node with other parts.

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
"""Estimated bytes of memory of an object, or of an entry of a dictionary; a set and a call take more."""


@dataclass(frozen=True, slots=True)
class Global:
    """Name that a real unpickler would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """Inert record of an object that a real unpickler would make by a call.

    Attributes:
        function: The function: a ``Global``, or any other node in a hostile file.
        args: The positional arguments.
        kwargs: The keyword arguments of NEWOBJ_EX.
        state: The state that BUILD would set on the result; None without BUILD.
        items: Items that APPENDS or ADDITEMS would add to the result.
        pairs: Keys and values that SETITEMS would set.
        is_new: Whether ``__new__`` of the class would be called (NEWOBJ), without ``__init__``.
        kind: Kind of the result, set by ``constructors.evaluate``; empty before.
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


class DictSubclass(dict[Any, Any]):
    """A dictionary of another class.

    Attributes:
        kind: The class.
        state: The state that BUILD would set on it, or None.
        factory: The function that a ``defaultdict`` calls for a missing key; None for other classes.
    """

    __slots__ = ("factory", "kind", "state")

    def __init__(
        self, kind: Global, pairs: Iterable[tuple[Any, Any]] = (), state: Any = None, factory: Any = None
    ) -> None:
        super().__init__(pairs)
        self.kind, self.state, self.factory = kind, state, factory


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """Placeholder for an object that can't be converted.

    Attributes:
        reason: The object and why it can't be converted, as a sentence without its period.
        content: The part of it that can be converted and replaces it, its tensors; None if there is none.
    """

    reason: str
    content: object = None


ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of plain values, which have no parts."""
MAPPINGS = frozenset(Global("collections", name) for name in ("OrderedDict", "defaultdict", "Counter"))
"""Classes that a ``DictSubclass`` may have."""
NOTHING = Global("types", "NoneType")
"""``Call(NOTHING, ())`` is the tree of a file that contains just None; a tree of None means no tree."""
REQUIRES_GRAD = Global("torch.Tensor", "requires_grad_")
"""``Call(REQUIRES_GRAD, (tensor,))`` is a tensor with ``requires_grad`` that isn't a parameter."""
NDARRAY = Global("numpy", "asarray")
"""``Call(NDARRAY, (tensor,))`` is a NumPy array of these elements."""
QUANTIZED = Global("torch._utils", "_rebuild_qtensor")
FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
MASKED = Global("numpy.ma.core", "_mareconstruct")
"""Functions that rebuild quantized tensors, those of subclasses, and masked arrays; with fewer arguments in a
tree than in a pickle."""


def is_removed(node: object) -> bool:
    """Return whether a node can't be converted and has no replacement."""
    return isinstance(node, Opaque) and node.content is None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Persistent id, which the format around the pickle resolves."""

    id: Any


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Reference to a long string of bytes or text in the file.

    Attributes:
        offset: Offset in ``source``.
        nbytes: Size in the file.
        kind: ``bytes``, ``text`` (UTF-8), ``8-bit`` (Python 2's ``str``), or ``latin1``: bytes that protocol
            2 stores as text, in which a byte from 0x80 on takes two bytes of the file.
    """

    source: Readable
    offset: int
    nbytes: int
    kind: str

    def blocks(self, limit: int) -> Iterator[bytes]:
        """Yield the content as bytes, in blocks of at most ``limit``."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        for start in range(self.offset, self.offset + self.nbytes, limit):
            data = self.source.read(start, min(limit, self.offset + self.nbytes - start))
            yield decode(data).encode("latin-1", "replace") if self.kind == "latin1" else data

    def read(self) -> bytes:
        """Return the whole content as bytes."""
        return b"".join(self.blocks(1 << 20))


@dataclass(slots=True)
class Pickle:
    """One interpreted pickle; offsets are in the pickle's source.

    Attributes:
        root: The object.
        end: Offset after STOP.
        names: Every name that would be imported, with the offset of the first import.
        unsafe: Dangerous calls, with offsets.
        unknown: Names whose own code would run, with a verb: a key of ``pickle_safety._CODE``.
        nested: Bytes that ``torch.storage._load_from_bytes`` would load, by (offset, kind) or by themselves.
        misuse: Operations that no honest pickle has, as (offset, sentence).
        protocol: The highest protocol that it declares.
        calls: Number of calls.
        arrays: Number of joblib's arrays.
    """

    root: object = None
    end: int = 0
    names: dict[Global, int] = field(default_factory=dict)
    unsafe: list[tuple[int, Call]] = field(default_factory=list)
    unknown: dict[Global, str] = field(default_factory=dict)
    nested: dict[object, object] = field(default_factory=dict)
    misuse: list[tuple[int, str]] = field(default_factory=list)
    protocol: int = 0
    calls: int = 0
    arrays: int = 0

    def add(self, inner: Pickle) -> None:
        """Add names, calls and misuse of a pickle that is inside this one."""
        self.names |= {name: at for name, at in inner.names.items() if name not in self.names}
        self.unsafe += inner.unsafe
        self.unknown |= inner.unknown
        self.nested |= inner.nested
        self.misuse += inner.misuse
        self.calls += inner.calls


# Parts of nodes -------------------------------------------------------------------------------------


def children(node: object) -> Sequence[object] | None:
    """Return the parts of a node in the order that ``rebuild`` takes; None for types without parts."""
    if type(node) in ATOMS:
        return None
    if isinstance(node, list | tuple):
        return node
    if isinstance(node, DictSubclass):
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
    """Return a copy of a node with other parts, in the order of ``children``."""
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
        return (
            DictSubclass(node.kind, pairs, *parts[2 * count :])
            if isinstance(node, DictSubclass)
            else dict(pairs)
        )
    if isinstance(node, Persistent):
        return Persistent(parts[0])
    return Opaque(node.reason, parts[0]) if isinstance(node, Opaque) else type(node)(parts)


def nodes(root: object, visited: set[int] | None = None) -> Iterator[object]:
    """Yield every node that can have parts, at any depth, each once.

    ``visited``: addresses of nodes to skip, to which those of this walk are added; to walk several parts of
    one pickle.
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
    """Yield every persistent id in a tree once; ``visited`` as in ``nodes``."""
    return (node for node in nodes(root, visited) if isinstance(node, Persistent))


Name: TypeAlias = tuple[str, str]
"""A module and a name in it, as the pickle spells them."""


class Trust(enum.Enum):
    """Risk of a name, or of a call, in a pickle that is loaded."""

    PLAIN = "plain"
    """Harmless data, whatever the pickle does with it."""

    UNKNOWN = "unknown"
    """Code of an unknown package, of ``__main__``, or of the user's own modules."""

    KNOWN = "known"
    """A name of a widely installed package that is on no list: harmless to import, but a call could do
    anything."""

    DANGEROUS = "dangerous"
    """Any other name of the standard library, or a dotted one that reaches into other modules."""


LISTS = Path(__file__).with_name("lists")
_SCRIPTS = frozenset({"__main__", "__mp_main__"})
_OWN_ROOTS = _SCRIPTS | {"__torch__"}
"""Modules of the user with dunder names: scripts, and TorchScript's names of the user's classes."""
_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_PYTHON_2_GLOBALS: dict[Name, Name] = {
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"),
}


def python3_name(module: str, name: str) -> Name:
    """Return the module and name in Python 3; protocols up to 2 have the names of Python 2."""
    renamed = _PYTHON_2_GLOBALS.get((module, name))
    return renamed or (_PYTHON_2_MODULES.get(module, module), name)


def trust(module: str, name: str) -> Trust:
    """Return the trust in a global that is stored as data; any two texts are valid arguments.

    The trust in a call depends on its arguments: see ``constructors.evaluate``.
    """
    module, name = python3_name(module, name)
    return Trust.PLAIN if value_kind(module, name) is not None else trust_of_unlisted(module, name)


@lru_cache(1 << 12)
def value_kind(module: str, name: str) -> str | None:
    """Return the kind of a global that is data wherever it is stored; None for others."""
    return _values().get((module, name))


def is_object(module: str, name: str) -> bool:
    """Return whether a global is one of ``objects.txt``: honest pickles call it, and its own code runs."""
    return (module, name) in globals_in("objects.txt")


@lru_cache(1 << 12)
def trust_of_unlisted(module: str, name: str) -> Trust:
    """Return the trust in a global that is neither a value nor a constructor."""
    if is_object(module, name):
        return Trust.KNOWN
    # A dotted name reaches into what its module has imported: ``__main__`` may have imported anything, and
    # another module one of the standard library, such as ``os.system`` in ``torch.serialization``. The same
    # holds for a name in a known package that is itself a module of the standard library.
    standard_library = words_in("stdlib.txt")
    package, *below = f"{module}.{name}".split(".")
    reaches = "." in name and (module in _SCRIPTS or not standard_library.isdisjoint(name.split(".")))
    # STACK_GLOBAL of protocol 4 looks up dotted names part by part: ``f.__globals__`` leads to everything.
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
    """Return the words of a list, with one or more in a line."""
    return frozenset(word for line in lines_of(LISTS / file) for word in line.split())

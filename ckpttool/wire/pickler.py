"""Trees written as pickles of protocol 2, in the opcodes that PyTorch's ``weights_only`` accepts.

Only names of harmless data get into a pickle (``wire/trust.py``), whatever the tree holds.

Source: CPython ``Lib/pickle.py``; PyTorch ``torch/_weights_only_unpickler.py``, ``torch/_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpttool.tensor import Tensor
from ckpttool.wire.calls import is_plain
from ckpttool.wire.opcode_text import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    NONE,
    REDUCE,
    SETITEMS,
    TUPLE,
    TUPLES,
    Named,
    Op,
    Put,
    Streamed,
    encoded,
    spelled_float,
    spelled_int,
    spelled_text,
)
from ckpttool.wire.pickled import MAPPINGS, NOTHING, Call, Global, Mapped, Opaque, is_gone
from ckpttool.wire.tensor_pickling import spelled_call, spelled_tensor
from ckpttool.wire.trust import Trust, trust

_PYTHON_2 = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_SHAREABLE = (list, tuple, set, frozenset, dict, bytearray, Call, Tensor)
_LONGEST_KNOWN = 1 << 10
"""Texts up to so many characters are written once."""


class Storages:
    """Numbers the storages in the order in which a pickle first uses them; tied tensors have one.

    ``tensors`` has one tensor for each storage, at the index that is the key: its elements in C order are the
    storage.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._keys: dict[str, str] = {}

    def __call__(self, tensor: Tensor) -> str:
        """Return the key of the storage of a tensor: "0", "1", …."""
        owner = tensor.shares_with or tensor.name
        if owner not in self._keys:
            self._keys[owner] = str(len(self.tensors))
            self.tensors.append(tensor)
        return self._keys[owner]


def pickled(tree: object, storage_of: Callable[[Tensor], str]) -> bytes:
    """Return the pickle of a tree, whole; see ``pickle_into``."""
    parts: list[bytes] = []
    pickle_into(lambda data: parts.append(bytes(data)), tree, storage_of)
    return b"".join(parts)


def pickle_into(
    write: Callable[[bytes | memoryview], object], tree: object, storage_of: Callable[[Tensor], str]
) -> None:
    """Write the pickle of a tree, in bounded memory: an array of NumPy's lies in the pickle itself.

    ``storage_of`` gives the key of the record that holds a tensor's elements, in C order and little-endian. A
    tree that holds what no tree holds, such as a name that is not known to be harmless, is a ValueError.
    """
    _Pickling(write, storage_of, _shared(tree)).run(tree)


def imported_by(tree: object) -> set[Global]:
    """Return the names that the pickle of a tree would import; no value is read."""
    pickling = _Pickling(lambda data: None, Storages(), _shared(tree))
    pickling.run(tree, reads=False)
    return {Global(name.module, name.name) for name in pickling.names}


class _Pickling:
    """A pickle on its way: on a stack lies what is still to be written, of each node that was begun."""

    def __init__(
        self,
        write: Callable[[bytes | memoryview], object],
        storage_of: Callable[[Tensor], str],
        shared: set[int],
    ) -> None:
        self._write = write
        self._storage_of = storage_of
        self._shared = shared
        self._memo: dict[object, int] = {}

    @property
    def names(self) -> list[Named]:
        """Return what was imported so far."""
        return [key for key in self._memo if isinstance(key, Named)]

    def run(self, tree: object, *, reads: bool = True) -> None:
        self._write(b"\x80\x02")
        todo: list[Iterator[Any]] = [iter([tree])]
        pieces = bytearray()
        while todo:
            for item in todo[-1]:
                kind = type(item)
                if kind is Op:
                    pieces += item
                elif kind is Put:
                    pieces += self._put(item.key)
                elif kind is Streamed:
                    self._flush(pieces)
                    for block in item.blocks() if reads else ():
                        self._write(block)
                else:
                    todo.append(iter(self._spelled(item)))
                    break
            else:
                todo.pop()
            if len(pieces) > 1 << 16:
                self._flush(pieces)
        self._write(bytes(pieces) + b".")

    def _flush(self, pieces: bytearray) -> None:
        self._write(bytes(pieces))
        pieces.clear()

    def _spelled(self, node: Any) -> list[Any]:
        """Return what stands for a node: opcodes, and other nodes between them."""
        if id(node) in self._shared and id(node) in self._memo:
            return [self._get(id(node))]
        spell = _SPELLED.get(type(node))
        if spell is None:
            raise ValueError(f"a {type(node).__name__} can't be pickled as data")
        return spell(self, node)

    # The memo ---------------------------------------------------------------------------------------

    def _put(self, key: object) -> bytes:
        at = self._memo[key] = len(self._memo)
        return b"q" + bytes([at]) if at < 256 else b"r" + at.to_bytes(4, "little")

    def _get(self, key: object) -> Op:
        at = self._memo[key]
        return Op(b"h" + bytes([at]) if at < 256 else b"j" + at.to_bytes(4, "little"))

    def _kept(self, node: object) -> list[Put]:
        """Return what remembers the node that was just made, where it is met again."""
        return [Put(id(node))] if id(node) in self._shared else []

    # Values -----------------------------------------------------------------------------------------

    def _text(self, text: str) -> list[Any]:
        if len(text) > _LONGEST_KNOWN:
            return [spelled_text(text)]
        return [self._get(text)] if text in self._memo else [spelled_text(text), Put(text)]

    def _global(self, name: Global) -> list[Any]:
        if trust(name.module, name.name) is not Trust.PLAIN or "\n" in name.module + name.name:
            raise ValueError(f"{name} is not known to be harmless, and is not written into a pickle")
        return [Named(name.module, name.name)]

    def _named(self, name: Named) -> list[Any]:
        if name in self._memo:
            return [self._get(name)]
        line = f"c{_PYTHON_2.get(name.module, name.module)}\n{name.name}\n"
        return [Op(line.encode()), Put(name)]

    def _bytes(self, data: bytes) -> list[Any]:
        return encoded(spelled_text(data.decode("latin-1")))

    def _bytearray(self, data: bytearray) -> list[Any]:
        return [Named("builtins", "bytearray"), bytes(data), TUPLES[1], REDUCE, *self._kept(data)]

    def _complex(self, number: complex) -> list[Any]:
        return [Named("builtins", "complex"), number.real, number.imag, TUPLES[2], REDUCE]

    # Containers -------------------------------------------------------------------------------------

    def _list(self, items: list[Any]) -> list[Any]:
        return [EMPTY_LIST, *self._kept(items), *_appended(items)]

    def _tuple(self, items: tuple[Any, ...]) -> list[Any]:
        if not items:
            return [EMPTY_TUPLE]
        if len(items) in TUPLES:
            return [*map(_present, items), TUPLES[len(items)], *self._kept(items)]
        return [MARK, *map(_present, items), TUPLE, *self._kept(items)]

    def _set(self, items: set[Any] | frozenset[Any]) -> list[Any]:
        name = "set" if type(items) is set else "frozenset"
        made = [EMPTY_LIST, *_appended(in_order(items)), TUPLES[1], REDUCE]
        return [Named("builtins", name), *made, *self._kept(items)]

    def _dict(self, items: dict[Any, Any]) -> list[Any]:
        return [EMPTY_DICT, *self._kept(items), *_set_by_key(items.items())]

    def _mapped(self, items: Mapped) -> list[Any]:
        name = items.kind.name
        if items.kind not in MAPPINGS:
            raise ValueError(f"{items.kind} is no dictionary that can be written into a pickle")
        pairs = _set_by_key(items.items())
        if name == "Counter":
            made = [EMPTY_DICT, *pairs, TUPLES[1], REDUCE, *self._kept(items)]
        else:
            factory = [_present(items.factory), TUPLES[1]] if name == "defaultdict" else [EMPTY_TUPLE]
            made = [*factory, REDUCE, *self._kept(items), *pairs]
        return [Named("collections", name), *made, *self._built(items.state)]

    def _built(self, state: object) -> list[Any]:
        if state is None or is_gone(state):
            return []
        return [state, BUILD]

    # Objects ----------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor) -> list[Any]:
        return [*spelled_tensor(tensor, self._storage_of(tensor)), *self._kept(tensor)]

    def _call(self, call: Call) -> list[Any]:
        special = spelled_call(call, self._storage_of)
        if special is not None:
            return [*special, *self._kept(call)]
        if call.function == NOTHING and not call.args:
            return [NONE]
        if not isinstance(call.function, Global) or not is_plain(call):
            raise ValueError(f"a call of {call.function} that is not known to be harmless is no data")
        function = Named(call.function.module, call.function.name)
        made = [function, call.args, NEWOBJ if call.is_new else REDUCE, *self._kept(call)]
        return [*made, *_appended(call.items), *_set_by_key(call.pairs), *self._built(call.state)]

    def _opaque(self, opaque: Opaque) -> list[Any]:
        return [opaque.content]


def _appended(items: Iterable[Any]) -> list[Any]:
    present = [_present(item) for item in items]
    return [MARK, *present, APPENDS] if present else []


def _set_by_key(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return what sets pairs; those of which a part can't be carried are left out."""
    present = [part for pair in pairs if not any(map(is_gone, pair)) for part in pair]
    return [MARK, *present, SETITEMS] if present else []


def _present(node: object) -> object:
    return NONE if is_gone(node) else node


def in_order(items: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the items of a set, plain ones in an order that is the same in every process."""
    return sorted(items, key=lambda item: (type(item).__name__, repr(item) if type(item) in _PLAIN else ""))


_PLAIN = frozenset({str, bytes, float, bool, complex})

_SPELLED: dict[type, Callable[[_Pickling, Any], list[Any]]] = {
    type(None): lambda pickling, node: [NONE],
    bool: lambda pickling, node: [Op(b"\x88" if node else b"\x89")],
    int: lambda pickling, node: [spelled_int(node)],
    float: lambda pickling, node: [spelled_float(node)],
    complex: _Pickling._complex,
    str: _Pickling._text,
    bytes: _Pickling._bytes,
    Named: _Pickling._named,
    bytearray: _Pickling._bytearray,
    list: _Pickling._list,
    tuple: _Pickling._tuple,
    set: _Pickling._set,
    frozenset: _Pickling._set,
    dict: _Pickling._dict,
    Mapped: _Pickling._mapped,
    Global: _Pickling._global,
    Call: _Pickling._call,
    Tensor: _Pickling._tensor,
    Opaque: _Pickling._opaque,
}


def _shared(tree: object) -> set[int]:
    """Return the addresses of the nodes that are met more than once."""
    shared: set[int] = set()
    entered: set[int] = set()
    seen: set[int] = set()
    pending: list[tuple[object, bool]] = [(tree, True)]
    while pending:
        node, is_entry = pending.pop()
        if not is_entry:
            entered.discard(id(node))
        elif id(node) in entered:
            raise ValueError("a tree that holds itself can't be pickled")
        elif id(node) in seen:
            shared.add(id(node))
            pending += [(node.content, True)] if isinstance(node, Opaque) else []
        elif isinstance(node, (*_SHAREABLE, Opaque)):
            seen.add(id(node))
            entered.add(id(node))
            pending.append((node, False))
            pending += [(part, True) for part in _parts(node) if isinstance(part, (*_SHAREABLE, Opaque))]
    return shared


def _parts(node: object) -> Iterable[object]:
    if isinstance(node, Call):
        return [node.args, node.state, *node.items, *(part for pair in node.pairs for part in pair)]
    if isinstance(node, Mapped):
        return [*node.keys(), *node.values(), node.state, node.factory]
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, Opaque):
        return [node.content]
    return node if isinstance(node, list | tuple | set | frozenset) else ()

"""Trees written as pickles of protocol 2, in the opcodes that PyTorch's ``weights_only`` accepts.

Only names of harmless data get into a pickle (``pickle_nodes.trust``), whatever the tree has.

Each node becomes a list of opcodes, with other nodes between them that are written in turn. Tensors and
arrays are written as the calls that rebuild them; the elements of tensors are in other records, those of
arrays in the pickle.

Source: CPython ``Lib/pickle.py``; PyTorch ``torch/_weights_only_unpickler.py``, ``torch/_utils.py`` and
``torch/_tensor.py`` (``_reduce_ex_internal``); NumPy ``numpy/_core/src/multiarray/methods.c``
(``array_reduce``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpttool.containers.pickle.constructors import is_plain
from ckpttool.containers.pickle.pickle_nodes import (
    FROM_TYPE,
    MAPPINGS,
    MASKED,
    NDARRAY,
    NOTHING,
    QUANTIZED,
    REQUIRES_GRAD,
    Call,
    DictSubclass,
    Global,
    Opaque,
    Trust,
    children,
    is_removed,
    trust,
)
from ckpttool.core.errors import Unsupported
from ckpttool.core.tensor import Tensor

MAX_TEXT = 0xFFFFFFFF
"""Limit in bytes on one text: its length takes four bytes."""

_PYTHON_2 = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_SHAREABLE = (list, tuple, set, frozenset, dict, bytearray, Call, Tensor)
_ORDERED = frozenset({str, bytes, float, bool, complex})
"""Types whose values are sorted when a set is written."""
_LONGEST_KNOWN = 1 << 10
"""Limit in characters on texts that are put into the memo, and written once."""
_FLUSHED_BYTES = 1 << 16

_STORAGES = frozenset(
    {"Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double"}
    | {"ComplexFloat", "ComplexDouble", "QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4"}
)
"""Element types with a storage class in PyTorch; others are in an ``UntypedStorage``."""
_ARRAY_KINDS = {"float": "f", "integer": "i", "boolean": "b", "complex": "c"}
_STEP = 1 << 20
_ASCII = bytes(range(0x80))


# Opcodes --------------------------------------------------------------------------------------------


class Op(bytes):
    """Bytes that are written unchanged."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Store the top of the stack in the memo; the writer finds it by ``key``."""

    key: Any


@dataclass(frozen=True, slots=True)
class Import:
    """Import a name that the writer itself needs."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class StreamedBytes:
    """Bytes of a pickle that are produced while it is written."""

    blocks: Callable[[], Iterator[bytes]]


MARK, NONE = Op(b"("), Op(b"N")
EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE = Op(b"]"), Op(b"}"), Op(b")")
TUPLE, TUPLES = Op(b"t"), {1: Op(b"\x85"), 2: Op(b"\x86"), 3: Op(b"\x87")}
APPENDS, SETITEMS = Op(b"e"), Op(b"u")
REDUCE, NEWOBJ, BUILD, BINPERSID = Op(b"R"), Op(b"\x81"), Op(b"b"), Op(b"Q")
FALSE, TRUE = Op(b"\x89"), Op(b"\x88")
LATIN1 = Op(b"X\x06\0\0\0latin1")


def int_opcode(number: int) -> Op:
    if 0 <= number < 1 << 8:
        return Op(b"K" + bytes([number]))
    if 0 <= number < 1 << 16:
        return Op(b"M" + number.to_bytes(2, "little"))
    if -(1 << 31) <= number < 1 << 31:
        return Op(b"J" + number.to_bytes(4, "little", signed=True))
    length = (number if number >= 0 else ~number).bit_length() // 8 + 1
    data = number.to_bytes(length, "little", signed=True)
    # LONG1, or LONG4 for 256 bytes and more, which PyTorch's ``weights_only`` doesn't accept.
    head = b"\x8a" + bytes([length]) if length < 256 else b"\x8b" + struct.pack("<i", length)
    return Op(head + data)


def text_opcode(text: str) -> Op:
    data = text.encode("utf-8", "surrogatepass")
    return Op(text_header(len(data)) + data)


def text_header(nbytes: int) -> bytes:
    """Return the opcode and length before a text of ``nbytes``."""
    if nbytes > MAX_TEXT:
        found = f"{nbytes:,} bytes of text or of an array"
        raise Unsupported("a pickle", found, expected=f"at most {MAX_TEXT:,}")
    return b"X" + nbytes.to_bytes(4, "little")


def bytes_opcodes(text: Op | StreamedBytes) -> list[Any]:
    """Return bytes in protocol 2, which has no opcode for them: ``_codecs.encode(text, "latin1")``."""
    return [Import("_codecs", "encode"), text, LATIN1, TUPLES[2], REDUCE]


# Pickling a tree ------------------------------------------------------------------------------------


class Storages:
    """Numbers storages in the order of their first use in a pickle; tied tensors share one.

    ``tensors``: a tensor for each storage, at the index of its key; its elements in C order are the storage.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._keys: dict[str, str] = {}

    def __call__(self, tensor: Tensor) -> str:
        """Return the key of a tensor's storage: "0", "1", …."""
        owner = tensor.shares_with or tensor.name
        if owner not in self._keys:
            self._keys[owner] = str(len(self.tensors))
            self.tensors.append(tensor)
        return self._keys[owner]


def dumps(tree: object, storage_of: Callable[[Tensor], str]) -> bytes:
    """Return the pickle of a tree; see ``pickle_into``."""
    parts: list[bytes] = []
    pickle_into(lambda data: parts.append(bytes(data)), tree, storage_of)
    return b"".join(parts)


def pickle_into(
    write: Callable[[bytes | memoryview], object], tree: object, storage_of: Callable[[Tensor], str]
) -> None:
    """Write the pickle of a tree in bounded memory, as NumPy arrays in it may be large.

    Args:
        write: Called with consecutive pieces.
        storage_of: Returns the key of the record with a tensor's elements, in C order and little-endian.

    Raises:
        ValueError: The tree has a node that can't be written, such as a name not known to be harmless.
    """
    _Pickler(write, storage_of, _shared_nodes(tree)).run(tree)


def imported_by(tree: object) -> set[Global]:
    """Return the names that the pickle of a tree would import, without reading tensors."""
    pickler = _Pickler(lambda data: None, Storages(), _shared_nodes(tree))
    pickler.run(tree, reads=False)
    return {Global(key.module, key.name) for key in pickler.memo if isinstance(key, Import)}


def _shared_nodes(tree: object) -> set[int]:
    """Return the addresses of nodes that occur more than once; raise ValueError for one inside itself."""
    # Only these nodes are put into the memo; for others that would cost an opcode for nothing. Each node is
    # on the stack twice, the second time to leave it: a node that is met before it is left is inside itself.
    shared: set[int] = set()
    entered: set[int] = set()
    seen: set[int] = set()
    pending: list[tuple[object, bool]] = [(tree, True)]
    while pending:
        node, is_entry = pending.pop()
        if not is_entry:
            entered.discard(id(node))
        elif id(node) in entered:
            raise ValueError("a tree that contains itself can't be pickled")
        elif id(node) in seen:
            shared.add(id(node))
            # An ``Opaque`` is written as its content, which therefore occurs again, too.
            pending += [(node.content, True)] if isinstance(node, Opaque) else []
        elif isinstance(node, (*_SHAREABLE, Opaque)):
            seen.add(id(node))
            entered.add(id(node))
            pending.append((node, False))
            pending += [
                (part, True) for part in children(node) or () if isinstance(part, (*_SHAREABLE, Opaque))
            ]
    return shared


class _Pickler:
    """Writer of one pickle; ``memo`` has the indexes of nodes (by address), texts and imported names."""

    def __init__(
        self,
        write: Callable[[bytes | memoryview], object],
        storage_of: Callable[[Tensor], str],
        shared: set[int],
    ) -> None:
        self._write = write
        self._storage_of = storage_of
        self._shared = shared
        self.memo: dict[object, int] = {}

    def run(self, tree: object, *, reads: bool = True) -> None:
        self._write(b"\x80\x02")
        # A stack in place of recursion: the remaining opcodes and nodes of each node that is being written.
        todo: list[Iterator[Any]] = [iter([tree])]
        pieces = bytearray()
        while todo:
            for item in todo[-1]:
                kind = type(item)
                if kind is Op:
                    pieces += item
                elif kind is Put:
                    at = self.memo[item.key] = len(self.memo)
                    pieces += b"q" + bytes([at]) if at < 256 else b"r" + at.to_bytes(4, "little")
                elif kind is StreamedBytes:
                    self._flush(pieces)
                    for block in item.blocks() if reads else ():
                        self._write(block)
                else:
                    todo.append(iter(self._opcodes(item)))
                    break
            else:
                todo.pop()
            if len(pieces) > _FLUSHED_BYTES:
                self._flush(pieces)
        self._write(bytes(pieces) + b".")

    def _flush(self, pieces: bytearray) -> None:
        self._write(bytes(pieces))
        pieces.clear()

    def _opcodes(self, node: Any) -> list[Any]:
        """Return the opcodes of a node, with other nodes between them."""
        if id(node) in self._shared and id(node) in self.memo:
            return [self._get(id(node))]
        opcodes_of = _OPCODES.get(type(node))
        if opcodes_of is None:
            raise ValueError(f"a {type(node).__name__} can't be pickled as data")
        return opcodes_of(self, node)

    def _get(self, key: object) -> Op:
        at = self.memo[key]
        return Op(b"h" + bytes([at]) if at < 256 else b"j" + at.to_bytes(4, "little"))

    def _put(self, node: object) -> list[Put]:
        """Return the opcode that stores the new node in the memo, if the node is shared."""
        return [Put(id(node))] if id(node) in self._shared else []

    # One method for each type of node, see ``_OPCODES``

    def _text(self, text: str) -> list[Any]:
        if len(text) > _LONGEST_KNOWN:
            return [text_opcode(text)]
        return [self._get(text)] if text in self.memo else [text_opcode(text), Put(text)]

    def _global(self, name: Global) -> list[Any]:
        if trust(name.module, name.name) is not Trust.PLAIN or "\n" in name.module + name.name:
            raise ValueError(f"{name} is not known to be harmless, so it can't be pickled")
        return [Import(name.module, name.name)]

    def _import(self, name: Import) -> list[Any]:
        if name in self.memo:
            return [self._get(name)]
        line = f"c{_PYTHON_2.get(name.module, name.module)}\n{name.name}\n"
        return [Op(line.encode()), Put(name)]

    def _bytes(self, data: bytes) -> list[Any]:
        return bytes_opcodes(text_opcode(data.decode("latin-1")))

    def _bytearray(self, data: bytearray) -> list[Any]:
        return [Import("builtins", "bytearray"), bytes(data), TUPLES[1], REDUCE, *self._put(data)]

    def _complex(self, number: complex) -> list[Any]:
        return [Import("builtins", "complex"), number.real, number.imag, TUPLES[2], REDUCE]

    def _list(self, items: list[Any]) -> list[Any]:
        return [EMPTY_LIST, *self._put(items), *_append_all(items)]

    def _tuple(self, items: tuple[Any, ...]) -> list[Any]:
        if not items:
            return [EMPTY_TUPLE]
        if len(items) in TUPLES:
            return [*map(_or_none, items), TUPLES[len(items)], *self._put(items)]
        return [MARK, *map(_or_none, items), TUPLE, *self._put(items)]

    def _set(self, items: set[Any] | frozenset[Any]) -> list[Any]:
        name = "set" if type(items) is set else "frozenset"
        made = [EMPTY_LIST, *_append_all(sorted_items(items)), TUPLES[1], REDUCE]
        return [Import("builtins", name), *made, *self._put(items)]

    def _dict(self, items: dict[Any, Any]) -> list[Any]:
        return [EMPTY_DICT, *self._put(items), *_set_all(items.items())]

    def _mapping(self, items: DictSubclass) -> list[Any]:
        name = items.kind.name
        if items.kind not in MAPPINGS:
            raise ValueError(f"{items.kind} is not a dictionary type that can be pickled")
        pairs = _set_all(items.items())
        # A Counter is made from its pairs, and put into the memo afterwards; the others are made empty, put
        # into the memo, and filled.
        if name == "Counter":
            made = [EMPTY_DICT, *pairs, TUPLES[1], REDUCE, *self._put(items)]
        else:
            factory = [_or_none(items.factory), TUPLES[1]] if name == "defaultdict" else [EMPTY_TUPLE]
            made = [*factory, REDUCE, *self._put(items), *pairs]
        return [Import("collections", name), *made, *_build(items.state)]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        return [*tensor_opcodes(tensor, self._storage_of(tensor)), *self._put(tensor)]

    def _call(self, call: Call) -> list[Any]:
        rewritten = call_opcodes(call, self._storage_of)
        if rewritten is not None:
            return [*rewritten, *self._put(call)]
        if call.function == NOTHING and not call.args:
            return [NONE]
        if not isinstance(call.function, Global) or not is_plain(call):
            raise ValueError(f"a call of {call.function} that is not known to be harmless can't be pickled")
        function = Import(call.function.module, call.function.name)
        made = [function, call.args, NEWOBJ if call.is_new else REDUCE, *self._put(call)]
        return [*made, *_append_all(call.items), *_set_all(call.pairs), *_build(call.state)]


_OPCODES: dict[type, Callable[[_Pickler, Any], list[Any]]] = {
    type(None): lambda pickler, node: [NONE],
    bool: lambda pickler, node: [TRUE if node else FALSE],
    int: lambda pickler, node: [int_opcode(node)],
    float: lambda pickler, node: [Op(b"G" + struct.pack(">d", node))],
    complex: _Pickler._complex,
    str: _Pickler._text,
    bytes: _Pickler._bytes,
    Import: _Pickler._import,
    bytearray: _Pickler._bytearray,
    list: _Pickler._list,
    tuple: _Pickler._tuple,
    set: _Pickler._set,
    frozenset: _Pickler._set,
    dict: _Pickler._dict,
    DictSubclass: _Pickler._mapping,
    Global: _Pickler._global,
    Call: _Pickler._call,
    Tensor: _Pickler._tensor,
    Opaque: lambda pickler, node: [node.content],
}


def _or_none(node: object) -> object:
    return NONE if is_removed(node) else node


def _append_all(items: Iterable[Any]) -> list[Any]:
    present = [_or_none(item) for item in items]
    return [MARK, *present, APPENDS] if present else []


def _set_all(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return the opcodes that set pairs, without those whose key or value can't be converted."""
    present = [part for pair in pairs if not any(map(is_removed, pair)) for part in pair]
    return [MARK, *present, SETITEMS] if present else []


def _build(state: object) -> list[Any]:
    return [] if state is None or is_removed(state) else [state, BUILD]


def sorted_items(items: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the items of a set in an order that is the same in every process, if they are plain."""
    return sorted(items, key=lambda item: (type(item).__name__, repr(item) if type(item) in _ORDERED else ""))


# Tensors --------------------------------------------------------------------------------------------


def tensor_opcodes(tensor: Tensor, key: str, requires_grad: bool = False) -> list[Any]:
    """Return the call that rebuilds a tensor as a contiguous view of its whole storage."""
    if tensor.dtype.kind in ("quantized", "string"):
        raise Unsupported(tensor.name, f"a tensor of {tensor.dtype} needs more than its elements")
    # A tensor of a typed storage has the storage's type. Newer element types have no storage class:
    # ``_rebuild_tensor_v3`` takes the type as a further argument.
    if tensor.dtype.storage in _STORAGES:
        function, dtype = "_rebuild_tensor_v2", []
    else:
        function, dtype = "_rebuild_tensor_v3", [Import("torch", tensor.dtype.name)]
    flag = TRUE if requires_grad else FALSE
    made = [MARK, *_view(tensor, key), flag, *_no_hooks(), *dtype, TUPLE, REDUCE]
    return [Import("torch._utils", function), *made]


def _view(tensor: Tensor, key: str) -> list[Any]:
    """Return storage, offset, shape and strides."""
    strides: list[int] = []
    step = 1
    for length in reversed(tensor.shape):
        strides.append(step)
        step *= max(length, 1)  # PyTorch's strides of an empty axis
    return [*_storage(tensor, key), int_opcode(0), tensor.shape, tuple(reversed(strides))]


def _storage(tensor: Tensor, key: str, kind: str | None = None) -> list[Any]:
    """Return the persistent id of a storage."""
    is_typed = tensor.dtype.storage in _STORAGES and kind != "UntypedStorage"
    name = f"{tensor.dtype.storage}Storage" if is_typed else "UntypedStorage"
    count = tensor.nbytes // (tensor.dtype.itemsize if is_typed else 1)
    module = "torch" if is_typed else "torch.storage"
    fields = ["storage", Import(module, name), key, "cpu", int_opcode(count)]
    return [MARK, *fields, TUPLE, BINPERSID]


def _no_hooks() -> list[Any]:
    return [Import("collections", "OrderedDict"), EMPTY_TUPLE, REDUCE]


def call_opcodes(call: Call, storage_of: Callable[[Tensor], str]) -> list[Any] | None:
    """Return the opcodes of a call that a tree has with other arguments than a pickle; None for others."""
    args = call.args
    if not args or not isinstance(call.function, Global):
        return None
    tensor = args[0]
    if call.function == FROM_TYPE and len(args) == 3:
        return _subclass(args, storage_of)
    if not isinstance(tensor, Tensor):
        return None
    if call.function == REQUIRES_GRAD:
        return tensor_opcodes(tensor, storage_of(tensor), requires_grad=True)
    if call.function == NDARRAY:
        return array_opcodes(tensor)
    if call.function == QUANTIZED and len(args) == 3:
        made = [*_view(tensor, storage_of(tensor)), args[1], bool(args[2]), *_no_hooks()]
        return [Import(QUANTIZED.module, QUANTIZED.name), MARK, *made, TUPLE, REDUCE]
    if call.function == MASKED and len(args) == 3 and isinstance(args[1], Tensor):
        return _masked_array(tensor, args[1], args[2])
    if call.function.name.endswith("Storage") and len(args) == 1:
        return _storage(tensor, storage_of(tensor), call.function.name)
    return None


def is_rewritten(call: Call) -> bool:
    """Return whether ``call_opcodes`` handles a call."""
    args = call.args
    if call.function == FROM_TYPE:
        return len(args) == 3
    if not args or not isinstance(args[0], Tensor) or not isinstance(call.function, Global):
        return False
    if call.function in (QUANTIZED, MASKED):
        return len(args) == 3
    return call.function in (REQUIRES_GRAD, NDARRAY) or call.function.name.endswith("Storage")


def _subclass(args: tuple[Any, ...], storage_of: Callable[[Tensor], str]) -> list[Any]:
    """Return the call that rebuilds a tensor of a subclass, or with attributes."""
    # ``_rebuild_from_type_v2(function, class, arguments, state)`` calls the inner function itself: so the
    # call of the inner tensor is taken apart, into the function, and a tuple that isn't reduced.
    inner, kind, state = args
    if isinstance(inner, Tensor):
        call: list[Any] = tensor_opcodes(inner, storage_of(inner))
    elif isinstance(inner, Call) and inner.function != FROM_TYPE:
        rewritten = call_opcodes(inner, storage_of)
        call = [inner.function, inner.args, REDUCE] if rewritten is None else rewritten
    else:
        raise ValueError("a tensor subclass that is not made from a tensor")
    if call[-1] != REDUCE:
        raise ValueError("a tensor subclass that is not made by a call")
    function, *arguments = call[:-1]
    outer = Import(FROM_TYPE.module, FROM_TYPE.name)
    return [outer, MARK, function, kind, *arguments, state, TUPLE, REDUCE]


# Arrays of NumPy ------------------------------------------------------------------------------------


def array_opcodes(tensor: Tensor) -> list[Any]:
    """Return the call that rebuilds a NumPy array, with its elements."""
    empty = [Import("numpy", "ndarray"), (0,), b"b", TUPLES[3], REDUCE]
    fields = [int_opcode(1), tensor.shape, *_array_type(tensor), FALSE]
    content = bytes_opcodes(_elements(tensor))
    return [Import("numpy.core.multiarray", "_reconstruct"), *empty, MARK, *fields, *content, TUPLE, BUILD]


def _masked_array(values: Tensor, mask: Tensor, fill: object) -> list[Any]:
    """Return the call that rebuilds a masked array from its values, mask and fill value."""
    kinds = [Import("numpy.ma.core", "MaskedArray"), Import("numpy", "ndarray")]
    empty = [MARK, *kinds, (0,), b"b", TUPLE, REDUCE]
    fields = [int_opcode(1), values.shape, *_array_type(values), FALSE]
    contents = [*bytes_opcodes(_elements(values)), *bytes_opcodes(_elements(mask))]
    state = [MARK, *fields, *contents, fill if fill is not None else NONE, TUPLE, BUILD]
    return [Import(MASKED.module, MASKED.name), *empty, *state]


def _array_type(tensor: Tensor) -> list[Any]:
    """Return the call that rebuilds the ``numpy.dtype`` of a tensor's elements."""
    outer, dtype = Import("numpy", "dtype"), tensor.dtype
    has_numpys_name = dtype.numpy == dtype.name
    if has_numpys_name and dtype.name.rstrip("0123456789") in ("bool", "int", "uint", "float", "complex"):
        kind = "u" if dtype.name.startswith("uint") else _ARRAY_KINDS[dtype.kind]
        order = "|" if dtype.itemsize == 1 else "<"
        state = (3, order, None, None, None, -1, -1, 0)
        return [outer, f"{kind}{dtype.itemsize}", FALSE, TRUE, TUPLES[3], REDUCE, state, BUILD]
    if not has_numpys_name or dtype.kind != "float":
        raise Unsupported(tensor.name, f"NumPy has no type for {dtype}")
    return [outer, Import("ml_dtypes", dtype.name), FALSE, TRUE, TUPLES[3], REDUCE]


def _elements(tensor: Tensor) -> StreamedBytes:
    """Return the elements as text for ``bytes_opcodes``: Latin-1 encoded in UTF-8, with its header."""

    def blocks() -> Iterator[bytes]:
        # The length comes first, and a byte from 0x80 on takes two: so the elements are read twice.
        above_ascii = sum(len(bytes(block).translate(None, _ASCII)) for block in tensor.blocks(_STEP))
        yield text_header(tensor.nbytes + above_ascii)
        for block in tensor.blocks(_STEP):
            yield bytes(block).decode("latin-1").encode()

    return StreamedBytes(blocks)

"""Encodes a content tree as JSON and decodes it: every type, shared objects, the order of keys.

A value of a JSON type is itself. Anything else is an object whose first key begins with ``$``;
docs/reference/sidecar.md has the table. Decoded documents may be hostile: only names that are known to be
harmless are accepted, in bounded time and memory.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable
from typing import Any

from ckpttool.containers.jsontext import DuplicateKeyObject
from ckpttool.containers.pickle.constructors import EXACT_ONLY, has_plain_attributes, is_constructor, is_plain
from ckpttool.containers.pickle.pickle_nodes import (
    MAPPINGS,
    NDARRAY,
    NOTHING,
    REQUIRES_GRAD,
    Call,
    DictSubclass,
    Global,
    Opaque,
    Trust,
    children,
    trust,
)
from ckpttool.containers.pickle.pickler import is_rewritten
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.parameters import LogicalTensor
from ckpttool.core.tensor import Tensor
from ckpttool.formats.content.plain_data import KeyText, stable_order
from ckpttool.formats.content.tree import NodeParts, fold

MAX_NESTED = 40
"""Limit on the nesting of JSON; deeper parts are moved to the list of shared parts."""
SAFE_INTEGER = 1 << 53
"""Limit on integers as JSON numbers, which many readers round to float64; larger ones are in hexadecimal."""
_NAN = struct.pack(">d", math.nan)
_SHAREABLE = (list, tuple, set, frozenset, dict, bytearray, Call, Opaque)
MAX_KEY_PARTS = 1000
"""Limit on the parts of a key that is a tuple, at any depth."""
MAX_COLLISIONS = 1000
"""Limit on keys with the same hash."""
_TREE_CALLS = (NDARRAY, REQUIRES_GRAD)
"""Functions that only trees have, and no pickle: each takes one tensor."""
_INTEGER = re.compile("-?0x[0-9a-f]+")
_FLOAT = re.compile("[0-9a-f]{16}")
_NAMED = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


# Encoding -------------------------------------------------------------------------------------------


def encode_tree(tree: object) -> tuple[object, list[object]]:
    """Return a tree as JSON, and the list of parts to which it refers by ``{"$same": index}``.

    Tensors are encoded by name. A part refers only to parts before it in the list.

    Raises:
        ValueError: The tree has a node that isn't plain data.
    """
    encoding = _Encoding(_shared_addresses(tree))
    return encoding.run(tree), encoding.shared


class _Encoding:
    """Encodes the nodes of one tree, and collects its shared parts.

    A part is moved to the list if the tree has it twice, or if it is nested too deeply; ``_depths`` has the
    nesting of encoded parts by address.
    """

    def __init__(self, shared_addresses: set[int]) -> None:
        self._shared_addresses = shared_addresses
        self.shared: list[object] = []
        self._depths: dict[int, tuple[object, int]] = {}

    def run(self, tree: object) -> object:
        return fold(tree, self._expand)

    def _expand(self, node: Any) -> object:
        encode = _ENCODE.get(type(node))
        if encode is None:
            raise ValueError(f"a {type(node).__name__} can't be written as JSON")
        parts = encode(node)
        if not isinstance(parts, NodeParts):
            return parts if type(node) is not bytearray else self._place(node, parts, 1)

        def make(done: list[Any]) -> object:
            deepest = max((self._depths.get(id(part), (None, 0))[1] for part in done), default=0)
            return self._place(node, parts.make(done), deepest + 3)  # {"$dict": [[key, value]]}: three levels

        return NodeParts(parts.parts, make)

    def _place(self, node: object, form: object, depth: int) -> object:
        """Return the encoded form of a node for its parent, or a reference if it is moved to the list."""
        if id(node) in self._shared_addresses or depth > MAX_NESTED:
            self.shared.append(form)
            form, depth = {"$same": len(self.shared) - 1}, 1
        self._depths[id(form)] = form, depth
        return form


def _shared_addresses(tree: object) -> set[int]:
    """Return the addresses of objects that a tree has more than once."""
    shared: set[int] = set()
    seen: set[int] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        # The empty tuple is one object in all of Python, so having it twice doesn't mean that it is shared.
        if not isinstance(node, _SHAREABLE) or node == ():
            continue
        if id(node) in seen:
            shared.add(id(node))
            continue
        seen.add(id(node))
        pending += children(node) or ()
    return shared


def _encode_text(text: str) -> object:
    # Lone surrogates, which Python's strings can have, are no UTF-8 and no valid JSON.
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"$text": _base64(text.encode("utf-8", "surrogatepass"))}
    return text


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_float(number: float) -> object:
    # JSON has neither infinities nor NaN. A NaN has many bit patterns, and all but the usual one are
    # written in hexadecimal, so that the tree is the same bit by bit.
    if math.isfinite(number):
        return number
    packed = struct.pack(">d", number)
    return {"$float": packed.hex() if math.isnan(number) and packed != _NAN else str(number)}


def _encode_dict(node: dict[Any, Any]) -> NodeParts:
    keys, count = list(node), len(node)
    if all(type(key) is str and not key.startswith("$") and type(_encode_text(key)) is str for key in keys):
        return NodeParts(list(node.values()), lambda done: dict(zip(keys, done, strict=True)))
    return NodeParts([*keys, *node.values()], lambda done: {"$dict": _pairs(done, count)})


def _pairs(done: list[Any], count: int) -> list[list[object]]:
    return [[key, value] for key, value in zip(done[:count], done[count : 2 * count], strict=True)]


def _encode_mapping(node: DictSubclass) -> NodeParts:
    count, fields = len(node), {"state": node.state, "factory": node.factory}
    fields = {name: part for name, part in fields.items() if part is not None}

    def make(done: list[Any]) -> object:
        encoded = dict(zip(fields, done[2 * count :], strict=True))
        return {"$mapping": [node.kind.module, node.kind.name], "pairs": _pairs(done, count), **encoded}

    return NodeParts([*node.keys(), *node.values(), *fields.values()], make)


def _encode_call(node: Call) -> NodeParts:
    if not isinstance(node.function, Global):
        raise ValueError("a call of something that is not a name")
    if node.kwargs:
        raise ValueError(f"named arguments of {node.function}")
    pairs = [list(pair) for pair in node.pairs]
    fields = {"args": list(node.args), "state": node.state, "items": node.items, "pairs": pairs}
    fields = {name: part for name, part in fields.items() if part is not None and part != []}
    head: dict[str, object] = {"$call": [node.function.module, node.function.name]}
    if node.is_new:
        head["new"] = True
    return NodeParts(list(fields.values()), lambda done: {**head, **dict(zip(fields, done, strict=True))})


def _encode_opaque(node: Opaque) -> object:
    if node.content is None:
        return {"$opaque": _encode_text(node.reason)}
    return NodeParts([node.content], lambda done: {"$opaque": _encode_text(node.reason), "content": done[0]})


_ENCODE: dict[type, Callable[[Any], object]] = {
    type(None): lambda node: node,
    bool: lambda node: node,
    int: lambda node: node if -SAFE_INTEGER <= node <= SAFE_INTEGER else {"$int": hex(node)},
    float: _encode_float,
    complex: lambda node: {"$complex": [_encode_float(node.real), _encode_float(node.imag)]},
    str: _encode_text,
    KeyText: lambda node: _encode_text(str(node)),
    bytes: lambda node: {"$bytes": _base64(node)},
    bytearray: lambda node: {"$bytearray": _base64(node)},
    list: lambda node: NodeParts(node, list),
    tuple: lambda node: NodeParts(node, lambda done: {"$tuple": done}),
    set: lambda node: NodeParts(stable_order(node), lambda done: {"$set": done}),
    frozenset: lambda node: NodeParts(stable_order(node), lambda done: {"$frozenset": done}),
    dict: _encode_dict,
    LogicalTensor: _encode_dict,  # only in metadata
    DuplicateKeyObject: _encode_dict,  # its reader reports the repeated key
    DictSubclass: _encode_mapping,
    Global: lambda node: {"$global": [node.module, node.name]},
    Call: _encode_call,
    Opaque: _encode_opaque,
    Tensor: lambda node: {"$tensor": node.name},
}


# Decoding -------------------------------------------------------------------------------------------


def decode_tree(form: object, shared: object, tensors: Callable[[str], Tensor]) -> object:
    """Return the tree that ``encode_tree`` encoded.

    Args:
        form: The parsed JSON.
        shared: The parts to which it refers.
        tensors: Returns the tensor of a name; raises KeyError if there is none.

    Raises:
        ValueError: It is malformed, or has a name that isn't known to be harmless.
        LimitExceeded: A key is too large, or too many keys have the same hash.
    """
    decoding = _Decoding(tensors)
    for part in _require_type(list, shared):
        decoding.shared.append(decoding.run(part))
    return decoding.run(form)


class _Decoding:
    """Decodes the parts of one tree; each refers only to parts decoded before it, so there is no cycle."""

    def __init__(self, tensors: Callable[[str], Tensor]) -> None:
        self._tensors = tensors
        self.shared: list[object] = []
        self._hashes: dict[int, tuple[object, int]] = {}

    def run(self, form: object) -> object:
        return fold(form, self._expand)

    def _expand(self, form: Any) -> object:
        if isinstance(form, list):
            return NodeParts(form, list)
        if not isinstance(form, dict):
            return form
        if hasattr(form, "key"):
            raise ValueError(f"duplicate key {form.key!r}")
        # The kind of a form is its first key, as ``encode_tree`` writes it. A dictionary of the tree with a
        # key that begins with ``$`` is a list of pairs under ``$dict``, so the two can't be confused.
        kind = next((key for key in form if key.startswith("$")), None)
        if kind is None:
            return NodeParts(list(form.values()), lambda done: dict(zip(form, done, strict=True)))
        decode = _DECODE.get(kind)
        if decode is None or next(iter(form)) != kind:
            raise ValueError(f"unknown form {kind!r}")
        return decode(self, form[kind], form)

    def _same(self, index: Any, form: dict[str, Any]) -> object:
        if type(index) is not int or not 0 <= index < len(self.shared):
            raise ValueError("a reference to a shared part that doesn't precede it")
        return self.shared[index]

    def _tensor(self, name: Any, form: dict[str, Any]) -> object:
        try:
            return self._tensors(_require_type(str, name))
        except KeyError as missing:
            raise ValueError(f"unknown tensor {name!r}") from missing

    def _sequence(self, items: Any, form: dict[str, Any]) -> NodeParts:
        kind = _NAMED[next(iter(form))]
        if kind is tuple:
            return NodeParts(_require_type(list, items), tuple)
        return NodeParts(_require_type(list, items), lambda done: kind(map(self._hashable, done)))

    def _dict(self, pairs: Any, form: dict[str, Any]) -> NodeParts:
        return NodeParts(_flat(pairs), lambda done: self._make_dict(done))

    def _make_dict(self, done: list[Any]) -> dict[Any, Any]:
        made = {self._hashable(key): value for key, value in zip(done[::2], done[1::2], strict=True)}
        if len(made) * 2 != len(done):
            raise ValueError("a duplicate key")
        return made

    def _mapping(self, name: Any, form: dict[str, Any]) -> NodeParts:
        kind = Global(*_name_parts(name))
        if kind not in MAPPINGS:
            raise ValueError(f"unknown dictionary type {kind}")
        parts = [*_flat(form.get("pairs", [])), form.get("state"), form.get("factory")]
        return NodeParts(parts, lambda done: DictSubclass(kind, self._make_dict(done[:-2]), *done[-2:]))

    def _global(self, name: Any, form: dict[str, Any]) -> Global:
        plain = Global(*_name_parts(name))
        if trust(plain.module, plain.name) is not Trust.PLAIN:
            raise ValueError(f"the name {plain}, which is not known to be harmless")
        return plain

    def _call(self, name: Any, form: dict[str, Any]) -> NodeParts:
        function = Global(*_name_parts(name))
        if function == NOTHING and len(form) == 1:
            return NodeParts([], lambda done: Call(NOTHING, ()))
        if function not in _TREE_CALLS and (function in EXACT_ONLY or not is_constructor(function)):
            raise ValueError(f"a call of {function}, which is not known to be harmless")
        pairs = _flat(form.get("pairs", []))
        parts = [_require_type(list, form.get(key, [])) for key in ("args", "items")]
        if form.get("kwargs") is not None:
            raise ValueError(f"named arguments of {function}")

        def make(done: list[Any]) -> Call:
            args, items, state, *flat = done
            if function in _TREE_CALLS and (len(args) != 1 or not isinstance(args[0], Tensor)):
                raise ValueError(f"{function} of a non-tensor")
            made = zip(flat[::2], flat[1::2], strict=True)
            call = Call(function, tuple(args), None, state, items, made, is_new=form.get("new") is True)
            # The pickler writes some calls of a tree in another form than the tree has (tensors, arrays,
            # storages), so that only their attributes are judged here; all others must be plain data
            # without changes, as in a pickle.
            is_written_otherwise = function in _TREE_CALLS or is_rewritten(call)
            if not (has_plain_attributes(state) if is_written_otherwise else is_plain(call)):
                raise ValueError(f"a call of {function} that is not known to be harmless")
            return call

        return NodeParts([*parts, form.get("state"), *pairs], make)

    def _opaque(self, what: Any, form: dict[str, Any]) -> NodeParts:
        return NodeParts(
            [what, form.get("content")], lambda done: Opaque(_require_type(str, done[0]), done[1])
        )

    def _hashable(self, key: Any) -> Any:
        """Return a key if it is hashable, small, and not one of too many with the same hash."""
        if isinstance(key, str | bytes) or (type(key) is int and abs(key) < SAFE_INTEGER):
            return key
        # Nested tuples that share their parts may take exponential time to hash, and n keys with one hash
        # (large integers can be chosen so) n² comparisons.
        pending, parts = [key], 0
        while pending:
            part = pending.pop()
            parts += 1
            if parts > MAX_KEY_PARTS:
                raise LimitExceeded("", f"a key of more than {MAX_KEY_PARTS:,} parts")
            if isinstance(part, tuple | frozenset):
                pending += part
            elif isinstance(part, list | dict | set | bytearray):
                raise ValueError(f"a {type(part).__name__} as a key")
        digest = hash(key)
        first, others = self._hashes.get(digest, (key, 0))
        others += key != first
        if others > MAX_COLLISIONS:
            raise LimitExceeded("", f"more than {MAX_COLLISIONS:,} keys with one hash")
        self._hashes[digest] = first, others
        return key


_DECODE: dict[str, Callable[[_Decoding, Any, dict[str, Any]], object]] = {
    "$same": _Decoding._same,
    "$tensor": _Decoding._tensor,
    "$tuple": _Decoding._sequence,
    "$set": _Decoding._sequence,
    "$frozenset": _Decoding._sequence,
    "$dict": _Decoding._dict,
    "$mapping": _Decoding._mapping,
    "$global": _Decoding._global,
    "$call": _Decoding._call,
    "$opaque": _Decoding._opaque,
    "$int": lambda decoding, value, form: _to_int(value),
    "$float": lambda decoding, value, form: _to_float(value),
    "$complex": lambda decoding, value, form: _to_complex(value),
    "$text": lambda decoding, value, form: _bytes(value).decode("utf-8", "surrogatepass"),
    "$bytes": lambda decoding, value, form: _bytes(value),
    "$bytearray": lambda decoding, value, form: bytearray(_bytes(value)),
}


def _require_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _name_parts(name: Any) -> tuple[str, str]:
    if not isinstance(name, list) or len(name) != 2 or not all(isinstance(part, str) for part in name):
        raise ValueError("a name without module and name")
    return name[0], name[1]


def _pair(pair: Any) -> list[Any]:
    if len(_require_type(list, pair)) != 2:
        raise ValueError("an invalid pair")
    return list(pair)


def _flat(pairs: Any) -> list[Any]:
    return [part for pair in _require_type(list, pairs) for part in _pair(pair)]


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(_require_type(str, text), validate=True)
    except binascii.Error as failure:
        raise ValueError(f"invalid base64: {failure}") from failure


def _to_float(value: Any) -> float:
    text = _require_type(str, value) if not isinstance(value, float) else str(value)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if not _FLOAT.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is not a float")
    number: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return number


def _to_int(value: Any) -> int:
    if not _INTEGER.fullmatch(_require_type(str, value)):
        raise ValueError(f"{value[:20]!r} is not a hexadecimal integer")
    return int(value, 16)


def _to_complex(value: Any) -> complex:
    return complex(
        *(
            _to_float(part.get("$float")) if isinstance(part, dict) else float(_require_type(float, part))
            for part in _pair(value)
        )
    )

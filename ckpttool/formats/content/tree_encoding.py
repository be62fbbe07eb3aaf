"""A tree as JSON: every type, shared objects, the order of keys; ``tree_decoding`` is the way back.

A value is itself where JSON has it. What JSON has not is an object with a key that begins with ``$``;
docs/entry.md has the table.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any

from ckpttool.formats.content.folding import Parts, fold
from ckpttool.formats.content.telling import KeyText, in_order
from ckpttool.tensor import Tensor
from ckpttool.wire.pickled import Call, Global, Mapped, Opaque

MAX_NESTED = 40
"""How deep JSON gets before a part of it becomes an entry of its own."""
SAFE_INTEGER = 1 << 53
"""The first whole number that a JSON reader with floats alone may read as another."""

_NAN = struct.pack(">d", math.nan)
_SHAREABLE = (list, tuple, set, frozenset, dict, bytearray, Call, Opaque)


def encoded(tree: object) -> tuple[object, list[object]]:
    """Return a tree as JSON, and the parts of it to which it refers by ``{"$same": index}``.

    Tensors stand in it by their names.

    Raises:
        LimitExceeded: It is nested too deep.
        ValueError: It holds itself, or something that no tree holds.
    """
    encoding = _Encoding(_met_again(tree))
    return encoding.run(tree), encoding.shared


class _Encoding:
    """A tree on its way to JSON; ``depths`` has how deep what was made is nested, by address."""

    def __init__(self, again: set[int]) -> None:
        self._again = again
        self.shared: list[object] = []
        self._depths: dict[int, tuple[object, int]] = {}

    def run(self, tree: object) -> object:
        return fold(tree, self._expand, _no_cycle)

    def _expand(self, node: Any) -> object:
        encode = _ENCODE.get(type(node))
        if encode is None:
            raise ValueError(f"a {type(node).__name__} can't be written as JSON")
        parts = encode(node)
        if not isinstance(parts, Parts):
            return parts if type(node) is not bytearray else self._made(node, parts, 1)
        return Parts(parts.parts, lambda done: self._made(node, parts.make(done), self._deepest(done) + 3))

    def _deepest(self, done: list[Any]) -> int:
        return max((self._depths.get(id(part), (None, 0))[1] for part in done), default=0)

    def _made(self, node: object, form: object, depth: int) -> object:
        if id(node) in self._again or depth > MAX_NESTED:
            self.shared.append(form)
            form, depth = {"$same": len(self.shared) - 1}, 1
        self._depths[id(form)] = form, depth
        return form


def _met_again(tree: object) -> set[int]:
    """Return the addresses of the objects that are met more than once."""
    again: set[int] = set()
    seen: set[int] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, _SHAREABLE) or node == ():
            continue
        if id(node) in seen:
            again.add(id(node))
            continue
        seen.add(id(node))
        pending += _held(node)
    return again


def _held(node: Any) -> list[object]:
    if isinstance(node, Call):
        return [
            node.args,
            node.kwargs,
            node.state,
            *node.items,
            *(part for pair in node.pairs for part in pair),
        ]
    if isinstance(node, Opaque):
        return [node.content]
    if isinstance(node, dict):
        own = [node.state, node.factory] if isinstance(node, Mapped) else []
        return [*node.keys(), *node.values(), *own]
    return [] if isinstance(node, bytearray) else list(node)


def _text(text: str) -> object:
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"$text": _base64(text.encode("utf-8", "surrogatepass"))}
    return text


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _float(number: float) -> object:
    if math.isfinite(number):
        return number
    packed = struct.pack(">d", number)
    return {"$float": packed.hex() if math.isnan(number) and packed != _NAN else str(number)}


def _dict(node: dict[Any, Any]) -> Parts:
    keys, count = list(node), len(node)
    if all(type(key) is str and not key.startswith("$") and type(_text(key)) is str for key in keys):
        return Parts(list(node.values()), lambda done: dict(zip(keys, done, strict=True)))
    return Parts([*keys, *node.values()], lambda done: {"$dict": _pairs(done, count)})


def _pairs(done: list[Any], count: int) -> list[list[object]]:
    return [[key, value] for key, value in zip(done[:count], done[count : 2 * count], strict=True)]


def _mapped(node: Mapped) -> Parts:
    count, told = len(node), {"state": node.state, "factory": node.factory}
    own = {name: part for name, part in told.items() if part is not None}

    def make(done: list[Any]) -> object:
        rest = dict(zip(own, done[2 * count :], strict=True))
        return {"$mapping": [node.kind.module, node.kind.name], "pairs": _pairs(done, count), **rest}

    return Parts([*node.keys(), *node.values(), *own.values()], make)


def _call(node: Call) -> Parts:
    if not isinstance(node.function, Global):
        raise ValueError("a call of what is no name")
    if node.kwargs:
        raise ValueError(f"named arguments of {node.function}")
    pairs = [list(pair) for pair in node.pairs]
    told = {"args": list(node.args), "state": node.state, "items": node.items, "pairs": pairs}
    own = {name: part for name, part in told.items() if part is not None and part != []}
    head: dict[str, object] = {"$call": [node.function.module, node.function.name]}
    if node.is_new:
        head["new"] = True
    return Parts(list(own.values()), lambda done: {**head, **dict(zip(own, done, strict=True))})


def _opaque(node: Opaque) -> object:
    if node.content is None:
        return {"$opaque": _text(node.what)}
    return Parts([node.content], lambda done: {"$opaque": _text(node.what), "content": done[0]})


def _no_cycle(node: object) -> object:
    raise ValueError("a tree that holds itself")


_ENCODE: dict[type, Callable[[Any], object]] = {
    type(None): lambda node: node,
    bool: lambda node: node,
    int: lambda node: node if -SAFE_INTEGER <= node <= SAFE_INTEGER else {"$int": hex(node)},
    float: _float,
    complex: lambda node: {"$complex": [_float(node.real), _float(node.imag)]},
    str: _text,
    KeyText: lambda node: _text(str(node)),
    bytes: lambda node: {"$bytes": _base64(node)},
    bytearray: lambda node: {"$bytearray": _base64(node)},
    list: lambda node: Parts(node, list),
    tuple: lambda node: Parts(node, lambda done: {"$tuple": done}),
    set: lambda node: Parts(in_order(node), lambda done: {"$set": done}),
    frozenset: lambda node: Parts(in_order(node), lambda done: {"$frozenset": done}),
    dict: _dict,
    Mapped: _mapped,
    Global: lambda node: {"$global": [node.module, node.name]},
    Call: _call,
    Opaque: _opaque,
    Tensor: lambda node: {"$tensor": node.name},
}

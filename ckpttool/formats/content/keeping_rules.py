"""What of a pickle is plain data, and why the rest is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpttool.formats.content.objects import call_of
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.calls import is_plain
from ckpttool.wire.pickled import Call, Global, views_memory
from ckpttool.wire.tensor_pickling import FROM_TYPE

_RECORDS = frozenset({("argparse", "Namespace"), ("types", "SimpleNamespace")})
"""Classes of which any attribute may be missing."""


def nested(found: Iterable[tuple[Path, Any]], by_values: dict[int, Tensor]) -> object:
    """Return dictionaries in which tensors have the paths that they have below a node.

    A tensor that is the node itself has the others as its attributes.
    """
    root: dict[Any, Any] = {}
    itself: Tensor | None = None
    for path, parts in found:
        tensor = by_values.get(id(parts.values))
        if tensor is None:
            continue
        if not path:
            itself = itself or tensor
            continue
        level = root
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = tensor
    if itself is None:
        return root
    return Call(FROM_TYPE, (itself, Global("torch", "Tensor"), root)) if root else itself


def is_data(call: Call) -> bool:
    """Tell whether to make an object runs nothing that the file chose."""
    return is_plain(call) and not views_memory(call.state)


def is_record(call: Call) -> bool:
    function = call.function
    return isinstance(function, Global) and (function.module, function.name) in _RECORDS and not call.args


def without_reconstructor(call: Call) -> Call:
    """Return an object as newer protocols have it; ``copyreg._reconstructor`` makes an empty one."""
    if not call.is_of("copyreg", "_reconstructor") or len(call.args) != 3:
        return call
    kind, base, state = call.args
    if not isinstance(kind, Global) or base != Global("builtins", "object") or state is not None:
        return call
    return call_of(kind, (), None, call.state, call.items, call.pairs, is_new=True)


def plain_value(call: Call) -> object:
    """Return the number or the bytes that a call makes, or None."""
    if call.kwargs or call.state is not None or call.items or call.pairs:
        return None
    args = call.args
    if (
        call.is_of("builtins", "complex")
        and len(args) == 2
        and all(type(arg) in (int, float) for arg in args)
    ):
        return complex(*args)
    if call.is_of("builtins", "bytes") and not args:
        return b""
    if call.is_of("builtins", "bytearray") and all(type(arg) is bytes for arg in args) and len(args) < 2:
        return bytearray(*args)
    if call.is_of("builtins", "bytearray") and len(args) == 2 and args[1] in ("latin-1", "latin1"):
        return bytearray(args[0], "latin-1") if isinstance(args[0], str) else None
    return None

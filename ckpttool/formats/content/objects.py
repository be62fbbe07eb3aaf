"""The content of a checkpoint as one tree: ``Checkpoint.tree``, and what can be done with it.

A tree consists of plain Python containers and values, of ``Tensor`` objects, and of the inert nodes of
``ckpttool.wire.pickled``:

- ``Mapped``: an ``OrderedDict``, ``defaultdict`` or ``Counter``.
- ``Global``: a name that stands for itself, such as ``torch.float32``.
- ``Call``: an object of a class that is known to be harmless data, by what would make it: ``torch.Size``, a
  NumPy scalar. Tensors among its arguments are ``Tensor`` objects. Three functions have arguments of their
  own: ``_rebuild_qtensor(tensor, parameters, requires_grad)``, ``_rebuild_from_type_v2(inner, class, state)``
  and ``_mareconstruct(values, mask, fill_value)``; a storage is ``Call(its class, (tensor,))``.
- ``Opaque``: what can't be carried.

Objects that are shared are shared here; nothing holds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckpttool.formats.content.folding import Parts, fold
from ckpttool.formats.content.object_parts import members
from ckpttool.formats.content.trees import Leaf
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickled import NDARRAY, NOTHING, REQUIRES_GRAD, Call, Mapped, Opaque, is_gone

__all__ = [
    "NDARRAY",
    "REQUIRES_GRAD",
    "Opaque",
    "carried",
    "dropped",
    "kept",
    "replaced",
    "tensors_in",
    "told_apart",
    "walk",
]

_MAX_KEY_BITS = 64
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


def kept(
    root: object,
    leaf: Callable[[object], Leaf[Any] | None],
    tensors: tuple[Tensor, ...],
    path: str,
    *,
    unwrap: Callable[[object], object] = lambda node: node,
    arrays: bool = True,
) -> object:
    """Return the tree of what a pickle holds.

    Args:
        root: What the interpreter built.
        leaf: As for ``trees.flatten``, which has asked it before.
        tensors: The tensors that came out of that, with their names.
        path: The file, for errors.
        unwrap: Says what a node stands for, where it merely wraps another.
        arrays: Whether an array of NumPy is told from a tensor.

    Raises:
        LimitExceeded: It is nested too deep.
    """
    from ckpttool.formats.content.keeping import Keeping

    return Keeping(leaf, tensors, path, unwrap, arrays).run(root)


def told_apart(root: object) -> object:
    """Return the tree of what a file holds: None that it holds is told from no tree."""
    return Call(NOTHING, ()) if root is None else root


def replaced(tree: object, tensors: Mapping[int, Tensor]) -> object:
    """Return a tree in which other tensors stand.

    Args:
        tree: As ``Checkpoint.tree``.
        tensors: The new ones, by the ``id`` of those in whose places they go.

    What is shared stays shared. Tensors that are not among them stay.

    Raises:
        LimitExceeded: It is nested too deep.
    """

    def expand(node: object) -> object:
        if isinstance(node, Tensor):
            return tensors.get(id(node), node)
        return rebuilt(node) or node

    return fold(tree, expand, _no_cycle)


def carried(tree: object) -> object:
    """Return a tree as it is carried: without what is ``Opaque``, which is left out or stood in for.

    Raises:
        LimitExceeded: It is nested too deep.
    """

    def expand(node: object) -> object:
        if isinstance(node, Opaque):
            return _GONE if node.content is None else Parts([node.content], lambda done: done[0])
        parts = rebuilt(node)
        if parts is None:
            return node
        if isinstance(node, dict):
            count = len(node)
            kept = [at for at, pair in enumerate(node.items()) if not any(map(is_gone, pair))]
            at_kept = [*kept, *(count + at for at in kept)]
            state = [node.state, node.factory] if isinstance(node, Mapped) else []
            chosen = [parts.parts[at] for at in at_kept] + state
            return Parts(chosen, lambda done: _dict_like(node, [_or_none(one) for one in done], len(kept)))
        return Parts(parts.parts, lambda done: parts.make([_or_none(one) for one in done]))

    return _or_none(fold(tree, expand, _no_cycle))


class _Gone:
    """Stands for what is left out, while the tree around it is made."""


_GONE = _Gone()


def _or_none(made: object) -> object:
    return None if made is _GONE else made


def _dict_like(node: dict[Any, Any], done: list[Any], count: int) -> object:
    pairs = zip(done[:count], done[count : 2 * count], strict=True)
    return mapped_of(node.kind, pairs, *done[2 * count :]) if isinstance(node, Mapped) else dict(pairs)


def rebuilt(node: object) -> Parts | None:
    """Return the parts of a node of a tree, and what makes the like of it; None where it has none."""
    kind = type(node)
    if kind in _ATOMS:
        return None
    if isinstance(node, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        return Parts(list(node), kind)
    if isinstance(node, Mapped):
        return Parts([*node.keys(), *node.values(), node.state, node.factory], _mapped_like(node))
    if isinstance(node, dict):
        count = len(node)
        return Parts(
            [*node.keys(), *node.values()], lambda done: dict(zip(done[:count], done[count:], strict=True))
        )
    if isinstance(node, Call):
        parts = [node.function, node.args, node.kwargs, node.state, node.items, node.pairs]
        return Parts(parts, lambda done: call_of(*done, is_new=node.is_new))
    if isinstance(node, Opaque) and node.content is not None:
        return Parts([node.content], lambda done: Opaque(node.what, done[0]))
    return None


def _mapped_like(node: Mapped) -> Callable[[list[object]], Mapped]:
    def make(done: list[object]) -> Mapped:
        count = len(node)
        return mapped_of(
            node.kind, zip(done[:count], done[count : 2 * count], strict=True), *done[2 * count :]
        )

    return make


def mapped_of(
    kind: Any, pairs: Iterable[tuple[Any, Any]], state: object = None, factory: object = None
) -> Mapped:
    """Return a dictionary of another class."""
    made = Mapped(kind)
    made.update(pairs)
    made.state, made.factory = state, factory
    return made


def call_of(
    function: object,
    args: Any,
    kwargs: object = None,
    state: object = None,
    items: Iterable[Any] = (),
    pairs: Iterable[Any] = (),
    *,
    is_new: bool = False,
) -> Call:
    """Return the record of a call with all that is set on what it makes."""
    call = Call(function, args, kwargs)
    call.state, call.items, call.pairs = state, list(items), list(pairs)
    call.is_new = is_new
    return call


def _no_cycle(node: object) -> object:
    raise ValueError("a tree that holds itself")


def walk(tree: object) -> Iterator[tuple[Path, object]]:
    """Yield every node of a tree that is no plain value, once, with the first path that leads to it.

    Keys of dictionaries are walked too, where they are no plain values.
    """
    seen: set[int] = set()
    pending: list[tuple[Path, object]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        if type(node) in _ATOMS or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        below = [(path, part) if key is None else ((*path, key), part) for key, part in _below(node)]
        pending += reversed(below)


def _below(node: object) -> Iterator[tuple[str | int | None, object]]:
    """Yield the parts of a node with their keys; without one what lies at the path of the node itself."""
    if isinstance(node, dict):
        yield from ((None, key) for key in node if type(key) not in _ATOMS)
        yield from ((_text(key), part) for key, part in node.items())
        if isinstance(node, Mapped):
            yield from (("<state>", node.state), ("<factory>", node.factory))
    elif isinstance(node, list | tuple | set | frozenset):
        yield from enumerate(node)
    elif isinstance(node, Call):
        if any(isinstance(part, Tensor) for part in node.args):
            yield from (
                (None, part) for part in (*node.args, node.kwargs, node.state, node.items, node.pairs)
            )
        else:
            yield from ((_text(key), part) for key, part in members(node))
    elif isinstance(node, Opaque):
        yield None, node.content


def _text(key: object) -> str | int:
    if isinstance(key, str) or (type(key) is int and key.bit_length() <= _MAX_KEY_BITS):
        return key
    if isinstance(key, Opaque) and isinstance(key.content, str):
        return key.content
    from ckpttool.formats.content.telling import plain

    return str(plain(key))


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield every tensor object of a tree, once, in its order."""
    return (node for _, node in walk(tree) if isinstance(node, Tensor))


def dropped(tree: object) -> Iterator[tuple[str, str]]:
    """Yield what of a tree is not carried, as (path, why)."""
    for path, node in walk(tree):
        if isinstance(node, Opaque):
            yield ".".join(map(str, path)) if path else "the whole", node.what

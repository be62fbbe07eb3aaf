"""Graphs of objects as TensorFlow saves them with a checkpoint: made from names, and cut to what is kept.

A name's parts are steps from object to object, so that ``fc.weight`` is the attribute ``weight`` of what
``fc`` is.

Source: tensorflow/tensorflow ``core/protobuf/trackable_object_graph.proto``,
``python/checkpoint/trackable_view.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckpttool.formats.tensorflow.objects import GRAPH_KEY, VALUE, key_along, steps_of
from ckpttool.wire.protobuf import BYTES, VARINT, Field, bytes_field, fields, number_field, text_field

_CHILD, _ATTRIBUTE, _SLOT, _HAS_VALUES = 1, 2, 3, 5  # fields of TrackableObject
_TRUE = number_field(1, 1)
_COUNTER = "save_counter"


def key_of(name: str) -> str:
    """Return the key that a tensor gets by its name."""
    return key_along(steps_of(name))


class Objects:
    """Objects by number, each with its children by local name; the first is the root."""

    def __init__(self) -> None:
        self.children: list[dict[str, int]] = [{}]

    def reached(self, steps: Iterable[str]) -> int:
        """Return the number of the object that steps from the root lead to; it is made if need be."""
        at = 0
        for step in steps:
            child = self.children[at].get(step)
            if child is None:
                child = self.children[at][step] = len(self.children)
                self.children.append({})
            at = child
        return at

    def tie(self, name: str, owner: int) -> int:
        """Let a name lead to the object that another has; return the number of the object that it leads to.

        Where others lead through the object of that name it stays another one.
        """
        *above, last = steps_of(name)
        return self.children[self.reached(above)].setdefault(last, owner)


def objects_of(names: Iterable[str]) -> tuple[Objects, dict[str, int]]:
    """Return the objects that names lead to, and the number of each name's own."""
    objects = Objects()
    return objects, {name: objects.reached(steps_of(name)) for name in sorted(names)}


def graph_of(owned: Iterable[str], ties: Mapping[str, str]) -> bytes:
    """Return the graph of objects that the names of tensors describe.

    It has a counter of saves that says that it has a value, and has none: ``tf.train.Checkpoint`` makes one
    after it has restored the rest, and finds fault with a graph that doesn't know it.

    Args:
        owned: The names of tensors with values of their own.
        ties: The names of those that share another's, and whose. They are names of the same object.
    """
    objects, places = objects_of(owned)
    values = {place: _attribute(name) for name, place in places.items()}
    for name in sorted(ties):
        values.setdefault(objects.tie(name, places[ties[name]]), _attribute(ties[name]))
    values.setdefault(objects.reached((_COUNTER,)), b"")
    nodes = (_node(children, values.get(number)) for number, children in enumerate(objects.children))
    return b"".join(bytes_field(1, node) for node in nodes)


def _attribute(source: str) -> bytes:
    """Return what an object says of the value of its own, which lies under the name of a tensor."""
    told = text_field(1, VALUE) + text_field(2, source) + text_field(3, key_of(source))
    return bytes_field(_ATTRIBUTE, told)


def _node(children: Mapping[str, int], attribute: bytes | None) -> bytes:
    """Return an object; ``attribute`` is None where it is said to have no value of its own."""
    links = [
        bytes_field(_CHILD, number_field(1, child) + text_field(2, name)) for name, child in children.items()
    ]
    values = () if attribute is None else (attribute, bytes_field(_HAS_VALUES, _TRUE))
    return b"".join((*links, *values))


# A graph that is cut ----------------------------------------------------------------------------------


def cut_graph(path: str, message: bytes, kept: Collection[str], gone: Collection[str]) -> bytes:
    """Return a graph without the values that are gone; the very same where none is.

    Args:
        path: What it comes from, for errors.
        message: The graph.
        kept: The keys that stay.
        gone: The keys that there were besides.

    Raises:
        DamagedCheckpoint: It is no graph.
    """
    ordered_kept, ordered_gone = sorted(kept), sorted(gone)

    def is_gone(attribute: Field) -> bool:
        key = _text(path, attribute, 3)
        if key in kept or key in gone:
            return key in gone
        # Tables and iterators have keys that begin with the one that the graph states.
        return _has_beginning(ordered_gone, key) and not _has_beginning(ordered_kept, key)

    nodes = [part.data for part in fields(message, path, GRAPH_KEY) if part.number == 1] if gone else []
    lost = {
        number
        for number, node in enumerate(nodes)
        for part in fields(node, path, GRAPH_KEY)
        if part.number == _ATTRIBUTE and is_gone(part)
    }
    if not lost:
        return message

    def stays(part: Field) -> bool:
        if part.number == _ATTRIBUTE:
            return not is_gone(part)
        return part.number != _SLOT or _number(path, part, 3) not in lost

    return b"".join(bytes_field(1, _kept(path, node, stays)) for node in nodes)


def _has_beginning(ordered: Sequence[str], beginning: str) -> bool:
    """Tell whether one of the texts, which are in order, begins so."""
    at = bisect_left(ordered, beginning)
    return at < len(ordered) and ordered[at].startswith(beginning)


def _kept(path: str, message: memoryview, stays: Callable[[Field], bool]) -> bytes:
    return b"".join(_again(part) for part in fields(message, path, GRAPH_KEY) if stays(part))


def _again(field: Field) -> bytes:
    if field.kind == BYTES:
        return bytes_field(field.number, field.data)
    return number_field(field.number, field.integer) if field.kind == VARINT else b""


def _text(path: str, field: Field, number: int) -> str:
    return next((one.text for one in fields(field.data, path, GRAPH_KEY) if one.number == number), "")


def _number(path: str, field: Field, number: int) -> int:
    return next((one.integer for one in fields(field.data, path, GRAPH_KEY) if one.number == number), 0)

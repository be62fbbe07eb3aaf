"""Reachability analysis: the nodes and functions of a graph that serve its saver only.

A saver's ops touch files. They are harmless if nothing else that a caller can run depends on them: no
signature, no initialisation, no object, no other node or function. An op that writes must not be among those
that restore, which run when a model is loaded. Names prove nothing: a hostile model can put any op into the
scope ``save/``.

Source: tensorflow/tensorflow ``core/protobuf/saver.proto``, ``core/framework/function.proto``,
``core/framework/attr_value.proto``.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

from ckpttool.formats.savedmodel.ops import known_ops
from ckpttool.formats.savedmodel.walk import Message

SAVER_OPS = frozenset(
    {"SaveV2", "RestoreV2", "MergeV2Checkpoints", "Save", "SaveSlices", "Restore", "RestoreSlice"}
)
_WRITING = frozenset({"SaveV2", "MergeV2Checkpoints", "Save", "SaveSlices"})
RESTORING_OPS = SAVER_OPS - _WRITING
_SCOPE = re.compile(r"(^|/)save(_\d+)?/")
_FILE_NAME, _SAVE_TENSOR, _RESTORE_OP = 1, 2, 3  # fields of SaverDef
_LIST, _FUNCTION = 1, 10  # fields of AttrValue
_LISTED_FUNCTION = 9  # a field of AttrValue.ListValue

_Item = TypeVar("_Item", bound=Hashable)


class FileOp(NamedTuple):
    """Op that opens files: its node, and the function that has the node (``""`` for the graph)."""

    op: str
    name: str
    function: str


@dataclass
class Saver:
    """Dependencies between a graph's nodes and functions; nodes are hashes of their names.

    Attributes:
        prefix: Tensor that the prefix of the variables is fed to.
        functions: Functions of the library, each with those that it refers to.
        exposed: Functions that can be called from outside of the graph and the library.
        _saver_nodes: Nodes that save and restore, by the number of their field in SaverDef.
        _initializers: Initializers of variables.
        _entry_points: Nodes that are run for something else than saving.
        _scoped: Nodes whose names are in a scope ``save/``.
        _calls: Functions that each node of the graph refers to.
        _nodes, _inputs: All edges, as pairs of a node and one of its inputs.
    """

    prefix: str = ""
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    exposed: set[str] = field(default_factory=set)
    _saver_nodes: dict[int, int] = field(default_factory=dict)
    _initializers: set[int] = field(default_factory=set)
    _entry_points: set[int] = field(default_factory=set)
    _scoped: set[int] = field(default_factory=set)
    _calls: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    # Half a million edges are compact as arrays; dictionaries are made of them for each analysis.
    _nodes: array[int] = field(default_factory=lambda: array("q"))
    _inputs: array[int] = field(default_factory=lambda: array("q"))

    def add_saver_def(self, message: Message) -> None:
        """Add the nodes that a SaverDef names."""
        for number, part in message.parts():
            if number == _FILE_NAME:
                self.prefix = part.stable_text()
            elif number in (_SAVE_TENSOR, _RESTORE_OP):
                self._saver_nodes[number] = _node_of(part.text())

    def add_entry_point(self, reference: str) -> None:
        """Add a reference to a node that is run for something else than saving."""
        self._entry_points.add(_node_of(reference))

    def add_initializer(self, node: str) -> None:
        """Add the initializer of a variable; loaders don't run it, because they restore the variable."""
        self._initializers.add(_node_of(node))

    def initialized_by(self, name: str) -> set[int]:
        """Return the nodes between a node and the initializers it serves; none if it serves anything else."""
        found = _reachable([hash(name)], self._users)
        reserved = self._entry_points | {*self._saver_nodes.values()}
        serves_alone = found & self._initializers and not found & reserved
        return found - self._initializers - {hash(name)} if serves_alone else set()

    @cached_property
    def _users(self) -> Mapping[int, list[int]]:
        """Nodes that have each node as input, after all were added."""
        users: dict[int, list[int]] = defaultdict(list)
        for node, source in zip(self._nodes, self._inputs, strict=True):
            users[source].append(node)
        return users

    def add_node(self, name: str, inputs: Iterable[str]) -> None:
        """Add a node of the graph."""
        at = hash(name)
        for reference in inputs:
            self._nodes.append(at)
            self._inputs.append(_node_of(reference))
        if _SCOPE.search(name):
            self._scoped.add(at)

    def add_call(self, name: str, function: str, called: str) -> None:
        """Add a reference of a node, in a function or (``""``) in the graph, to a function."""
        (self.functions[function] if function else self._calls[hash(name)]).add(called)

    def reachable_from(self, references: Iterable[str]) -> set[int]:
        """Return the hashed names of all nodes that tensors depend on."""
        return _reachable(map(_node_of, references), self._inputs_by_node())

    def nodes_and_functions(self) -> tuple[set[int], set[str]]:
        """Return the nodes (hashed names) and the functions that serve the saver only."""
        saving, unused = self._own_nodes(self._inputs_by_node())
        return saving | unused, self._own_functions(saving)

    @cached_property
    def uncalled_functions(self) -> set[str]:
        """Functions that neither the graph nor anything outside calls, after all were added.

        A function with the name of an op is never among them: it may run in place of the op.
        """
        called = self._called_by(self._calls) | self.exposed | (self.functions.keys() & known_ops().keys())
        return self.functions.keys() - _reachable(called, self.functions)

    def usage_of(self, ops: Iterable[FileOp]) -> dict[FileOp, tuple[bool, bool]]:
        """Return for each op whether it serves the saver only, and whether the saver runs it.

        The nodes of an older saver serve it only, but aren't run.
        """
        # Loading runs all that the restore op of the SaverDef depends on, with the functions called from
        # there. An op that writes has no business among these, although the saver owns it.
        inputs = self._inputs_by_node()
        saving, unused = self._own_nodes(inputs)
        functions, nodes = self._own_functions(saving), saving | unused
        loading = _reachable(
            [end for number, end in self._saver_nodes.items() if number == _RESTORE_OP], inputs
        )
        loaded = _reachable(self._called_by(loading), self.functions)
        found = {}
        for op in ops:
            node = hash(op.name)
            is_own = op.function in functions if op.function else node in nodes
            is_loaded = op.function in loaded if op.function else node in loading
            is_run = bool(op.function) or node not in unused
            found[op] = is_own and not (is_loaded and op.op in _WRITING), is_run
        return found

    def _inputs_by_node(self) -> dict[int, list[int]]:
        inputs: dict[int, list[int]] = defaultdict(list)
        for node, source in zip(self._nodes, self._inputs, strict=True):
            inputs[node].append(source)
        return inputs

    def _own_nodes(self, inputs: Mapping[int, list[int]]) -> tuple[set[int], set[int]]:
        """Return the nodes that only the saver depends on, and the unused ones of older savers."""
        # TensorFlow 1 adds a saver to the graph each time the graph is saved, in a scope ``save_1/``, and
        # SaverDef names the last. The scope makes a node a candidate only; it is dropped if anything else
        # depends on it.
        saving = _reachable(self._saver_nodes.values(), inputs)
        candidates = saving | self._scoped
        needed = {source for node, sources in inputs.items() if node not in candidates for source in sources}
        foreign = _reachable((needed | self._entry_points) & candidates, inputs)
        return saving - foreign, self._scoped - saving - foreign

    def _own_functions(self, saving: set[int]) -> set[str]:
        """Return the functions that only the nodes of the saver call, directly or not."""
        called = _reachable(self._called_by(saving), self.functions)
        others = self._called_by(self._calls.keys() - saving)
        # A function with the name of an op may run in place of the op.
        others |= self.exposed | (self.functions.keys() - called - self.uncalled_functions)
        others |= called & known_ops().keys()
        foreign = _reachable(others, self.functions)
        return called - foreign

    def _called_by(self, nodes: Iterable[int]) -> set[str]:
        return {name for node in nodes for name in self._calls.get(node, ())}


def _node_of(reference: str) -> int:
    return hash(reference.removeprefix("^").partition(":")[0])


def _reachable(starts: Iterable[_Item], leads: Mapping[_Item, Collection[_Item]]) -> set[_Item]:
    """Return all items that can be reached from the starts, including these."""
    pending = list(starts)
    reached = set(pending)
    while pending:
        for item in leads.get(pending.pop(), ()):
            if item not in reached:
                reached.add(item)
                pending.append(item)
    return reached


# References in messages -----------------------------------------------------------------------------


def functions_in(attribute: Message) -> Iterator[str]:
    """Yield the functions in an attribute (a map entry), at any depth."""
    for value in _inner([attribute], 2):
        for number, part in value.parts():
            functions = [part] if number == _FUNCTION else ()
            for function in _inner([part], _LISTED_FUNCTION) if number == _LIST else functions:
                for inner, text in function.parts():
                    if inner == 1 and text.nbytes:
                        yield text.text()
                    elif inner == 2:
                        yield from functions_in(text)


def tensors_of(signature: Message) -> Iterator[str]:
    """Yield the names of all tensors that a signature (a map entry) takes and returns."""
    for side in _inner(_inner([signature], 2), 1, 2):
        yield from _tensors(_inner([side], 2))


def _tensors(infos: Iterable[Message]) -> Iterator[str]:
    for info in infos:
        sparse, parts = _inner([info], 4), _inner(_inner([info], 5), 2)
        yield from (name.text() for name in (*_inner([info], 1), *_inner(sparse, 1, 2, 3)))
        yield from _tensors(parts)


def _inner(messages: Iterable[Message], *numbers: int) -> Iterator[Message]:
    """Yield the contents of all fields with these numbers."""
    return (part for message in messages for number, part in message.parts() if number in numbers)

"""Whether the nodes of a graph, or of a function, take their inputs from what is there.

Names are kept as their hashes: a graph may have half a million nodes.

Source: tensorflow/tensorflow ``core/framework/node_def.proto``, ``function.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from ckpttool.formats.savedmodel.walk import Message
from ckpttool.report import Severity

_NAMES = Path(__file__).with_name("names")


def lines_of(file: str) -> list[str]:
    """Return a list's entries, without comments and empty lines."""
    text = (_NAMES / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@cache
def known_ops() -> dict[str, frozenset[str]]:
    """Return the names of the outputs of each op of TensorFlow; none of an op that only old ones have."""
    lines = (line.split() for line in lines_of("tf_ops.txt"))
    return {op: frozenset(outputs) for op, *outputs in lines}


def severity_of(op: str) -> Severity | None:
    """Return how much it matters that a graph uses an op; None where it only computes."""
    return next((severity for severity, glob in _unsafe() if fnmatchcase(op, glob)), None)


@cache
def _unsafe() -> tuple[tuple[Severity, str], ...]:
    pairs = (line.split() for line in lines_of("tf_unsafe_ops.txt"))
    return tuple((Severity(severity), glob) for severity, glob in pairs)


@dataclass(slots=True)
class Links:
    """What the nodes of one body are called, and what they take.

    Attributes:
        message: The GraphDef or FunctionDef.
        kind: The number of the field that holds its nodes.
    """

    message: Message
    kind: int
    _ops: dict[int, str] = field(default_factory=dict)
    _taken: set[tuple[int, str]] = field(default_factory=set)

    def node(self, name: str, op: str) -> None:
        """Take in a node; an argument of a function is one without an op."""
        self._ops[hash(name)] = op

    def take(self, reference: str) -> None:
        """Take in what a node takes, or a function returns."""
        self._taken.add(_parts(reference))

    def broken(self) -> str | None:
        """Return a reference to what isn't there; None where there is none."""
        lost = {one for one in self._taken if not self._is_there(one)}
        if not lost:
            return None
        return next((text for text in self._references() if _parts(text) in lost), None)

    def has(self, reference: str) -> bool:
        """Tell whether a node is there."""
        return _parts(reference)[0] in self._ops

    def _is_there(self, reference: tuple[int, str]) -> bool:
        node, output = reference
        if node not in self._ops:
            return False
        known = known_ops().get(self._ops[node]) if output else None
        return not known or output in known

    def _references(self) -> Iterator[str]:
        for number, _, part in self.message.fields():
            wanted = {self.kind: 3, 4: 2}.get(number) if self.kind == 3 or number == self.kind else None
            for inner, _, text in part.fields() if wanted else ():
                if inner == wanted:
                    yield text.text()


def _parts(reference: str) -> tuple[int, str]:
    """Return the hash of the node that a reference names, and the output where that is named, too.

    They look like ``^node``, ``node``, ``node:0``, and in functions ``node:output:0``.
    """
    node, _, rest = reference.removeprefix("^").partition(":")
    output, colon, _ = rest.partition(":")
    return hash(node), output if colon else ""

"""The variables of a SavedModel: its bundle compared with its objects, and the names that people know."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.errors import CheckpointError
from ckpttool.formats.savedmodel.graph import MetaGraph
from ckpttool.formats.savedmodel.objects import Object, Variable
from ckpttool.formats.savedmodel.paths import require_inside
from ckpttool.formats.savedmodel.walk import message_in
from ckpttool.report import Finding, error, note, warning
from ckpttool.tensor import Role, Tensor
from ckpttool.wire.farmhash import fingerprint64
from ckpttool.wire.source import Source

FINGERPRINT = "fingerprint.pb"
INDEX = os.path.join("variables", "variables.index")
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"

_SLOT = "/.OPTIMIZER_SLOT/"
_ESCAPED = re.compile(r"\.([.S])")
_VARIABLE_OPS = frozenset({"VarHandleOp", "Variable", "VariableV2"})
_NUMBERED = re.compile(r"/\d+$|(^|/)layer(_with_weights)?-\d+/")
_UNNAMED = "Variable"
_MAX_HASHED = 1 << 23  # hashed in Python, at 5 MB/s
_SHOWN = 200

Fingerprint = Mapping[str, object]


def needs_variables(graph: MetaGraph) -> bool:
    """Tell whether a graph can't be loaded without values of variables."""
    if graph.objects:
        return any(item.variable for item in graph.objects)
    return not _VARIABLE_OPS.isdisjoint(graph.ops)


def raw_key(tensor: Tensor) -> str:
    """Return a variable's key in the bundle."""
    return tensor.key or "/".join(map(str, tensor.path))


def nodes_along(objects: Sequence[Object], key: str) -> list[int]:
    """Return the numbers of the objects on the way that a key tells, from the root as far as it goes."""
    found = [0] if objects else []
    for part in key.removesuffix(VALUE).split("/") if found else ():
        name = _ESCAPED.sub(lambda match: "/" if match[1] == "S" else ".", part)
        child = objects[found[-1]].children.get(name)
        if child is None or child >= len(objects):
            return found
        found.append(child)
    return found


def _node(objects: Sequence[Object], key: str) -> int | None:
    """Return the number of the object that a bundle's key leads to from the root; None where none is."""
    found = nodes_along(objects, key)
    return found[-1] if len(found) == key.removesuffix(VALUE).count("/") + 2 else None


# The bundle against the objects ---------------------------------------------------------------------


def compare(tensors: Sequence[Tensor], objects: Sequence[Object]) -> Iterator[Finding]:
    """Yield where the variables of the graph and the entries of the bundle are not the same."""
    lost = sum(child >= len(objects) for item in objects for child in (*item.children.values(), *item.slots))
    if lost:
        yield error("object-graph", f"{lost:,} references to objects that there are none of")
    reached = set()
    for tensor in tensors:
        key = raw_key(tensor)
        if not key.endswith(VALUE) or _SLOT in key:
            continue
        at = _node(objects, key)
        variable = None if at is None else objects[at].variable
        if at is None or variable is None:
            yield warning("variable-foreign", "the model's objects don't lead to it", tensor.name)
        else:
            reached.add(at)
            yield from _different(tensor, variable)
    yield from _missing(objects, reached)


def _missing(objects: Sequence[Object], reached: set[int]) -> Iterator[Finding]:
    slots = {slot for item in objects for slot in item.slots}
    names = [
        item.variable.name or f"object {at}"
        for at, item in enumerate(objects)
        if item.variable and not item.variable.is_composed and at not in reached and at not in slots
    ]
    if names:
        message = f"the bundle lacks {len(names):,} of the model's variables, like {names[0][:_SHOWN]!r}"
        yield error("variable-missing", message, INDEX)


def _different(tensor: Tensor, variable: Variable) -> Iterator[Finding]:
    known = variable.shape
    fits = known is None or (
        len(known) == len(tensor.shape)
        and all(want in (None, length) for want, length in zip(known, tensor.shape, strict=True))
    )
    if not fits or variable.dtype != tensor.dtype.name:
        stored = f"{tensor.dtype.name} {list(tensor.shape)}"
        message = f"{stored} in the bundle, and {variable.dtype} {known} in the graph"
        yield error("variable-mismatch", message, tensor.name)


# Names ----------------------------------------------------------------------------------------------


def named(tensors: Sequence[Tensor], objects: Sequence[Object]) -> tuple[Tensor, ...]:
    """Return the variables; those that are items of a list, or in a numbered layer, by their own names.

    Keras exports a list of all variables and a second, private one, whose items are copies.
    """
    own = {raw_key(tensor): _own_name(tensor, objects) for tensor in tensors}
    public = Counter(name for key, name in own.items() if name and not _is_private(key))
    taken = {tensor.name for tensor in tensors if own[raw_key(tensor)] is None}
    return tuple(_renamed(tensor, own[raw_key(tensor)], public, taken) for tensor in tensors)


def _is_private(key: str) -> bool:
    return key.startswith("_")


def _renamed(tensor: Tensor, name: str | None, public: Mapping[str, int], taken: Container[str]) -> Tensor:
    """Return a variable under its own name, unless another has it, too."""
    key = raw_key(tensor)
    if name is None or name == tensor.name:
        return tensor
    if _is_private(key):
        return replace(tensor, role=Role.OTHER) if name in public else tensor
    if public[name] > 1 or name.replace("/", ".") in taken:
        return tensor
    return replace(tensor, path=tuple(name.split("/")), key=key)


def _own_name(tensor: Tensor, objects: Sequence[Object]) -> str | None:
    """Return the name that a variable was given, where the path to it only says which one it is."""
    key = raw_key(tensor)
    if _SLOT in key or not _NUMBERED.search(key.removesuffix(VALUE)):
        return None
    at = _node(objects, key)
    variable = None if at is None else objects[at].variable
    return variable.name if variable and variable.name not in ("", _UNNAMED) else None


# The fingerprint ------------------------------------------------------------------------------------


def read_fingerprint(directory: str) -> tuple[Fingerprint | None, list[Finding]]:
    """Return what a SavedModel's fingerprint says, if there is one, and what is wrong with it."""
    path = os.path.join(directory, FINGERPRINT)
    if not os.path.lexists(path):
        return None, []
    told: dict[str, object] = {"uuid": None, "checkpoint_hash": None}
    try:
        require_inside(path, directory)
        with Source(path) as source:
            for number, value, part in message_in(source).fields():
                if number == 5:
                    told["checkpoint_hash"] = f"{value or part.unsigned():016x}"
                elif number == 7:
                    told["uuid"] = part.text()
    except CheckpointError as failure:
        return None, [warning("fingerprint-damaged", failure.reason, FINGERPRINT)]
    return told, []


def fingerprint_findings(told: Fingerprint | None, index: str) -> Iterator[Finding]:
    """Yield an error where the index of the variables is not the one that was saved with the graph."""
    stated = told["checkpoint_hash"] if told else None
    if stated is None:
        return
    with Source(index) as source:
        if source.size > _MAX_HASHED:
            message = f"the fingerprint of {source.size:,} bytes was not computed; up to {_MAX_HASHED:,} are"
            yield note("fingerprint-skipped", message, INDEX)
            return
        found = f"{fingerprint64(source.read(0, source.size)):016x}"
    if found != stated:
        message = f"its fingerprint is {found} instead of {stated}: it was not saved with this graph"
        yield error("fingerprint-mismatch", message, INDEX)

"""Opens TorchScript archives: their attributes, constants, and what their code says.

The code is TorchScript, which ``torch.jit.load`` compiles and runs without Python. Classes of the pickles
are looked up in it and never imported.

Source: PyTorch ``torch/csrc/jit/serialization/export_module.cpp``, ``import.cpp``, ``unpickler.cpp``,
``torch/jit/_pickle.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.errors import CheckpointError, DamagedCheckpoint
from ckpttool.formats.content.assembly import assemble
from ckpttool.formats.content.flattening import Flat, Leaf, flatten
from ckpttool.formats.content.object_parts import direct_parts, nodes
from ckpttool.formats.content.plain_data import describe_content, under_free_key
from ckpttool.formats.interface import Probe
from ckpttool.formats.torch.legacy import safety_in_errors
from ckpttool.formats.torch.objects import TensorParts, TorchObjects
from ckpttool.formats.torch.torch_operators import CLASSES, judge_classes
from ckpttool.formats.torch.torchscript_code import (
    definitions_of,
    describe_code,
    judge_byte_code,
    judge_text,
    without_mangles,
)
from ckpttool.formats.torch.zip import Records, StorageRecords
from ckpttool.report import Finding, error, warning
from ckpttool.tensor import Path, Role
from ckpttool.wire.pickle_nodes import Call, Global, Pickle
from ckpttool.wire.pickle_safety import PickleSequence, judge
from ckpttool.wire.zip_reader import Member

_OWN_PREFIX = "__torch__"
_WRAPPERS = frozenset(
    Global("torch.jit._pickle", name)
    for name in (
        "build_intlist",
        "build_tensorlist",
        "build_doublelist",
        "build_boollist",
        "restore_type_tag",
    )
)
_TOLD = frozenset({"data.pkl", "constants.pkl", "bytecode.pkl"})


def open_torchscript(probe: Probe, format: str) -> Checkpoint:
    """Return the checkpoint that an archive holds."""
    records = Records(probe.archive, probe.path)
    pickles = _ArchivePickles(records)
    data, constants = StorageRecords(records, "data"), StorageRecords(records, "constants")
    with safety_in_errors(pickles.found):
        flat = _attributes(pickles.root("data.pkl"), TorchObjects(probe.path, data), probe.path)
        fixed = pickles.root("constants.pkl")
        flat.tensors += _constants(fixed, TorchObjects(probe.path, constants), probe.path)
        pickles.judge_others(lambda name: data.holds(name) or constants.holds(name))
        pickles.found |= dict.fromkeys(judge_code(records))
        if "bytecode.pkl" in records.by_name:
            pickles.found |= dict.fromkeys(_byte_code_findings(pickles.root("bytecode.pkl")))
    code = definitions_of((name, records.archive.read(member)) for name, member in _code(records))
    findings = (
        *records.findings(),
        *data.findings(flat.tensors),
        *constants.findings(flat.tensors),
        *pickles.findings,
        *pickles.undefined(code),
    )
    return assemble(
        probe=probe,
        format=format,
        variant="lite" if "bytecode.pkl" in probe.members else None,
        flat=Flat(flat.tensors, _metadata(records, pickles, code, (data, constants), flat.plain)),
        files=(FileEntry(probe.path, probe.source.size),),
        spans=lambda: records.spans(flat.tensors),
        producer=Producer("pytorch"),
        findings=findings,
        safety=tuple(pickles.found),
    )


# The pickles --------------------------------------------------------------------------------------


class _ArchivePickles:
    """Interprets the pickle records, and keeps what is wrong with them and what they name."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._read: set[str] = set()
        self._roots: dict[str, object] = {}
        self._own: set[Global] = set()
        self.found: dict[Finding, None] = {}
        self.findings: list[Finding] = []

    def root(self, name: str) -> object:
        """Return what a pickle record holds."""
        if name not in self._roots:
            pickle = self._judged(name).pickles[0]
            self._roots[name] = pickle.root
            self._own |= _own_names(pickle).names.keys()
        return self._roots[name]

    def judge_others(self, is_storage: Callable[[str], bool]) -> None:
        """Interpret all pickles that no tensor lies in: inputs, byte code, debug records, and all others."""
        for name, member in self._records.by_name.items():
            if name.endswith("pkl") and name not in self._read:
                try:
                    self._judged(name)
                except DamagedCheckpoint as failure:
                    rest = warning("not-scanned", f"a pickle that breaks off: {failure.reason}", member.name)
                    self.found |= dict.fromkeys((*failure.safety, rest))
                    self.findings.append(error(failure.code, failure.reason, failure.where or member.name))
                except CheckpointError as failure:
                    self.findings.append(error(failure.code, failure.reason, failure.where or member.name))
        others = self._records.judged_but(lambda name: name in self._read or is_storage(name))
        self.found |= dict.fromkeys(others)

    def undefined(self, code: Mapping[bytes, bytes]) -> Iterator[Finding]:
        """Yield an error for each class that objects have, and the archive's code does not define."""
        for name in sorted(f"{own.module}.{own.name}" for own in self._own):
            if not name.startswith(CLASSES) and name.encode() not in code:
                yield error("class-undefined", "the code lacks this class, which an object has", name)

    def _judged(self, name: str) -> PickleSequence:
        self._read.add(name)
        judged = self._records.judged_pickle(name)
        member = self._records.by_name[name]
        own = [set(judge(_own_names(pickle), member.name)) for pickle in judged.pickles]
        self.found |= dict.fromkeys(f for f in judged.safety if not any(f in inert for inert in own))
        self.found |= dict.fromkeys(judge_classes(_classes(judged), member.name))
        behind = len(judged.pickles) - 1
        if behind or judged.trailing:
            message = f"{behind} more pickles and {judged.trailing:,} bytes behind the first pickle"
            self.findings.append(error("pickle-trailing", message, member.name))
        return judged


def _own_names(pickle: Pickle) -> Pickle:
    """Return the names of a pickle alone that the archive's own code defines."""
    own = {name: at for name, at in pickle.names.items() if name.module.partition(".")[0] == _OWN_PREFIX}
    return Pickle(names=own)


def _classes(judged: PickleSequence) -> Iterator[str]:
    """Yield the classes in C++ that pickles name, by namespace and name."""
    for pickle in judged.pickles:
        full = (f"{name.module}.{name.name}" for name in pickle.names)
        yield from (name.removeprefix(CLASSES) for name in full if name.startswith(CLASSES))


# Tensors ------------------------------------------------------------------------------------------


def _own_class(node: object) -> Global | None:
    """Return the class of an object that the archive's own code defines, or None of any other node."""
    function = node.function if isinstance(node, Call) else None
    if isinstance(function, Global) and function.module.partition(".")[0] == _OWN_PREFIX:
        return function
    return None


def _is_tag(call: Call) -> bool:
    """Tell whether a call only says which type its first argument has."""
    is_known = isinstance(call.function, Global) and call.function in _WRAPPERS
    return is_known and bool(call.args) and not call.kwargs


def _unwrapped(node: object) -> object:
    """Return the value that a call only tags with its type, or the state of an object that isn't a module."""
    while isinstance(node, Call) and _is_tag(node):
        node = node.args[0]
    if isinstance(node, Call) and _own_class(node) and isinstance(node.state, list | tuple):
        return node.state
    return node


def _attributes(root: object, objects: TorchObjects, path: str) -> Flat[TensorParts]:
    """Return the attributes of the model, each tensor under its dotted name.

    What a module holds itself are its weights: parameters and buffers. What lies in its lists and
    dictionaries is no part of the state dict.
    """
    weights = _held_by_modules(root)

    def leaf(node: object) -> Leaf[TensorParts] | None:
        found = objects.leaf(node)
        if found is None:
            return None
        role = Role.WEIGHTS if id(node) in weights else Role.OTHER
        return replace(
            found, tensors=tuple((below, replace(parts, role=role)) for below, parts in found.tensors)
        )

    flat = flatten(root, leaf, path, _unwrapped)
    return Flat([((".".join(map(str, keys)),), parts) for keys, parts in flat.tensors], flat.plain)


def _held_by_modules(root: object) -> set[int]:
    """Return the addresses of all that is an attribute of a module, or lies in what it packs."""
    held: set[int] = set()
    for node in nodes(root):
        if isinstance(node, Call) and _own_class(node):
            if isinstance(node.state, dict):
                held.update(map(id, node.state.values()))
            else:
                held.update(map(id, nodes(node.state)))
    return held


def _constants(root: object, objects: TorchObjects, path: str) -> list[tuple[Path, TensorParts]]:
    """Return the tensors that belong to the code."""
    flat = flatten(root, objects.leaf, path, _unwrapped)
    return [(("constants", *keys), replace(parts, role=Role.OTHER)) for keys, parts in flat.tensors]


# The code -----------------------------------------------------------------------------------------


def _metadata(
    records: Records,
    pickles: _ArchivePickles,
    code: Mapping[bytes, bytes],
    storages: Sequence[StorageRecords],
    attributes: object,
) -> dict[str, object]:
    own = _own_class(pickles.root("data.pkl"))
    name = f"{own.module}.{own.name}" if own else ""
    told: dict[str, object] = {
        "attributes": attributes,
        "code": describe_code(code, name),
        "extra": records.described_below("extra/"),
    }
    if "bytecode.pkl" in records.by_name:
        told["bytecode"] = _describe_pickle(pickles.root("bytecode.pkl"), records.path)
    others = records.unknown(lambda name: _is_described(name) or any(one.holds(name) for one in storages))
    return told | under_free_key(others, told)


def _describe_pickle(root: object, path: str) -> str:
    """Return size and checksum of what a pickle says, whatever a process added to the names of classes."""
    plain = flatten(root, lambda node: None, path, _unwrapped).plain
    text = without_mangles(json.dumps(plain, sort_keys=True).encode())
    return describe_content(len(text), crc32(text))


def _is_described(name: str) -> bool:
    """Tell whether a record is told by itself, or says only where in a source the code comes from."""
    is_code = name.startswith("code/") and name.endswith((".py", ".debug_pkl"))
    return is_code or name in _TOLD or name.startswith("extra/")


def _code(records: Records) -> Iterator[tuple[str, Member]]:
    for name, member in records.by_name.items():
        if name.startswith("code/") and name.endswith(".py"):
            yield member.name.partition("/")[2], member


def judge_code(records: Records) -> Iterator[Finding]:
    """Yield what running the model's code would do besides computing."""
    for _, member in _code(records):
        yield from judge_text(records.archive.read(member), member.name)


def _byte_code_findings(root: object) -> Iterator[Finding]:
    texts = (part for node in nodes(root) for part in _leaves(node))
    return judge_byte_code(texts, "bytecode.pkl")


def _leaves(node: object) -> Iterator[str]:
    """Yield the texts among the parts of a node, however old a pickle writes them."""
    for part in direct_parts(node) or ():
        if isinstance(part, str):
            yield part
        elif isinstance(part, bytes):
            yield part.decode("utf-8", "replace")

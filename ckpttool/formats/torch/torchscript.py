"""TorchScript archives of ``torch.jit.save``: a model with its attributes, constants and code.

The container is that of ``zip.py``. ``data.pkl`` is the model: objects with their attributes, among them
parameters and buffers, whose storages are ``data/<key>``. ``constants.pkl``, with ``constants/<key>``, has
the tensors that the code refers to. ``code/`` has the classes and functions in TorchScript, a subset of
Python that ``torch.jit.load`` compiles and runs without Python; the classes of the pickles are looked up
there and never imported. An archive for the lite interpreter has byte code in ``bytecode.pkl``.

Source: PyTorch ``torch/csrc/jit/serialization/export_module.cpp``, ``import.cpp``, ``unpickler.cpp``,
``torch/jit/_pickle.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar
from zlib import crc32

from ckpttool.containers.pickle.pickle_nodes import Call, Global, children, nodes
from ckpttool.containers.pickle.pickle_safety import PickleSequence, attach_safety, findings_of_pickle
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, error_of
from ckpttool.core.report import Finding, error, not_scanned
from ckpttool.core.tensor import Role
from ckpttool.formats.content.assembly import checkpoint_of_tree
from ckpttool.formats.content.plain_data import describe_content, other_records
from ckpttool.formats.content.tree import Flat, Leaf, TensorParts, flatten
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.torch.objects import TorchObjects
from ckpttool.formats.torch.torch_operators import CLASSES, judge_classes
from ckpttool.formats.torch.torchscript_code import (
    WRAPPERS,
    classes_in,
    code_tokens,
    definitions_of,
    describe_code,
    judge_byte_code,
    judge_loops,
    judge_text,
    judge_types,
    without_mangles,
)
from ckpttool.formats.torch.zip import Records, StorageRecords

_OWN_PREFIX = "__torch__"
_FIRST_RECORDS = ("data/0", "extra/")
_PICKLES = frozenset({"data.pkl", "constants.pkl", "bytecode.pkl"})


class TorchScript(Format):
    """A file that ``torch.jit.save`` wrote."""

    name: ClassVar[str] = "torchscript"
    suffixes = (".torchscript", ".ptl", ".jit")

    def matches(self, probe: Probe) -> bool:
        if {"data.pkl", "constants.pkl"} <= probe.members:
            return True
        # Of a zip whose directory is lost only the first record is known; torch.save's is data.pkl.
        return len(probe.members) == 1 and min(probe.members).startswith(_FIRST_RECORDS)

    def open(self, probe: Probe) -> Checkpoint:
        records = Records(probe.archive, probe.path)
        pickles = _ArchivePickles(records)
        data, constants = StorageRecords(records, "data"), StorageRecords(records, "constants")
        with attach_safety(pickles.safety):
            # Whatever fails below, the safety findings made until then are attached to the error.
            flat = _model_attributes(pickles.root("data.pkl"), TorchObjects(probe.path, data), probe.path)
            # The tensors that the code refers to are in a pickle of their own.
            leaf = TorchObjects(probe.path, constants).leaf
            of_code = flatten(pickles.root("constants.pkl"), leaf, probe.path, _unwrap)
            flat.tensors += [
                (("constants", *keys), replace(parts, role=Role.OTHER)) for keys, parts in of_code.tensors
            ]
            pickles.judge_others(lambda name: data.holds(name) or constants.holds(name))
            # PyTorch finds the file of a class by the class's name: ``code/__torch__/nets.py`` has those of
            # the module ``__torch__.nets``. Names are without the archive's root, places with it.
            files = [
                (member.name, member.name.partition("/")[2], records.archive.read(member))
                for name, member in records.by_name.items()
                if name.startswith("code/") and name.endswith(".py")
            ]
            for place, _, text in files:
                pickles.safety |= dict.fromkeys(judge_text(text, place))
            tokens = [code_tokens(text)[0] for _, _, text in files]
            places, names = [place for place, _, _ in files], [name for _, name, _ in files]
            pickles.safety |= dict.fromkeys(judge_loops(zip(places, tokens, strict=True)))
            classes = classes_in(zip(names, tokens, strict=True))
            for name in ("data.pkl", "constants.pkl"):
                pickles.safety |= dict.fromkeys(judge_types(pickles.root(name), classes, name))
            if "bytecode.pkl" in records.by_name:
                texts = _texts(pickles.root("bytecode.pkl"))
                pickles.safety |= dict.fromkeys(judge_byte_code(texts, "bytecode.pkl"))
        code = definitions_of((name, text) for _, name, text in files)
        findings = (
            *records.findings(),
            *data.findings(flat.tensors),
            *constants.findings(flat.tensors),
            *pickles.findings,
            *pickles.undefined_classes(code),
        )
        return checkpoint_of_tree(
            probe=probe,
            format=self.name,
            variant="lite" if "bytecode.pkl" in probe.members else None,
            flat=Flat(flat.tensors, _metadata(records, pickles, code, (data, constants), flat.plain)),
            files=(FileEntry(probe.path, probe.source.size),),
            spans=lambda: records.spans(flat.tensors),
            producer=Producer("pytorch"),
            findings=findings,
            safety=tuple(pickles.safety),
        )


# The pickles --------------------------------------------------------------------------------------


class _ArchivePickles:
    """Interprets the pickle records, each once, and collects their findings and classes."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._read: set[str] = set()
        self._roots: dict[str, object] = {}
        self._defined: set[Global] = set()
        """Classes of objects that the archive's code must define."""
        self.safety: dict[Finding, None] = {}
        self.findings: list[Finding] = []

    def root(self, name: str) -> object:
        """Return the object in a pickle record."""
        if name not in self._roots:
            pickle = self._interpret(name).pickles[0]
            self._roots[name] = pickle.root
            self._defined |= set(filter(_is_own, pickle.names))
        return self._roots[name]

    def judge_others(self, is_storage: Callable[[str], bool]) -> None:
        """Judge all other pickles: inputs, byte code, debug records, and any elsewhere in the archive."""
        for name, member in self._records.by_name.items():
            if name.endswith("pkl") and name not in self._read:
                try:
                    self._interpret(name)
                except CheckpointError as failure:
                    if isinstance(failure, DamagedCheckpoint):
                        message = f"a damaged pickle: {failure.reason}"
                        rest = not_scanned(member.name, message)
                        self.safety |= dict.fromkeys((*failure.safety, rest))
                    self.findings.append(error_of(failure, failure.where or member.name))
        others = self._records.judge_others(self._read, is_storage)
        self.safety |= dict.fromkeys(others)

    def undefined_classes(self, code: Mapping[bytes, bytes]) -> Iterator[Finding]:
        """Yield an error for each class of an object that the archive's code doesn't define."""
        for name in sorted(f"{name.module}.{name.name}" for name in self._defined):
            if not name.startswith(CLASSES) and name.encode() not in code:
                yield error("class-undefined", "no code for this class of an object", name)

    def _interpret(self, name: str) -> PickleSequence:
        self._read.add(name)
        judged = self._records.read_pickle(name)
        member = self._records.by_name[name]
        for pickle in judged.pickles:
            # Loading doesn't import the archive's own classes, so they aren't judged.
            imported = {name: at for name, at in pickle.names.items() if not _is_own(name)}
            self.safety |= dict.fromkeys(findings_of_pickle(replace(pickle, names=imported), member.name))
        names = (f"{name.module}.{name.name}" for pickle in judged.pickles for name in pickle.names)
        classes = [name.removeprefix(CLASSES) for name in names if name.startswith(CLASSES)]
        self.safety |= dict.fromkeys(judge_classes(classes, member.name))
        more = len(judged.pickles) - 1
        if more or judged.trailing:
            message = f"{more} more pickles and {judged.trailing:,} bytes after the first pickle"
            self.findings.append(error("pickle-trailing", message, member.name))
        return judged


def _is_own(name: Global) -> bool:
    """Return whether a class is one that the archive's code defines."""
    return name.module.partition(".")[0] == _OWN_PREFIX


# Tensors ------------------------------------------------------------------------------------------


def _own_class(node: object) -> Global | None:
    """Return the class of an object that the archive's code defines, or None for another node."""
    function = node.function if isinstance(node, Call) else None
    return function if isinstance(function, Global) and _is_own(function) else None


def _unwrap(node: object) -> object:
    """Return the list or dictionary in a type tag, or the state of an object that isn't a module."""
    while (
        isinstance(node, Call)
        and isinstance(node.function, Global)
        and node.function in WRAPPERS
        and node.args
        and not node.kwargs
    ):
        node = node.args[0]
    if isinstance(node, Call) and _own_class(node) and isinstance(node.state, list | tuple):
        return node.state
    return node


def _model_attributes(root: object, objects: TorchObjects, path: str) -> Flat[TensorParts]:
    """Return the attributes of the model, each tensor under its dotted name."""
    # TorchScript doesn't distinguish parameters from other tensors. Tensors that are attributes of a module
    # count as weights; those in its lists and dictionaries aren't part of a state dict.
    weights: set[int] = set()
    for node in nodes(root):
        if isinstance(node, Call) and _own_class(node):
            # An object whose state is not a dictionary is packed parameters, as of a quantized layer.
            held = node.state.values() if isinstance(node.state, dict) else nodes(node.state)
            weights.update(map(id, held))

    def leaf(node: object) -> Leaf[TensorParts] | None:
        tensors = objects.leaf(node)
        if tensors is None:
            return None
        role = Role.WEIGHTS if id(node) in weights else Role.OTHER
        return replace(
            tensors, tensors=tuple((keys, replace(parts, role=role)) for keys, parts in tensors.tensors)
        )

    flat = flatten(root, leaf, path, _unwrap)
    return Flat([((".".join(map(str, keys)),), parts) for keys, parts in flat.tensors], flat.plain)


# The code -----------------------------------------------------------------------------------------


def _metadata(
    records: Records,
    pickles: _ArchivePickles,
    code: Mapping[bytes, bytes],
    storages: Sequence[StorageRecords],
    attributes: object,
) -> dict[str, object]:
    root_class = _own_class(pickles.root("data.pkl"))
    root_name = f"{root_class.module}.{root_class.name}" if root_class else ""
    metadata: dict[str, object] = {
        "attributes": attributes,
        "code": describe_code(code, root_name),
        "extra": records.describe_directory("extra/"),
    }
    if "bytecode.pkl" in records.by_name:
        # Size and checksum are of the normalised content, without the mangled names of one process.
        byte_code = pickles.root("bytecode.pkl")
        plain = flatten(byte_code, lambda node: None, records.path, _unwrap).plain
        text = without_mangles(json.dumps(plain, sort_keys=True).encode())
        metadata["bytecode"] = describe_content(len(text), crc32(text))

    def is_known(name: str) -> bool:
        # Debug records say only where in a source the code comes from.
        is_code = name.startswith("code/") and name.endswith((".py", ".debug_pkl"))
        is_described = is_code or name in _PICKLES or name.startswith("extra/")
        return is_described or any(storage.holds(name) for storage in storages)

    return metadata | other_records(records.unknown(is_known), metadata)


def _texts(root: object) -> Iterator[str]:
    """Yield the texts in a pickle; old pickles have them as byte strings."""
    for node in nodes(root):
        for part in children(node) or ():
            if isinstance(part, str):
                yield part
            elif isinstance(part, bytes):
                yield part.decode("utf-8", "replace")

"""Exported programs of ``torch.export.save``: a graph as JSON, with weights and constants.

Since PyTorch 2.8 the container is that of ``zip.py``: ``models/<model>.json`` is a program with its graph and
signature; ``data/weights/<model>_weights_config.json`` has type, shape, strides and record of each weight,
and ``data/constants`` likewise; ``data/aotinductor`` has compiled models. From 2.1 to 2.7 it is a plain zip
of ``serialized_exported_program.json`` and files of ``torch.save`` (``serialized_state_dict.pt``). Types,
inputs, texts and the operators that the graph calls are judged; nothing is run.

Source: PyTorch ``torch/export/pt2_archive/_package.py``, ``torch/_export/serde/schema.py``; the old layout,
``torch/export/__init__.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar
from zlib import crc32

from ckpttool.containers.jsontext import DuplicateKeyObject, objects, parse_json
from ckpttool.containers.pickle.pickle_detection import is_pickle
from ckpttool.containers.pickle.pickle_safety import pickle_findings
from ckpttool.containers.zip_reader import (
    LOCAL_MAGIC,
    STORED,
    Archive,
    Member,
    duplicate_record,
    with_version_errors,
)
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, Unsupported, require_at_most
from ckpttool.core.readable import reader_from
from ckpttool.core.report import Finding, error, not_scanned, note, warning
from ckpttool.core.tensor import Extent, Path, Role, Span
from ckpttool.core.text import counted
from ckpttool.formats.content.assembly import checkpoint_of_tree
from ckpttool.formats.content.plain_data import (
    describe_content,
    describe_members,
    describe_operators,
    other_records,
)
from ckpttool.formats.content.tree import Flat, TensorParts
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.torch.dcp_items import Item, open_item
from ckpttool.formats.torch.expressions import judge_expressions, judge_names, judge_structures
from ckpttool.formats.torch.objects import Storage, TorchObjects
from ckpttool.formats.torch.torch_operators import OPERATORS
from ckpttool.formats.torch.zip import Records

_SCALAR_TYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
_VERSION_KEYS = frozenset({"schema_version", "torch_version"})
_SHOWN_CHARACTERS = 200
_TENSORS = frozenset({"as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors"})
_IDENTIFIER = r"(?!__)[A-Za-z_][A-Za-z0-9_]*"
_OPERATOR = re.compile(
    rf"torch\.ops\.(?:(?P<space>{_IDENTIFIER})\.(?P<name>{_IDENTIFIER})\.(?P<overload>{_IDENTIFIER})"
    rf"|higher_order\.(?P<function>{_IDENTIFIER}))"
)
"""An overload of an operator, or a higher-order operator."""
_PACKET_ATTRIBUTES = frozenset({"op", "op_overloads", "overloads"})
"""Attributes of operators in Python, which aren't names of overloads."""
_PYTHON_PREFIXES = ("torch", "_operator", "math")
"""Prefixes of targets that PyTorch looks up in Python modules, attribute by attribute."""
_ARITHMETIC = "abs add and_ floordiv getitem lshift mod mul neg or_ pos pow rshift sub truediv xor"
_COMPARING = "eq ge gt le lt ne not_"
_FUNCTIONS = frozenset(
    {f"_operator.{name}" for name in f"{_ARITHMETIC} {_COMPARING}".split()}
    | {f"math.{name}" for name in ("ceil", "floor", "trunc")}
    | {f"torch.sym_{name}" for name in ("float", "int", "ite", "max", "min", "not", "sqrt", "sum")}
    | {"torch._sym_sqrt", "torch._C._set_grad_enabled", "torch.autograd.grad_mode.set_grad_enabled"}
    | {f"torch.amp.autocast_mode._{name}_autocast" for name in ("enter", "exit")}
    | {"torch.fx.experimental.symbolic_shapes.cast_symbool_to_symint_guardless"}
    | {f"torch._functorch.predispatch._{name}_batch_dim" for name in ("add", "remove")}
    | {f"torch._functorch.predispatch._{name}_dual" for name in ("make", "unpack")}
    | {f"torch._functorch.predispatch._{name}_dual_level" for name in ("enter", "exit")}
    | {
        f"torch._functorch.predispatch._{kind}_{name}_nesting"
        for kind in ("jvp", "vmap")
        for name in ("increment", "decrement")
    }
    | {f"torch._functorch.predispatch.{name}" for name in ("lazy_load_decompositions", "_unwrap_for_grad")}
)
"""Python functions that graphs call besides operators: arithmetic on sizes, and mode switches.

Source: PyTorch ``torch/_export/verifier.py``, ``_SYM_OPS`` of ``torch/_export/serde/serialize.py``.
"""
_FIRST_RECORDS = ("data/weights/", "data/constants/", "data/aotinductor/", "models/", "archive_format")
_OLD_PROGRAM = "serialized_exported_program.json"
"""The program's record in archives of PyTorch 2.1 to 2.7."""
MAX_JSON = 1 << 27
"""Limit in bytes on the JSON of a program."""

_STRIDED = 7
_CONFIG = re.compile(r"data/(?P<kind>weights|constants)/(?P<model>.+?)_(model_)?\w+_config\.json")
_OLD_PARTS = {"serialized_state_dict": (), "serialized_constants": ("constants",)}
_NATIVE = re.compile(r"\.(so|dylib|dll|pyd|o|a|cubin|ptx|fatbin|hsaco|spv|metallib|exe)$")
_NATIVE_MAGIC = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_COMPILED = re.compile(r"(?:^|/)data/aotinductor/", re.IGNORECASE)
"""Records of compiled models: machine code, or sources and flags of a compiler that loading runs."""
_UNPICKLED = re.compile(
    r"(?:[^/]*/)?(?:data/(?:weights|constants|sample_inputs)/(?!.*_config\.json$).+|serialized_\w+\.pt)",
    re.IGNORECASE,
)
"""Records that PyTorch unpickles whatever their first bytes are, unless they are a tensor's values."""
_OBJECT_PREFIXES = ("custom_obj_", "opaque_obj_")
"""Prefixes of the records of constants that aren't tensors."""


class TorchExport(Format):
    """A file that ``torch.export.save`` wrote, or a package of compiled models."""

    name: ClassVar[str] = "torch-export"
    suffixes = (".pt2",)

    def matches(self, probe: Probe) -> bool:
        members = probe.members
        if "archive_format" in members:
            return True
        if len(members) == 1 and min(members).startswith(_FIRST_RECORDS):
            return True  # of a zip whose directory is lost only the first record is known
        if any(name.startswith("models/") and name.endswith(".json") for name in members):
            return any(name.startswith("data/") for name in members)
        return _is_old(probe)

    def open(self, probe: Probe) -> Checkpoint:
        kind = _OldProgramArchive if _is_old(probe) else _ProgramArchive
        program = kind(probe.archive, probe.path)
        program.read()
        return checkpoint_of_tree(
            probe=probe,
            format=self.name,
            variant=program.variant,
            flat=Flat(program.tensors, program.metadata),
            files=(FileEntry(probe.path, probe.source.size),),
            spans=program.spans,
            producer=Producer("pytorch", program.torch_version),
            findings=tuple(program.findings),
            safety=tuple(dict.fromkeys(program.safety)),
        )


def _is_old(probe: Probe) -> bool:
    try:
        return probe.is_zip and _OLD_PROGRAM in probe.archive.names
    except CheckpointError:
        return False


# The graph ------------------------------------------------------------------------------------------


def _size_number(size: Any) -> int:
    """Return the number of a size or stride; ``TypeError`` or ``KeyError`` if it isn't constant."""
    number = size["as_int"]
    if type(number) is not int:
        raise TypeError("a size that is not a number")
    return number


def _input_specs(program: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the specification of each input in a graph's signature."""
    graph = program.get("graph_module")
    signature = graph.get("signature") if isinstance(graph, dict) else None
    specs = signature.get("input_specs") if isinstance(signature, dict) else None
    yield from (spec for spec in specs if isinstance(spec, dict)) if isinstance(specs, list) else ()


def _needed_tensors(program: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the parameters, buffers and constants that a graph takes."""
    fields = {
        "parameter": "parameter_name",
        "buffer": "buffer_name",
        "tensor_constant": "tensor_constant_name",
    }
    for spec in _input_specs(program):
        for kind, field in fields.items():
            tensor = spec.get(kind)
            if isinstance(tensor, dict) and isinstance(tensor.get(field), str):
                yield tensor[field]


def user_inputs(program: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that a caller passes."""
    names = []
    for spec in _input_specs(program):
        user_input = spec.get("user_input")
        argument = user_input.get("arg") if isinstance(user_input, dict) else None
        tensor = argument.get("as_tensor") if isinstance(argument, dict) else None
        if isinstance(tensor, dict) and isinstance(tensor.get("name"), str):
            names.append(tensor["name"])
    return names


def _describe_graph(program: Mapping[str, Any]) -> dict[str, object]:
    """Return a program's operators by kind, and a checksum of the whole program.

    The checksum excludes the writer's version and the origin of each node in its source; the latter is
    removed from ``program``.
    """
    # The metadata of a node is its place in the source of the exporting program, which changes when that is
    # edited or moved, although the graph is the same.
    calls = [node for node in objects(program) if _is_call(node)]
    for node in calls:
        node.pop("metadata", None)
    content = {key: value for key, value in program.items() if key not in _VERSION_KEYS}
    text = json.dumps(content, sort_keys=True).encode()
    operators = describe_operators(
        (str(node["target"]).removeprefix("torch.ops."), _other_arguments(node)) for node in calls
    )
    return {"operators": operators, "graph": describe_content(len(text), crc32(text))}


def _is_call(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("target"), str) and "inputs" in node


def _other_arguments(node: Mapping[str, Any]) -> bytes:
    """Return a node's arguments other than tensors, as JSON."""
    settings = []
    for given in node["inputs"] if isinstance(node["inputs"], list) else ():
        argument = given.get("arg") if isinstance(given, dict) else None
        if not isinstance(argument, dict) or _TENSORS.isdisjoint(argument):
            settings.append(given)
    return json.dumps(settings, sort_keys=True).encode()


def _judge_operators(program: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Judge the targets of all calls in a program, which should be PyTorch's own operators."""
    targets: dict[str, None] = {}
    for node in objects(program):
        if _is_call(node):
            targets[node["target"]] = None
        if isinstance(node.get("as_operator"), str):  # an argument of a call
            targets[node["as_operator"]] = None
    operators: set[str] = set()
    for target in targets:
        if target in _FUNCTIONS:
            continue
        match = _OPERATOR.fullmatch(target)
        if match and match["overload"] not in _PACKET_ATTRIBUTES:
            operators.add(
                f"higher_order::{match['function']}"
                if match["function"]
                else f"{match['space']}::{match['name']}"
            )
        elif target.startswith(_PYTHON_PREFIXES):
            message = (
                f"its graph calls {target[:_SHOWN_CHARACTERS]}, which is a Python function, not an operator"
            )
            yield error("unsafe-op", message, where)
        else:
            operators.add(target)
    yield from OPERATORS.judge(operators, where, "its graph calls")


# The archives ---------------------------------------------------------------------------------------


class _ProgramArchive:
    """An archive in the layout since PyTorch 2.8."""

    variant: str | None = None

    def __init__(self, archive: Archive, path: str) -> None:
        self._archive, self._path = archive, path
        self.tensors: list[tuple[Path, TensorParts]] = []
        self.metadata: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.safety: list[Finding] = []
        self.torch_version: str | None = None
        self._raw: set[str] = set()  # records that are a tensor's values

    def read(self) -> None:
        """Read tensors and graphs, and judge all other records."""
        self._records = Records(self._archive, self._path)
        self.findings += self._records.findings()
        format = self._records.text("archive_format")
        if format is not None and format != "pt2":
            self.findings.append(error("archive-format", f"archive format {format!r}, not pt2"))
        tensor_names = self._read_tensors()
        for name, member in self._records.by_name.items():
            if _is_graph(name):
                model = member.name.rpartition("/")[2].removesuffix(".json")
                self._read_graph(model, member, tensor_names)
        self._list_other_parts()
        others = self._records.unknown(
            lambda name: (
                _is_graph(name)
                or _CONFIG.fullmatch(name) is not None
                or self._records.by_name[name].name in self._raw
            )
        )
        self.metadata |= other_records(others, self.metadata)
        self.safety += self._records.judge_others()
        self.safety += self._judge_members(self._archive.members)

    def spans(self) -> Iterator[Span]:
        """Yield all records with their checksums."""
        return self._records.spans(self.tensors)

    # The graph -------------------------------------------------------------------------------------

    def _json(self, member: Member) -> dict[str, Any]:
        require_at_most(self._path, MAX_JSON, member.size, "{:,} bytes of JSON", member.name)
        document = parse_json(self._path, self._archive.read(member), "program", constants=True)
        if not isinstance(document, dict):
            found = f"JSON of type {type(document).__name__}"
            raise DamagedCheckpoint(self._path, found, where=member.name, code="program-not-object")
        if isinstance(document, DuplicateKeyObject):
            raise document.error(self._path, member.name)
        return document

    def _read_graph(self, model: str, member: Member, tensor_names: set[str]) -> None:
        """Read a graph: its inputs, the tensors that it needs, the operators that it calls."""
        program = self._json(member)
        version = program.get("torch_version")
        self.torch_version = version if isinstance(version, str) else self.torch_version
        for key in ("schema_version", "opset_version"):
            if key in program:
                self.metadata.setdefault(key, program[key])
        self.safety += judge_expressions(program, member.name)
        self.safety += judge_names(program, member.name)
        self.safety += judge_structures(program, member.name)
        self.safety += _judge_operators(program, member.name)
        needs = set(_needed_tensors(program))
        if missing := sorted(needs - tensor_names):
            message = (
                f"the graph of {model} needs {counted(len(missing), 'missing tensor')}, like {missing[0]!r}"
            )
            self.findings.append(error("weight-missing", message, member.name))
        inputs = user_inputs(program)
        description = {"inputs": inputs, "tensors": len(needs), **_describe_graph(program)}
        self.metadata.setdefault("models", {})[model] = description

    # The tensors -----------------------------------------------------------------------------------

    def _read_tensors(self) -> set[str]:
        """Read the tensors in all configurations, and return their names."""
        names: set[str] = set()
        # Each model of a package has its own configurations, which may share records. Names get the model's
        # name as a prefix only if there are several, so that those of a single model are the names of its
        # state dict.
        models = {m["model"] for n in self._records.by_name if (m := _CONFIG.fullmatch(n))}
        for name, member in self._records.by_name.items():
            match = _CONFIG.fullmatch(name)
            if match is None:
                continue
            config = self._json(member).get("config")
            if not isinstance(config, dict):
                found = "no config that maps names to tensors"
                raise DamagedCheckpoint(self._path, found, where=member.name, code="program-malformed")
            directory = f"data/{match['kind']}"
            prefix: Path = ("constants",) if match["kind"] == "constants" else ()
            prefix = (match["model"], *prefix) if len(models) > 1 else prefix
            for fqn, entry in config.items():
                names.add(fqn)
                tensors = self._tensors_of_entry(directory, fqn, entry)
                self.tensors += (((*prefix, fqn, *path), parts) for path, parts in tensors)
        return names

    def _tensors_of_entry(self, directory: str, fqn: str, entry: Any) -> Iterator[tuple[Path, TensorParts]]:
        try:
            name, meta = entry["path_name"], entry["tensor_meta"]
            if name.startswith(_OBJECT_PREFIXES):
                return  # judged with the other records
            member = self._records.by_name.get(f"{directory}/{name}".casefold())
            if member is None:
                found, where = "a tensor's record is missing", f"{directory}/{name}"
                raise DamagedCheckpoint(self._path, found, where=where, code="storage-missing")
            role = Role.OTHER if directory.endswith("constants") else Role.WEIGHTS
            if entry.get("use_pickle"):
                item = self._open_file_inside(member)
                self.safety += (note._replace(where=f"{member.name}: {note.where}") for note in item.safety)
                yield from ((path, replace(parts, role=role)) for path, parts in item.tensors)
            elif meta is not None:
                yield (), replace(self._view(member, meta), role=role)
        except (KeyError, TypeError, AttributeError) as failure:
            found = f"not the entry of a tensor: {failure!r:.100}"
            raise DamagedCheckpoint(self._path, found, where=fqn, code="tensor-damaged") from failure

    def _view(self, member: Member, meta: Mapping[str, Any]) -> TensorParts:
        number = meta["dtype"]
        if type(number) is not int or number not in _SCALAR_TYPES:
            found, expected = f"element type {number!r:.20}", "one that PyTorch numbers"
            raise DamagedCheckpoint(
                self._path, found, expected=expected, where=member.name, code="unknown-dtype"
            )
        element = BY_NAME[_SCALAR_TYPES[number]]
        shape, strides = (tuple(map(_size_number, meta[key])) for key in ("sizes", "strides"))
        if meta.get("layout", _STRIDED) != _STRIDED:
            message = f"a tensor of layout {meta['layout']!r:.20}, whose values are not read"
            self.findings.append(warning("layout-not-read", message, member.name))
            return TensorParts(element, shape)
        self._raw.add(member.name)
        extent = Extent(self._path, member.payload, member.stored) if member.method == STORED else None
        content, start = self._archive.content(member), self._archive.offset(member)
        order = self._records.byteorder
        storage = Storage(member.name, element, member.size, content, start, extent, order)
        objects = TorchObjects(self._path, lambda _: storage)
        return objects.tensor_view(storage, element, _size_number(meta["storage_offset"]), shape, strides)

    def _open_file_inside(self, member: Member) -> Item:
        """Return the content of a record that is a whole file of ``torch.save``."""
        if member.method != STORED:
            raise Unsupported(self._path, "a compressed archive inside the archive", where=member.name)
        content, start = self._archive.content(member), self._archive.offset(member)
        if content.read(start, min(len(LOCAL_MAGIC), member.size), member.name) != LOCAL_MAGIC:
            failure = DamagedCheckpoint(self._path, "not an archive of torch.save", where=member.name)
            failure.safety = pickle_findings(content, start, start + member.size, member.name)
            raise failure
        place = Extent(member.name, member.payload, member.size)
        return open_item(self._archive.source, place, member.name)

    # Safety -----------------------------------------------------------------------------------------

    def _judge_members(self, members: Iterable[Member]) -> Iterator[Finding]:
        """Judge the content of every record, whatever its name."""
        for member in members:
            name = member.name.rpartition("/")[2].casefold()
            # A configuration may declare a record as a tensor's values. PyTorch unpickles it all the same if
            # it has one of these names, so only others are exempt.
            if member.name in self._raw and not (name.endswith(".pt") or name.startswith(_OBJECT_PREFIXES)):
                continue
            try:
                content, start = self._archive.content(member), self._archive.offset(member)
                head = content.read(start, min(4, member.size), member.name)
            except CheckpointError:  # what can't be inflated fails its checksum
                continue
            if _NATIVE.search(member.name) or head.startswith(_NATIVE_MAGIC):
                yield error("native-code", "compiled code, which loading it runs", member.name)
            elif _COMPILED.search(member.name):
                yield error("native-code", "part of a compiled model, which loading it runs", member.name)
            elif head == LOCAL_MAGIC:
                yield from self._judge_archive(member)
            elif head and (
                _UNPICKLED.fullmatch(member.name) or is_pickle(content, start, start + member.size)
            ):
                yield from pickle_findings(content, start, start + member.size, member.name)

    def _judge_archive(self, member: Member) -> Iterator[Finding]:
        try:
            item = self._open_file_inside(member)
        except CheckpointError as failure:
            yield from getattr(failure, "safety", ())
            message = f"an archive inside that can't be read: {failure.reason}"
            yield not_scanned(member.name, message)
            return
        yield from (note._replace(where=f"{member.name}: {note.where}") for note in item.safety)

    def _list_other_parts(self) -> None:
        """List sample inputs, compiled models and extra files in the metadata."""
        names = list(self._records.by_name)
        for key in ("sample_inputs", "aotinductor"):
            parts = [name.partition(f"data/{key}/")[2] for name in names if name.startswith(f"data/{key}/")]
            if parts:
                self.metadata[key] = parts
        extra = [name.partition("/")[2] for name in names if name.startswith("extra/")]
        if extra:
            self.metadata["extra_files"] = extra
        if "aotinductor" in self.metadata and not self.tensors:
            message = "weights of compiled models are not listed"
            self.findings.append(note("compiled-only", message, "data/aotinductor"))


class _OldProgramArchive(_ProgramArchive):
    """An archive in the layout of PyTorch 2.1 to 2.7: files of ``torch.save`` in a plain zip."""

    variant = "old"

    def read(self) -> None:
        members = {member.name: member for member in self._archive.members}
        self.findings += with_version_errors(self._archive.findings)
        if len(members) != len(self._archive.members):
            raise duplicate_record(self._path)
        self.safety += self._judge_members(self._archive.members)
        tensor_names: set[str] = set()
        # Until PyTorch 2.7 each part is a whole file of ``torch.save`` in a record. Early releases call the
        # records ``.json`` although their content is the same; an empty record has no tensors.
        for stem, prefix in _OLD_PARTS.items():
            member = members.get(f"{stem}.pt") or members.get(f"{stem}.json")
            if member is not None and member.size:
                item = self._open_file_inside(member)
                self.findings += (
                    finding._replace(where=f"{member.name}: {finding.where}") for finding in item.findings
                )
                for path, parts in item.tensors:
                    role = Role.OTHER if prefix else Role.WEIGHTS
                    tensor_names.add(str(path[0]) if path else "")
                    self.tensors.append((prefix + path, replace(parts, role=role)))
        program = self._archive.require(members.get(_OLD_PROGRAM), _OLD_PROGRAM)
        self._read_graph("model", program, tensor_names)
        known = {
            _OLD_PROGRAM,
            "version",
            *(f"{stem}{end}" for stem in _OLD_PARTS for end in (".pt", ".json")),
        }
        others = describe_members(self._archive, lambda name: name in known)
        self.metadata |= other_records(others, self.metadata)
        version = members.get("version")
        if version is not None and version.size < 100:
            self.metadata["version"] = self._archive.read(version).decode("ascii", "replace")

    def spans(self) -> Iterator[Span]:
        for member in self._archive.members:
            extent = Extent(self._path, member.payload, member.stored)
            read = reader_from(self._archive.content(member), self._archive.offset(member))
            inflated = None if member.method == STORED else member.size
            yield Span(extent, member.name, read, member.crc32, inflated=inflated)


def _is_graph(name: str) -> bool:
    """Return whether a record is a program: PyTorch loads all in ``models/``, whatever their suffix."""
    return name.startswith("models/") and not name.endswith("/")

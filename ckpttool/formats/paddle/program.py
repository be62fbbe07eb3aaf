"""Programs of Paddle 1 and 2 (``ProgramDesc``): variables, the order of their values, dangerous operators.

A program is a protobuf of blocks; a block declares variables and lists operators. Its parameters are in other
files, without names: the program's saved variables, sorted by name, are in the order of a combined file.

::

    ProgramDesc  1 blocks, 4 version {1 version}
    BlockDesc    1 idx, 2 parent_idx, 3 vars, 4 ops
    VarDesc      1 name, 2 type, 3 persistable
    VarType      1 type, 3 lod_tensor {1 tensor description, 2 lod_level}
    OpDesc       1 inputs, 2 outputs, 3 type, 4 attrs {1 name, 5 s, 10 b}

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/framework.proto``, ``python/paddle/static/io.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpttool.containers.lodtensor import ELEMENTS, parse_description
from ckpttool.containers.protobuf import BYTES, VARINT, Field, fields
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.name_lists import OperatorLists
from ckpttool.core.readable import Readable
from ckpttool.core.report import Finding, error
from ckpttool.formats.content.plain_data import digest
from ckpttool.formats.paddle.operators import MALFORMED, Operator, describe_program, kinds_by_operator

MAX_FIELDS = 2_000_000
"""Limit on protobuf fields read per program; one of 50,000 operators has about as many."""
MAX_OPERATOR_FIELDS = 8_000_000
"""The same for its operators with all their attributes, which are read on demand."""
MAX_VARIABLES = 1_000_000
MAX_NAME = 1 << 16
_SHOWN, _LONGEST = 20, 200

# A program begins with its first block (field 1, of any length), whose idx is 0 and whose parent_idx is -1: a
# negative int32 is a varint of 10 bytes.
_START = re.compile(rb"\x0a[\x80-\xff]{0,9}[\x00-\x7f]\x08\x00\x10\xff{9}\x01")
LOD_TENSOR = 7  # of VarType.Type

FILE_ATTRIBUTES = frozenset({"file_path", "filename", "output_dir"})
"""Attributes of operators that name a file."""
_NOT_COMPUTED = frozenset({"op_callstack", "op_device", "op_namescope", "op_role", "op_role_var"})
"""Attributes that don't change the computation."""
_TRANSPOSING = frozenset({"trans_y", "transpose_Y", "transpose_y"})
OPERATORS = OperatorLists(Path(__file__).with_name("lists"), "paddle")


class ProgramVariable(NamedTuple):
    """Declaration of a variable; ``kind`` is a ``VarType.Type``, the last two are None if it is no tensor."""

    name: str
    kind: int
    is_persistable: bool
    dtype: DType | None
    shape: tuple[int, ...] | None

    @property
    def is_stored(self) -> bool:
        """Whether a combined file has its values."""
        return self.is_persistable and self.kind == LOD_TENSOR


class Program(NamedTuple):
    """A program of either generation.

    Attributes:
        source: Its file.
        variables: By name, persistable or not.
        safety: Findings about its operators.
        read_operators: Reads the file again, and yields its operators.
        version: Of Paddle, as ``major * 10^6 + minor * 10^3 + patch``; 0 if it isn't recorded.
        is_typed: Whether operators have the types of their results, as in Paddle 3; otherwise variables have.
    """

    source: Readable
    variables: dict[str, ProgramVariable]
    safety: tuple[Finding, ...]
    read_operators: Callable[[], Iterable[Operator]]
    version: int = 0
    is_typed: bool = False

    @property
    def stored(self) -> list[ProgramVariable]:
        """The variables whose values are saved, in the order of a combined file: sorted by name."""
        return sorted(
            (variable for variable in self.variables.values() if variable.is_stored),
            key=lambda variable: variable.name,
        )

    def kinds(self) -> Mapping[str, str]:
        """Return the kinds of layers by name of parameter; none if the operators are damaged."""
        try:
            return kinds_by_operator(self.read_operators())
        except MALFORMED:
            return {}

    def computation(self) -> object:
        """Return a summary of the computation."""
        types = {
            one.name: f"{one.kind} {one.dtype and one.dtype.name} {one.shape}"
            for one in self.variables.values()
            if not self.is_typed
        }
        saved = [variable.name for variable in self.variables.values() if variable.is_stored]
        return describe_program(self.source, self.read_operators, saved, types)

    def paths_outside(self) -> tuple[Finding, ...]:
        """Return an error for each variable that names a file outside of the directory."""
        names = [one.name for one in self.variables.values() if one.is_persistable]
        outside = [one for one in names if one.startswith("/") or ".." in one.split("/")]
        message = "loading it reads the variable's file outside of the directory"
        return tuple(error("path-outside", message, name[:_LONGEST]) for name in outside[:_SHOWN])

    @property
    def release(self) -> str | None:
        """Release of Paddle that wrote it, such as ``2.6.2``, if it is recorded."""
        if not self.version:
            return None
        major, rest = divmod(self.version, 1_000_000)
        return f"{major}.{rest // 1000}.{rest % 1000}"


def looks_like_program(head: bytes) -> bool:
    """Return whether bytes begin with the first block of a program."""
    return _START.match(head) is not None


class _ProgramReader:
    """Reads the messages of one program, up to a number of fields, as even an empty one costs time."""

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit
        self._seen = 0

    def fields(self, message: bytes | memoryview, where: str | None) -> Iterator[Field]:
        for field in fields(message, self._path, where):
            self._seen += 1
            if self._seen > self._limit:
                raise LimitExceeded(self._path, f"more than {self._limit:,} fields", where=where)
            yield field

    def variable(self, message: Field) -> ProgramVariable:
        """Return the variable of a ``VarDesc``."""
        name, kind, is_persistable = "", -1, False
        dtype, shape = None, None
        for field in self.fields(message.data, "a variable"):
            if (field.number, field.kind) == (1, BYTES):
                if len(field.data) > MAX_NAME:
                    raise LimitExceeded(
                        self._path, f"a name of {len(field.data):,} bytes", where="a variable"
                    )
                name = field.text
            elif (field.number, field.kind) == (2, BYTES):
                kind, dtype, shape = self._type(field)
            elif (field.number, field.kind) == (3, VARINT):
                is_persistable = bool(field.integer)
        return ProgramVariable(name, kind, is_persistable, dtype, shape)

    def _type(self, message: Field) -> tuple[int, DType | None, tuple[int, ...] | None]:
        kind, dtype, shape = -1, None, None
        for field in self.fields(message.data, "a variable's type"):
            if (field.number, field.kind) == (1, VARINT):
                kind = field.integer
            elif (field.number, field.kind) == (3, BYTES):
                for inner in self.fields(field.data, "a tensor's type"):
                    if (inner.number, inner.kind) == (1, BYTES):
                        number, shape = parse_description(inner.data, self._path, "a tensor's type")
                        dtype = ELEMENTS.get(-1 if number is None else number)
        return kind, dtype, shape

    def kind(self, message: Field) -> str:
        """Return the type of an ``OpDesc``, such as ``matmul_v2``."""
        names = [
            field.text
            for field in self.fields(message.data, "an operator")
            if (field.number, field.kind) == (3, BYTES)
        ]
        return names[-1] if names else ""

    def file(self, message: Field) -> str | None:
        """Return the path in the attributes of an ``OpDesc`` that reads or writes a file."""
        for field in self.fields(message.data, "an operator"):
            if (field.number, field.kind) == (4, BYTES):
                name, text, _ = self._attribute(field)
                if name in FILE_ATTRIBUTES:
                    return text
        return None

    def operator(self, message: Field) -> Operator:
        """Return the operator of an ``OpDesc``."""
        kind, mode, is_transposing = "", "", False
        sides: dict[int, list[tuple[str, tuple[str, ...]]]] = {1: [], 2: []}  # inputs, outputs
        settings: list[bytes] = []
        for field in self.fields(message.data, "an operator"):
            if field.kind != BYTES:
                continue
            if field.number in sides:
                texts = [inner for inner in self.fields(field.data, "a slot") if inner.kind == BYTES]
                slot = next((inner.text for inner in texts if inner.number == 1), "")
                sides[field.number].append((slot, tuple(one.text for one in texts if one.number == 2)))
            elif field.number == 3:
                kind = field.text
            elif field.number == 4:
                name = self._attribute_name(field)
                if name not in _NOT_COMPUTED:
                    settings.append(bytes(field.data))
                if name == "mode":
                    _, mode, _ = self._attribute(field)
                elif name in _TRANSPOSING:
                    _, _, flag = self._attribute(field)
                    is_transposing |= flag
        settings_digest = digest(sorted(settings)).to_bytes(4, "little")
        return Operator(kind, sides[1], sides[2], settings_digest, is_transposing, mode)

    def _attribute_name(self, message: Field) -> str:
        # A fast path, as a program has many attributes: protobuf writes fields in order, so the name (field
        # 1, key 0x0A) is first, and under 128 bytes its length is one byte.
        data = message.data
        if len(data) > 2 and data[0] == 0x0A and data[1] < 0x80:
            return bytes(data[2 : 2 + data[1]]).decode("utf-8", "backslashreplace")
        return self._attribute(message)[0]

    def _attribute(self, message: Field) -> tuple[str, str, bool]:
        """Return the name of an attribute, and its value as a string and as a bool; it has one of them."""
        name, text, flag = "", "", False
        for field in self.fields(message.data, "an attribute"):
            if (field.number, field.kind) == (1, BYTES):
                name = field.text
            elif (field.number, field.kind) == (5, BYTES):
                text = field.text
            elif (field.number, field.kind) == (10, VARINT):
                flag = bool(field.integer)
        return name, text, flag


def read_program(source: Readable, where: str | None = None) -> Program:
    """Read a program.

    Args:
        source: The file.
        where: Its name for errors, if it is a part of a checkpoint.
    """
    reader = _ProgramReader(source.path, MAX_FIELDS)
    variables: dict[str, ProgramVariable] = {}
    kinds: dict[str, str | None] = {}
    version = 0
    for outer in reader.fields(source.read(0, source.size), where):
        if (outer.number, outer.kind) == (1, BYTES):
            for field in reader.fields(outer.data, "a block"):
                if (field.number, field.kind) == (3, BYTES):
                    variable = reader.variable(field)
                    variables.setdefault(variable.name, variable)
                elif (field.number, field.kind) == (4, BYTES):
                    # One finding a kind is enough; a program has thousands of operators of few kinds, and
                    # attributes are parsed only for the first of a dangerous kind.
                    kind = reader.kind(field)
                    if kind not in kinds:
                        kinds[kind] = reader.file(field) if OPERATORS.danger(kind) else None
                if len(variables) > MAX_VARIABLES:
                    raise LimitExceeded(source.path, f"more than {MAX_VARIABLES:,} variables")
        elif (outer.number, outer.kind) == (4, BYTES):
            versions = (field.integer for field in reader.fields(outer.data, "version") if field.number == 1)
            version = next(versions, 0)
        elif outer.number not in (2, 3, 5):
            raise DamagedCheckpoint(source.path, f"field {outer.number}", expected="a program", where=where)
    safety = operator_findings(kinds)
    return Program(source, variables, safety, partial(read_operators, source), version)


def operator_findings(kinds: Mapping[str, str | None]) -> tuple[Finding, ...]:
    """Return safety findings of operators that do more than compute, given the file that each kind names."""
    files = {kind: file for kind, file in kinds.items() if file is not None}
    return tuple(OPERATORS.judge(kinds, "operator", "running it calls", files))


def read_operators(source: Readable) -> Iterator[Operator]:
    """Yield the operators of a program, block after block."""
    reader = _ProgramReader(source.path, MAX_OPERATOR_FIELDS)
    for block in reader.fields(source.read(0, source.size), None):
        if (block.number, block.kind) == (1, BYTES):
            for field in reader.fields(block.data, "a block"):
                if (field.number, field.kind) == (4, BYTES):
                    yield reader.operator(field)

"""Paddle's programs: which variables one has, in which order their values were saved, and what it could run.

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/framework.proto``, ``python/paddle/static/io.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
from ckpttool.formats.paddle.computation import describe_program, program_steps
from ckpttool.formats.paddle.operators import kinds_by_operator, operators_in

MAX_FIELDS = 2_000_000
"""The most fields of all messages that are looked at; a program of 50,000 operators has about as many."""
MAX_VARIABLES = 1_000_000
MAX_NAME = 1 << 16
_SHOWN, _LONGEST = 20, 200

# The first block is number 0, and its parent is -1.
_START = re.compile(rb"\x0a[\x80-\xff]{0,9}[\x00-\x7f]\x08\x00\x10\xff{9}\x01")
LOD_TENSOR, _SELECTED_ROWS = 7, 8

FILE_SETTINGS = frozenset({"file_path", "filename", "output_dir"})
"""Which attributes of operators name a file."""
OPERATORS = OperatorLists(Path(__file__).with_name("lists"), "paddle")


class ProgramVariable(NamedTuple):
    """A variable of a program; ``dtype`` and ``shape`` are None where it is no tensor."""

    name: str
    kind: int
    is_persistable: bool
    is_parameter: bool
    dtype: DType | None
    shape: tuple[int, ...] | None

    @property
    def is_stored(self) -> bool:
        """Return whether its values are saved."""
        return self.is_persistable and self.kind == LOD_TENSOR


class Program(NamedTuple):
    """A program: its variables by name, its version, and what running it could do.

    ``kinds`` reads it once more, for the kinds of layers that take its variables, and ``computation`` for
    what it computes.
    """

    variables: dict[str, ProgramVariable]
    version: int
    operators: int
    safety: tuple[Finding, ...]
    kinds: Callable[[], Mapping[str, str]] = dict
    computation: Callable[[], object] = lambda: None

    @property
    def stored(self) -> list[ProgramVariable]:
        """Return the variables whose values are saved, in the order of a combined file."""
        return sorted(
            (variable for variable in self.variables.values() if variable.is_stored),
            key=lambda variable: variable.name,
        )

    def paths_outside(self) -> tuple[Finding, ...]:
        """Return an error for each variable that names a file outside of the directory."""
        names = [one.name for one in self.variables.values() if one.is_persistable]
        outside = [one for one in names if one.startswith("/") or ".." in one.split("/")]
        message = "loading it reads the variable's file outside of the directory"
        return tuple(error("path-outside", message, name[:_LONGEST]) for name in outside[:_SHOWN])

    @property
    def release(self) -> str | None:
        """Return the release of Paddle that wrote it, where it says so."""
        if not self.version:
            return None
        major, rest = divmod(self.version, 1_000_000)
        return f"{major}.{rest // 1000}.{rest % 1000}"


def looks_like_program(head: bytes) -> bool:
    """Return whether bytes begin like a program."""
    return _START.match(head) is not None


class _ProgramReader:
    """Reads messages of one program, and counts the fields: each costs time, however little it says."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = 0

    def fields(self, message: bytes | memoryview, where: str | None) -> Iterator[Field]:
        for field in fields(message, self._path, where):
            self._seen += 1
            if self._seen > MAX_FIELDS:
                raise LimitExceeded(self._path, f"more than {MAX_FIELDS:,} fields", where=where)
            yield field

    def variable(self, message: Field) -> ProgramVariable:
        """Return the variable that a message declares."""
        name, kind, is_persistable, is_parameter = "", -1, False, False
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
            elif (field.number, field.kind) == (5, VARINT):
                is_parameter = bool(field.integer)
        return ProgramVariable(name, kind, is_persistable, is_parameter, dtype, shape)

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
        """Return the name of an operator's kind."""
        names = [
            field.text
            for field in self.fields(message.data, "an operator")
            if (field.number, field.kind) == (3, BYTES)
        ]
        return names[-1] if names else ""

    def file(self, message: Field) -> str | None:
        """Return the file that an operator's attributes name."""
        for field in self.fields(message.data, "an operator"):
            if (field.number, field.kind) == (4, BYTES):
                name = text = ""
                for inner in self.fields(field.data, "an attribute"):
                    if (inner.number, inner.kind) == (1, BYTES):
                        name = inner.text
                    elif (inner.number, inner.kind) == (5, BYTES):
                        text = inner.text
                if name in FILE_SETTINGS:
                    return text
        return None


def read_program(source: Readable, where: str | None = None) -> Program:
    """Return the program that a file is."""
    reader = _ProgramReader(source.path)
    variables: dict[str, ProgramVariable] = {}
    kinds: dict[str, str | None] = {}
    version = operators = 0
    for outer in reader.fields(source.read(0, source.size), where):
        if (outer.number, outer.kind) == (1, BYTES):
            for field in reader.fields(outer.data, "a block"):
                if (field.number, field.kind) == (3, BYTES):
                    variable = reader.variable(field)
                    variables.setdefault(variable.name, variable)
                elif (field.number, field.kind) == (4, BYTES):
                    operators += 1
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
    stored = [variable.name for variable in variables.values() if variable.is_stored]

    def type_of(name: str) -> str:
        one = variables.get(name)
        return "" if one is None else f"{one.kind} {one.dtype and one.dtype.name} {one.shape}"

    computation = partial(describe_program, source, partial(program_steps, source), stored, type_of)
    safety = operator_findings(kinds)
    return Program(variables, version, operators, safety, partial(_layer_kinds, source), computation)


def operator_findings(kinds: Mapping[str, str | None]) -> tuple[Finding, ...]:
    """Return what running operators would do besides computing, from the file that each kind touches."""
    files = {kind: file for kind, file in kinds.items() if file is not None}
    return tuple(OPERATORS.judge(kinds, "operator", "running it calls", files))


def _layer_kinds(source: Readable) -> Mapping[str, str]:
    """Return the kinds of layers that take parameters; operators that can't be read tell nothing."""
    try:
        return kinds_by_operator(operators_in(source))
    except DamagedCheckpoint:
        return {}

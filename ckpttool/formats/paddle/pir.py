"""Programs of Paddle 3 (PIR, in JSON): their variables, and operators that do more than compute.

::

    {"base_code": {"magic": "pir", ...},
     "program": {"regions": [{"blocks": [{"ops": [OPERATOR, ...]}]}]}}

    OPERATOR    "#" kind, as "<dialect>.<name>", or "p" for a parameter
                "I" inputs, "O" outputs: {"%": number of the value, "TT": its type}
                "A" attributes: {"N": name, "AT": {"#": type, "D": value}}; those of a parameter are a list
                with its name at index 3
                "regions" the branches of an ``if``, the body of a ``while``

Source: PaddlePaddle/Paddle ``paddle/fluid/pir/serialize_deserialize``, ``python/paddle/static/pir_io.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import DamagedCheckpoint, require_at_most
from ckpttool.core.readable import Readable
from ckpttool.formats.paddle.operators import INPUTS, Operator
from ckpttool.formats.paddle.program import (
    FILE_ATTRIBUTES,
    LOD_TENSOR,
    Program,
    ProgramVariable,
    operator_findings,
)

MAX_BYTES = 1 << 26
"""Limit on the bytes of a program; one of 50,000 operators has a third of it."""

_START = re.compile(rb'\s*\{\s*"base_code"\s*:\s*\{[^{}]*"magic"\s*:\s*"pir"')
_PARAMETER = "p"
_DIALECTS = frozenset({"", "0", "1", "2"})
"""Dialects of Paddle: built-in, computing and control-flow operators; users' libraries have other numbers."""

ELEMENTS = {
    f"t_{short}": BY_NAME[name]
    for short, name in {
        "bool": "bool",
        "i8": "int8",
        "ui8": "uint8",
        "i16": "int16",
        "i32": "int32",
        "i64": "int64",
        "f16": "float16",
        "bf16": "bfloat16",
        "f32": "float32",
        "f64": "float64",
        "c64": "complex64",
        "c128": "complex128",
    }.items()
}
"""Types of elements by their names in the JSON."""

_NOT_COMPUTED = frozenset({"op_callstack", "struct_name", "name"})
"""Attributes that don't change the computation."""


def looks_like_pir(head: bytes) -> bool:
    """Return whether bytes begin with the header of a PIR program."""
    return _START.match(head) is not None


def read_pir(source: Readable) -> Program:
    """Read a program."""
    require_at_most(source.path, MAX_BYTES, source.size, "a program of {:,} bytes")
    tree = _parse(source)
    if (key := _doubled_key(tree)) is not None:
        raise DamagedCheckpoint(source.path, f"duplicate key {key!r}", expected="a program")
    variables: dict[str, ProgramVariable] = {}
    kinds: dict[str, str | None] = {}
    operators = 0
    try:
        for operator in _operators(tree["program"]):
            operators += 1
            if operator["#"] == _PARAMETER:
                parameter = _read_parameter(operator)
                variables.setdefault(parameter.name, parameter)
                continue
            # Another library's operator keeps its dialect in its name.
            dialect, _, bare = operator["#"].rpartition(".")
            kind = bare.removesuffix("_") if dialect in _DIALECTS else operator["#"]
            if not kinds.get(kind):
                files = (one["AT"].get("D") for one in operator.get("A", ()) if one["N"] in FILE_ATTRIBUTES)
                kinds[kind] = next((str(file) for file in files), None)
    except (KeyError, IndexError, TypeError, AttributeError) as failure:
        what = f"operator {operators:,} is malformed"
        raise DamagedCheckpoint(source.path, what, expected="a program") from failure

    return Program(
        source, variables, operator_findings(kinds), partial(read_operators, source), is_typed=True
    )


def _parse(source: Readable) -> Any:
    # It is parsed again each time: kept, the objects would take many times the bytes of the file.
    return parse_json(source.path, source.read(0, source.size), "program")


def read_operators(source: Readable) -> Iterator[Operator]:
    """Yield the operators of a program, but for those that declare its parameters."""
    # Values have numbers. An operator "p" gives a parameter one, by which later operators refer to it; these
    # and the program's inputs are named here, others ``%<number>``.
    names: dict[object, str] = {}

    def names_of(values: list[Mapping[str, Any]]) -> tuple[str, ...]:
        return tuple(names.get(value.get("%"), f"%{value.get('%')}") for value in values)

    for operator in _operators(_parse(source)["program"]):
        kind, results = _bare(operator["#"]), _as_list(operator.get("O"))
        if operator["#"] == _PARAMETER:
            names[results[0].get("%")] = _read_parameter(operator).name
            continue
        attributes = {attribute["N"]: attribute["AT"] for attribute in operator["A"]}
        values = {name: value.get("D") for name, value in attributes.items()}
        if kind in INPUTS and results:
            names[results[0].get("%")] = str(values.get("name", ""))
        computed = sorted((name, value) for name, value in attributes.items() if name not in _NOT_COMPUTED)
        yield Operator(
            kind,
            [(None, names_of(_as_list(operator.get("I"))))],
            [(None, names_of(results))],
            json.dumps([computed, [value.get("TT") for value in results]], sort_keys=True).encode(),
            values.get("transpose_y") is True,
            str(values.get("mode", "")),
        )


def _as_list(values: Any) -> list[Mapping[str, Any]]:
    return values if isinstance(values, list) else [] if values is None else [values]


def _doubled_key(tree: Any) -> str | None:
    """Return a key that some object has twice, or None; JSON readers disagree on which value counts."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, DuplicateKeyObject):
            return node.key
        pending += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return None


def _operators(program: Any) -> Iterator[Any]:
    """Yield all operators, including those in branches and loops."""
    pending = list(program["regions"])[::-1]
    while pending:
        for block in pending.pop()["blocks"]:
            for operator in block["ops"]:
                yield operator
                pending += operator.get("regions", ())


def _read_parameter(operator: Any) -> ProgramVariable:
    name, result = operator["A"][3], operator["O"]["TT"]
    if not isinstance(name, str):
        raise TypeError("no name")
    element, lengths = result["D"][0]["#"], result["D"][1]
    if not all(type(length) is int for length in lengths):
        raise TypeError("no shape")
    dtype = ELEMENTS.get(_bare(element))
    return ProgramVariable(name, LOD_TENSOR, True, dtype, tuple(lengths))


def _bare(name: str) -> str:
    """Return a name without its dialect: ``0.t_f32`` is ``t_f32``."""
    return name.partition(".")[2] or name

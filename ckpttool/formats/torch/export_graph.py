"""What the JSON of an exported program says: types, inputs, and what its graph calls.

Source: PyTorch ``torch/_export/serde/schema.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from ckpttool.dtypes import BY_NAME, DType
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.content.digests import described, told_operators
from ckpttool.report import Finding, error, warning
from ckpttool.wire.jsontext import objects

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
_OWN_OPERATORS = frozenset(
    {"aten", "prim", "prims", "higher_order", "quantized_decomposed", "_c10d_functional"}
)
_ABOUT_THE_FILE = frozenset({"schema_version", "torch_version"})
_TENSORS = frozenset({"as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors"})
_TARGET = re.compile(r"(?:torch\.ops\.)?([A-Za-z_]\w*)[.:]+([\w.]+)")


def dtype(path: str, where: str, number: object) -> DType:
    name = _SCALAR_TYPES.get(number) if type(number) is int else None
    if name is None:
        found = f"element type {number!r:.20}"
        raise DamagedCheckpoint(
            path, found, expected="one that PyTorch numbers", where=where, code="unknown-dtype"
        )
    return BY_NAME[name]


def integer(told: Any) -> int:
    """Return a size as a number.

    Raises:
        TypeError: It is an expression, or nothing.
    """
    number = told["as_int"]
    if type(number) is not int:
        raise TypeError("a size that is no number")
    return number


def _specs(program: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what the signature of a graph says of each input."""
    graph = program.get("graph_module")
    signature = graph.get("signature") if isinstance(graph, dict) else None
    specs = signature.get("input_specs") if isinstance(signature, dict) else None
    yield from (spec for spec in specs if isinstance(spec, dict)) if isinstance(specs, list) else ()


def needed(program: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors that a graph needs."""
    fields = {
        "parameter": "parameter_name",
        "buffer": "buffer_name",
        "tensor_constant": "tensor_constant_name",
    }
    for spec in _specs(program):
        for kind, field in fields.items():
            named = spec.get(kind)
            if isinstance(named, dict) and isinstance(named.get(field), str):
                yield named[field]


def user_inputs(program: Mapping[str, Any]) -> list[str]:
    """Return the names of the inputs that a caller gives."""
    found = []
    for spec in _specs(program):
        given = spec.get("user_input")
        argument = given.get("arg") if isinstance(given, dict) else None
        tensor = argument.get("as_tensor") if isinstance(argument, dict) else None
        if isinstance(tensor, dict) and isinstance(tensor.get("name"), str):
            found.append(tensor["name"])
    return found


def told_graph(program: Mapping[str, Any]) -> dict[str, object]:
    """Return what a program computes: its operators by kind, and a checksum of all that it says.

    Who wrote it is left out, and where in a source a node comes from; that is removed from ``program``.
    """
    calls = [node for node in objects(program) if _is_call(node)]
    for node in calls:
        node.pop("metadata", None)
    said = {key: value for key, value in program.items() if key not in _ABOUT_THE_FILE}
    text = json.dumps(said, sort_keys=True).encode()
    operators = told_operators((_kind(node), _settings(node)) for node in calls)
    return {"operators": operators, "graph": described(len(text), crc32(text))}


def _is_call(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("target"), str) and "inputs" in node


def _kind(node: Mapping[str, Any]) -> str:
    return str(node["target"]).removeprefix("torch.ops.")


def _settings(node: Mapping[str, Any]) -> bytes:
    """Return what is set for a node, without the tensors that it takes."""
    inputs = node["inputs"] if isinstance(node["inputs"], list) else ()
    given = [one for one in inputs if not (isinstance(one, dict) and _is_tensor(one.get("arg")))]
    return json.dumps(given, sort_keys=True).encode()


def _is_tensor(argument: object) -> bool:
    return isinstance(argument, dict) and not _TENSORS.isdisjoint(argument)


def judge_operators(program: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield what a graph calls besides PyTorch's own operators, wherever in it a call stands."""
    foreign: dict[str, None] = {}
    for node in objects(program):
        target = node.get("target")
        match = _TARGET.match(target) if isinstance(target, str) else None
        if match and "inputs" in node and match[1] not in ("_operator", "operator", "math", "torch"):
            if match[1] not in _OWN_OPERATORS:
                foreign[match[1]] = None
            elif match[2].split(".")[0] in ("from_file", "save"):
                yield error("unsafe-op", f"its graph calls {target}, which touches files", where)
    if foreign:
        message = (
            f"its graph calls operators of {', '.join(sorted(foreign)[:8])}, which are code of their own"
        )
        yield warning("custom-ops", message, where)

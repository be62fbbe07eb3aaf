"""What the JSON of an exported program says: types, inputs, and what its graph calls.

Source: PyTorch ``torch/_export/serde/schema.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from ckpttool.containers.jsontext import objects
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.report import Finding, error
from ckpttool.formats.content.plain_data import describe_content, describe_operators
from ckpttool.formats.torch.torch_operators import OPERATORS

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
_ABOUT_THE_FILE = frozenset({"schema_version", "torch_version"})
_LONGEST = 200
_TENSORS = frozenset({"as_tensor", "as_tensors", "as_optional_tensor", "as_optional_tensors"})
_IDENTIFIER = r"(?!__)[A-Za-z_][A-Za-z0-9_]*"
_OPERATOR = re.compile(
    rf"torch\.ops\.(?:(?P<space>{_IDENTIFIER})\.(?P<name>{_IDENTIFIER})\.(?P<overload>{_IDENTIFIER})"
    rf"|higher_order\.(?P<function>{_IDENTIFIER}))"
)
"""An overload of an operator, or an operator that takes functions."""
_OF_PACKETS = frozenset({"op", "op_overloads", "overloads"})
"""Methods of operators in Python, which no overload is called."""
_RESOLVED = ("torch", "_operator", "math")
"""What begins like these is looked up in Python's modules, attribute by attribute."""
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
"""What graphs call besides operators: arithmetic on sizes, and switches.

Source: PyTorch ``torch/_export/verifier.py``, ``_SYM_OPS`` of ``torch/_export/serde/serialize.py``.
"""


def scalar_type(path: str, where: str, number: object) -> DType:
    name = _SCALAR_TYPES.get(number) if type(number) is int else None
    if name is None:
        found = f"element type {number!r:.20}"
        raise DamagedCheckpoint(
            path, found, expected="one that PyTorch numbers", where=where, code="unknown-dtype"
        )
    return BY_NAME[name]


def size_number(size: Any) -> int:
    """Return a size as a number."""
    number = size["as_int"]
    if type(number) is not int:
        raise TypeError("a size that is no number")
    return number


def _specs(program: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what the signature of a graph says of each input."""
    graph = program.get("graph_module")
    signature = graph.get("signature") if isinstance(graph, dict) else None
    specs = signature.get("input_specs") if isinstance(signature, dict) else None
    yield from (spec for spec in specs if isinstance(spec, dict)) if isinstance(specs, list) else ()


def needed_tensors(program: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors that a graph needs."""
    fields = {
        "parameter": "parameter_name",
        "buffer": "buffer_name",
        "tensor_constant": "tensor_constant_name",
    }
    for spec in _specs(program):
        for kind, field in fields.items():
            tensor = spec.get(kind)
            if isinstance(tensor, dict) and isinstance(tensor.get(field), str):
                yield tensor[field]


def user_inputs(program: Mapping[str, Any]) -> list[str]:
    """Return the names of the inputs that a caller gives."""
    names = []
    for spec in _specs(program):
        user_input = spec.get("user_input")
        argument = user_input.get("arg") if isinstance(user_input, dict) else None
        tensor = argument.get("as_tensor") if isinstance(argument, dict) else None
        if isinstance(tensor, dict) and isinstance(tensor.get("name"), str):
            names.append(tensor["name"])
    return names


def describe_graph(program: Mapping[str, Any]) -> dict[str, object]:
    """Return what a program computes: its operators by kind, and a checksum of all that it says.

    Who wrote it is left out, and where in a source a node comes from; that is removed from ``program``.
    """
    calls = [node for node in objects(program) if _is_call(node)]
    for node in calls:
        node.pop("metadata", None)
    content = {key: value for key, value in program.items() if key not in _ABOUT_THE_FILE}
    text = json.dumps(content, sort_keys=True).encode()
    operators = describe_operators(
        (str(node["target"]).removeprefix("torch.ops."), _settings(node)) for node in calls
    )
    return {"operators": operators, "graph": describe_content(len(text), crc32(text))}


def _is_call(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("target"), str) and "inputs" in node


def _settings(node: Mapping[str, Any]) -> bytes:
    """Return what is set for a node, without the tensors that it takes."""
    settings = []
    for given in node["inputs"] if isinstance(node["inputs"], list) else ():
        argument = given.get("arg") if isinstance(given, dict) else None
        if not isinstance(argument, dict) or _TENSORS.isdisjoint(argument):
            settings.append(given)
    return json.dumps(settings, sort_keys=True).encode()


def judge_operators(program: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Yield what a graph calls besides PyTorch's own operators, wherever in it a call stands."""
    targets: dict[str, None] = {}
    for node in objects(program):
        if _is_call(node):
            targets[node["target"]] = None
        if isinstance(node.get("as_operator"), str):  # handed to a call
            targets[node["as_operator"]] = None
    operators: set[str] = set()
    for target in targets:
        if target in _FUNCTIONS:
            continue
        match = _OPERATOR.fullmatch(target)
        if match and match["overload"] not in _OF_PACKETS:
            operators.add(
                f"higher_order::{match['function']}"
                if match["function"]
                else f"{match['space']}::{match['name']}"
            )
        elif target.startswith(_RESOLVED):
            message = f"its graph calls {target[:_LONGEST]}, which is a Python function and no operator"
            yield error("unsafe-op", message, where)
        else:
            operators.add(target)
    yield from OPERATORS.judge(operators, where, "its graph calls")

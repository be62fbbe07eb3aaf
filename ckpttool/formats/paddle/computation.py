"""Summary of a Paddle program's computation: the number of operators of each kind, and checksums.

Two saves of one program have the same summary: the source lines and devices of operators are left out, and
intermediate variables, whose names Paddle generates, are numbered instead.

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/framework.proto``,
``paddle/fluid/pir/serialize_deserialize``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from ckpttool.containers.protobuf import BYTES, Field, fields
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import Readable
from ckpttool.core.text import counted
from ckpttool.formats.content.plain_data import describe_content, describe_operators, digest

_NOT_COMPUTED = frozenset({"op_callstack", "op_device", "op_namescope", "op_role", "op_role_var"})
"""Attributes of Paddle 1 and 2 that don't change the computation."""
_PIR_NOT_COMPUTED = frozenset({"op_callstack", "struct_name", "name"})
"""Attributes of Paddle 3 that don't change the computation."""
_PARAMETER = "p"
_NAMING = frozenset({"feed", "data"})
"""Operators that return inputs of the program, under the names that its callers use."""
_SLOT = "\0"
"""Prefix of a slot's name among variables; no variable begins with it."""


class ComputationStep(NamedTuple):
    """An operator: its kind, attributes as bytes, and the names of its input and output variables."""

    kind: str
    settings: bytes
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def describe_program(
    source: Readable,
    steps: Callable[[], Iterable[ComputationStep]],
    saved: Iterable[str],
    type_of: Callable[[str], str] = lambda name: "",
) -> object:
    """Return a summary of a program; if its operators can't be read, the checksum of the file.

    Args:
        source: The program's file.
        steps: Returns its operators.
        saved: Names of the variables whose values are saved; other names are replaced by numbers.
        type_of: Returns the type of a variable by name, for programs whose operators don't have it.
    """
    try:
        return _describe_steps([*steps()], saved, type_of)
    except (CheckpointError, KeyError, IndexError, TypeError, AttributeError):
        return describe_content(source.size, crc32(source.read(0, source.size)))


def _describe_steps(
    steps: list[ComputationStep], saved: Iterable[str], type_of: Callable[[str], str]
) -> dict[str, object]:
    named = {*saved, *(name for step in steps if step.kind in _NAMING for name in step.gives)}
    numbers: dict[str, int] = {}

    def label_of(name: str) -> str:
        if name.startswith(_SLOT):
            return name
        known = f"={name}" if name in named else f"%{numbers.setdefault(name, len(numbers))}"
        return f"{known} {type_of(name)}"

    def wiring_lines() -> Iterator[bytes]:
        for step in steps:
            variables = [*map(label_of, step.takes), "->", *map(label_of, step.gives)]
            yield json.dumps([step.kind, *variables]).encode()

    wiring = digest(wiring_lines())
    return {
        "operators": describe_operators((step.kind, step.settings) for step in steps),
        "wiring": f"<{counted(len(steps), 'operator')}, CRC-32 {wiring:08x}>",
    }


# Programs of Paddle 1 and 2 --------------------------------------------------------------------------


def program_steps(source: Readable) -> Iterator[ComputationStep]:
    """Yield the operators of a program, block after block."""
    path = source.path
    for block in fields(source.read(0, source.size), path):
        if (block.number, block.kind) == (1, BYTES):
            for operator in fields(block.data, path):
                if (operator.number, operator.kind) == (4, BYTES):
                    yield _read_step(operator, path)


def _read_step(operator: Field, path: str) -> ComputationStep:
    kind, settings = "", []
    sides: dict[int, list[str]] = {1: [], 2: []}
    for field in fields(operator.data, path):
        if field.kind != BYTES:
            continue
        if field.number in sides:  # inputs (1) or outputs (2) of a slot
            texts = [inner for inner in fields(field.data, path) if inner.kind == BYTES]
            slot = next((inner.text for inner in texts if inner.number == 1), "")
            sides[field.number] += f"{_SLOT}{slot}", *(inner.text for inner in texts if inner.number == 2)
        elif field.number == 3:
            kind = field.text
        elif field.number == 4 and _attribute_name(field, path) not in _NOT_COMPUTED:
            settings.append(bytes(field.data))
    settings_digest = digest(sorted(settings)).to_bytes(4, "little")
    return ComputationStep(kind, settings_digest, tuple(sides[1]), tuple(sides[2]))


def _attribute_name(attribute: Field, path: str) -> str:
    # A fast path, as a program has many attributes: protobuf writes fields in order, so the name (field 1,
    # key 0x0A) is first, and under 128 bytes its length is one byte.
    data = attribute.data
    if len(data) > 2 and data[0] == 0x0A and data[1] < 0x80:
        return bytes(data[2 : 2 + data[1]]).decode("utf-8", "backslashreplace")
    return next((field.text for field in fields(data, path) if (field.number, field.kind) == (1, BYTES)), "")


# Programs of Paddle 3 --------------------------------------------------------------------------------


def pir_steps(operators: Iterable[Any]) -> Iterator[ComputationStep]:
    """Yield the operators of a program in JSON; parameters and inputs by name, other values by number."""
    names: dict[object, str] = {}
    for operator in operators:
        kind = str(operator["#"]).partition(".")[2] or str(operator["#"])
        gives = [value.get("%") for value in _as_list(operator.get("O"))]
        if operator["#"] == _PARAMETER:
            names[gives[0]] = str(operator["A"][3])
            continue
        attributes = {setting["N"]: setting["AT"] for setting in _as_list(operator.get("A"))}
        if kind in _NAMING and gives:
            names[gives[0]] = str(attributes.get("name", {}).get("D", ""))
        settings = {name: value for name, value in attributes.items() if name not in _PIR_NOT_COMPUTED}
        types = [value.get("TT") for value in _as_list(operator.get("O"))]
        text = json.dumps([sorted(settings.items()), types], sort_keys=True).encode()
        takes = [value.get("%") for value in _as_list(operator.get("I"))]
        yield ComputationStep(kind, text, _value_names(takes, names), _value_names(gives, names))


def _as_list(values: Any) -> list[Mapping[str, Any]]:
    return values if isinstance(values, list) else [] if values is None else [values]


def _value_names(numbers: list[Any], names: Mapping[object, str]) -> tuple[str, ...]:
    return tuple(names.get(number, f"%{number}") for number in numbers)

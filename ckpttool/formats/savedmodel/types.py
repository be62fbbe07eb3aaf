"""TensorFlow's element types and shapes, as graphs spell them.

Source: tensorflow/tensorflow ``core/framework/types.proto``, ``tensor_shape.proto``.
"""

from __future__ import annotations

from ckpttool.formats.savedmodel.walk import Message, signed

TYPES = (
    *("unknown", "float32", "float64", "int32", "uint8", "int16", "int8", "string", "complex64", "int64"),
    *("bool", "qint8", "quint8", "qint32", "bfloat16", "qint16", "quint16", "uint16", "complex128"),
    *("float16", "resource", "variant", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "int4", "uint4", "int2", "uint2"),
    "float4_e2m1fn",
)
_REF = 100  # added to the number of a type that stands for a reference

Shape = list[int | None] | None


def type_name(number: int) -> str:
    """Return the name of a TensorFlow type; what nobody knows is spelled by its number."""
    is_reference, bare = number > _REF, number % _REF if number < 2 * _REF else number
    name = TYPES[bare] if bare < len(TYPES) else f"DT_{number}"
    return f"{name}_ref" if is_reference and bare < len(TYPES) else name


def read_shape(message: Message) -> Shape:
    """Return a shape, with None for a length that is not known; None where not even the rank is."""
    shape: list[int | None] = []
    for number, value, part in message.fields():
        if number == 2:
            size = next((signed(length) for at, length, _ in part.fields() if at == 1), 0)
            shape.append(None if size < 0 else size)
        elif number == 3 and value:
            return None
    return shape

"""Messages that are written: as the documentation spells them, and as they are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.protobuf import (
    bytes_field,
    encoded_varint,
    fields,
    fixed32_field,
    number_field,
    text_field,
    varint,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number_field(1, 150), "08 96 01"),  # the documentation's own example
        (text_field(2, "testing"), "12 07 74 65 73 74 69 6e 67"),
        (number_field(1, 0), ""),
        (text_field(1, ""), ""),
        (bytes_field(2, b""), "12 00"),
        (number_field(1, -1), "08 ff ff ff ff ff ff ff ff ff 01"),
        (fixed32_field(6, 0xA282EAD8), "35 d8 ea 82 a2"),
        (number_field(16, 1), "80 01 01"),
    ],
)
def test_fields(written: bytes, expected: str) -> None:
    assert written.hex(" ") == expected


@given(st.integers(0, (1 << 64) - 1))
def test_numbers_come_back(number: int) -> None:
    data = encoded_varint(number)
    assert varint(data, 0) == (number, len(data))


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 28), st.one_of(st.binary(), st.integers(-(1 << 63), (1 << 63) - 1)))
    )
)
def test_messages_come_back(parts: list[tuple[int, bytes | int]]) -> None:
    kept = [(number, value) for number, value in parts if value != 0]
    message = b"".join(
        bytes_field(number, value) if isinstance(value, bytes) else number_field(number, value)
        for number, value in parts
    )
    found = [
        (field.number, bytes(field.data) if isinstance(value, bytes) else field.signed)
        for field, (_, value) in zip(fields(message, "m"), kept, strict=True)
    ]
    assert found == kept

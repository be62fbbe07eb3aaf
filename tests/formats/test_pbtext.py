"""The text form of Protocol Buffers, as SavedModels may be written in it, becomes the binary one."""

from __future__ import annotations

import pytest

from ckpttool import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.savedmodel.pbtext import encode
from tests.formats import savedmodel_messages as pb

SCHEMA = {"M": {"n": (1, "integer"), "s": (2, "string"), "m": (3, "M"), "t": (4, "type")}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n: 5", pb.number(1, 5)),
        ("n: -1", pb.number(1, (1 << 64) - 1)),
        ("n: [1, 2] # comment", pb.number(1, 1) + pb.number(1, 2)),
        ("n: 0x1F, n: 010;", pb.number(1, 31) + pb.number(1, 8)),
        (
            f"n: 0x{'0' * 60}5, n: 0{'0' * 60}7, n: 18446744073709551615",
            b"".join(map(pb.number, [1] * 3, [5, 7, (1 << 64) - 1])),
        ),
        ("n: 0b11 n: 1_0", pb.number(1, 3) + pb.number(1, 10)),
        ("n: true", pb.number(1, 1)),
        (r"""s: "a\n" 'b\x41\101\"' """, pb.part(2, 'a\nbAA"')),
        ("s: '\\u00e9'", pb.part(2, "é")),
        ("m { n: 1 }", pb.part(3, pb.number(1, 1))),
        ("m: < n: 1 >", pb.part(3, pb.number(1, 1))),
        ("m: [{ n: 1 }, { m {} }]", pb.part(3, pb.number(1, 1)) + pb.part(3, pb.part(3, b""))),
        ("t: DT_X", pb.number(4, 7)),
        ("unknown: 1.5e-3 other { n: 1 [a.b/c]: { x: inf } } n: 2", pb.number(1, 2)),
        ("", b""),
    ],
)
def test_text_becomes_binary(text: str, expected: bytes) -> None:
    assert encode("m", text.encode(), SCHEMA, "M", {"DT_X": 7}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "}",
        "m {",
        "n:",
        "n: x",
        "n: 99999999999999999999999",
        f"n: {10**40}",
        "n: 0x1ffffffffffffffff",
        "n: 09",
        ": 1",
        "n: [",
        "s: 'a",
        "[a",
        "\0",
        "m: 5",
        "s: 5",
        'n: "a"',
        "m { n: 1 >",
    ],
)
def test_text_that_is_none_is_damaged(text: str) -> None:
    with pytest.raises(DamagedCheckpoint):
        encode("m", text.encode(), SCHEMA, "M", {})


def test_deep_text_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        encode("m", b"m {" * 100_000, SCHEMA, "M", {})
    with pytest.raises(LimitExceeded):
        encode("m", b"m: [{" * 100_000, SCHEMA, "M", {})

"""What describes a value stands for all of it: two values that differ are never told alike."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import functools
import pickle
import sys
import uuid
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool import LimitExceeded, open_checkpoint
from ckpttool.formats.content import plain_data
from ckpttool.formats.content.plain_data import KeyText, PlainDataRenderer
from ckpttool.formats.content.tree import flatten
from tests.support.containers import pickles_in
from tests.support.limits import lower_limits


class Odd:
    """An object whose parts lie where pickle lets them lie."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.parts: tuple[Any, ...] = (None, None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        state, *more = self.parts
        return (Odd, self.args, state, *(None if part is None else iter(part) for part in more))


def odd(*args: object, state: object = None, items: object = None, pairs: object = None) -> Odd:
    made = Odd(*args)
    made.parts = state, items, pairs
    return made


def plain_form(value: object, protocol: int = 2) -> object:
    (found,) = pickles_in(pickle.dumps(value, protocol)).pickles
    return flatten(found.root, lambda node: None, "some.pkl").plain


def crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


UTC, EAST = datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=9))
DAY = datetime.datetime(2026, 1, 2)


def test_what_differs_is_told_apart() -> None:
    pairs = [
        (b"x" * 1000, b"x" * 999 + b"y"),
        (b"x" * 100_000, b"x" * 99_999 + b"y"),
        (b"\xff" * 100_000, b"\xff" * 99_999 + b"\xfe"),
        (bytearray(b"x" * 100), bytearray(b"x" * 99 + b"y")),
        ("x" * 5000, "x" * 4999 + "y"),
        ("x" * 100_000, "x" * 99_999 + "y"),
        (1 << 5000, (1 << 5000) + 1),
        (-(1 << 5000), 1 << 5000),
        (DAY, DAY + datetime.timedelta(microseconds=1)),
        (DAY.replace(tzinfo=UTC), DAY.replace(tzinfo=EAST)),
        (1 + 2j, 1 + 3j),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (PurePosixPath("a", "b" * 300), PurePosixPath("a", "b" * 299 + "c")),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (array.array("d", [1.0]), array.array("d", [2.0])),
        (functools.partial(sorted, [1, [2, {"a": 3}]]), functools.partial(sorted, [1, [2, {"a": 4}]])),
        (functools.partial(sorted, key=1), functools.partial(sorted, key=2)),
        ({(1, (2, 3)): 0}, {(1, (2, 4)): 0}),
        ({tuple(range(20)): 0}, {(*range(19), 20): 0}),
        ({b"x" * 100: 0}, {b"x" * 99 + b"y": 0}),
        (odd(1), odd(2)),
        (odd([1, {"a": [2]}]), odd([1, {"a": [3]}])),
        (odd(*range(500)), odd(*range(499), 500)),
        (odd(1, state={"b": 1}), odd(2, state={"b": 1})),
        (odd(state=(1, [2])), odd(state=(1, [3]))),
        (odd(state=({"a": 1}, {"b": 2})), odd(state=({"a": 1}, {"b": 3}))),
        (odd(state=(5, {"b": 2})), odd(state=(6, {"b": 2}))),
        (odd(state={"0": 1}, items=[2]), odd(state={"0": 1}, items=[3])),
        (odd(state={0: 1}, items=[2]), odd(state={0: 3}, items=[2])),
        (odd(state={"a": 1}, pairs=[("a", 2)]), odd(state={"a": 1}, pairs=[("a", 3)])),
        (odd(state={"a": 1}, pairs=[("a", 2)]), odd(state={"a": 3}, pairs=[("a", 2)])),
        (np.array([["a", 1]], object), np.array(["a", 1], object)),
    ]
    for protocol in [2, 4]:
        for one, other in pairs:
            assert plain_form(one, protocol) == plain_form(one, protocol), (one, other)
            assert plain_form(one, protocol) != plain_form(other, protocol), (one, other)


STAMPS = st.binary(min_size=0, max_size=600)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(0, 3), st.integers(0, 3))
PLAIN = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | STAMPS | st.datetimes() | st.fractions(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN, PLAIN)
@example({1: 2, "1": 3}, {1: 4, "1": 3})
@example({1: 2, "1": 3, "[1]": 4}, {1: 5, "1": 3, "[1]": 4})
def test_equal_descriptions_mean_equal_values(one: object, other: object) -> None:
    ours, theirs = plain_form({"v": one}), plain_form({"v": other})
    if one == other:
        assert ours == theirs
    else:
        assert ours != theirs or typed(ours) != typed(theirs)


def typed(tree: Any) -> Any:
    """Return a tree with the keys that are no texts told from those that are."""
    if isinstance(tree, dict):
        return {(type(key), str(key)): typed(form) for key, form in tree.items()}
    return [typed(form) for form in tree] if isinstance(tree, list) else tree


def test_bytes_have_the_checksum_of_all_of_them() -> None:
    for size in [17, 1000, 100_000]:
        for protocol in range(6):
            data = bytes(range(256)) * (size // 256 + 1)
            data = data[:size]
            assert plain_form(data, protocol) == f"<{size:,} bytes, CRC-32 {crc(data)}>", size


def test_few_bytes_are_shown() -> None:
    assert plain_form(b"\0\1") == "<2 bytes: 00 01>"
    # Year in two bytes, month, day, hour, minute, second, microsecond in three.
    assert plain_form(DAY) == "datetime.datetime(<10 bytes: 07 ea 01 02 00 00 00 00 00 00>)"


def test_long_texts_begin_and_are_summed() -> None:
    text = "ä" * 5000
    assert plain_form(text) == f"{'ä' * 4096}… (5,000 characters, CRC-32 {crc(text.encode())})"
    text *= 20
    assert plain_form(text) == f"<text of 200,000 bytes, CRC-32 {crc(text.encode())}>"


def test_keys_that_look_alike() -> None:
    found = plain_form({"1": 3, 1: 2, "[1]": 4, 2: 5})
    assert isinstance(found, dict)
    assert found == {"1": 3, "[[1]]": 2, "[1]": 4, "2": 5}
    assert {key: type(key) for key in found} == {"1": str, "[[1]]": KeyText, "[1]": str, "2": KeyText}


def test_parts_that_have_no_keys_take_no_others_place() -> None:
    found = plain_form(odd(7, state={"<args>": 1}))
    assert found == {"<class>": f"{__name__}.Odd", "<args>": 1, "<<args>>": [7]}


@pytest.mark.framework
def test_tensors_in_arguments_are_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    wrapped = functools.partial(sorted, torch.arange(3.0), reverse=True)
    torch.save({"f": wrapped}, tmp_path / "some.pth")
    with open_checkpoint(tmp_path / "some.pth") as checkpoint:
        (tensor,) = checkpoint.tensors
        assert tensor.tobytes() == np.arange(3, dtype="<f4").tobytes()
        assert tensor.path[0] == "f"


# Bounds ---------------------------------------------------------------------------------------------


def test_what_is_shared_is_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    real = plain_data.describe_bytes

    def counted(data: bytes) -> str:
        summed.append(len(data))
        return real(data)

    monkeypatch.setattr(plain_data, "describe_bytes", counted)
    shared = b"x" * 60_000
    found = plain_form([shared] * 1000 + [{}])
    assert isinstance(found, list)
    assert len(found) == 1001
    assert summed == [60_000]


def test_a_budget_for_what_is_read_from_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plain_data, "MAX_SUMMED", 150_000)
    path = tmp_path / "some.pkl"
    path.write_bytes(pickle.dumps({"a": b"x" * 100_000, "b": b"y" * 100_000, "c": "z" * 100_000}, 4))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata == {
            "a": f"<100,000 bytes, CRC-32 {crc(b'x' * 100_000)}>",
            "b": "<100,000 bytes of data>",
            "c": "<100,000 bytes of text>",
        }


def test_a_budget_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MAX_WORDS", 100)
    assert plain_form({tuple(range(1000)): 0}) == {"tuple(…)": 0}
    assert plain_form([odd(*range(20)) for _ in range(10)])[-1] == f"{__name__}.Odd(…)"  # type: ignore[index]


def test_an_object_made_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[object] = []
    inner.append(inner)
    assert plain_form(odd(inner)) == {"<class>": f"{__name__}.Odd", "<args>": [["<a cycle>"]]}
    monkeypatch.setattr(plain_data, "MAX_WORDS", 1000)
    assert PlainDataRenderer().render(inner) == "list(…)"


def test_references_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, repeats=1000)
    level: object = odd(1)
    for _ in range(200):
        level = odd((level, level))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        data = pickle.dumps(level, 2)
    finally:
        sys.setrecursionlimit(limit)
    (found,) = pickles_in(data).pickles
    with pytest.raises(LimitExceeded):
        flatten(found.root, lambda node: None, "some.pkl")


def test_many_keys_that_look_alike_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MAX_WORDS", 0)  # of a tuple only the kind is told then
    found = plain_form({(number, "x"): number for number in range(100)})
    assert isinstance(found, dict)
    assert list(found.values()) == list(range(100))
    assert max(map(len, found)) < 50

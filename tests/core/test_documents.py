"""Documents of records, and records that are read back from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from typing import Any, NamedTuple

import pytest

from ckpttool.core.result import document_of, record_of


class Colour(str, Enum):
    RED = "red"


class Inner(NamedTuple):
    name: str
    nbytes: int = 0


@dataclass(frozen=True)
class Outer:
    path: str
    colours: tuple[Colour, ...] = ()
    inner: Inner | None = None
    others: tuple[Inner, ...] = ()
    share: float = 0.5
    is_there: bool = True
    facts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Own:
    number: int

    def document(self) -> dict[str, Any]:
        return {"own": self.number}


WHOLE = Outer("a", (Colour.RED,), Inner("b", 7), (Inner("c"),))


def test_a_record_is_its_fields() -> None:
    assert document_of(WHOLE) == {
        "path": "a",
        "colours": ["red"],
        "inner": {"name": "b", "bytes": 7},
        "others": [{"name": "c", "bytes": 0}],
        "share": 0.5,
        "is_there": True,
        "facts": {},
    }
    assert type(document_of(WHOLE)["colours"][0]) is str


def test_keys_have_an_order_and_attributes_other_names() -> None:
    names = {"there": "is_there", "size": "inner.nbytes"}
    document = document_of(WHOLE, "there", "size", "path", names=names)
    assert [*document.items()] == [("there", True), ("size", 7), ("path", "a")]
    assert document_of(Outer("a"), "size", names=names) == {"size": None}
    assert document_of(Inner("b"), names={"called": "name"}) == {"called": "b", "bytes": 0}


def test_an_optional_key_is_left_out_if_there_is_nothing() -> None:
    optional = ("inner", "others", "facts", "share")
    assert document_of(Outer("a", share=0.0), "path", optional=optional) == {"path": "a", "share": 0.0}
    assert [*document_of(WHOLE, "path", optional=optional)] == ["path", "inner", "others", "share"]


class Values(NamedTuple):
    values: Any


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (1 + 2j, [1.0, 2.0]),
        (date(2027, 1, 1), "2027-01-01"),
        (Own(3), {"own": 3}),
        ([Own(3), (1, None)], [{"own": 3}, [1, None]]),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_values(value: Any, told: Any) -> None:
    assert document_of(Values(value)) == {"values": told}


@dataclass(frozen=True)
class Read:
    path: str
    nbytes: int
    colour: Colour | None = None
    inner: Inner | None = None
    others: tuple[Inner, ...] = ()
    names: tuple[str, ...] = ()


READ = Read("a", 3, Colour.RED, Inner("b", 7), (Inner("c"), Inner("d", 2)), ("x",))


@pytest.mark.parametrize("record", [READ, Read("a", 3)])
def test_a_record_is_read_back(record: Read) -> None:
    assert record_of(Read, {**document_of(record), "more": 1}) == record


def test_a_field_that_is_missing_has_its_default() -> None:
    assert record_of(Read, {"path": "a", "bytes": 3}) == Read("a", 3)


@pytest.mark.parametrize(
    "change",
    [
        {"path": 1},
        {"path": None},
        {"path": {}},
        {"bytes": "3"},
        {"bytes": True},
        {"colour": "blue"},
        {"inner": "b"},
        {"inner": {"bytes": 7}},
        {"others": {"name": "c"}},
        {"names": "x"},
        {"names": [None]},
    ],
    ids=str,
)
def test_what_is_no_document_of_a_record(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        record_of(Read, {**document_of(READ), **change})

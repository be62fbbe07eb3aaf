"""JUnit files: whole ones, valid by the schema of Jenkins, whatever the names in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema

from ckpttool import AccessDenied, Status, Verification
from ckpttool.core.report import error, note
from tests.support.golden import Golden
from tests.support.rendering import escaped, report_of

Verified = Callable[..., Verification]
junit = partial(report_of, "junit")
SCHEMA = Path(__file__).parents[2] / "schemas" / "junit-10.xsd"


@pytest.fixture(scope="module")
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(str(SCHEMA))


def test_whole_ones(
    golden: Golden, verified: Verified, several: list[Verification], schema: xmlschema.XMLSchema
) -> None:
    unread = [AccessDenied("run/locked.pth", "permission denied")]
    apart = [verified("m.pth", error("nan", "3 NaN", "w")), verified("n.pth", note("old", "an old one"))]
    reports = {
        "no checkpoint": junit(),
        "one of each verdict": junit(several, unread, seconds={"run/nan.pth": 1.5}),
        "findings of no check": junit(apart),
        "warnings of what passed": junit([replace(several[0], findings=several[1].findings[1:])]),
    }
    golden(reports)
    for report in [*reports.values()][1:]:
        schema.validate(report)


def test_many_findings_are_cut_and_counted(verified: Verified) -> None:
    found = [error("missing-key", "not there", f"k{at}")._replace(check="load") for at in range(107)]
    (failure,) = cases(junit([verified("m.pth", *found, load=Status.FAILED)]))["load"]
    assert failure.text is not None
    assert failure.text.split("\n")[-2:] == [
        "error missing-key [k99]: not there",
        "… and 7 more findings (--json has them all)",
    ]


def test_hostile_names(verified: Verified, hostile_names: list[str], schema: xmlschema.XMLSchema) -> None:
    for hostile in hostile_names:
        found = error("nan", hostile, hostile)._replace(check="values")
        text = junit([verified(hostile, found, values=Status.FAILED)], [AccessDenied(hostile, hostile)])
        schema.validate(text)
        assert all(line.isprintable() for line in text.split("\n"))
        (failure,) = cases(text)["values"]
        assert failure.text == f"error nan [{escaped(hostile)}]: {escaped(hostile)}"
        text.encode("utf-8")


def test_endless_names_are_cut(verified: Verified, endless: str, schema: xmlschema.XMLSchema) -> None:
    found = error("nan", endless, endless)._replace(check="values")
    text = junit([verified(endless, found, values=Status.FAILED)], [AccessDenied(endless, endless)])
    schema.validate(text)
    assert len(text) < 200_000


def cases(text: str) -> dict[str, ElementTree.Element]:
    """Return the cases of a report by name."""
    return {case.get("name", ""): case for case in ElementTree.fromstring(text).iter("testcase")}

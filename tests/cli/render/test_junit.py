"""JUnit files: whole ones, valid by the schema of Jenkins, whatever the names in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import xmlschema

from ckpttool import AccessDenied, Status, Verification
from ckpttool.core.report import error, note
from tests.support.rendering import escaped, report_of

Verified = Callable[..., Verification]
junit = partial(report_of, "junit")
SCHEMA = Path(__file__).parents[2] / "schemas" / "junit-10.xsd"


@pytest.fixture(scope="module")
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(str(SCHEMA))


def test_no_checkpoint() -> None:
    assert junit() == (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        '<testsuites name="ckpttool verify" tests="0" failures="0" errors="0" time="0.000" />\n'
    )


def test_one_of_each_verdict(several: list[Verification], schema: xmlschema.XMLSchema) -> None:
    text = junit(several, [AccessDenied("run/locked.pth", "permission denied")], seconds={"run/nan.pth": 1.5})
    schema.validate(text)
    assert text == (
        """\
<?xml version="1.0" encoding="utf-8"?>
<testsuites name="ckpttool verify" tests="18" failures="2" errors="2" time="1.500">
  <testsuite name="run/good.pth" tests="3" failures="0" errors="0" skipped="0" time="0.000">
    <testcase classname="run/good.pth" name="structure" time="0.000" />
    <testcase classname="run/good.pth" name="values" time="0.000" />
    <testcase classname="run/good.pth" name="safety" time="0.000" />
  </testsuite>
  <testsuite name="run/nan.pth" tests="3" failures="1" errors="0" skipped="0" time="1.500">
    <testcase classname="run/nan.pth" name="structure" time="0.000" />
    <testcase classname="run/nan.pth" name="values" time="0.000">
      <failure message="NAN (and 1 more)">NAN
warning infinity [fc.bias]: 1 Inf in 2 values</failure>
    </testcase>
    <testcase classname="run/nan.pth" name="safety" time="0.000" />
  </testsuite>
  <testsuite name="run/evil.pth" tests="3" failures="1" errors="0" skipped="0" time="0.000">
    <testcase classname="run/evil.pth" name="structure" time="0.000" />
    <testcase classname="run/evil.pth" name="values" time="0.000" />
    <testcase classname="run/evil.pth" name="safety" time="0.000">
      <failure message="IMPORT">IMPORT</failure>
    </testcase>
  </testsuite>
  <testsuite name="run/idle.pth" tests="5" failures="0" errors="1" skipped="1" time="0.000">
    <testcase classname="run/idle.pth" name="structure" time="0.000" />
    <testcase classname="run/idle.pth" name="values" time="0.000" />
    <testcase classname="run/idle.pth" name="safety" time="0.000" />
    <testcase classname="run/idle.pth" name="load" time="0.000">
      <skipped message="not asked for" />
    </testcase>
    <testcase classname="run/idle.pth" name="predict" time="0.000">
      <error message="not done: not asked for">error not-predicted: no --model was given</error>
    </testcase>
  </testsuite>
  <testsuite name="run/known.pth" tests="3" failures="0" errors="0" skipped="0" time="0.000">
    <testcase classname="run/known.pth" name="structure" time="0.000" />
    <testcase classname="run/known.pth" name="values" time="0.000">
      <system-out>error nan [head.bias]: 1 NaN in 2 values (ignored: a mask)</system-out>
    </testcase>
    <testcase classname="run/known.pth" name="safety" time="0.000" />
  </testsuite>
  <testsuite name="run/locked.pth" tests="1" failures="0" errors="1" skipped="0" time="0.000">
    <testcase classname="run/locked.pth" name="open" time="0.000">
      <error message="permission denied">error access-denied: run/locked.pth: permission denied</error>
    </testcase>
  </testsuite>
</testsuites>
""".replace("NAN", "error nan [fc.weight]: 3 NaN in 20 values").replace(
            "IMPORT", "error unsafe-import [data.pkl]: it names os.system"
        )
    )


@pytest.mark.parametrize(
    ("finding", "told"),
    [
        (error("nan", "3 NaN", "w"), {"outcome": "failure", "text": "error nan [w]: 3 NaN"}),
        (note("old", "an old one"), {"outcome": "system-out", "text": "note old: an old one"}),
    ],
)
def test_what_belongs_to_no_check_is_not_lost(verified: Verified, finding: Any, told: dict[str, str]) -> None:
    case = cases(junit([verified("m.pth", finding)]))["other"]
    assert {"outcome": case[0].tag, "text": case[0].text} == told


def test_warnings_of_what_passed_stand_aside(several: list[Verification]) -> None:
    warned = replace(several[0], findings=several[1].findings[1:])
    (aside,) = cases(junit([warned]))["values"]
    assert (aside.tag, aside.text) == ("system-out", "warning infinity [fc.bias]: 1 Inf in 2 values")


def test_many_findings_are_cut_and_counted(verified: Verified) -> None:
    found = [error("missing-key", "not there", f"k{at}")._replace(check="load") for at in range(107)]
    (failure,) = cases(junit([verified("m.pth", *found, load=Status.FAILED)]))["load"]
    assert failure.text is not None
    assert failure.text.split("\n")[-2:] == [
        "error missing-key [k99]: not there",
        "… and 7 more findings (--json has them all)",
    ]


def test_hostile_names(verified: Verified, hostile: str, schema: xmlschema.XMLSchema) -> None:
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

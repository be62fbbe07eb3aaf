"""SARIF logs: valid by the published schema, stable from run to run, and such as GitHub takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ckpttool import AccessDenied, Verification
from ckpttool.core.report import error, note
from tests.support.golden import Golden
from tests.support.rendering import escaped, limit_results, report_of

Verified = Callable[..., Verification]
sarif = partial(report_of, "sarif")
PUBLISHED = Path(__file__).parents[2] / "schemas" / "sarif-schema-2.1.0.json"


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    formats = jsonschema.FormatChecker()
    assert {"uri", "uri-reference"} <= formats.checkers.keys()
    return jsonschema.Draft7Validator(json.loads(PUBLISHED.read_text("utf-8")), format_checker=formats)


class About(dict[str, str]):
    """Metadata of a package: a version, and its links."""

    def __init__(self, *links: str) -> None:
        super().__init__(Version="1.2.3")
        self._links = links

    def get_all(self, key: str) -> tuple[str, ...] | None:
        assert key == "Project-URL"
        return self._links or None


def run_of(text: str) -> dict[str, Any]:
    (run,) = json.loads(text)["runs"]
    assert isinstance(run, dict)
    return run


def test_one_of_each_verdict(
    golden: Golden,
    several: list[Verification],
    schema: jsonschema.Draft7Validator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: About())
    text = sarif(several, [AccessDenied("run/locked.pth", "permission denied")])
    document = json.loads(text)
    schema.validate(document)
    assert text == json.dumps(document) + "\n"
    golden(json.dumps(document, indent=1, ensure_ascii=False))
    run = run_of(sarif(several))
    assert run["invocations"] == [{"executionSuccessful": True}]
    results = [(one["ruleId"], one["locations"][0].get("logicalLocations")) for one in run["results"]]
    for (rule, place), result in zip(results, run["results"], strict=True):
        where = place[0]["fullyQualifiedName"] if place else ""
        digest = sha256(f"{rule}\0{where}".encode()).hexdigest()[:16]
        assert result["partialFingerprints"] == {"primaryLocationLineHash": f"{digest}:1"}


def test_links_come_from_the_package(
    several: list[Verification], schema: jsonschema.Draft7Validator, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = About("Homepage, https://example.org/tool", "Findings, https://example.org/findings.md")
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: about)
    text = sarif(several)
    schema.validate(json.loads(text))
    driver = run_of(text)["tool"]["driver"]
    assert driver["informationUri"] == "https://example.org/tool"
    assert driver["rules"][1]["helpUri"] == "https://example.org/findings.md#nan"


def test_version_is_the_installed_one() -> None:
    assert run_of(sarif())["tool"]["driver"]["version"] == version("ckpttool")


PATHS = (
    *(("m.pth", None), ("./a/../m 1.pth", None), ("a:b#c?d%e.pth", None), ("größe.pth", None)),
    *(("\udcff.pth", None), ("\ud800.pth", None), ("../m.pth", None), ("/data/m 1.pth", None)),
    *(("/src/run/m.pth", "/src"), ("/src/run/m.pth", "/"), ("/src/run/../../m.pth", "/src")),
    ("/srcs/m.pth", "/src"),
)


def test_locations(golden: Golden, verified: Verified) -> None:
    golden(
        {
            ascii(f"{path} in {root}"): run_of(sarif([verified(path)], root=root))["artifacts"][0]["location"]
            for path, root in PATHS
        }
    )


def test_a_relative_path_is_named_from_the_root(
    verified: Verified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "models")
    run = run_of(sarif([verified("m.pth")], root=str(tmp_path)))
    assert run["artifacts"][0]["location"] == {"uri": "models/m.pth", "uriBaseId": "%SRCROOT%"}


def test_fingerprints_outlive_counts_and_tell_alike_findings_apart(verified: Verified) -> None:
    first = [error("nan", "3 NaN", "w"), error("nan", "4 NaN", "w"), error("nan", "5 NaN", "v")]
    again = [one._replace(message="7 NaN") for one in first]
    marks = [
        [one["partialFingerprints"]["primaryLocationLineHash"] for one in run_of(sarif([v]))["results"]]
        for v in (verified("m.pth", *first), verified("m.pth", *again))
    ]
    assert marks[0] == marks[1]
    assert len(set(marks[0])) == 3
    assert [mark[-2:] for mark in marks[0]] == [":1", ":2", ":1"]


def test_too_many_results_lose_the_least(
    verified: Verified, schema: jsonschema.Draft7Validator, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_results(monkeypatch, 2)
    found = [note("old", "old"), error("nan", "1 NaN")._replace(ignored="known"), error("nan", "2 NaN")]
    text = sarif([verified("m.pth", *found)])
    schema.validate(json.loads(text))
    run = run_of(text)
    assert [one["message"]["text"] for one in run["results"]] == ["2 NaN", "old"]
    assert run["invocations"][0]["toolExecutionNotifications"] == [
        {
            "level": "warning",
            "message": {"text": "1 more finding omitted, the least severe (--json has them all)."},
        }
    ]


def test_hostile_names(
    verified: Verified, hostile_names: list[str], schema: jsonschema.Draft7Validator
) -> None:
    for hostile in hostile_names:
        found = error("nan", hostile, hostile)._replace(check="values", ignored=hostile)
        text = sarif([verified(hostile, found)], [AccessDenied(hostile, hostile)])
        schema.validate(json.loads(text))
        assert text.rstrip("\n").isprintable()
        (one,) = run_of(text)["results"]
        assert one["message"]["text"] == f"{escaped(hostile)} [{escaped(hostile)}]"
        text.encode("utf-8")


def test_endless_names_are_cut(verified: Verified, endless: str, schema: jsonschema.Draft7Validator) -> None:
    found = error("nan", endless, endless)._replace(check="values")
    text = sarif([verified(endless, found)], [AccessDenied(endless, endless)])
    schema.validate(json.loads(text))
    assert len(text) < 200_000

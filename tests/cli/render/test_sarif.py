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
from tests.support.rendering import escaped, limit_results, report_of

Verified = Callable[..., Verification]
sarif = partial(report_of, "sarif")
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PUBLISHED = Path(__file__).parents[2] / "schemas" / "sarif-schema-2.1.0.json"


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    formats = jsonschema.FormatChecker()
    assert {"uri", "uri-reference"} <= formats.checkers.keys()
    return jsonschema.Draft7Validator(json.loads(PUBLISHED.read_text("utf-8")), format_checker=formats)


def rule(code: str, check: str, level: str, meaning: str, remedy: str) -> dict[str, Any]:
    properties: dict[str, Any] = {"tags": [check]}
    if check == "safety":
        properties = {"tags": [check, "security"], "security-severity": "9.0"}
    advice = f"{remedy[0].upper()}{remedy[1:]}."
    return {
        "id": code,
        "name": code.title().replace("-", ""),
        "shortDescription": {"text": code.replace("-", " ")},
        "fullDescription": {"text": f"{meaning.replace('`', '')}."},
        "help": {
            "text": f"{meaning.replace('`', '')}.\n\nWhat to do: {advice.replace('`', '')}",
            "markdown": f"{meaning}.\n\n**What to do:** {advice}",
        },
        "defaultConfiguration": {"level": level},
        "properties": properties,
    }


def artifact(uri: str, word: str, **odd: str) -> dict[str, Any]:
    checks = {"structure": "passed", "values": "passed", "safety": "passed"} | odd
    safety = "unsafe" if word == "unsafe" else "safe"
    told = {"format": "pytorch", "verdict": word, "safety": safety, "checks": checks}
    return {"location": {"uri": uri}, "roles": ["analysisTarget"], "properties": told}


def result(
    rule: tuple[int, str], level: str, text: str, at: tuple[int, str], where: str | None = None
) -> dict[str, Any]:
    spot = {"artifactLocation": {"uri": at[1], "index": at[0]}, "region": {"startLine": 1}}
    place: dict[str, Any] = {"physicalLocation": spot}
    if where:
        place["logicalLocations"] = [{"fullyQualifiedName": where}]
    digest = sha256(f"{rule[1]}\0{where or ''}".encode()).hexdigest()[:16]
    return {
        "ruleId": rule[1],
        "ruleIndex": rule[0],
        "level": level,
        "message": {"text": text},
        "locations": [place],
        "partialFingerprints": {"primaryLocationLineHash": f"{digest}:1"},
    }


NOT_PREDICTED = (
    "The prediction could not be made",
    "read the message; `--model`, `--input-shape` or `--trust` may be missing",
)
DRIVER = {
    "name": "ckpttool",
    "version": "1.2.3",
    "rules": [
        rule(
            *("infinity", "values", "warning", "A tensor holds infinities (warning)"),
            "fine in masks; otherwise use an earlier checkpoint",
        ),
        rule(
            *("nan", "values", "error", "A tensor holds NaN: training diverged"),
            "go back to the checkpoint before",
        ),
        rule("not-predicted", "predict", "error", *NOT_PREDICTED),
        rule(
            *(
                "unsafe-import",
                "safety",
                "error",
                "The file names a function that has no place in a checkpoint",
            ),
            "don't load it; find out where it came from",
        ),
    ],
}
ARTIFACTS = [
    artifact("run/good.pth", "valid"),
    artifact("run/nan.pth", "invalid", values="failed"),
    artifact("run/evil.pth", "unsafe", safety="failed"),
    artifact("run/idle.pth", "not run", load="skipped", predict="skipped"),
    artifact("run/known.pth", "valid"),
]
RESULTS = [
    result((1, "nan"), "error", "3 NaN in 20 values [fc.weight]", (1, "run/nan.pth"), "fc.weight"),
    result((3, "unsafe-import"), "error", "it names os.system [data.pkl]", (2, "run/evil.pth"), "data.pkl"),
    result((2, "not-predicted"), "error", "no --model was given", (3, "run/idle.pth")),
    result((0, "infinity"), "warning", "1 Inf in 2 values [fc.bias]", (1, "run/nan.pth"), "fc.bias"),
    result((1, "nan"), "error", "1 NaN in 2 values [head.bias]", (4, "run/known.pth"), "head.bias")
    | {"suppressions": [{"kind": "external", "justification": "a mask"}]},
]


def test_one_of_each_verdict(
    several: list[Verification], schema: jsonschema.Draft7Validator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: About())
    text = sarif(several)
    schema.validate(json.loads(text))
    run = {
        "tool": {"driver": DRIVER},
        "invocations": [{"executionSuccessful": True}],
        "artifacts": ARTIFACTS,
        "results": RESULTS,
    }
    assert text == json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


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


def test_what_was_not_read_fails_the_run(schema: jsonschema.Draft7Validator) -> None:
    text = sarif([], [AccessDenied("run/locked.pth", "permission denied")])
    schema.validate(json.loads(text))
    assert run_of(text)["invocations"] == [
        {
            "executionSuccessful": False,
            "toolExecutionNotifications": [
                {
                    "level": "error",
                    "message": {"text": "run/locked.pth: permission denied"},
                    "descriptor": {"id": "access-denied"},
                    "locations": [{"physicalLocation": {"artifactLocation": {"uri": "run/locked.pth"}}}],
                }
            ],
        }
    ]


@pytest.mark.parametrize(
    ("path", "root", "location"),
    [
        ("m.pth", None, {"uri": "m.pth"}),
        ("./a/../m 1.pth", None, {"uri": "m%201.pth"}),
        ("a:b#c?d%e.pth", None, {"uri": "a%3Ab%23c%3Fd%25e.pth"}),
        ("größe.pth", None, {"uri": "gr%C3%B6%C3%9Fe.pth"}),
        ("\udcff.pth", None, {"uri": "%FF.pth"}),
        ("\ud800.pth", None, {"uri": "%ED%A0%80.pth"}),
        ("../m.pth", None, {"uri": "../m.pth"}),
        ("/data/m 1.pth", None, {"uri": "file:///data/m%201.pth"}),
        ("/src/run/m.pth", "/src", {"uri": "run/m.pth", "uriBaseId": "%SRCROOT%"}),
        ("/src/run/m.pth", "/", {"uri": "src/run/m.pth", "uriBaseId": "%SRCROOT%"}),
        ("/src/run/../../m.pth", "/src", {"uri": "file:///m.pth"}),
        ("/srcs/m.pth", "/src", {"uri": "file:///srcs/m.pth"}),
    ],
)
def test_locations(verified: Verified, path: str, root: str | None, location: dict[str, str]) -> None:
    assert run_of(sarif([verified(path)], root=root))["artifacts"][0]["location"] == location


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
            "message": {"text": "1 more finding left out, the least severe (--json has them all)."},
        }
    ]


def test_hostile_names(verified: Verified, hostile: str, schema: jsonschema.Draft7Validator) -> None:
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

"""The documents that scripts read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Check, Finding, Inspection, Role, Safety, Status, Tensor, TrainingState, Verification
from ckpttool.core.checkpoint import FileEntry
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.report import error, note, warning
from ckpttool.core.tensor import Extent
from tests.support import results
from tests.support.rendering import inspect_json, json_text, verify_json

INFINITY = float("inf")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_document_is_json_and_says_the_same(document: dict[str, Any]) -> None:
    text = json_text(document)
    told = json.loads(json.dumps(document), parse_constant=str)
    assert json.loads(text, parse_constant=refuse) == told
    assert "\n" not in text
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("number", "told"),
    [(float("nan"), "NaN"), (INFINITY, "Infinity"), (-INFINITY, "-Infinity"), (0.1, 0.1), (-0.0, -0.0)],
)
def test_numbers_that_json_lacks_are_strings(number: float, told: object) -> None:
    assert json.loads(json_text({"a": [{"b": (number, 1)}]})) == {"a": [{"b": [told, 1]}]}


@pytest.mark.parametrize(
    "name", ["\x1b[31m", "\x9b2J", "a\u202eb", "\ud800", "\udcff.pth", "\x7f", "\u2028", "日本"]
)
def test_names_come_through_and_do_no_harm_on_a_terminal(name: str) -> None:
    text = json_text({"name": name, name: 1})
    assert json.loads(text) == {"name": name, name: 1}
    text.encode("utf-8")
    assert all(character.isprintable() for character in text)


def inspection(safety: tuple[Finding, ...] = (), **known: Any) -> Inspection:
    tensor = Tensor(
        ("model", 0, "w"),
        BY_NAME["bfloat16"],
        (2, 3),
        Role.WEIGHTS,
        extent=Extent("m.pth", 64, 12),
        key="w/.ATTRIBUTES",
        shares_with="model.0.v",
    )
    return results.inspection(
        tensor,
        files=(FileEntry("m.pth", 1234),),
        metadata=lambda: {"loss": float("nan"), "epoch": 3},
        training=lambda: TrainingState(epoch=3, origin={"epoch": "key epoch"}),
        findings=(warning("odd", "it is odd", "data/0"),),
        safety=safety,
        complete=False,
        **known,
    )


def test_inspect_document_whole() -> None:
    assert inspect_json(inspection()) == {
        "schema": "ckpttool.inspect/1",
        "checkpoints": [
            {
                "path": "m.pth",
                "format": "pytorch",
                "variant": "zip",
                "complete": False,
                "granularity": "partial",
                "bytes": 1234,
                "files": [{"path": "m.pth", "bytes": 1234}],
                "producer": {"framework": None, "version": None},
                "training": {
                    "epoch": 3,
                    "step": None,
                    "loss": None,
                    "learning_rate": None,
                    "metrics": {},
                    "best": None,
                    "saved_at": None,
                    "seed": None,
                    "hyper_parameters": {},
                    "origin": {"epoch": "key epoch"},
                },
                "resume": {
                    "level": "weights-only",
                    "found": ["weights", "step or epoch"],
                    "missing": ["optimizer", "scheduler", "RNG state", "data loader state"],
                },
                "parameters": 0,
                "buffers": 0,
                "packed": 0,
                "model": {"class": None, "family": None, "layers": {}, "signatures": {}},
                "tensors": [
                    {
                        "name": "model.0.w",
                        "path": ["model", 0, "w"],
                        "role": "weights",
                        "dtype": "bfloat16",
                        "shape": [2, 3],
                        "bytes": 12,
                        "file": "m.pth",
                        "offset": 64,
                        "shares_with": "model.0.v",
                        "key": "w/.ATTRIBUTES",
                    }
                ],
                "values": {"loss": "NaN", "epoch": 3},
                "findings": [
                    {"code": "odd", "severity": "warning", "message": "it is odd", "where": "data/0"}
                ],
                "safety": "safe",
            }
        ],
    }


def test_inspect_document_with_statistics() -> None:
    found = inspection(statistics={"model.0.w": (6, 1, 2, 3, -1.0, INFINITY, 0.5, None)})
    (told,) = inspect_json(found)["checkpoints"]
    assert told["tensors"][0]["stats"] == {
        "min": -1.0,
        "max": "Infinity",
        "mean": 0.5,
        "std": None,
        "zeros": 3,
        "nan": 1,
        "inf": 2,
    }


@pytest.mark.parametrize(
    ("findings", "word"),
    [
        ((), "safe"),
        ((note("a", "b"),), "safe"),
        ((warning("a", "b"),), "unknown"),
        ((warning("a", "b"), error("a", "b")), "unsafe"),
    ],
)
def test_inspect_says_what_loading_could_run(findings: tuple[Any, ...], word: str) -> None:
    (told,) = inspect_json(inspection(safety=findings))["checkpoints"]
    assert told["safety"] == word


def verification(status: Status = Status.PASSED, safety: Safety = Safety.SAFE) -> Verification:
    checks = (
        Check("structure", status, "1 file, 2 tensors"),
        Check("checksum", Status.SKIPPED, "not asked for"),
        Check("safety", Status.FAILED if safety is Safety.UNSAFE else Status.PASSED, ""),
    )
    return Verification("m.pth", "pytorch", "zip", safety, checks, (error("nan", "1 of 2", "w"),), 7)


def test_verify_document_whole() -> None:
    assert verify_json(verification(Status.FAILED)) == {
        "schema": "ckpttool.verify/1",
        "verdict": "invalid",
        "checkpoints": [
            {
                "path": "m.pth",
                "format": "pytorch",
                "variant": "zip",
                "verdict": "invalid",
                "safety": "safe",
                "bytes": 7,
                "checks": [
                    {"name": "structure", "status": "failed", "detail": "1 file, 2 tensors"},
                    {"name": "checksum", "status": "skipped", "detail": "not asked for"},
                    {"name": "safety", "status": "passed", "detail": ""},
                ],
                "findings": [{"code": "nan", "severity": "error", "message": "1 of 2", "where": "w"}],
            }
        ],
    }


def test_verdict_is_about_integrity_and_of_all() -> None:
    unsafe = verification(safety=Safety.UNSAFE)
    assert verify_json(unsafe)["verdict"] == "valid"
    assert verify_json(unsafe, verification(Status.FAILED))["verdict"] == "invalid"
    assert verify_json()["verdict"] == "valid"


def test_keys_stand_in_the_order_of_the_contract() -> None:
    document = verify_json(verification())
    assert list(document) == ["schema", "verdict", "checkpoints"]
    assert next(iter(inspect_json())) == "schema"

"""The documents that scripts read."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import Check, Finding, Inspection, Role, Safety, Status, Tensor, TrainingState, Verification
from ckpttool.core.checkpoint import FileEntry
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.report import error, note, warning
from ckpttool.core.tensor import Extent
from tests.support import results
from tests.support.golden import Golden
from tests.support.rendering import inspect_json, json_text, verify_json

INFINITY = float("inf")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@settings(max_examples=settings.default.max_examples // 2)
@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_document_is_json_and_says_the_same(document: dict[str, Any]) -> None:
    text = json_text(document)
    told = json.loads(json.dumps(document), parse_constant=str)
    assert json.loads(text, parse_constant=refuse) == told
    assert "\n" not in text
    text.encode("utf-8")


def test_numbers_that_json_lacks_are_strings() -> None:
    numbers = (float("nan"), INFINITY, -INFINITY, 0.1, -0.0)
    told = ["NaN", "Infinity", "-Infinity", 0.1, -0.0]
    assert json.loads(json_text({"a": [{"b": (numbers, 1)}]})) == {"a": [{"b": [told, 1]}]}


def test_names_come_through_and_do_no_harm_on_a_terminal() -> None:
    for name in ("\x1b[31m", "\x9b2J", "a\u202eb", "\ud800", "\udcff.pth", "\x7f", "\u2028", "日本"):
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


def verification(status: Status = Status.PASSED, safety: Safety = Safety.SAFE) -> Verification:
    checks = (
        Check("structure", status, "1 file, 2 tensors"),
        Check("checksum", Status.SKIPPED, "not requested"),
        Check("safety", Status.FAILED if safety is Safety.UNSAFE else Status.PASSED, ""),
    )
    return Verification("m.pth", "pytorch", "zip", safety, checks, (error("nan", "1 of 2", "w"),), 7)


def test_documents(golden: Golden) -> None:
    statistics = {"model.0.w": (6, 1, 2, 3, -1.0, INFINITY, 0.5, None)}
    (measured,) = inspect_json(inspection(statistics=statistics))["checkpoints"]
    documents = {
        "inspect": inspect_json(inspection()),
        "statistics": measured["tensors"][0]["stats"],
        "verify": verify_json(verification(Status.FAILED)),
        "inspect nothing": inspect_json(),
        "verify nothing": verify_json(),
    }
    golden({name: json.dumps(document, indent=1) for name, document in documents.items()})


def test_inspect_says_what_loading_could_run() -> None:
    for findings, word in (
        ((), "safe"),
        ((note("a", "b"),), "safe"),
        ((warning("a", "b"),), "unknown"),
        ((warning("a", "b"), error("a", "b")), "unsafe"),
    ):
        (told,) = inspect_json(inspection(safety=findings))["checkpoints"]
        assert told["safety"] == word


def test_verdict_is_about_integrity_and_of_all() -> None:
    unsafe = verification(safety=Safety.UNSAFE)
    assert verify_json(unsafe)["verdict"] == "valid"
    assert verify_json(unsafe, verification(Status.FAILED))["verdict"] == "invalid"
    assert verify_json()["verdict"] == "valid"

"""Graphs of SavedModels: walked once, and digested by what their functions call."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool import inspect, verify
from ckpttool.formats.savedmodel.computation import function_digests
from ckpttool.formats.savedmodel.graph import read_model
from ckpttool.formats.savedmodel.walk import message_in
from ckpttool.storage.source import Source
from tests.formats import savedmodel_messages as pb


def test_a_large_graph_is_walked_once_and_not_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes say few different things of themselves, which are taken apart once."""
    nodes = [
        pb.node(f"n{at}", "AddV2")
        + pb.taking("x", f"n{max(at - 1, 0)}")
        + pb.attribute("T", pb.number(6, 1))
        + pb.attribute("_output_shapes", pb.part(1, pb.part(7, pb.number(3, 1))))
        for at in range(1000)
    ]
    path = pb.written(
        tmp_path / "model", pb.model(pb.meta_graph(pb.graph(pb.node("x", "Placeholder"), *nodes)))
    )
    digested = []
    digests = "ckpttool.formats.savedmodel.computation.node_digests"
    monkeypatch.setattr(digests, lambda body, *others: digested.append(body) or {})
    with Source(path / "saved_model.pb") as source:
        message = message_in(source)
        (read,) = read_model(message).graphs
    assert read.ops == {"AddV2": 1000, "Placeholder": 1}
    assert message.window.fields < 7.5 * len(nodes)  # the node, its name, its op, two inputs, two attributes
    inspected = inspect(str(path))
    assert not digested
    assert inspected.checkpoint.metadata["meta_graphs"]
    assert digested


def test_functions_are_told_apart_by_what_they_call_at_any_depth() -> None:
    deep = 5000
    chains = {f"{chain}{at}": (b"same", [f"{chain}{at + 1}"]) for chain in "ab" for at in range(deep)}
    ends: dict[str, tuple[bytes, list[str]]] = {f"a{deep}": (b"this", []), f"b{deep}": (b"that", ["lost"])}
    found = function_digests(chains | ends)
    assert len(set(found.values())) == len(found) == 2 * (deep + 1)
    assert found == function_digests(dict(reversed([*(chains | ends).items()])))


def test_functions_that_call_each_other_end() -> None:
    assert len(function_digests({"a": (b"1", ["b", "a"]), "b": (b"2", ["a"])})) == 2
    assert function_digests({}) == {}


WRITES = pb.node("w", "WriteFile")
ALIAS = pb.part(1, pb.part(8, pb.part(1, "f") + pb.part(2, "other")))


@pytest.mark.parametrize(
    "content",
    [
        pb.meta_graph(pb.graph(WRITES + b"\x15NoOp")),
        pb.meta_graph(pb.graph(WRITES + b"\x10\x05")),
        pb.meta_graph(pb.graph(functions=(pb.function("", WRITES),))),
        pb.meta_graph(pb.graph(functions=(pb.function("f", WRITES),)), ALIAS),
    ],
    ids=["another op of four bytes", "another op that is a number", "a function without a name", "an alias"],
)
def test_what_tensorflow_runs_is_unsafe_however_it_is_hidden(content: bytes, tmp_path: Path) -> None:
    """Protocol Buffers skips a field of another wire type; objects and options can ask for a function."""
    assert verify(pb.written(tmp_path / "model", pb.model(content))).safety.value == "unsafe"
    alone = pb.meta_graph(pb.graph(functions=(pb.function("f", WRITES),)))
    assert verify(pb.written(tmp_path / "alone", pb.model(alone))).safety.value != "unsafe"

"""Graphs of objects: made from names, read by TensorFlow's own schema, and cut; keys of slices."""

from __future__ import annotations

import pytest

from ckpttool.formats.tensorflow.bundle import slice_key
from ckpttool.formats.tensorflow.native import keys_from, native_of, stored_keys
from ckpttool.formats.tensorflow.object_graph import (
    graph_of,
    key_of,
    path_of_key,
    prune_graph,
    read_graph,
    steps_of_name,
)
from tests.support.protobuf import bytes_field, number_field

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def node(
    children: dict[str, int],
    key: str = "",
    slots: tuple[tuple[int, str, int], ...] = (),
    name: str = "VARIABLE_VALUE",
) -> bytes:
    links = [bytes_field(1, number_field(1, at) + bytes_field(2, name)) for name, at in children.items()]
    told = [bytes_field(2, bytes_field(1, name) + bytes_field(3, key))] if key else []
    ends = [
        bytes_field(3, number_field(1, of) + bytes_field(2, slot) + number_field(3, to))
        for of, slot, to in slots
    ]
    return bytes_field(1, b"".join((*links, *told, *ends)))


def test_keys_escape_what_separates() -> None:
    assert key_of("a.b/c") == f"a/b.Sc{VALUE}"
    assert key_of("") == VALUE
    assert key_of("a..b") == f"a//b{VALUE}"
    assert key_of(".".join("x" * 70)).startswith("x/" * 63 + "x..x..")
    assert ".".join(steps_of_name(".".join("x" * 70))) == ".".join("x" * 70)


def test_names_come_back_from_their_graph() -> None:
    names = ["a.w", "a.b.w", "a.b", "", "x/y.z", "optimizer.w", "deep." * 80 + "w"]
    graph = read_graph("", graph_of(names, {"tied.w": "a.w", "a": "a.b.w"}))
    assert {".".join(map(str, path_of_key(key_of(name), graph))) for name in names} == set(names)


def test_a_tie_is_a_second_way_to_one_object() -> None:
    """The owner has one key, and is known by its own name, be the other way as short as it may."""
    message = graph_of(["z.z.z"], {"a": "z.z.z"})
    assert message.count(key_of("z.z.z").encode()) == 1
    assert path_of_key(key_of("z.z.z"), read_graph("", message)) == ("z", "z", "z")


def test_a_graph_of_which_nothing_is_gone_is_the_same() -> None:
    message = graph_of(["a", "b"], {})
    assert prune_graph("", message, {key_of("a"), key_of("b")}, set()) is message
    assert prune_graph("", message, {key_of("a"), key_of("b")}, {"c"}) is message


def test_what_is_gone_is_cut_with_its_slots() -> None:
    slot = f"w/.OPTIMIZER_SLOT/adam/m{VALUE}"
    before = (
        node({"w": 1, "adam": 2, "table": 4, "data": 5})
        + node({}, f"w{VALUE}")
        + node({}, slots=((1, "m", 3),))
        + node({}, slot)
        + node({}, "table/.ATTRIBUTES/table", name="table")
        + node({}, "data/.ATTRIBUTES/ITERATOR", name="ITERATOR")
    )
    table = "table/.ATTRIBUTES/table-keys"
    after = prune_graph("", before, {f"w{VALUE}", table}, {slot, "data/.ATTRIBUTES/ITERATOR_STATE"})
    assert after == (
        node({"w": 1, "adam": 2, "table": 4, "data": 5})
        + node({}, f"w{VALUE}")
        + node({})
        + node({})
        + node({}, "table/.ATTRIBUTES/table", name="table")
        + node({})
    )


@pytest.mark.parametrize(
    ("children", "has_slots", "expected"),
    [
        (["_iterations", "_learning_rate", "_variables"], False, True),
        (["iter", "decay", "learning_rate"], False, True),
        (["iter"], False, False),
        (["kernel"], True, True),
        (["kernel", "learning_rate"], False, False),
    ],
)
def test_optimizers_are_told_by_what_they_hold(children: list[str], has_slots: bool, expected: bool) -> None:
    rule = node(dict.fromkeys(children, 2), slots=((2, "m", 2),) if has_slots else ())
    graph = read_graph("p", node({"rule": 1}) + rule + node({}, "the key"))
    assert graph["the key"].is_optimizer is expected


def test_native_parts_are_those_that_names_do_not_tell() -> None:
    keys = {name: key_of(name).encode() for name in ("a.b", "c")}
    assert native_of(keys, graph_of(keys, {})) == {}
    assert native_of({"dense/kernel": b"dense/kernel"}, None) == {"tensorflow.keys": b"{}"}
    assert native_of({"\\xff": b"\xff"}, None) == {"tensorflow.keys": b'{"\\\\xff":"\\udcff"}'}
    message = node({"a": 1}) + node({}, f"a{VALUE}")
    native = native_of({"a": f"a{VALUE}".encode()}, message)
    assert native == {"tensorflow.object_graph": message, "tensorflow.keys": f'{{"a":"a{VALUE}"}}'.encode()}
    assert stored_keys(native) == {"a": f"a{VALUE}"}
    assert keys_from(native, ()) == {}


def test_keys_that_are_no_text_come_back() -> None:
    native = native_of({"\\xff": b"\xff"}, None)
    assert stored_keys(native) == {"\\xff": b"\xff".decode("utf-8", "surrogateescape")}
    assert stored_keys({}) is None
    assert stored_keys({"tensorflow.keys": b"[" * 500}) is None


def test_slice_keys() -> None:
    """The keys that TensorFlow makes, from its tests of ordered codes."""
    assert slice_key(b"a", ((0, None),)) == b"\0a\0\1\1\1\x80\x7f"
    assert slice_key(b"\0\xff", ((64, 2),)) == b"\0\0\xff\xff\0\0\1\1\1\xc0\x40\x82"

"""Trees compared node by node, against what is written of them."""

from __future__ import annotations

import copy
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.containers.pickle.pickle_nodes import (
    Call,
    DictSubclass,
    Global,
    Opaque,
    children,
    nodes,
    rebuild,
)
from ckpttool.formats.content.tree import trees_equal
from ckpttool.formats.content.tree_json import encode_tree
from tests.support.checkpoints import numbers, tensor

A, B = (tensor(name, numbers(2)) for name in "ab")
SIZE = Global("torch", "Size")
ATOMS = st.sampled_from(
    [
        None,
        True,
        1,
        1.0,
        0.0,
        -0.0,
        math.nan,
        math.inf,
        "1",
        b"1",
        "é",
        2**70,
        A,
        B,
        SIZE,
        Global("torch", "int8"),
    ]
)
KEYS = st.sampled_from(["a", "b", "$c", 1, (1, 2), None])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(KEYS, inner), max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.builds(dict, pairs),
        st.builds(bytearray, st.binary(max_size=2)),
        inner.map(lambda node: [node, node]),
        st.builds(
            DictSubclass,
            st.sampled_from([Global("collections", "OrderedDict")]),
            pairs.map(dict),
            inner,
            inner,
        ),
        st.builds(Call, st.just(SIZE), lists.map(tuple), st.none(), inner, lists, pairs),
    )


TREES = st.recursive(ATOMS, containers, max_leaves=8)


@given(TREES, TREES)
def test_what_is_alike_is_written_alike(one: object, two: object) -> None:
    if trees_equal(one, two):
        assert repr(encode_tree(one)) == repr(encode_tree(two))


@given(TREES)
def test_a_copy_is_alike(tree: object) -> None:
    assert trees_equal(tree, copy.deepcopy(tree))


def shared(twice: bool) -> list[Any]:
    node = [1]
    return [node, node if twice else [1]]


def new() -> Call:
    call = Call(SIZE, ())
    call.is_new = True
    return call


def test_what_differs_or_can_not_be_told_is_not() -> None:
    cases = [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", b"1"),
        ([1], (1,)),
        ([1, 2], [1]),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (A, B),
        (A, "a"),
        (shared(True), shared(False)),
        (shared(False), shared(True)),
        (bytearray(b"1"), bytearray(b"2")),
        (Call(SIZE, ((1,),)), Call(SIZE, ((2,),))),
        (Call(SIZE, ()), Call(Global("torch", "device"), ())),
        (Call(SIZE, (), None, {"a": 1}), Call(SIZE, (), None, {"a": 2})),
        (Call(SIZE, (), None, None, [1]), Call(SIZE, (), None, None, [2])),
        (Call(SIZE, (), None, None, (), [(1, 2)]), Call(SIZE, (), None, None, (), [(1, 3)])),
        (Call(SIZE, ()), new()),
        (DictSubclass(SIZE, {}), DictSubclass(Global("torch", "device"), {})),
        (DictSubclass(SIZE, {}, 1), DictSubclass(SIZE, {}, 2)),
        (DictSubclass(SIZE, {}, None, 1), DictSubclass(SIZE, {}, None, 2)),
        (DictSubclass(SIZE, {}), {}),
        (Opaque("x"), Opaque("x")),
        ({1}, {1}),
    ]
    for one, two in cases:
        assert not trees_equal(one, two), (one, two)
        assert not trees_equal([one], [two]), (one, two)


@settings(deadline=None)
@given(TREES)
def test_a_node_made_again_of_what_it_holds_is_the_same(tree: Any) -> None:
    """What ``children`` gives ``rebuild`` takes, for every node of a tree."""
    for node in nodes(tree):
        again = rebuild(node, children(node) or ())
        assert type(again) is type(node)
        assert trees_equal(again, node)
        assert list(map(id, children(again) or ())) == list(map(id, children(node) or ()))


def test_another_child_makes_another_node() -> None:
    """Each child stands in a place of its own: a node with another in that place holds it there."""
    parts = Call(SIZE, ((1,),), {"named": 2}, {"state": 3}, [4, 5], [("key", 6)], is_new=True)
    mapped = DictSubclass(
        Global("collections", "defaultdict"), [("a", 1)], {"state": 2}, Global("builtins", "list")
    )
    for node in (parts, mapped, {"a": 1}, [1, 2], (1, 2), Opaque("an object", [1])):
        held = list(children(node) or ())
        for number in range(len(held)):
            changed = [*held[:number], ("new",), *held[number + 1 :]]
            again = list(children(rebuild(node, changed)) or ())
            assert again[number] == ("new",)
            assert again == changed

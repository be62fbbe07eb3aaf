"""Pickles that are written: by their opcodes, and by what Python and PyTorch make of them."""

from __future__ import annotations

import collections
import pickle
import pickletools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Tensor, Unsupported
from ckpttool.containers.pickle import pickler
from ckpttool.containers.pickle.pickle_nodes import (
    FROM_TYPE,
    MASKED,
    NDARRAY,
    QUANTIZED,
    REQUIRES_GRAD,
    Call,
    DictSubclass,
    Global,
    Opaque,
)
from ckpttool.containers.pickle.pickler import Storages, dumps, pickle_into
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import in_memory

# What PyTorch's weights_only unpickler knows: torch/_weights_only_unpickler.py.
ACCEPTED = set(
    [
        "PROTO",
        "STOP",
        "MARK",
        "GLOBAL",
        "REDUCE",
        "BUILD",
        "NEWOBJ",
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "EMPTY_TUPLE",
        "EMPTY_LIST",
        "EMPTY_DICT",
        "EMPTY_SET",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINSTRING",
        "LONG1",
        "BINPERSID",
        "BINGET",
        "LONG_BINGET",
        "BINPUT",
        "LONG_BINPUT",
    ]
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 2000), 1 << 2000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.text("\ud800a")
    | st.binary()
    | st.builds(bytearray, st.binary()),
    lambda below: (
        st.lists(below)
        | st.lists(below, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()) | st.binary(), below)
        | st.sets(st.text() | st.integers() | st.binary())
        | st.frozensets(st.integers())
    ),
    max_leaves=30,
)


def tensor(array: np.ndarray[Any, Any], name: str = "t", dtype: str | None = None, **more: Any) -> Tensor:
    values = in_memory(array.tobytes())
    return Tensor((name,), BY_NAME[dtype or array.dtype.name], array.shape, values=values, **more)


def names_in(data: bytes) -> set[str]:
    return {str(argument) for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}


def opcodes_in(data: bytes) -> set[str]:
    return {opcode.name for opcode, _, _ in pickletools.genops(data)}


def spelled(value: Any) -> object:
    """Return a value with its types and its order, and sets in one order."""
    if isinstance(value, list | tuple):
        return type(value), [spelled(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    if isinstance(value, dict):
        return [(spelled(key), spelled(item)) for key, item in value.items()]
    return repr(value)


@given(PLAIN)
def test_python_loads_what_it_would_have_pickled(value: object) -> None:
    data = dumps(value, Storages())
    made = pickle.loads(data)
    assert spelled(made) == spelled(value)
    assert opcodes_in(data) <= ACCEPTED


def test_integers_of_every_size() -> None:
    edges = [1 << bits for bits in (0, 7, 8, 15, 16, 31, 32, 63, 64, 2039, 2040, 9000)]
    numbers = [sign * edge + off for edge in edges for sign in (1, -1) for off in (-1, 0, 1)]
    assert pickle.loads(dumps(numbers, Storages())) == numbers


def test_many_objects_have_wide_places_in_the_memo() -> None:
    lists = [[at] for at in range(300)]
    made = pickle.loads(dumps(lists + lists, Storages()))
    assert all(made[at] is made[at + 300] for at in range(300))
    assert "LONG_BINPUT" in opcodes_in(dumps(lists + lists, Storages()))


def test_deep_trees_do_not_recurse() -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = (deep,)
    assert opcodes_in(dumps(deep, Storages())) <= ACCEPTED


def test_a_dictionary_of_another_class_keeps_what_hangs_on_it() -> None:
    mapped = DictSubclass(Global("collections", "OrderedDict"))
    mapped.update({"b": 1, "a": 2})
    mapped.state = {"_metadata": {"": 1}}
    made = pickle.loads(dumps(mapped, Storages()))
    assert (made, type(made), made._metadata) == (mapped, collections.OrderedDict, {"": 1})


def test_what_is_not_carried_is_left_out() -> None:
    gone, text = Opaque("a class"), Opaque("a key", "key")
    tree = {"gone": gone, "list": [1, gone], "tuple": (gone, 2), "part": Opaque("a class", {"x": 1}), text: 3}
    made = pickle.loads(dumps(tree, Storages()))
    assert made == {"list": [1, None], "tuple": (None, 2), "part": {"x": 1}, "key": 3}


def test_what_stands_for_something_twice_is_one_object() -> None:
    part = Opaque("a class", {"x": 1})
    first, second = pickle.loads(dumps([part, part], Storages()))
    assert first is second


# Names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [("os", "system"), ("builtins", "eval"), ("numpy", "load"), ("mine", "Class"), ("torch", "a\nb")],
)
def test_no_name_gets_in_that_is_not_known_to_be_harmless(name: tuple[str, str]) -> None:
    found = Global(*name)
    trees: list[object] = [found, Call(found, ("x",)), {found: 1}, [Call(Global("torch", "Size"), (found,))]]
    for tree in trees:
        with pytest.raises(ValueError, match="not known to be harmless"):
            dumps(tree, Storages())


def test_what_no_tree_holds_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    called = Call(Call(Global("torch", "Size"), ()), ())
    trees = [
        cycle,
        called,
        object(),
        DictSubclass(Global("os", "environ")),
        Call(Global("torch", "Size"), (), {"a": 1}),
    ]
    for tree in trees:
        with pytest.raises(ValueError):
            dumps(tree, Storages())


# Tensors --------------------------------------------------------------------------------------------


def test_storages_are_numbered_in_the_order_of_their_use() -> None:
    one, two = tensor(np.ones(2, np.float32), "one"), tensor(np.zeros(3, np.int64), "two")
    tied = tensor(np.ones(2, np.float32), "three", shares_with="one")
    storages = Storages()
    data = dumps({"b": two, "a": one, "c": tied}, storages)
    assert [found.name for found in storages.tensors] == ["two", "one"]
    assert storages(tied) == storages(one) == "1"
    assert opcodes_in(data) <= ACCEPTED
    assert names_in(data) == {
        "torch._utils _rebuild_tensor_v2",
        "torch LongStorage",
        "torch FloatStorage",
        "collections OrderedDict",
    }


def test_types_without_a_class_of_storages_lie_in_bytes() -> None:
    names = names_in(dumps(tensor(np.ones(2, np.uint8), dtype="float8_e5m2"), Storages()))
    assert {"torch._utils _rebuild_tensor_v3", "torch.storage UntypedStorage", "torch float8_e5m2"} <= names


def test_elements_alone_make_no_quantized_tensor() -> None:
    held = tensor(np.ones(2, np.int8), dtype="qint8")
    for tree in (
        held,
        Call(REQUIRES_GRAD, (held,)),
        Call(NDARRAY, (tensor(np.ones(4, np.uint8), dtype="complex32"),)),
    ):
        with pytest.raises(Unsupported, match=r"^t: "):
            dumps(tree, Storages())
    assert dumps(Call(QUANTIZED, (held, (Global("torch", "per_tensor_affine"), 0.1, 0), False)), Storages())


def test_a_tensor_of_a_class_needs_a_tensor() -> None:
    kind = Global("torch", "Tensor")
    with pytest.raises(ValueError, match="not made from a tensor"):
        dumps(Call(FROM_TYPE, ({}, kind, None)), Storages())
    inner = Call(FROM_TYPE, (tensor(np.ones(1)), kind, None))
    with pytest.raises(ValueError, match="not made from a tensor"):
        dumps(Call(FROM_TYPE, (inner, kind, None)), Storages())


# Arrays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 4)])
def test_numpy_loads_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(int(np.prod(shape))) * 37 - 5).astype(dtype).reshape(shape)
    data = dumps(Call(NDARRAY, (tensor(array),)), Storages())
    made = pickle.loads(data)
    assert (made.dtype, made.shape, made.tobytes()) == (array.dtype, shape, array.tobytes())
    assert opcodes_in(data) <= ACCEPTED


def test_a_masked_array_keeps_its_mask() -> None:
    array = np.ma.array([1.0, 2.0], mask=[False, True], fill_value=7.0)
    call = Call(MASKED, (tensor(array.data), tensor(np.asarray(array.mask)), None))
    made = pickle.loads(dumps(call, Storages()))
    assert isinstance(made, np.ma.MaskedArray)
    assert (made.data.tolist(), made.mask.tolist()) == ([1.0, 2.0], [False, True])


def test_an_array_is_written_in_pieces() -> None:
    array = np.arange(1 << 20, dtype=np.uint32)
    pieces: list[int] = []
    content = bytearray()

    def write(data: bytes | memoryview) -> None:
        pieces.append(len(data))
        content.extend(data)

    pickle_into(write, [Call(NDARRAY, (tensor(array),)), 1], Storages())
    assert max(pieces) <= 2 << 20
    assert np.array_equal(pickle.loads(content)[0], array)


def test_a_text_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickler, "MAX_TEXT", 10)
    for tree in ("x" * 11, Call(NDARRAY, (tensor(np.full(6, 255, np.uint8)),))):
        with pytest.raises(Unsupported, match=r"\d+ bytes of text"):
            dumps(tree, Storages())


def test_no_call_gets_in_that_is_not_known_to_be_harmless() -> None:
    evaluate = Global("builtins", "eval")
    for call in (
        Call(Global("numpy", "float32"), (1,)),
        Call(Global("torch.nn.modules.linear", "Linear"), (3, 4)),
        Call(Global("torch._utils", "_rebuild_parameter"), (evaluate, True)),
        Call(Global("numpy.random._pickle", "__generator_ctor"), ("x", evaluate)),
    ):
        with pytest.raises(ValueError, match="not known to be harmless"):
            dumps(call, Storages())

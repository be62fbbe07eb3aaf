"""Pickles made against the table of constructors, with full knowledge of it: none is safe.

Each did in its loader what its name says: it changed a class or another object, crashed the interpreter, read
memory, or took more memory or time than its bytes pay for.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest

from ckpttool.core.errors import LimitExceeded
from ckpttool.core.report import has_errors
from tests.security.assembler import Build, Call, Code, Discarded, Name, PersistentId, call, pickled, spelled
from tests.security.triggers import ATTRIBUTES, calling, mappings, optimizers, sequences
from tests.support.containers import pickles_in

TENSOR, OBJECT = Name("torch", "Tensor"), Name("builtins", "object")
NOWHERE = PersistentId(("storage", Name("torch", "FloatStorage"), "0", "meta", 6))
NO_HOOKS: Any = call("collections", "OrderedDict")
STORAGE = PersistentId(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6))
REBUILT = (STORAGE, 0, (2, 3), (3, 1), False, NO_HOOKS)
REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
PARAMETER = call("torch.nn.parameter", "Parameter")
WITH_STATE = Name("torch._utils", "_rebuild_parameter_with_state")
EVAL, LIST = Name("builtins", "eval"), Name("builtins", "list")


def again(count: int, function: Any, *arguments: Any) -> Code:
    """Return a list of what so many calls make, of one memoized function and tuple of arguments."""
    head = spelled(function, 2) + b"q\1" + b"0" + spelled(arguments, 2) + b"q\2" + b"0"
    return Code(head + b"](" + b"h\1h\2R" * count + b"e")


def nested(depth: int) -> Code:
    """Return a tuple of twice one tuple, and so on: few bytes, and parts without end."""
    return Code(b")" + b"2\x86" * depth)


def dtype(code: str, *state: Any) -> Any:
    made = call("numpy", "dtype", code, False, True)
    return Build(made, state) if state else made


def array(kind: Any, shape: tuple[int, ...], elements: Any) -> Build:
    empty = call("numpy.core.multiarray", "_reconstruct", Name("numpy", "ndarray"), (0,), b"b")
    return Build(empty, (1, shape, kind, False, elements))


def keyed(key: Any, count: int = 1) -> Code:
    """Return a dictionary with a key, set so many times."""
    return Code(b"}" + spelled(key, 2) + b"q\1" + b"Ns" + b"h\1Ns" * (count - 1))


OBJECTS = dtype("O8", 3, "|", None, None, None, -1, -1, 63)
LONG = dtype("i8")
OVERLAPPING = dtype("V8", 3, "|", None, ("a", "b"), {"a": (OBJECTS, 0), "b": (LONG, 0)}, 8, 1, 27)
VIEW = {"__array_interface__": {"data": (16705, False), "shape": (64,), "typestr": "|u1", "version": 3}}
STATE = Name("accelerate.state", "PartialState")
INDEX = Call(Name("torch.distributed.checkpoint.metadata", "MetadataIndex"), how="newobj")
TAG = ("torch.jit._pickle", "restore_type_tag")
BIG, PRIME = b"x" * 60_000, (1 << 61) - 1
EMPTY = dtype("V0", 3, "|", (dtype("S0"), (2**31 - 1,)), None, None, 0, 1, 0)

STORAGE_HEAD = (
    b"\x80\2\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b".\x80\2M\xe9\3.\x80\2}."
)


def spelled_storage(count: int) -> bytes:
    """Return the pickle of a storage of so many elements, as PyTorch's old serialization has it."""
    return pickled(PersistentId(("storage", Name("torch", "FloatStorage"), "0", "cpu", count, None)), 2)


_PART = (Code(b"h\5"), 0)
_TWICE = dtype("V8", 3, "|", None, ("a", "b"), {"a": _PART, "b": _PART}, 8, 1, 0)
PARTS = Code(spelled(LONG, 2) + b"q\5" + (b"0" + spelled(_TWICE, 2) + b"q\5") * 28)

HARMFUL: dict[str, Any] = {
    "changes a class by a type for a method": call(
        "torch._tensor", "_rebuild_from_type_v2", WITH_STATE, TENSOR,
        (PARAMETER, False, {}, {"as_subclass": Name("numpy", "object_")}), {"to": LIST},
    ),
    "changes what was read": call(
        "torch._utils", "_rebuild_parameter_with_state", call("torch._utils", "_rebuild_tensor_v2", *REBUILT),
        False, NO_HOOKS, {"data": call("torch._utils", "_rebuild_tensor_v2", *REBUILT)},
    ),
    "stores eval behind a tag": [call(*TAG, EVAL, "x")],
    "runs a record's __init__": call("accelerate.state", "PartialState"),
    "changes the state of all records": Build(Call(STATE), {"evil": 1}),
    "changes a record's class": Build(Call(STATE, how="newobj"), ({}, {"__class__": LIST})),
    "asks for a method to fill it": Code(
        spelled(Build(NO_HOOKS, {"extend": Name("builtins", "bytearray")}), 2) + b"(e"
    ),
    "keeps the names of eval": Code(
        b"}" + spelled("data", 2) + spelled(array(LONG, (1,), b"12345678"), 2) + b"sq\1"
        + spelled(EVAL, 2) + spelled("data", 2) + b"h\1\x86Rh\1\x86"
    ),
    "is no storage": call("torch.storage", "_load_from_bytes", pickled(call("types", "SimpleNamespace"), 2)),
    "has no values": call("torch._utils", "_rebuild_tensor_v2", NOWHERE, *REBUILT[1:]),
    "is made by half": call("copyreg", "_reconstructor", Name("fractions", "Fraction"), OBJECT, "1/2"),
    "takes numbers for pointers": array(OVERLAPPING, (1,), [([], 1)]),
    "frees what was never set": array(dtype("O8", 3, "|", None, None, None, -1, -1, 3), (1,), [[]]),
    "has dates without a unit": array(dtype("m8", 4, "<", None, None, None, -1, -1, 0), (1,), b"12345678"),
    "views memory through slots": Build(Call(STATE, how="newobj"), (VIEW, {})),
    "views memory through keys": call(ATTRIBUTES.module, ATTRIBUTES.attribute, VIEW),
    "indexes behind a sparse tensor": call(
        "torch._utils", "_rebuild_sparse_tensor", Name("torch", "sparse_coo"), ([[10**12]], [1.0], (3,), True)
    ),
    "copies to another type": again(
        800, Name("torch._utils", "_rebuild_device_tensor_from_numpy"), array(LONG, (1,), b"12345678"),
        Name("torch", "complex128"), "cpu", False,
    ),
    "copies bytes": again(20_000, Name("builtins", "bytearray"), BIG),
    "copies text": again(20_000, Name("_codecs", "encode"), BIG.decode(), "latin1"),
    "scales by nested lists": call(
        "torch._utils", "_rebuild_qtensor", *REBUILT[:4],
        (Name("torch", "per_channel_affine"), [[[1.0]]], [[[1]]], 0), False, NO_HOOKS,
    ),
    "hashes a tuple without end": keyed(Build(INDEX, {"fqn": nested(40), "offset": None, "index": None})),
    "hashes a record's slots without end": keyed(Build(INDEX, ({"fqn": nested(40)}, {}))),
    "hashes a record in a record without end": keyed(
        Build(INDEX, {"fqn": Build(INDEX, {"fqn": nested(40)}), "offset": None})
    ),
    "hashes a tuple of tuples without end": keyed(nested(40)),
    "has keys of one hash": Code(
        b"}" + b"".join(spelled(call("fractions", "Fraction", i * PRIME, 1), 2) + b"Ns" for i in range(1500))
    ),
    "spells objects without end": array(call("numpy.dtypes", "StringDType"), (1,), [nested(34)]),
    "has elements of no bytes": array(
        dtype("V8", 3, "|", None, ("a",), {"a": (EMPTY, 0)}, 8, 1, 16), (1,), b"12345678",
    ),
    "describes a long structure": call(
        "numpy.core.multiarray", "_reconstruct", Name("numpy", "ndarray"), (0,), "i4," * 1000 + "i4"
    ),
    "frees by recursion": Discarded(
        Code(b"ccollections\ndeque\nq\1" + b"0" + b"h\1)R" * 120_000 + b"a" * 119_999), {}
    ),
    "divides long numbers": call("builtins", "range", 0, 1 << 8_000, 1 << 4_000),
    "fills a list that was only tagged": Code(
        b"]q\1" + spelled(call("torch.jit._pickle", "build_intlist", Code(b"h\1")), 2)
        + spelled(EVAL, 2) + b"a0"
    ),
    "rebuilds with arguments of another tuple": call(
        "torch._tensor", "_rebuild_from_type_v2", Name("torch._utils", "_rebuild_tensor_v2"), TENSOR,
        call("builtins", "tuple", (1,)), None,
    ),
    "hashes a tuple made of a list without end": keyed(call("builtins", "tuple", [nested(40)])),
    "hashes what has a tag without end": keyed(call(*TAG, nested(40), "x")),
    "hashes the elements of a set without end": call(
        "builtins", "set", call("builtins", "tuple", (call("builtins", "tuple", [nested(40)]),))
    ),
    "hashes what a loader gives back without end": keyed(PersistentId(("module", nested(40), "", ""))),
    "has the same type in types without end": keyed(PARTS),
    "has elements of a gigabyte": array(
        dtype("V900000000", 3, "|", None, ("a",), {"a": (OBJECTS, 0)}, 900_000_000, 1, 27), (3,), [None] * 3
    ),
    "copies what a tuple holds": again(
        4_000, LIST, call("builtins", "tuple", call("builtins", "tuple", (None,) * 50_000))
    ),
    "compares a decimal with a long number": Code(
        b"}\x8b" + struct.pack("<i", 10_000) + (PRIME << 79_900).to_bytes(10_000, "little") + b"Ns"
        + spelled(call("decimal", "Decimal", "0"), 2) + b"Ns"
    ),
    "loads a storage again and again": again(
        100_000, Name("torch.storage", "_load_from_bytes"),
        STORAGE_HEAD + spelled_storage(2) + pickled(["0"], 2) + struct.pack("<Qff", 2, 1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMFUL)
def test_no_harm_is_safe(name: str) -> None:
    data = pickled(HARMFUL[name], 2)
    assert len(data) < 1_000_000
    try:
        safety = pickles_in(data).safety
    except LimitExceeded:
        return
    assert safety != ()


def test_keys_of_nested_frozensets_have_a_limit() -> None:
    """Two that are equal and not the same are compared part by part, forty levels deep."""
    made = b"(K\1\x91" + b"q\1(h\1h\1\x86\x91" * 40
    data = b"\x80\4}" + made + b"Ns" + made + b"Ns."
    with pytest.raises(LimitExceeded, match="parts"):
        pickles_in(data)


def test_a_list_of_what_only_looks_like_one_is_read() -> None:
    inner = call("torch.jit._pickle", "build_intlist", [1])
    assert pickles_in(pickled(call("builtins", "list", inner), 2)).safety == ()


def test_a_deque_holds_no_more_than_it_may() -> None:
    """The first ones would be gone when it is loaded."""
    data = b"\x80\2ccollections\ndeque\n)K\2\x86R(K\1K\2%be."
    assert pickles_in(data % b"").safety == ()
    assert has_errors(pickles_in(data % b"K\3").safety)


def test_a_storage_in_bytes_has_what_it_says() -> None:
    """A storage of elements that are not there would be whatever the memory holds."""
    for keys, elements, is_safe in (
        (["0"], struct.pack("<Qff", 2, 1, 2), True),
        ([], b"", False),
        (["0"], struct.pack("<Qf", 1, 1), False),
        (["0"], struct.pack("<Q", 2), False),
    ):
        content = STORAGE_HEAD + spelled_storage(2) + pickled(keys, 2) + elements
        data = b"\x80\3" + spelled(call("torch.storage", "_load_from_bytes", content), 3) + b"."
        assert (pickles_in(data).safety == ()) is is_safe


# One chain, in all that could trigger it ------------------------------------------------------------------


CALLS = calling(Name("torch.nn.functional", "torch"), "x")
TRIGGERS: dict[str, Any] = {**mappings(CALLS), **sequences(CALLS), **optimizers(CALLS)}


@pytest.mark.parametrize("name", TRIGGERS)
def test_an_attribute_that_is_called_is_never_safe(name: str) -> None:
    assert pickles_in(pickled(TRIGGERS[name], 2)).safety != ()
    assert pickles_in(pickled([Discarded(TRIGGERS[name], 1)], 4)).safety != ()

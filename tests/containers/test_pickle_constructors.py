"""Which calls of a pickle make plain data: the closed table, its kinds, and what is filled into results."""

from __future__ import annotations

import importlib
import inspect
import pickle
from typing import Any

import pytest

from ckpttool.containers.pickle.constructors import (
    constructors,
    evaluate,
    is_constructor,
    judge_state,
    kind_of,
)
from ckpttool.containers.pickle.pickle_nodes import (
    Call,
    DictSubclass,
    Global,
    Persistent,
    Trust,
    globals_in,
    is_object,
    python3_name,
    value_kind,
    words_in,
)
from ckpttool.core.report import has_errors
from tests.support.containers import pickles_in


def made(module: str, name: str, *args: object, is_new: bool = False, state: object = None) -> Call:
    """Return a call that has been evaluated, with a state that was set on it."""
    call = Call(Global(module, name), args)
    call.is_new = is_new
    evaluate(call)
    call.state = state
    return call


EVAL = Global("builtins", "eval")
GETATTR = made("builtins", "getattr", Global("torch._C", "_VariableFunctionsClass"), "relu")
TENSOR_CLASS = Global("torch", "Tensor")
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
STORAGE = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 6))
NO_HOOKS = DictSubclass(Global("collections", "OrderedDict"))
REBUILT = (STORAGE, 0, (2, 3), (3, 1), False, NO_HOOKS)
TENSOR = made("torch._utils", "_rebuild_tensor_v2", *REBUILT)
WIDE = made("torch._utils", "_rebuild_tensor_v2", STORAGE, 0, (1 << 40,), (0,), False, NO_HOOKS)
MODULE = made("torch.nn.modules.container", "ModuleList", is_new=True)
ARRAY = made("numpy.core.numeric", "_frombuffer", b"", made("numpy", "dtype", "f4", False, True), (0,), "C")
AFFINE = (Global("torch", "per_tensor_affine"), 1.0, 0)
NAMESPACE = made("argparse", "Namespace", state={"keys": 1})
PARTIAL = made("functools", "partial", Global("torch.nn.modules.linear", "Linear"))
TREE = made("sklearn.tree._tree", "Tree", 1, "classes", 1)
RANGE = made("builtins", "range", 10**10)
FLOAT = made("numpy", "dtype", "f4", False, True)
POINTERS = made("numpy", "dtype", "O8", False, True)

PLAIN: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("builtins", "list", ([1, EVAL],), "list"),
    ("builtins", "bytearray", (b"x",), "bytearray"),
    ("builtins", "range", (10**10,), "range"),
    ("builtins", "complex", (1.0, 2), "complex"),
    ("builtins", "type", (None,), "type"),
    ("_codecs", "encode", ("text", "latin1"), "bytes"),
    ("collections", "OrderedDict", ([["a", 1]],), "ordered-dict"),
    ("collections", "defaultdict", (Global("builtins", "list"),), "default-dict"),
    ("collections", "deque", ([], 5), "deque"),
    ("datetime", "datetime", (b"0123456789",), "datetime"),
    ("decimal", "Decimal", ("-1.50E+3",), "decimal"),
    ("fractions", "Fraction", ("1/3",), "fraction"),
    ("pathlib", "PosixPath", ("a", "b", "c"), "path"),
    ("builtins", "eval", ("data", {"data": ARRAY}), "ndarray"),
    ("numpy", "dtype", ("f4", False, True), "dtype"),
    ("numpy", "dtype", ("O8", False, True), "object-dtype"),
    ("numpy", "dtype", ("V8", False, True), "open-dtype"),
    ("numpy.core.multiarray", "scalar", (FLOAT, b"1234"), "number"),
    ("torch", "device", ("cuda", 0), "device"),
    ("torch._utils", "_rebuild_tensor_v2", REBUILT, "tensor"),
    ("torch._utils", "_rebuild_tensor_v2", (STORAGE, 0, (1 << 40,), (0,), False, NO_HOOKS), "view"),
    ("torch._utils", "_rebuild_parameter", (WIDE, True, NO_HOOKS), "parameter"),
    ("torch._utils", "_rebuild_parameter_with_state", (TENSOR, True, NO_HOOKS, {"a": 1}), "attributed"),
    ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, TENSOR_CLASS, REBUILT, {}), "tensor"),
    ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, TENSOR_CLASS, REBUILT, {"a": 1}), "attributed"),
    ("transformers.training_args", "OptimizerNames", ("adamw_torch",), "member"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "args", "kind"), PLAIN)
def test_a_call_that_is_on_a_row_makes_data_of_a_kind(module: str, name: str, args: tuple, kind: str) -> None:
    call = Call(Global(module, name), args)
    assert evaluate(call) is Trust.PLAIN
    assert kind_of(call) == kind


UNSAFE: list[tuple[str, str, tuple[Any, ...]]] = [
    ("torch._tensor", "_rebuild_from_type_v2", (EVAL, TENSOR_CLASS, ("x",), {})),
    ("torch._tensor", "_rebuild_from_type_v2", (GETATTR, TENSOR_CLASS, ("x",), {})),
    ("torch._tensor", "_rebuild_from_type_v2", (MODULE, TENSOR_CLASS, ("x",), {})),
    ("torch._tensor", "_rebuild_from_type_v2", (Global("builtins", "dict"), TENSOR_CLASS, ("x",), {})),
    ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, EVAL, REBUILT, {})),
    ("torch._utils", "_rebuild_parameter", ([EVAL], True, NO_HOOKS)),
    ("numpy.random._pickle", "__generator_ctor", ("x", EVAL)),
    ("sklearn.neighbors._kd_tree", "newObj", (EVAL,)),
    ("functools", "partial", (EVAL,)),
    ("collections", "defaultdict", (EVAL,)),
    ("builtins", "dict", (NAMESPACE,)),
    ("builtins", "list", (MODULE,)),
    ("builtins", "tuple", (PARTIAL,)),
    ("collections", "OrderedDict", (TREE,)),
    ("collections", "deque", (RANGE,)),
    ("builtins", "list", (RANGE,)),
    ("builtins", "bytes", (10**11,)),
    ("builtins", "bytearray", (10**11,)),
    ("builtins", "getattr", ([], "append")),
    ("builtins", "type", ("Name", (), {})),
    ("builtins", "eval", ("data", {"data": "x"})),
    ("builtins", "eval", ("open('x')", {"data": TENSOR})),
    ("_codecs", "encode", ("text", "zlib")),
    ("torch.storage", "_load_from_bytes", ("text",)),
    ("torch.nn.modules.linear", "Linear", (3, 4)),
    ("numpy", "memmap", ("path",)),
]
UNKNOWN: list[tuple[str, str, tuple[Any, ...]]] = [
    ("fractions", "Fraction", ("1e999999999",)),
    ("decimal", "Decimal", ("1e999999999",)),
    ("numpy.core.multiarray", "_reconstruct", (Global("numpy", "ndarray"), (10**12,), b"b")),
    ("numpy.core.multiarray", "_reconstruct", (Global("my.arrays", "Array"), (0,), b"b")),
    ("numpy.core.multiarray", "scalar", (made("numpy", "dtype", "V8", False, True), b"12345678")),
    ("numpy.core.multiarray", "scalar", (POINTERS, b"12345678")),
    ("torch._utils", "_rebuild_qtensor", (STORAGE, 0, (1 << 40,), (0,), AFFINE, False, NO_HOOKS)),
    ("torch._utils", "_rebuild_xla_tensor", (WIDE, Global("torch", "float"), "cpu", True)),
    ("torch._utils", "_rebuild_parameter_with_state", (TENSOR, True, NO_HOOKS, {"__class__": "x"})),
    ("torch._utils", "_rebuild_parameter", (MODULE, True, NO_HOOKS)),
    ("re", "_compile", ("(a+)+$", 0)),
    ("builtins", "int", (made("decimal", "Decimal", "1"),)),
    ("collections", "defaultdict", (PARTIAL,)),
    ("functools", "partial", (Global("torch.nn.modules.linear", "Linear"),)),
    ("functools", "partial", (MODULE,)),
    ("sklearn.neighbors._kd_tree", "newObj", (Global("sklearn.neighbors._kd_tree", "KDTree"),)),
    ("collections", "UserDict", ()),
    ("random", "Random", ()),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "args"), UNSAFE)
def test_a_function_or_an_object_in_place_of_data_is_dangerous(module: str, name: str, args: tuple) -> None:
    assert evaluate(Call(Global(module, name), args)) is Trust.DANGEROUS


@pytest.mark.parametrize(("module", "name", "args"), UNKNOWN)
def test_a_call_on_no_row_is_unknown(module: str, name: str, args: tuple) -> None:
    call = Call(Global(module, name), args)
    assert evaluate(call) is Trust.UNKNOWN
    assert kind_of(call) == "opaque"


@pytest.mark.parametrize("name", [Global(module, name) for module, name in constructors()], ids=str)
def test_no_constructor_takes_a_function_or_an_object(name: Global) -> None:
    """But for the ways to name a class: of a tensor, of an array, and of an object of protocol 0."""
    for opaque in (Global("my", "function"), MODULE, PARTIAL, TREE, GETATTR):
        for before in ((), ("x",), (1,), (STORAGE,), (TENSOR,), (b"",)):
            call = Call(name, (*before, opaque))
            assert evaluate(call) is not Trust.PLAIN, before


def test_classes_are_made_and_not_called() -> None:
    linear = Global("torch.nn.modules.linear", "Linear")
    call = Call(linear, ())
    call.is_new = True
    assert evaluate(call) is Trust.UNKNOWN
    assert evaluate(Call(linear, ())) is Trust.DANGEROUS


class Evaluated:
    """An object that is pickled as a call, and a state if there is one."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    ("state", "is_safe"),
    [
        ((1, (2,), POINTERS, False, [1, 2]), True),
        ((1, (10**10,), POINTERS, False, []), False),
        ((1, (2,), FLOAT, False, b"12345678"), True),
        ((1, (2,), POINTERS, False, b"1234567812345678"), False),
        ((1, (2,), FLOAT, False, FLOAT), False),
    ],
)
def test_objects_of_an_array_are_as_many_as_its_shape_says(state: tuple, is_safe: bool) -> None:
    array = made("numpy.core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (0,), b"b")
    assert (judge_state(array, state) is Trust.PLAIN) is is_safe


@pytest.mark.framework
def test_what_pytorch_loads_with_weights_only_is_listed() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    allowed = {tuple(dotted.rpartition(".")[::2]) for dotted in _get_allowed_globals()}
    assert globals_in("weights_only.txt") == allowed
    names = [python3_name(module, name) for module, name in allowed]
    missing = {pair for pair in names if value_kind(*pair) is None and not is_constructor(Global(*pair))}
    # A wrapper makes an object of a class that is not PyTorch's own; the others take memory.
    assert missing == {
        ("torch._utils", "_rebuild_wrapper_subclass"),
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
        ("torch._utils", "_rebuild_device_tensor_from_numpy"),
    }


@pytest.mark.framework
def test_what_a_tensor_does_when_it_is_set_is_no_plain_attribute() -> None:
    import torch

    classes = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    found = [(name, inspect.getattr_static(cls, name)) for cls in classes for name in dir(cls)]
    properties = {name for name, value in found if hasattr(type(value), "__set__")}
    unlisted = properties - words_in("tensor_properties.txt")
    assert {name for name in unlisted if not name.startswith("__")} == set()


def is_dtype(value: object) -> bool:
    import numpy as np

    return isinstance(value, type) and issubclass(value, np.generic)


@pytest.mark.framework
def test_types_of_elements_are_values() -> None:
    import ml_dtypes
    import numpy as np
    import torch

    kinds = (torch.dtype, torch.layout, torch.qscheme)
    names = [("torch", name) for name, value in vars(torch).items() if isinstance(value, kinds)]
    names += [("numpy", name) for name, value in vars(np).items() if is_dtype(value)]
    names += [("ml_dtypes", name) for name, value in vars(ml_dtypes).items() if is_dtype(value)]
    assert [pair for pair in names if value_kind(*pair) is None] == []


RECORDS = [
    pair
    for pair, rows in constructors().items()
    if rows[0].result in ("record", "namespace", "attribute-dict")
]
NOT_INSTALLED = {"deepspeed", "lightning_fabric"}
OWN_STATE = {"TensorProperties"}
"""It unpacks a tuple of five values, and compares one with numbers."""


@pytest.mark.framework
@pytest.mark.parametrize(("module", "name"), RECORDS)
def test_creating_a_record_only_fills_its_attributes(module: str, name: str) -> None:
    if module.partition(".")[0] in NOT_INSTALLED:
        return
    cls = getattr(importlib.import_module(module), name)
    assert cls.__new__ in (object.__new__, dict.__new__) or cls.__module__ == "types"
    if name not in OWN_STATE:
        assert inspect.getattr_static(cls, "__setstate__", None) is None


@pytest.mark.framework
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pair
        for pair, rows in constructors().items()
        if rows[0].result == "member" and pair[0].partition(".")[0] not in {"builtins", *NOT_INSTALLED}
    ],
)
def test_members_are_of_enumerations(module: str, name: str) -> None:
    import enum

    found = getattr(importlib.import_module(module), name, None)
    assert found is None or issubclass(found, enum.Enum)  # some are of older versions


def test_nothing_is_stored_that_is_a_function() -> None:
    for value in (Evaluated, len, print):
        assert pickles_in(pickle.dumps({"a": [value]}, 2)).safety != ()
    stored = pickles_in(b"\x80\2}X\1\0\0\0ac_codecs\nencode\ns.").safety
    assert has_errors(stored)
    for name in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"cargparse\nNamespace\n"):
        (finding,) = pickles_in(b"\x80\2]" + name + b"a.").safety
        assert finding.message.startswith("loading it stores ")


@pytest.mark.parametrize("value", [float, dict, Ellipsis, type(None)])
def test_types_of_plain_values_are_data(value: object) -> None:
    for protocol in range(6):
        assert pickles_in(pickle.dumps({"type": value}, protocol)).safety == ()


def test_objects_have_no_constructor() -> None:
    assert [pair for pair in constructors() if is_object(*pair)] == []

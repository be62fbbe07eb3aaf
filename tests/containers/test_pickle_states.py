"""States that BUILD sets: those of NumPy's types agree with what they describe, attributes steer nothing."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpttool import Safety, verify
from ckpttool.core.report import has_errors
from tests.security.assembler import Build, Call, Code, Name, PersistentId, call, pickled, spelled
from tests.support.containers import pickles_in

POINTER = b"A" * 8
PLAIN_ARRAY = call("numpy._core.multiarray", "_reconstruct", Name("numpy", "ndarray"), (0,), b"b")


def dtype(spec: Any, *state: Any) -> Build:
    """Return a type with its state but for the version."""
    return Build(call("numpy", "dtype", spec, False, True), (3, *state))


def structured(fields: Any, *, size: int = 8, flags: int = 0) -> Build:
    return dtype("V8", "|", None, ("a",), fields, size, 1, flags)


OBJECT = dtype("O8", "|", None, None, None, -1, -1, 63)
FLOAT = dtype("f8", "<", None, None, None, -1, -1, 0)
FORGED_OBJECT = dtype("O8", "|", None, None, None, -1, -1, 0)


def scalar(kind: Any) -> Call:
    return call("numpy._core.multiarray", "scalar", kind, POINTER)


def safety_messages(data: bytes) -> list[str]:
    """Return what the judge says of a pickle."""
    return [finding.message for finding in pickles_in(data).safety]


def changed_later() -> Code:
    """Return a scalar of a type whose fields become pointers once it was judged."""
    fields = b"}q\1" + spelled("a", 4) + spelled((FLOAT, 0), 4) + b"s"
    kind = spelled(structured(Code(fields)), 4) + b"q\2" + b"0"
    return Code(
        kind + b"h\1" + spelled("a", 4) + spelled((OBJECT, 0), 4) + b"s0" + spelled(scalar(Code(b"h\2")), 4)
    )


VOID = call("numpy", "dtype", "V8", False, True)
DESCRIBED = (3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 0)
FORGED = {
    "pointers without their flags": scalar(FORGED_OBJECT),
    "a field of pointers": call("builtins", "tuple", scalar(structured({"a": (OBJECT, 0)}))),
    "a field far away": call("builtins", "tuple", scalar(structured({"a": (FLOAT, 1 << 40)}))),
    "a field before the begin": call("builtins", "tuple", scalar(structured({"a": (FLOAT, -(1 << 40))}))),
    "fields changed later": call("builtins", "tuple", changed_later()),
    "another name": call(
        "builtins",
        "tuple",
        scalar(Build(call("torch.jit._pickle", "restore_type_tag", VOID, ""), DESCRIBED)),
    ),
    "a copy that is none": call("builtins", "tuple", scalar(Build(call("numpy", "dtype", VOID), DESCRIBED))),
}
"""Pickles on which NumPy reads memory that is none of the array's, by what is wrong with the type."""


@pytest.mark.framework
def test_numpy_does_follow_forged_pointers_while_it_loads(tmp_path: Path) -> None:
    survived = []
    for name, value in FORGED.items():
        path = tmp_path / "forged.pkl"
        path.write_bytes(pickled(value, 4))
        code = f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)
        if done.returncode >= 0:  # no signal
            survived.append(name)
    assert survived == []


@pytest.mark.parametrize("name", FORGED)
def test_forged_types_are_unsafe(name: str) -> None:
    assert any("which no honest pickle does" in text for text in safety_messages(pickled(FORGED[name], 4)))


@pytest.mark.parametrize(
    "kind",
    [
        structured({"a": (FLOAT, 1)}),
        structured({"a": (FLOAT, 0)}, size=4),
        structured({"a": (FLOAT, 0)}, flags=27),
        structured({"a": (VOID, 0)}),
        structured({"a": (FLOAT,)}),
        structured({"b": (FLOAT, 0)}),
        structured(None),
        dtype("V8", "|", (FLOAT, (2,)), None, None, 8, 1, 0),
        dtype("V8", "|", (FLOAT, (-1,)), None, None, 8, 1, 0),
        dtype("V8", "|", None, None, None, 8, 0, 0),
        dtype("f8", "<", None, None, None, -1, -1, 63),
        dtype("f8", "<", None, None, None, 4, -1, 0),
        dtype("U2", "<", None, None, None, 7, 4, 8),
        dtype("S2", "|", None, None, None, -8, 1, 0),
        dtype(Name("ml_dtypes", "bfloat16"), "<", None, None, None, 1, 1, 0),
        dtype({"names": ["a"]}, "|", None, None, None, 8, 1, 0),
        Build(call("numpy.dtypes", "VoidDType", 8), (3, "|", None, None, None, 8, 1, 0)),
        Build(call("numpy", "dtype", "f8", False, True), (3, "<")),
        Build(PLAIN_ARRAY, (1, (1,), VOID, False, POINTER)),
    ],
    ids=range(19),
)
def test_types_that_contradict_themselves_are_unsafe(kind: Build) -> None:
    assert safety_messages(pickled(kind, 4)) != []


@given(arrays.array_dtypes(allow_subarrays=True), st.integers(0, 5))
def test_any_type_of_numpys_is_plain(kind: np.dtype, protocol: int) -> None:
    assert safety_messages(pickle.dumps([kind, np.zeros(2, kind)], protocol)) == []


@given(arrays.scalar_dtypes(), st.integers(0, 5))
def test_any_plain_type_of_numpys_is_plain(kind: np.dtype, protocol: int) -> None:
    assert safety_messages(pickle.dumps([kind, np.zeros(2, kind)], protocol)) == []


@pytest.mark.parametrize("protocol", range(6))
def test_odd_types_of_numpys_are_plain(protocol: int) -> None:
    import ml_dtypes

    kinds = [
        np.dtype([("a", "f8"), ("b", "O", (2,)), ("c", [("d", "U3"), ("e", "M8[ns]")])]),
        np.dtype([("a", "i1"), ("b", "c16")], align=True),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0], "itemsize": 16}),
        np.dtype([(("title", "a"), "f8")]),
        np.dtype("f8", metadata={"unit": "m"}),
        np.dtype(("f4", (2, 3))),
        np.dtype(("O", (2,))),
        np.dtype((np.record, [("a", "f8")])),
        np.dtype("V0"),
        np.dtype([]),
        np.dtype("M8"),
        *(np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e5m2)),
    ]
    assert safety_messages(pickle.dumps([*kinds, np.dtypes.StringDType()], protocol)) == []


@pytest.mark.parametrize(
    "state",
    [
        {"__array_interface__": {}},
        (None, {"__array_interface__": {}}),
        {call("builtins", "str", "__array_interface__"): {}},
        call("builtins", "dict", [("__array_interface__", {})]),
        (None, call("builtins", "dict", [("__class__", 1)])),
        {"__setstate__": Name("torch", "relu")},
        (None, {"__dict__": {}}),
        call("argparse", "Namespace"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("target", ["argparse.Namespace", "collections.OrderedDict"])
def test_attributes_that_steer_are_unsafe(target: str, state: Any) -> None:
    made = call(*target.split("."))
    assert safety_messages(pickled(Build(made, state), 4)) != []


def test_names_that_scripting_notes_steer_nothing_in_a_module() -> None:
    """``torch.jit.script`` leaves ``__overloads__`` in each module; no plain object has it."""
    noted, steering = ({name: {}} for name in ("__overloads__", "__setstate__"))
    made = call("torch.nn.modules.linear", "Linear", how="newobj")
    assert not has_errors(pickles_in(pickled(Build(made, noted), 4)).safety)
    assert has_errors(pickles_in(pickled(Build(made, steering), 4)).safety)
    assert has_errors(pickles_in(pickled(Build(call("argparse", "Namespace"), noted), 4)).safety)


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_zip", [False, True])
def test_a_whole_model_that_was_scripted_before_is_unknown(tmp_path: Path, is_zip: bool) -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.TransformerEncoderLayer(2, 1))
    for module in model:
        torch.jit.script(module)
    assert "__overloads__" in vars(model[0])
    torch.save(model, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    assert verify(tmp_path / "m.pt", only={"safety"}).safety is Safety.UNKNOWN


@pytest.mark.parametrize(
    "made",
    [
        call("transformers.trainer_utils", "IntervalStrategy", "no"),
        call("torch.jit._pickle", "restore_type_tag", {}, ""),
        call("torch", "device", "cpu"),
        scalar(FLOAT),
    ],
    ids=["enum", "restored", "device", "scalar"],
)
def test_what_is_shared_takes_no_state(made: Call) -> None:
    assert safety_messages(pickled(made, 4)) == []
    assert safety_messages(pickled(Build(made, {"x": 1}), 4)) != []


@pytest.mark.parametrize(
    "key",
    [
        "__setstate__",
        call("builtins", "str", "__setstate__"),
        call("torch.jit._pickle", "restore_type_tag", "__setstate__", ""),
        PersistentId(("module", "__setstate__", "", "")),
    ],
    ids=["text", "call", "given back", "persistent"],
)
def test_no_key_of_a_dictionary_spells_what_the_unpickler_looks_up(key: Any) -> None:
    made = Call(Name("yacs.config", "CfgNode"), how="newobj")
    filled = spelled(made, 2) + spelled(key, 2) + spelled(Name("torch", "relu"), 2) + b"s"
    assert has_errors(pickles_in(b"\x80\2" + filled + b".").safety)
    honest = spelled(made, 2) + spelled("add", 2) + spelled(Name("torch", "relu"), 2) + b"s"
    assert not has_errors(pickles_in(b"\x80\2" + honest + b".").safety)

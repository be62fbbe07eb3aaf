"""Recordings: what is written is what is read, and what is no recording is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ckpttool.predict.inputs import SCHEMA, Recording, dtype_named, read_recording, write_recording
from ckpttool.predict.interface import LoadFailed

_DTYPES = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "u8", "?", "c8", "c16", "U5"])
_ARRAYS = _DTYPES.flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0, max_side=4)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inputs=st.dictionaries(st.sampled_from(["0", "x", "a/b"]), _ARRAYS), output=_ARRAYS)
def test_what_is_written_is_what_is_read(
    tmp_path: Path, inputs: dict[str, np.ndarray[Any, Any]], output: np.ndarray[Any, Any]
) -> None:
    path = str(tmp_path / "g.npz")
    write_recording(path, Recording(inputs, {"output": output}, {"seed": 3}))
    found = read_recording(path)
    assert found.about == {"schema": SCHEMA, "seed": 3}
    assert found.inputs.keys() == inputs.keys()
    for name, array in {**inputs, "": output}.items():
        again = found.inputs[name] if name else found.outputs["output"]
        assert again.dtype == array.dtype
        assert again.shape == array.shape
        assert again.tobytes() == array.tobytes()


def test_bfloat16_stays_so(tmp_path: Path) -> None:
    path = str(tmp_path / "g.npz")
    values = np.arange(3).astype(dtype_named("bfloat16"))
    write_recording(path, Recording({"x": values}, {"y": values}, {}))
    found = read_recording(path)
    assert found.inputs["x"].dtype == found.outputs["y"].dtype == values.dtype
    with np.load(path) as plain:
        assert plain["input/x"].dtype == np.float32


def test_text_of_any_kind_is_text(tmp_path: Path) -> None:
    path = str(tmp_path / "g.npz")
    write_recording(path, Recording({}, {"y": np.array(["a", "bc"], object)}, {}))
    assert read_recording(path).outputs["y"].tolist() == ["a", "bc"]


def test_any_npz_with_outputs_will_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **{"output/y": np.ones(2), "else": np.ones(1)})
    found = read_recording(str(tmp_path / "g.npz"))
    assert found.outputs["y"].tolist() == [1, 1]
    assert not found.inputs and not found.about


@pytest.mark.parametrize(
    "about",
    [
        "no JSON",
        "[" * 100_000,
        "[1]",
        json.dumps({"dtypes": ["output/y"]}),
        json.dumps({"dtypes": {"output/y": "object"}}),
        json.dumps({"dtypes": {"output/y": ["bfloat16"], "output/none": "bfloat16"}}),
        json.dumps({"dtypes": {"output/y": "no type"}}),
    ],
)
def test_what_a_recording_says_of_itself_may_be_anything(tmp_path: Path, about: str) -> None:
    np.savez(tmp_path / "g.npz", **{"output/y": np.ones(2), "ckpttool": np.array(about)})
    assert read_recording(str(tmp_path / "g.npz")).outputs["y"].tolist() == [1, 1]


def test_no_outputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", y=np.ones(2))
    with pytest.raises(LoadFailed, match="it has no output/<name>"):
        read_recording(str(tmp_path / "g.npz"))


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_recording(str(tmp_path / "none" / "g.npz"), Recording({}, {"y": np.ones(1)}, {}))
    assert not list(tmp_path.iterdir())

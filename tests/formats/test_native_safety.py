"""What a carried model could run is told by whatever carries it, as the reader of the model tells it."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import pytest

from ckpttool import Safety, Severity, convert, open_checkpoint, verify
from ckpttool.formats.sidecar import native_safety

CARRIERS = ["x.safetensors", "x.npz", "x.hdf5", "x.weights.h5", "x.pt"]


@pytest.mark.parametrize("name", CARRIERS)
def test_a_carried_lambda_is_told_as_of_its_own_file(name: str, files: Path, tmp_path: Path) -> None:
    source = files / "keras-unsafe" / "lambda.keras"
    convert(source, tmp_path / name)
    with open_checkpoint(source) as own, open_checkpoint(tmp_path / name) as carrier:
        assert (
            [(one.code, one.severity) for one in carrier.safety]
            == [(one.code, one.severity) for one in own.safety]
            != []
        )
        for one, other in zip(carrier.safety, own.safety, strict=True):
            assert one.message == f"in a model that is written from it: {other.message}"
            place = str(other.where).removeprefix("config.json")
            assert one.where == f"ckpttool.content.keras.config{place}"
    assert verify(tmp_path / name).safety is verify(source).safety is Safety.UNSAFE


def test_a_harmless_model_adds_nothing(files: Path, tmp_path: Path) -> None:
    convert(files / "keras" / "adam.keras", tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as opened:
        assert "keras.config" in opened.native
        assert opened.safety == ()


class Run:
    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, ("true",)


@pytest.mark.parametrize(
    ("key", "data", "code", "severity"),
    [
        ("keras.config", b"{", "not-scanned", Severity.WARNING),
        ("keras.config", b'{"class_name": "Lambda", "config": {}}', "keras-lambda", Severity.ERROR),
        (
            "keras.training_config",
            json.dumps({"loss": {"class_name": "x", "module": "os"}}).encode(),
            "keras-gadget",
            Severity.ERROR,
        ),
        ("keras.asset:assets/x.npz", b"anything", "not-scanned", Severity.WARNING),
    ],
)
def test_each_part_is_judged(key: str, data: bytes, code: str, severity: Severity) -> None:
    found = native_safety({key: data}, "entry", 0)
    assert {(one.code, one.severity) for one in found} == {(code, severity)}
    assert all(str(one.where).startswith(f"entry.{key}") for one in found)


def test_a_pickle_beside_a_model_is_judged_as_in_its_own_file(tmp_path: Path, files: Path) -> None:
    data = pickle.dumps(Run(), 2)
    target = tmp_path / "x.keras"
    with zipfile.ZipFile(files / "keras" / "adam.keras") as own, zipfile.ZipFile(target, "w") as made:
        for name in own.namelist():
            made.writestr(name, own.read(name))
        made.writestr("assets/p.pkl", data)
    with open_checkpoint(target) as opened:
        own_codes = [one.code for one in opened.safety]
    found = native_safety({"keras.asset:assets/p.pkl": data}, "entry", 0)
    assert [one.code for one in found] == own_codes != []


def test_other_parts_run_nothing() -> None:
    native = {"tensorflow.object_graph": b"\x80\x02x", "fluid.heights": b"{}", "keras.stored": b"{"}
    assert native_safety(native, "entry", 0) == ()


def test_sizes_are_held_against_the_file_that_carries_the_model() -> None:
    layer = {"class_name": "Dense", "config": {"name": "l", "units": 1 << 22}}
    data = json.dumps({"class_name": "Sequential", "config": {"name": "s", "layers": [layer]}}).encode()
    assert [one.code for one in native_safety({"keras.config": data}, "entry", 1 << 20)] == ["keras-work"]
    assert native_safety({"keras.config": data}, "entry", 1 << 24) == ()

"""Keras files from Keras files: Keras loads them, predicts the same, and has the same optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool import open_checkpoint
from ckpttool.checkpoint import Role, Tensor
from ckpttool.errors import UsageError
from ckpttool.ops.convert import convert
from ckpttool.ops.verify import verify
from ckpttool.wire.staged import Staged
from ckpttool.writing import writer_of
from ckpttool.writing.content import Content
from ckpttool.writing.interface import WriteOptions, Writer
from tests.writing.contents import content_of, tensor

NAMES = ("many", "custom", "subclassed", "mixed_float16", "bfloat16", "vocabulary", "int4")
KERAS, MODEL, WEIGHTS = ".keras", ".h5", ".weights.h5"

REFUSED = {
    ("custom", KERAS, MODEL): "layer 'mine' (Scale) is not one of Keras's own",
    ("custom", MODEL, KERAS): "is not one of Keras's own",
    ("subclassed", KERAS, MODEL): "its layers make themselves",
    ("subclassed", MODEL, KERAS): "the layers are not known",
    ("bfloat16", KERAS, MODEL): "Keras reads no bfloat16 out of an .h5",
    ("bfloat16", MODEL, KERAS): "bits16",
    ("vocabulary", KERAS, MODEL): "an .h5 has no place for a file of the model",
    ("int4", KERAS, MODEL): "was quantized",
    ("int4", MODEL, KERAS): "was quantized",
}
"""What can't be told or loaded, by model, source and target."""

NOT_IN_H5 = "vocabulary"
"""What Keras saves without in an ``.h5``, so that it does not predict by its own file."""

OWN_OPTIMIZER = "mixed_float16"
"""Where Keras scales losses by itself: its own two kinds of files come back with different optimizers."""

WAYS = [(KERAS, KERAS), (KERAS, MODEL), (KERAS, WEIGHTS), (MODEL, KERAS)]
MORE = [(MODEL, MODEL), (MODEL, WEIGHTS), (WEIGHTS, WEIGHTS)]
CASES = [(name, *way) for name in NAMES for way in (WAYS + MORE if name == "many" else WAYS)]
CASES.remove((NOT_IN_H5, MODEL, KERAS))


def ask(*arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("keras_oracle.py"))]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def directory(place: Path, *parts: str) -> Path:
    found = place / "_".join(part.strip(".").replace(".", "_") for part in parts)
    found.mkdir(exist_ok=True)
    return found


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where Keras saved its models."""
    place = tmp_path_factory.mktemp("keras")
    ask("save", place)
    return place


@pytest.fixture(scope="session")
def answers(saved: Path) -> dict[str, Any]:
    """Return what Keras says of all files: its own, and what became of them, by safetensors as well."""
    cases = [case for case in CASES if case not in REFUSED]
    files = {str(saved / f"{name}{target}") for name, _, target in cases}
    for name, source, target in cases:
        files |= {*map(str, converted(saved, name, source, target))}
    told = ask("load", saved, *sorted(files)).splitlines()[-1]
    found: dict[str, Any] = json.loads(told)
    return found


def converted(saved: Path, name: str, source: str, target: str) -> list[Path]:
    """Return what a file became, directly and, of one model, by way of safetensors."""
    straight = directory(saved, source, target) / f"{name}{target}"
    if not straight.exists():
        assert not convert(saved / f"{name}{source}", straight).mismatches
    if name != "many":
        return [straight]
    between = directory(saved, source, "safetensors") / f"{name}.safetensors"
    around = directory(saved, source, "around", target) / f"{name}{target}"
    if not between.exists():
        assert not convert(saved / f"{name}{source}", between).mismatches
    if not around.exists():
        assert not convert(between, around).mismatches
    return [straight, around]


@pytest.mark.framework
@pytest.mark.parametrize(("name", "source", "target"), [case for case in CASES if case not in REFUSED])
def test_keras_loads_it_as_its_own(
    name: str, source: str, target: str, saved: Path, answers: dict[str, Any]
) -> None:
    own = answers[str(saved / f"{name}{target}")]
    truth = json.loads((saved / f"{name}.json").read_text())
    assert own["predicted"] == truth["predicted"], own
    for path in converted(saved, name, source, target):
        found = answers[str(path)]
        assert found["predicted"] == truth["predicted"], found
        if name != OWN_OPTIMIZER:
            assert found["optimizer"] == own["optimizer"]
        assert verify(path).is_valid
        with open_checkpoint(path) as opened:
            assert opened.complete and not opened.findings


@pytest.mark.framework
@pytest.mark.parametrize(("case", "why"), REFUSED.items())
def test_what_cannot_be_told_or_loaded_is_refused(
    case: tuple[str, str, str], why: str, saved: Path, tmp_path: Path
) -> None:
    name, source, target = case
    with pytest.raises(UsageError) as raised:
        convert(saved / f"{name}{source}", tmp_path / f"x{target}")
    assert why in str(raised.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.framework
@pytest.mark.parametrize("name", ["many", "vocabulary", "subclassed"])
def test_keras_writes_the_same_zip(name: str, saved: Path, tmp_path: Path) -> None:
    import zipfile

    assert not convert(saved / f"{name}.keras", tmp_path / "x.keras").mismatches
    with zipfile.ZipFile(saved / f"{name}.keras") as own, zipfile.ZipFile(tmp_path / "x.keras") as made:
        assert sorted(own.namelist()) == sorted(made.namelist())
        assert made.testzip() is None
        for member in own.namelist():
            if not member.endswith(".h5"):
                assert made.read(member) == own.read(member)


@pytest.mark.framework
@pytest.mark.parametrize("suffix", [MODEL, WEIGHTS])
def test_the_same_groups_datasets_and_attributes(suffix: str, saved: Path, tmp_path: Path) -> None:
    assert not convert(saved / f"many{suffix}", tmp_path / f"x{suffix}").mismatches
    assert told(tmp_path / f"x{suffix}") == told(saved / f"many{suffix}")


def told(path: Path) -> dict[str, Any]:
    """Return all that h5py finds in a file."""
    found: dict[str, Any] = {}

    def add(name: str, one: Any) -> None:
        attributes = {key: np.asarray(value).astype(str).tolist() for key, value in one.attrs.items()}
        content = (str(one.dtype), one.shape, one[()].tobytes()) if isinstance(one, h5py.Dataset) else None
        found[name] = attributes, content

    with h5py.File(path) as file:
        add("", file)
        file.visititems(add)
    return found


@pytest.mark.framework
def test_weights_alone_become_a_model_again_by_their_entry(saved: Path, tmp_path: Path) -> None:
    assert not convert(saved / "many.keras", tmp_path / "x.weights.h5").mismatches
    assert not convert(tmp_path / "x.weights.h5", tmp_path / "x.keras").mismatches
    with open_checkpoint(saved / "many.keras") as own, open_checkpoint(tmp_path / "x.keras") as made:
        assert {one.name: one.tobytes() for one in made.tensors} == {
            one.name: one.tobytes() for one in own.tensors
        }
        assert (made.native["keras.config"], made.metadata) == (own.native["keras.config"], own.metadata)


# Without Keras ----------------------------------------------------------------------------------------


def refusals(content: Content, name: str) -> list[str]:
    writer = writer_of("keras" if name.endswith(KERAS) else "keras-h5")
    return [*writer.refusals(content, WriteOptions(name=name))]


def write(content: Content, target: Path) -> tuple[Path, Writer]:
    writer, options = writer_of("keras-h5"), WriteOptions(name=target.name)
    assert [*writer.refusals(content, options)] == []
    with Staged(target) as staged:
        writer.write(content, staged, options)
        staged.settle()
        staged.commit()
    return target, writer


def test_a_model_needs_its_architecture(files: Path) -> None:
    with open_checkpoint(files / "keras" / "adam.weights.h5") as checkpoint:
        content = content_of(checkpoint)
        (keras,) = refusals(content, "x.keras")
        (model,) = refusals(content, "x.h5")
        assert "--model FILE" in keras and "--model FILE" in model and ".weights.h5" in model
        assert refusals(content, "x.weights.h5") == []


def test_names_must_be_those_of_keras() -> None:
    content = Content((tensor("fc.weight", np.zeros(2, np.float32)),))
    (found,) = refusals(content, "x.weights.h5")
    assert found.startswith("fc.weight: its name is not that of a Keras variable (layers/<name>/vars/<n>)")


@pytest.mark.parametrize(
    "path", [("layers", "dense", "vars", "0"), ("layers.dense.vars.0",), ("layers/dense/vars/0",)]
)
def test_names_of_keras_become_its_variables(path: tuple[str, ...], tmp_path: Path) -> None:
    one = replace(tensor("x", np.arange(3, dtype=np.float32)), path=path)
    target, writer = write(Content((one,)), tmp_path / "x.weights.h5")
    with h5py.File(target) as file:
        assert file["layers/dense/vars/0"][()].tolist() == [0, 1, 2]
    with open_checkpoint(target) as opened:
        assert [found.name for found in opened.tensors] == [writer.named(one)] == ["dense.0"]
        assert opened.format == "keras-h5"


def test_two_tensors_in_one_place_are_refused() -> None:
    made = [tensor("x", np.zeros(1, np.float32)) for _ in range(2)]
    paths = (("layers", "dense", "vars", "0"), ("layers/dense/vars/0",))
    content = Content(tuple(replace(one, path=path) for one, path in zip(made, paths, strict=True)))
    (found,) = refusals(content, "x.weights.h5")
    assert "it would lie where 'layers.dense.vars.0' lies" in found


def test_ties_are_one_dataset(tmp_path: Path) -> None:
    first = replace(tensor("x", np.arange(3, dtype=np.float32)), path=("layers", "z", "vars", "0"))
    second = Tensor(
        ("layers", "a", "vars", "0"),
        first.dtype,
        first.shape,
        Role.WEIGHTS,
        first.values,
        shares_with=first.name,
    )
    target, _ = write(Content((first, second)), tmp_path / "x.weights.h5")
    with h5py.File(target) as file:
        assert file["layers/z/vars/0"] == file["layers/a/vars/0"]
    with open_checkpoint(target) as opened:
        assert {one.name: one.shares_with for one in opened.tensors} == {
            "z.0": None,
            "a.0": "z.0",
        }


@pytest.mark.parametrize("name", ["adam.h5", "adam.weights.h5", "bfloat16.weights.h5", "keras2.h5"])
def test_each_fixture_is_written_again(name: str, files: Path, tmp_path: Path) -> None:
    suffix = WEIGHTS if name.endswith(WEIGHTS) else MODEL
    source, target = files / "keras" / name, tmp_path / f"x{suffix}"
    assert not convert(source, target).mismatches
    assert told(target) == told(source)


def test_a_sharded_set_becomes_one_file(files: Path, tmp_path: Path) -> None:
    source = files / "keras" / "sharded"
    assert not convert(source, tmp_path / "x.weights.h5").mismatches
    parts = [told(one) for one in sorted(source.glob("*.weights.h5"))]
    merged = {name: one for part in parts for name, one in part.items()}
    assert told(tmp_path / "x.weights.h5") == merged


def test_keras_2_is_not_given_the_order_of_keras_3(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Keras 2 wrote it"):
        convert(files / "keras" / "keras2.h5", tmp_path / "x.weights.h5")


def test_lists_of_names_are_cut_where_an_object_header_ends(tmp_path: Path) -> None:
    from ckpttool.formats.keras_layout import names_in
    from ckpttool.wire.hdf5_writing import Plan, draw
    from ckpttool.writing.keras_places import in_chunks

    names = [f"layer_{at:04}_{'x' * 60}" for at in range(3000)]
    attributes = in_chunks("layer_names", names)
    assert [*attributes] == [f"layer_names{at}" for at in range(len(attributes))] != []
    with Staged(tmp_path / "x.h5") as staged:
        draw(Plan(groups={(): attributes})).stream(staged.create())
        staged.settle()
        staged.commit()
    with h5py.File(tmp_path / "x.h5") as file:
        kept = {key: value.astype(str).tolist() for key, value in file.attrs.items()}
        assert names_in(kept, "layer_names") == names

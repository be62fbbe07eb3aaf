"""Keras files from Keras files: Keras loads them, predicts the same, and has the same optimizer."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest

from ckpttool import Role, Tensor, UsageError, convert, open_checkpoint, verify
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.writer import Content, WriteOptions, Writer, writer_of
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.frameworks import conversation_with_frameworks
from tests.support.writing import content_of, tensor
from tests.support.writing import write as written

NAMES = ("many", "custom", "subclassed", "mixed_float16", "bfloat16", "vocabulary", "int4")
ANSWER = "ANSWER"
KERAS, MODEL, WEIGHTS = ".keras", ".h5", ".weights.h5"

REFUSED = {
    ("custom", KERAS, MODEL): "layer 'mine' (Scale) is not one of Keras's own",
    ("custom", MODEL, KERAS): "is not one of Keras's own",
    ("subclassed", KERAS, MODEL): "the model's class creates its layers",
    ("subclassed", MODEL, KERAS): "the layers are unknown",
    ("bfloat16", KERAS, MODEL): "Keras reads no bfloat16 from an .h5",
    ("bfloat16", MODEL, KERAS): "bits16",
    ("vocabulary", KERAS, MODEL): "an .h5 can't hold a file of the model",
    ("int4", KERAS, MODEL): "was quantized",
    ("int4", MODEL, KERAS): "was quantized",
}
"""What can't be told or loaded, by model, source and target."""

NOT_IN_H5 = "vocabulary"
"""What Keras saves without in an ``.h5``, so that it does not predict by its own file."""

OWN_OPTIMIZER = "mixed_float16"
"""Where Keras scales losses by itself: its own two kinds of files come back with different optimizers."""

WAYS = [(KERAS, KERAS), (KERAS, MODEL), (KERAS, WEIGHTS), (MODEL, KERAS)]
ALIKE = [(MODEL, MODEL), (WEIGHTS, WEIGHTS)]
"""What becomes the same file again, as is shown without Keras."""

CASES = [(name, *way) for name in NAMES for way in WAYS] + [("many", MODEL, WEIGHTS)]
CASES.remove((NOT_IN_H5, MODEL, KERAS))


def directory(place: Path, *parts: str) -> Path:
    found = place / "_".join(part.strip(".").replace(".", "_") for part in parts)
    found.mkdir(exist_ok=True)
    return found


class Keras(NamedTuple):
    """Keras in a process of its own.

    Attributes:
        place: Where it saved its models.
        truth: What it says of them, by name.
        ask: Tells what came back of files.
    """

    place: Path
    truth: dict[str, dict[str, Any]]
    ask: Callable[[list[str]], dict[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def keras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keras]:
    place = tmp_path_factory.mktemp("keras")
    oracle = Path(__file__).with_name("keras_oracle.py")
    with conversation_with_frameworks(oracle, place, env={"CUDA_VISIBLE_DEVICES": ""}) as (orders, told):
        lines = (line.removeprefix(ANSWER) for line in told if line.startswith(ANSWER))

        def ask(files: list[str]) -> dict[str, dict[str, Any]]:
            print(json.dumps(files), file=orders, flush=True)
            found: dict[str, dict[str, Any]] = json.loads(next(lines))
            return found

        yield Keras(place, json.loads(next(lines)), ask)


@pytest.fixture(scope="session")
def saved(keras: Keras) -> Path:
    """Return where Keras saved its models."""
    return keras.place


@pytest.fixture(scope="session")
def answers(keras: Keras) -> dict[str, dict[str, Any]]:
    """Return what Keras says of what became of its files."""
    made = [str(converted(keras.place, *case)) for case in CASES if case not in REFUSED]
    return keras.ask([*made, str(keras.place / f"many{MODEL}")])


def converted(saved: Path, name: str, source: str, target: str) -> Path:
    """Return what a file became."""
    path = directory(saved, source, target) / f"{name}{target}"
    if not path.exists():
        assert not convert(saved / f"{name}{source}", path).mismatches
    return path


@pytest.mark.framework
@pytest.mark.parametrize(("name", "source", "target"), [case for case in CASES if case not in REFUSED])
def test_keras_loads_it_as_its_own(
    name: str, source: str, target: str, keras: Keras, answers: dict[str, dict[str, Any]]
) -> None:
    path = converted(keras.place, name, source, target)
    found, truth = answers[str(path)], keras.truth[name]
    assert found.get("predicted") == truth["predicted"], found
    if name != OWN_OPTIMIZER:
        own = answers[str(keras.place / f"many{MODEL}")] if (name, target) == ("many", MODEL) else truth
        assert found["optimizer"] == own["optimizer"]
    assert verify(path).is_valid
    with open_checkpoint(path) as opened:
        assert opened.complete and not opened.findings


@pytest.mark.framework
@pytest.mark.parametrize(("source", "target"), WAYS + ALIKE)
def test_by_way_of_safetensors_it_becomes_the_same(
    source: str, target: str, saved: Path, tmp_path: Path
) -> None:
    straight = converted(saved, "many", source, target)
    assert not convert(saved / f"many{source}", tmp_path / "x.safetensors").mismatches
    assert not convert(tmp_path / "x.safetensors", tmp_path / f"x{target}").mismatches
    assert contents(tmp_path / f"x{target}") == contents(straight)


def contents(path: Path) -> dict[str, Any]:
    """Return all that is in a file; of the entry, what it carries."""
    if path.suffix != KERAS:
        return {name: one for name, one in hdf5_content(path).items() if name != ENTRY}
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name != ENTRY}
    weights = path.with_name("weights.h5")
    weights.write_bytes(found.pop("model.weights.h5"))
    return {**found, "weights": hdf5_content(weights)}


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
    assert hdf5_content(tmp_path / f"x{suffix}") == hdf5_content(saved / f"many{suffix}")


def hdf5_content(path: Path) -> dict[str, Any]:
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
    writer = writer_of("keras-h5")
    return written(writer, content, target, WriteOptions(name=target.name)), writer


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
        assert [found.name for found in opened.tensors] == [writer.reader_name(one)] == ["dense.0"]
        assert opened.format == "keras-h5"


def test_two_tensors_in_one_place_are_refused() -> None:
    made = [tensor("x", np.zeros(1, np.float32)) for _ in range(2)]
    paths = (("layers", "dense", "vars", "0"), ("layers/dense/vars/0",))
    content = Content(tuple(replace(one, path=path) for one, path in zip(made, paths, strict=True)))
    (found,) = refusals(content, "x.weights.h5")
    assert "same place as 'layers.dense.vars.0'" in found


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
    assert hdf5_content(target) == hdf5_content(source)


def test_a_sharded_set_becomes_one_file(files: Path, tmp_path: Path) -> None:
    source = files / "keras" / "sharded"
    assert not convert(source, tmp_path / "x.weights.h5").mismatches
    parts = [hdf5_content(one) for one in sorted(source.glob("*.weights.h5"))]
    merged = {name: one for part in parts for name, one in part.items()}
    assert hdf5_content(tmp_path / "x.weights.h5") == merged


def test_keras_2_is_not_given_the_order_of_keras_3(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Keras 2 wrote it"):
        convert(files / "keras" / "keras2.h5", tmp_path / "x.weights.h5")


def test_lists_of_names_are_cut_where_an_object_header_ends(tmp_path: Path) -> None:
    from ckpttool.containers.hdf5_writer import Plan, build_structure
    from ckpttool.formats.keras.layout import names_in
    from ckpttool.formats.keras.places import chunked_attribute

    names = [f"layer_{at:04}_{'x' * 60}" for at in range(3000)]
    attributes = chunked_attribute("layer_names", names)
    assert [*attributes] == [f"layer_names{at}" for at in range(len(attributes))] != []
    with StagedOutput(tmp_path / "x.h5") as staged:
        build_structure(Plan(groups={(): attributes})).stream(staged.create())
        staged.settle()
        staged.commit()
    with h5py.File(tmp_path / "x.h5") as file:
        kept = {key: value.astype(str).tolist() for key, value in file.attrs.items()}
        assert names_in(kept, "layer_names") == names

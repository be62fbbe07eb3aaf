"""Files that Keras writes here and now: what it holds in memory is what is read, under the layers' names."""

from __future__ import annotations

import ast
import itertools
import json
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpttool import Checkpoint, Role, Safety, diff, open_checkpoint, verify
from ckpttool.formats.keras.names import CLASSES, TORCH_OPTIMIZERS
from tests.support.frameworks import python_with_frameworks

pytestmark = pytest.mark.framework


class Written(NamedTuple):
    """What a framework wrote: a directory for each part, and what it says of them."""

    place: Path
    truth: dict[str, Any]


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return what one process wrote: to import the framework takes longest of all."""
    place = tmp_path_factory.mktemp("written")
    writer = Path(__file__).with_name("keras_files.py")
    told = python_with_frameworks(writer, request.param, place)
    return Written(place, json.loads(told.splitlines()[-1]))


def held(checkpoint: Checkpoint) -> list[list[object]]:
    """Return what is read, as the framework tells it."""
    return sorted(
        [
            str(one.path[0]),
            [one.dtype.name, list(one.shape), sha256(one.tobytes()).hexdigest()],
        ]
        for one in checkpoint.tensors
        if one.role is Role.WEIGHTS
    )


def test_values_and_names_are_keras_own(written: Written) -> None:
    place, truth = written.place / "trained", written.truth["trained"]
    for name in truth["files"]:
        expected = sorted([layer, told] for layer, _, told in truth["layers"])
        with open_checkpoint(place / name) as checkpoint:
            assert held(checkpoint) == expected, name
            optimizer = [one for one in checkpoint.tensors if one.role is Role.OPTIMIZER]
            digests = sorted(sha256(one.tobytes()).hexdigest() for one in optimizer)
            wanted = sorted(digest for _, _, digest in truth["optimizer"])
            assert digests == ([] if name == "weights.h5" else wanted), name
            assert (
                sum(one.size for one in checkpoint.tensors if one.role is Role.WEIGHTS) == truth["parameters"]
            )
            if name == "m.h5":
                last = sorted(str(one.path[-1]) for one in checkpoint.tensors if one.role is Role.WEIGHTS)
                assert last == sorted(weight for _, weight, _ in truth["layers"])
        assert verify(place / name).is_valid


def test_layers_that_nobody_named_are_called_as_keras_calls_them(written: Written) -> None:
    """They are numbered in the order in which they were made, their groups in that of the model."""
    place = written.place / "unnamed"
    for name, told in written.truth["unnamed"].items():
        expected = {(value, place[0], place[-1]) for place, value in told["weights"]}
        for file in told["files"]:
            with open_checkpoint(place / file) as checkpoint:
                found = {
                    (one.tobytes().hex(), str(one.path[0]), str(one.path[-2])) for one in checkpoint.tensors
                }
                assert found == expected, file
                assert not checkpoint.findings, file
        for one, other in itertools.combinations(told["files"], 2):
            found = diff(place / one, place / other)
            assert found.compared == found.unchanged == len(told["weights"]), (one, other)
            assert not (found.added or found.removed), (one, other)
            assert not found.renamed or name == "around", (one, other)  # .h5 has no step for the model inside


def test_all_layers_have_the_weights_that_they_should(written: Written) -> None:
    place = written.place / "kinds"
    with open_checkpoint(place / "m.h5") as checkpoint:
        assert "loss_scale" not in checkpoint.training.origin.get("step", "")
    for path in place.iterdir():
        verification = verify(path)
        assert not verification.findings, path.name
        assert verification.safety is Safety.SAFE


def test_optimizers_of_the_backend_of_pytorch_are_known() -> None:
    """Keras saves these in the place of its own; the backend of this process may be another."""
    spec = find_spec("keras")
    assert spec is not None and spec.origin is not None
    place = Path(spec.origin).parent / "src" / "backend" / "torch" / "optimizers"
    there = {
        f"keras.src.backend.torch.optimizers.{file.stem}.{node.name}"
        for file in place.glob("torch_*.py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
    }
    assert there == TORCH_OPTIMIZERS

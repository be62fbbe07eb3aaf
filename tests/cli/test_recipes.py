"""Recipes of docs/reference/policies.md on files that Keras wrote: its rows of the table, word by word."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest

from tests.support.frameworks import python_with_frameworks

pytestmark = pytest.mark.framework

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "policies.md").read_text("utf-8")
_TRAINING = """
import keras, numpy
x = numpy.random.default_rng(0).random((16, 4), "float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.6), "mse")
callbacks = [
    keras.callbacks.ModelCheckpoint("named/e{epoch}-{val_loss:.4f}.keras"),
    keras.callbacks.ModelCheckpoint("logged/e{epoch}.keras"),
    keras.callbacks.CSVLogger("logged/log.csv"),
]
model.fit(x, x.sum(1), validation_split=0.5, epochs=11, verbose=0, callbacks=callbacks)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("keras")
    for name in ("named", "logged"):
        (place / name).mkdir()
    python_with_frameworks("-c", _TRAINING, cwd=place)
    return place


def _recipe(begin: str) -> list[str]:
    (told,) = re.findall(
        rf"^\|[^|]*\| `ModelCheckpoint\(\"{re.escape(begin)}\".*\| `(--[^`]+)` \|$", PAGE, re.M
    )
    return shlex.split(told)


@pytest.mark.parametrize(
    ("place", "begin"), [("named", "e{epoch}-{val_loss:.4f}.keras"), ("logged", "e{epoch}.keras")]
)
def test_the_best_and_the_newest_stay(run, trained: Path, place: str, begin: str) -> None:
    with (trained / "logged" / "log.csv").open() as file:
        losses = [float(row["val_loss"]) for row in csv.DictReader(file)]
    best = losses.index(min(losses)) + 1
    status, _, err = run("prune", trained / place, *_recipe(begin), "-q")
    assert (status, err) == (0, "")
    left = {
        int(path.name[1:].partition("-")[0].partition(".")[0]) for path in (trained / place).glob("*.keras")
    }
    assert left == {best, 11}

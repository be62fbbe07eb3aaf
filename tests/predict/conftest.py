"""What the tests of predictions share: a job done in this process, as the child does it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import python_with_frameworks
from tests.support.predictions import Do, Predict, Told, done_here, job_of, one_process


@pytest.fixture
def predict() -> Iterator[Predict]:
    """Return what does a job in this process: ``predict(path, model=…, shapes="1,10")``."""
    places = list(sys.path)
    yield lambda path, **options: done_here(job_of(path, **options))
    sys.path[:] = places


@pytest.fixture(scope="session")
def keras_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of what TensorFlow and Keras wrote, with recordings of what they predict."""
    directory = tmp_path_factory.mktemp("keras")
    writer = Path(__file__).parent / "models" / "write_keras.py"
    python_with_frameworks(writer, directory)
    return directory


@pytest.fixture(scope="session")
def keras_process() -> Iterator[Do]:
    """Return what does jobs as the child does, one after the other."""
    with one_process("keras") as done:
        yield done


@pytest.fixture
def predict_apart(keras_process: Do, keras_files: Path) -> Predict:
    """Return what does a job on a file of ``keras_files`` apart: ``predict_apart("m.keras", …)``."""

    def told(name: str, **options: Any) -> Told:
        options |= {key: keras_files / options[key] for key in ("expect", "input") if key in options}
        return keras_process(job_of(keras_files / name, **options))

    return told

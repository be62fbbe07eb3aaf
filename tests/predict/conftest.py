"""What the tests of predictions share: a job done in this process, as the child does it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import python_with_frameworks
from tests.support.predictions import Predict, Start, Told, Watched, done_here, job_of, watched


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
def start() -> Iterator[Start]:
    """Return what starts a process for a family of frameworks, each just once."""
    with ExitStack() as running:

        @cache
        def started(family: str) -> Watched:
            if find_spec(family) is None:
                pytest.skip(f"{family} is not installed")
            return running.enter_context(watched(family))

        yield started


@pytest.fixture(scope="session")
def paddle_files(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of Paddle's models, and recordings of what Paddle predicts with them."""
    directory = tmp_path_factory.mktemp("paddle")
    write = "import runpy; sys.argv[1:] = [str(path)]; runpy.run_path(str(script), run_name='__main__')"
    script = Path(__file__).parent / "write_paddle.py"
    assert start("paddle").run(write, path=directory, script=script) is None
    return directory


@pytest.fixture
def predict_apart(start: Start, keras_files: Path) -> Predict:
    """Return what does a job on a file of ``keras_files`` apart: ``predict_apart("m.keras", …)``."""

    def told(name: str, **options: Any) -> Told:
        options |= {key: keras_files / options[key] for key in ("expect", "input") if key in options}
        return start("tensorflow").do(job_of(keras_files / name, **options))

    return told

"""What the tests of predictions share: a job done in this process, as the child does it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpttool import open_checkpoint
from ckpttool.predict import child
from ckpttool.predict.jobs import job_for
from ckpttool.predict.request import PredictionJob, PredictionRequest, parse_input, to_json
from ckpttool.predict.run import FRAMEWORKS


class Stage(NamedTuple):
    """What a child tells of one stage."""

    detail: str
    findings: list[list[Any]]
    is_skipped: bool

    @property
    def codes(self) -> list[str]:
        """Return the codes of all findings."""
        return [code for code, *_ in self.findings]


class Told(NamedTuple):
    """What a child tells of a job."""

    load: Stage
    predict: Stage

    @property
    def codes(self) -> list[str]:
        """Return the codes of all findings of both stages."""
        return [*self.load.codes, *self.predict.codes]


def job_of(path: Path, *, shapes: str = "", **wishes: Any) -> PredictionJob:
    """Return the job for a checkpoint; ``shapes`` are inputs as the command line has them."""
    wishes = {name: str(value) if isinstance(value, Path) else value for name, value in wishes.items()}
    request = PredictionRequest(**wishes, input_shapes=tuple(map(parse_input, shapes.split())))
    with open_checkpoint(path) as checkpoint:
        return job_for(checkpoint, request)


def done_here(job: PredictionJob) -> Told:
    """Do a job in this process, and return what a child would tell."""
    answers = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a child's go to its stderr
        module = import_module(FRAMEWORKS[job.framework].module)
        child.answer(module, job, answers)
    told = [json.loads(line) for line in answers.getvalue().splitlines()]
    stages = {one.pop("stage"): Stage(**one) for one in told}
    return Told(stages["load"], stages["predict"])


Predict = Callable[..., Told]


@pytest.fixture
def predict() -> Iterator[Predict]:
    """Return what does a job in this process: ``predict(path, model=…, shapes="1,10")``."""
    places = list(sys.path)
    yield lambda path, **wishes: done_here(job_of(path, **wishes))
    sys.path[:] = places


ANSWER_ALL = """
import json, os, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path[:0] = json.loads(sys.argv[1])
from importlib import import_module
from ckpttool.predict.child import answer
from ckpttool.predict.run import FRAMEWORKS
from ckpttool.predict.request import from_json
for line in sys.stdin:
    job = from_json(json.loads(line))
    answer(import_module(FRAMEWORKS[job.framework].module), job, answers)
"""
"""What the child does with a job, with one more after it: importing TensorFlow takes longest."""


@pytest.fixture(scope="session")
def keras_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of what TensorFlow and Keras wrote, with recordings of what they predict."""
    directory = tmp_path_factory.mktemp("keras")
    writer = Path(__file__).parent / "models" / "write_keras.py"
    subprocess.run([sys.executable, str(writer), str(directory)], check=True, capture_output=True)
    return directory


@pytest.fixture(scope="session")
def keras_process() -> Iterator[subprocess.Popen[str]]:
    """Return a process that does jobs as the child does, one after the other."""
    command = [sys.executable, "-c", ANSWER_ALL, json.dumps(sys.path)]
    environment = {**FRAMEWORKS["keras"].environment, **os.environ}
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def predict_apart(keras_process: subprocess.Popen[str], keras_files: Path) -> Predict:
    """Return what does a job on a file of ``keras_files`` apart: ``predict_apart("m.keras", …)``."""

    def told(name: str, **wishes: Any) -> Told:
        wishes = {
            key: keras_files / one if key in ("expect", "input") else one for key, one in wishes.items()
        }
        assert keras_process.stdin is not None and keras_process.stdout is not None
        keras_process.stdin.write(json.dumps(to_json(job_of(keras_files / name, **wishes))) + "\n")
        keras_process.stdin.flush()
        lines = [json.loads(keras_process.stdout.readline()) for _ in range(2)]
        stages = {one.pop("stage"): Stage(**one) for one in lines}
        return Told(stages["load"], stages["predict"])

    return told

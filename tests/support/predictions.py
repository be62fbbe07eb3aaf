"""Predictions: what is asked for, and jobs done here, in a child, or one after the other in one process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest

from ckpttool import Finding, open_checkpoint
from ckpttool.ops import prediction
from ckpttool.predict import child
from ckpttool.predict.guard import resolve
from ckpttool.predict.jobs import NotPredictable, job_for
from ckpttool.predict.request import PredictionJob, PredictionRequest, parse_input, to_json
from ckpttool.predict.run import FRAMEWORKS, Answer, PredictionChild, StageResult
from tests.support.frameworks import conversation_with_frameworks


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


Predict = Callable[..., Told]


# What is asked for ----------------------------------------------------------------------------------


def request(*, shapes: str = "", **options: Any) -> PredictionRequest:
    """Return what is asked for; ``shapes`` are inputs as the command line has them."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return PredictionRequest(**options, input_shapes=tuple(map(parse_input, shapes.split())))


def job_of(path: Path, **options: Any) -> PredictionJob:
    """Return the job for a checkpoint."""
    with open_checkpoint(path) as checkpoint:
        return job_for(checkpoint, request(**options))


def refusal_of(path: Path, **options: Any) -> str:
    """Return why a checkpoint can't be run."""
    with pytest.raises(NotPredictable) as refused:
        job_of(path, **options)
    return str(refused.value)


def named(reference: str) -> Callable[..., Any]:
    """Return the class or function that ``--model`` names."""
    return resolve(reference)


# How it is done -------------------------------------------------------------------------------------


def done_here(job: PredictionJob) -> Told:
    """Do a job in this process, and return what a child would tell."""
    answers = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a child's go to its stderr
        module = import_module(FRAMEWORKS[job.framework].module)
        import_module(FRAMEWORKS[job.framework].package)
        child.answer(module, job, answers)
    return _read(map(json.loads, answers.getvalue().splitlines()))


def _read(answers: Iterable[dict[str, Any]]) -> Told:
    stages = {one.pop("stage"): Stage(**one) for one in answers}
    return Told(stages["load"], stages["predict"])


def done_in_a_child(job: PredictionJob) -> Answer:
    """Do a job as the command does it."""
    with PredictionChild(job.path, job.framework) as process:
        return process.ask(job)


def done_after(path: Path, change: Callable[[], object], **options: Any) -> Answer:
    """Do what is asked for of a checkpoint that is changed after it was opened."""
    opened = open_checkpoint(path)
    with opened as checkpoint, prediction.Prediction(checkpoint, request(**options)) as asked:
        change()
        return asked.answer(has_failed=False)


_WATCHED = Path(__file__).parents[1] / "predict" / "watched_child.py"


class Watched:
    """A process that does jobs as the child does, one after the other: importing a framework takes longest.

    Attributes:
        asked: What was unpickled while it did the last job.
    """

    def __init__(self, orders: TextIO, answers: TextIO) -> None:
        self.asked: list[str] = []
        self._orders, self._answers = orders, answers

    def do(self, job: PredictionJob) -> Told:
        """Do a job."""
        answer = self._answer({"job": to_json(job)})
        self.asked = answer["asked"]
        return _read(answer["stages"])

    def adapters(self, frameworks: list[str]) -> set[tuple[str, str, str | None]]:
        """Return all loaders of some frameworks, with the reader where they have several."""
        return {tuple(one) for one in self._answer({"adapters": frameworks})}

    def run(self, code: str, **names: Path) -> str | None:
        """Run code that knows some paths and ``Evil``; return what it raised."""
        order = {"run": code, "names": {name: str(path) for name, path in names.items()}}
        raised: str | None = self._answer(order)["raised"]
        return raised

    def _answer(self, order: dict[str, Any]) -> Any:
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        return json.loads(self._answers.readline())


@contextmanager
def watched(family: str) -> Iterator[Watched]:
    """Return a process for a family of frameworks."""
    program, environment = (_WATCHED, json.dumps(sys.path)), environment_of(family, "transformers")
    if family != "paddle":
        with conversation_with_frameworks(*program, env=environment) as (orders, answers):
            yield Watched(orders, answers)
        return
    pipe = subprocess.PIPE  # beside PyTorch it crashes
    command = [sys.executable, *map(str, program)]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Watched(process.stdin, process.stdout)
        process.stdin.close()


Start = Callable[[str], Watched]
"""Returns the process for a family of frameworks."""


def environment_of(*frameworks: str) -> dict[str, str]:
    """Return the environment of a process that loads with some frameworks."""
    made = {**FRAMEWORKS[frameworks[0]].environment, **os.environ}
    for framework in frameworks:
        made |= FRAMEWORKS[framework].forced
    return made


# What a child is made to say ------------------------------------------------------------------------


def stage(name: str, detail: str, *findings: Finding, is_skipped: bool = False) -> StageResult:
    """Return what a child says of a stage."""
    return StageResult(name, detail, findings, is_skipped=is_skipped)


def answer_alike(patch: pytest.MonkeyPatch, load: StageResult, predict: StageResult) -> None:
    """Have every child answer so, which imports nothing."""

    class Child:
        def __init__(self, path: str, framework: str) -> None:
            self.framework = framework

        def ask(self, job: PredictionJob) -> Answer:
            return Answer(load, predict)

        def stop(self) -> None:
            pass

    patch.setattr(prediction, "PredictionChild", Child)

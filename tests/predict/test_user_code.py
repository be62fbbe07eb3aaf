"""The user's own files of Python: what they import, and what is wrong in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpttool import CheckpointError, Finding
from ckpttool.cli.verdicts import MISTAKES
from ckpttool.formats.discovery import discover
from ckpttool.predict.guard import build_from, resolve
from ckpttool.predict.interface import LoadFailed, first_line
from ckpttool.predict.jobs import NotPredictable
from ckpttool.predict.request import PredictionJob, to_json, with_absolute_paths
from tests.support.predictions import job_of, request

FIXTURES = Path(__file__).parents[2] / "fixtures" / "files"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def failure(tmp_path: Path) -> Callable[[str], Finding]:
    """Return what tells of a model's file, whose text it is given."""

    def failure_of(text: str) -> Finding:
        path = tmp_path / "net.py"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(LoadFailed) as caught:
            build_from(f"{path}:Net", depth=3)
        (finding,) = caught.value.findings
        return finding

    return failure_of


def test_an_exit_of_the_users_code_is_a_finding_and_an_interrupt_is_none(
    failure: Callable[[str], Finding], tmp_path: Path
) -> None:
    found = failure("raise SystemExit(3)")
    assert (found.message, found.where) == ("net.py can't be imported: SystemExit: 3", "net.py:1")
    (tmp_path / "other.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        build_from(f"{tmp_path / 'other.py'}:Net")


def test_what_lies_beside_is_found_after_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("raise SystemExit", encoding="utf-8")
    (tmp_path / "lies_beside.py").write_text("VALUE = 7", encoding="utf-8")
    text = "import colorsys, lies_beside\ndef Net(): return colorsys.rgb_to_hsv and lies_beside.VALUE"
    (tmp_path / "net_beside.py").write_text(text, encoding="utf-8")

    assert resolve(f"{tmp_path / 'net_beside.py'}:Net")() == 7
    assert sys.path[-1] == str(tmp_path)


LACKING = "it needs the module numpy.no_such_module, which the installed numpy lacks"
NOT_INSTALLED = "it needs the package no_such_package, which is not installed"
UNEXPECTED = "TypeError: Net() got an unexpected keyword argument 'depth'"


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("import os\n\ndef Net(:\n", "net.py:3", "imported: SyntaxError: invalid syntax"),
        ("\nimport no_such_package.inner\n", "net.py:2", f"imported: {NOT_INSTALLED}"),
        ("import numpy.no_such_module\n", "net.py:1", f"imported: {LACKING}"),
        ("import sys\nsys.exit('usage: net')\n", "net.py:2", "imported: SystemExit: usage: net"),
        ("\n\n1 / 0\n", "net.py:3", "imported: ZeroDivisionError: division by zero"),
        ("def Net(): pass", None, f"called: {UNEXPECTED}"),
        ("def Net(depth):\n  return depth['x']", "net.py:2", "called: TypeError: 'int' object"),
        ("def Net(depth):\n  raise SystemExit", "net.py:2", "called: SystemExit"),
    ],
)
def test_what_the_users_code_raises_is_no_verdict_on_a_checkpoint(
    text: str, where: str | None, problem: str, failure: Callable[[str], Finding]
) -> None:
    finding = failure(text)
    what = "net.py:Net" if problem.startswith("called") else "net.py"
    assert finding.code in MISTAKES
    assert finding.where == where
    assert finding.message.startswith(f"{what} can't be {problem}")


def test_paths_are_absolute_before_the_users_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {name: f"{name}.npy" for name in ("input", "labels", "expect", "record")}
    asked = request(model="nets/net.py:Net", optimizer="torch.optim:SGD", min_accuracy=0.5, **files)

    found = with_absolute_paths(PredictionJob(path="m", framework="torch", loader="state", request=asked))

    assert {name: getattr(found.request, name) for name in files} == {
        name: f"{tmp_path / file}" for name, file in files.items()
    }
    assert found.request.model == f"{tmp_path / 'nets' / 'net.py'}:Net"
    assert found.request.optimizer == "torch.optim:SGD"


@pytest.mark.parametrize("name", ["deepspeed", "fluid", "paddle", "safetensors", "torch-dcp"])
def test_no_path_of_a_job_is_relative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES)
    jobs = []
    for unit in discover(name):
        with suppress(CheckpointError, NotPredictable):
            jobs.append(job_of(Path(unit.path), model="net:Net", optimizer="net:Make"))
    assert jobs
    texts = {text for job in jobs for text in _texts(to_json(job))}
    assert [text for text in texts if text.startswith(f"{name}/")] == []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def test_a_module_without_a_name() -> None:
    assert first_line(ModuleNotFoundError("gone")) == "ModuleNotFoundError: gone"

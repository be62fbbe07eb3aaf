"""Programs of TensorFlow, Paddle and PyTorch: those that do harm there are never safe, honest ones are."""

from __future__ import annotations

import json
import platform
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from ckpttool import Safety, verify
from ckpttool.formats.torch.torch_operators import OPERATORS
from tests.security.operator_sweep import KEPT, examples
from tests.security.truth import ends_in, run
from tests.support.frameworks import python_with_frameworks

SECURITY = Path(__file__).parent
PROGRAMS = SECURITY / "programs"
HARM_OF_TORCH: dict[str, str] = json.loads((PROGRAMS / "torch.json").read_text("utf-8"))
"""How the attacks of PyTorch that do harm ended, when they were proved last."""
MODULES = {"savedmodel_programs": 46, "paddle_programs": 44, "torch_programs": 130}
"""How many programs of each module do harm, at least; all of the first two."""


def assert_right(harmful: dict[Path, str], honest: Iterable[Path]) -> None:
    """Require that what does harm isn't safe, nor merely unknown if it ran code, and what is honest is."""
    verdicts = {path: verify(path).safety for path in harmful}
    wrong = {path: verdict for path, verdict in verdicts.items() if verdict is not Safety.UNSAFE}
    unknown = {path for path, verdict in wrong.items() if verdict is Safety.UNKNOWN}
    assert wrong.keys() == unknown
    assert [path for path in unknown if harmful[path] == "ran"] == []
    assert [path for path in honest if verify(path).safety is not Safety.SAFE] == []


@pytest.mark.framework
@pytest.mark.parametrize(
    "module",
    [
        "paddle_programs",
        pytest.param("savedmodel_programs", marks=pytest.mark.thorough),
        pytest.param("torch_programs", marks=pytest.mark.thorough),
    ],
)
def test_no_program_that_does_harm_is_safe(module: str, tmp_path: Path) -> None:
    status, answers = run(module, str(tmp_path), cwd=tmp_path)
    assert status == 0
    ends = ends_in(answers)
    honest = {end for end in ends if end.name.startswith("honest")}
    harmful = {end for end in ends if end.does_harm}
    assert {end.name for end in honest if end.how != "loaded"} == set()
    assert len(harmful) >= MODULES[module]
    if module == "torch_programs":
        assert {end.name for end in harmful if end.how == "ran"} == {
            name for name, how in HARM_OF_TORCH.items() if how == "ran"
        }
    else:
        assert harmful == set(ends) - honest
    if module == "savedmodel_programs":
        assert {end.name for end in ends} == {path.name for path in savedmodels(tmp_path / "kept")}
    assert_right({end.path: end.how for end in harmful}, [end.path for end in honest])


@pytest.mark.framework
def test_no_program_of_torch_that_did_harm_is_safe(tmp_path: Path) -> None:
    answers = python_with_frameworks(SECURITY / "torch_programs.py", tmp_path, "--write", cwd=tmp_path)
    written = {end.name: end.path for end in ends_in(answers)}
    assert len(HARM_OF_TORCH) >= MODULES["torch_programs"]
    assert_right({written[name]: how for name, how in HARM_OF_TORCH.items()}, [])


def savedmodels(directory: Path) -> list[Path]:
    """Unpack what ``savedmodel_programs`` wrote, and return the models; all but the honest ones do harm."""
    with tarfile.open(PROGRAMS / "savedmodels.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        archive.extractall(directory)  # an asset is a link to a file outside
    return sorted((directory / "models").iterdir())


def test_no_savedmodel_that_did_harm_is_safe(tmp_path: Path) -> None:
    models = savedmodels(tmp_path)
    honest = [path for path in models if path.name.startswith("honest")]
    harmful = [path for path in models if path not in honest]
    assert len(harmful) >= MODULES["savedmodel_programs"] and len(honest) >= 8
    assert_right(dict.fromkeys(harmful, "ran"), honest)


@pytest.mark.framework
@pytest.mark.parametrize(
    ("options", "count"),
    [(("--few-exported",), 55), pytest.param((), 100, marks=pytest.mark.thorough)],
    ids=["few exported", "all"],
)
def test_honest_programs_are_safe(options: tuple[str, ...], count: int, tmp_path: Path) -> None:
    program = SECURITY / "honest_programs.py"
    answers = python_with_frameworks(program, tmp_path / "honest", *options, cwd=tmp_path)
    assert int(answers.splitlines()[-1]) >= count
    verdicts = {path: verify(path) for path in sorted((tmp_path / "honest").iterdir())}
    unchecked = {
        path: verdicts.pop(path)
        for path in list(verdicts)
        if path.suffix == ".ptl" or path.name.startswith("static-int8-")
    }
    assert {path: one.findings for path, one in verdicts.items() if one.safety is not Safety.SAFE} == {}
    codes = {(one.safety, finding.code) for one in unchecked.values() for finding in one.findings}
    assert codes == {(Safety.UNKNOWN, "unchecked-ops")}


def test_the_list_of_unchecked_operators() -> None:
    assert OPERATORS.unchecked <= OPERATORS.registered
    assert OPERATORS.unchecked.isdisjoint(KEPT)


@pytest.mark.framework
def test_operators_accept_the_examples_of_the_sweep() -> None:
    import torch

    for name, make in examples().items():
        operator, _, overload = name.partition(".")
        torch._C._get_operation_overload(operator, overload)[0](**make())


@pytest.mark.framework
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("cc"), reason="guards need cc and x86-64"
)
def test_the_sweep_finds_what_the_list_holds(tmp_path: Path) -> None:
    names = {"aten::_cdist_backward", "aten::_cummax_helper", "aten::as_strided_"}
    found = run("operator_sweep", "--dry", *sorted(names), cwd=tmp_path)[1]
    assert {name for name in names if f"{name}\t" not in found} == set()
    assert names <= OPERATORS.unchecked

"""Programs of TensorFlow, Paddle and PyTorch: those that do harm there are never safe, honest ones are."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from ckpttool import Safety, verify
from ckpttool.formats.torch.torch_operators import OPERATORS
from tests.security.operator_sweep import KEPT, examples
from tests.security.truth import ends_in, run

HARMFUL = {"savedmodel_programs": 46, "paddle_programs": 44, "torch_programs": 130}
"""How many programs of each module do harm, at least; all of the first two."""


@pytest.mark.framework
@pytest.mark.parametrize("module", HARMFUL)
def test_no_program_that_does_harm_is_safe(module: str, tmp_path: Path) -> None:
    status, answers = run(module, str(tmp_path), cwd=tmp_path)
    assert status == 0
    honest = {end for end in ends_in(answers) if end.name.startswith("honest")}
    hostile = set(ends_in(answers)) - honest
    harmful = {end for end in hostile if end.does_harm}
    assert len(harmful) >= HARMFUL[module]
    assert module == "torch_programs" or hostile == harmful
    verdicts = {end: verify(end.path).safety for end in harmful | honest}
    unknown = {end for end in harmful if verdicts[end] is Safety.UNKNOWN}
    assert {end for end in harmful - unknown if verdicts[end] is not Safety.UNSAFE} == set()
    assert {end for end in unknown if end.how == "ran"} == set()
    assert {end for end in honest if end.how != "loaded" or verdicts[end] is not Safety.SAFE} == set()


@pytest.mark.framework
def test_honest_programs_are_safe(tmp_path: Path) -> None:
    _, answers = run("honest_programs", str(tmp_path / "honest"), cwd=tmp_path)
    assert int(answers.splitlines()[-1]) >= 100
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
@pytest.mark.parametrize("name", ["aten::_cdist_backward", "aten::_cummax_helper", "aten::as_strided_"])
def test_the_sweep_finds_what_the_list_holds(name: str, tmp_path: Path) -> None:
    assert f"{name}\t" in run("operator_sweep", "--dry", name, cwd=tmp_path)[1]
    assert name in OPERATORS.unchecked

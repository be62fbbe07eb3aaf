"""What Paddle's programs compute, with programs that Paddle saves here and now."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckpttool import open_checkpoint

PIR = Path(__file__).parents[2] / "fixtures" / "files" / "paddle" / "pir.json"

WRITE = """
import os, sys, zlib
import paddle
os.chdir(sys.argv[1])

class Net(paddle.nn.Layer):
    def __init__(self, act, slope):
        super().__init__()
        self.first, self.last = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
        self.act, self.slope = act, slope

    def forward(self, x):
        return paddle.nn.functional.leaky_relu(self.last(self.act(self.first(x))), self.slope)

def program(name, act, slope=0.1, width=-1, crossed=False):
    paddle.utils.unique_name.switch()
    net = Net(act, slope)
    net.eval()
    if crossed:
        net.first, net.last = net.last, net.first
    for name in name:
        paddle.jit.save(net, name, [paddle.static.InputSpec([width, 4], "float32", name="x")])

tanh, sigmoid = paddle.tanh, paddle.nn.functional.sigmoid
program(["one", "again"], tanh)
program(["sigmoid"], sigmoid)
program(["slope"], tanh, 0.2)
program(["crossed"], tanh, crossed=True)
program(["width"], tanh, width=7)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of programs that two processes wrote, the second one's in ``second``."""
    directory = tmp_path_factory.mktemp("programs")
    (directory / "second").mkdir()
    for place in (directory, directory / "second"):
        script = place / "write.py"  # Paddle reads the source of what it saves
        script.write_text(WRITE, encoding="utf-8")
        subprocess.run([sys.executable, str(script), str(place)], check=True, capture_output=True)
    return directory


def program_of(path: Path) -> Any:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.metadata["program"]


def changed(one: Any, other: Any) -> set[str]:
    """Return the kinds of operators, and the wiring, that differ."""
    both = [{**found["operators"], "wiring": found["wiring"]} for found in (one, other)]
    return {name for name in both[0] | both[1] if both[0].get(name) != both[1].get(name)}


@pytest.mark.framework
@pytest.mark.skipif(find_spec("paddle") is None, reason="Paddle is not installed")
class TestPaddlesOwn:
    """Programs of Paddle 2."""

    @pytest.mark.parametrize("again", ["again", "second/one"])
    def test_two_saves_say_the_same(self, programs: Path, again: str) -> None:
        first, other = programs / "one.pdmodel", programs / f"{again}.pdmodel"
        assert first.read_bytes() != other.read_bytes() or again != "again"  # call stacks
        assert program_of(first) == program_of(other)

    @pytest.mark.parametrize(
        ("name", "differing"),
        [
            ("sigmoid", {"tanh", "sigmoid", "wiring"}),
            ("slope", {"leaky_relu"}),
            ("crossed", {"wiring"}),
            ("width", {"wiring"}),
        ],
    )
    def test_another_program_says_what_differs(self, programs: Path, name: str, differing: set[str]) -> None:
        assert (
            changed(program_of(programs / "one.pdmodel"), program_of(programs / f"{name}.pdmodel"))
            == differing
        )

    def test_a_fluid_directory_tells_its_program(self, programs: Path, tmp_path: Path) -> None:
        (tmp_path / "__model__").write_bytes((programs / "one.pdmodel").read_bytes())
        (tmp_path / "__params__").write_bytes((programs / "one.pdiparams").read_bytes())
        assert program_of(tmp_path) == program_of(programs / "one.pdmodel")


def pir(place: Path, change: Any = None) -> Any:
    """Return what a copy of Paddle 3's program tells, with its operators changed."""
    program = json.loads(PIR.read_bytes())
    if change is not None:
        change({one["#"]: one for one in program["program"]["regions"][0]["blocks"][0]["ops"]})
    path = place / "net.json"
    path.write_text(json.dumps(program), encoding="utf-8")
    return program_of(path)


def numbered(operators: Any) -> None:
    for one in operators.values():
        one["A"] = [*one["A"]]
    norm = operators["1.batch_norm_"]
    next(setting for setting in norm["A"] if setting["N"] == "epsilon")["AT"]["D"] = 0.5


def test_a_program_of_paddle_3_says_what_differs(tmp_path: Path) -> None:
    plain = pir(tmp_path)
    assert set(plain["operators"]) == {"data", "matmul", "add", "batch_norm_", "fetch"}
    assert changed(plain, pir(tmp_path, numbered)) == {"batch_norm_"}

    def crossed(operators: Any) -> None:
        taken = operators["1.batch_norm_"]["I"]
        taken[1], taken[2] = taken[2], taken[1]

    assert changed(plain, pir(tmp_path, crossed)) == {"wiring"}

    def placed(operators: Any) -> None:
        settings = operators["1.batch_norm_"]["A"]
        next(one for one in settings if one["N"] == "struct_name")["AT"]["D"] = "/elsewhere/"

    assert pir(tmp_path, placed) == plain

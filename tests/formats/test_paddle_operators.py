"""What Paddle's programs do besides computing, told from their operators."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ckpttool import Finding, Safety, Severity, open_checkpoint, verify
from ckpttool.formats.paddle.program import FILE_ATTRIBUTES, OPERATORS
from tests.formats.paddle_programs import operator, program


def safety_of(directory: Path, *kinds: str) -> tuple[Finding, ...]:
    path = directory / "some.pdmodel"
    path.write_bytes(program(*map(operator, kinds)))
    with open_checkpoint(path) as checkpoint:
        return checkpoint.safety


@pytest.mark.parametrize(
    ("kind", "code", "severity"),
    [
        ("py_func", "unsafe-op", Severity.ERROR),
        ("read_file", "unsafe-op", Severity.ERROR),
        ("check_numerics", "unsafe-op", Severity.ERROR),
        ("listen_and_serv", "unsafe-op", Severity.ERROR),
        ("send_barrier", "unsafe-op", Severity.ERROR),
        ("recv", "unsafe-op", Severity.ERROR),
        ("c_gen_nccl_id", "unsafe-op", Severity.ERROR),
        ("tensorrt_engine", "unsafe-op", Severity.ERROR),
        ("ap_variadic", "unsafe-op", Severity.ERROR),
        ("c_allreduce_sum", "unsafe-op", Severity.WARNING),
        ("print", "unsafe-op", Severity.WARNING),
        ("my_relu", "custom-ops", Severity.WARNING),
        ("", "custom-ops", Severity.WARNING),
    ],
)
def test_what_is_told_of_an_operator(tmp_path: Path, kind: str, code: str, severity: Severity) -> None:
    assert [(one.code, one.severity) for one in safety_of(tmp_path, kind, "relu")] == [(code, severity)]


@pytest.mark.parametrize("kind", ["relu", "conv2d_grad", "while", "c_embedding", "lstm_unit", "load_balance"])
def test_operators_that_compute(tmp_path: Path, kind: str) -> None:
    known = kind in OPERATORS.registered
    assert known is (kind != "load_balance")
    assert [one.code for one in safety_of(tmp_path, kind)] == ([] if known else ["custom-ops"])


def test_each_danger_is_of_a_known_operator() -> None:
    """A typing error would make a danger harmless; some only older releases or other builds have."""
    of_others = {"anakin_engine", "cinn_instruction_run", "cinn_launch", "create_recordio_file_reader"}
    of_others |= {"dlnne_engine", "gen_*_id", "lite_engine", "nccl*", "ngraph_engine", "open_files"}
    globs = {glob for _, glob, _ in OPERATORS.dangers}
    lost = {glob for glob in globs if not any(fnmatchcase(name, glob) for name in OPERATORS.registered)}
    assert lost == of_others


LIST = """
import json
from paddle.base import core
from paddle.base.framework import OpProtoHolder
of_json = [name.removesuffix("_") for name in dir(core.pir.ops) if not name.startswith("__")]
attributes = {
    name: [one.name for one in proto.attrs] for name, proto in OpProtoHolder.instance().op_proto_map.items()
}
print(json.dumps({"names": [*core.get_all_op_names(), *of_json], "attributes": attributes}))
"""


@pytest.mark.framework
def test_all_operators_of_paddle_are_known(tmp_path: Path) -> None:
    """They are asked for in a process of its own: Paddle crashes beside PyTorch now and then."""
    answer = subprocess.run(
        [sys.executable, "-c", LIST], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout.splitlines()[-1])
    assert {*found["names"]} - OPERATORS.registered == set()
    opening = {
        name
        for name, attributes in found["attributes"].items()
        if any(
            one in FILE_ATTRIBUTES or any(part in one for part in ("path", "file", "endpoint"))
            for one in attributes
        )
    }
    assert opening
    assert {name for name in opening if OPERATORS.danger(name) is None} == set()


CHILD = """
import json, os, sys
import numpy as np
import paddle
paddle.enable_static()
found = {}

def run(name, add):
    made = os.path.abspath(name + ".made")
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        x = paddle.static.data("x", [2], "float32")
        add(main.global_block(), x, made)
    with open(name + ".pdmodel", "wb") as file:
        file.write(main.desc.serialize_to_string())
    with open(name + ".pdmodel", "rb") as file:
        again = paddle.static.Program.parse_from_string(file.read())
    fetched = ["read"] if again.global_block().has_var("read") else []
    values = paddle.static.Executor().run(again, feed={"x": np.ones(2, "float32")}, fetch_list=fetched)
    found[name] = os.path.exists(made) or bool(values) and values[0].tobytes() == b"secret"

def save(block, x, made):
    block.append_op(type="save", inputs={"X": [x]}, attrs={"file_path": made})

def combine(block, x, made):
    out = block.create_var(name="out", type=paddle.base.core.VarDesc.VarType.RAW)
    block.append_op(type="save_combine", inputs={"X": [x]}, outputs={"Y": [out]}, attrs={"file_path": made})

def read(block, x, made):
    with open("secret", "wb") as file:
        file.write(b"secret")
    out = block.create_var(name="read", dtype="uint8")
    block.append_op(type="read_file", outputs={"Out": [out]}, attrs={"filename": os.path.abspath("secret")})

def check(block, x, made):
    outputs = {"stats": [block.create_var(name="s", dtype="int64")],
               "values": [block.create_var(name="v", dtype="float32")]}
    attrs = {"op_type": "a", "var_name": "x", "check_nan_inf_level": 3, "stack_height_limit": 1}
    attrs["output_dir"] = made
    block.append_op(type="check_numerics", inputs={"tensor": [x]}, outputs=outputs, attrs=attrs)

def compute(block, x, made):
    paddle.nn.functional.relu(x)
    open(made, "w").close()

for add in (save, combine, read, check, compute):
    run(add.__name__, add)
print(json.dumps(found))
"""


@pytest.mark.framework
def test_programs_that_touch_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ran = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, made in ran.items() if not made] == []
    verdicts = {name: verify(tmp_path / f"{name}.pdmodel") for name in ran}
    assert verdicts.pop("compute").safety is Safety.SAFE
    for name, verdict in verdicts.items():
        (finding,) = [one for one in verdict.findings if one.code == "unsafe-op"]
        assert (verdict.safety, str(tmp_path) in finding.message) == (Safety.UNSAFE, True), name

"""Exported programs: the real ones, and what loading one could run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import DamagedCheckpoint, Safety, open_checkpoint, verify
from ckpttool.formats.torch.expressions import UnboundedError, objection
from tests.support.frameworks import python_with_frameworks

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "torch-export"
PROGRAM, OLD = FILES / "program.pt2", FILES / "program_old.pt2"
MODEL, WEIGHTS = "program/models/model.json", "program/data/weights/model_weights_config.json"
EVIL = b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R."


def rebuilt(path: Path, into: Path, **changes: bytes | None) -> Path:
    """Return a copy with some members replaced, added, or left out."""
    target = into / path.name
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        members = {name: source.read(name) for name in source.namelist()}
        for name, data in (members | changes).items():
            if data is not None:
                archive.writestr(name, data)
    return target


def edited(into: Path, member: str, change: Callable[[Any], None]) -> Path:
    """Return a copy in which the JSON of a member is changed."""
    with zipfile.ZipFile(PROGRAM) as archive:
        told = json.loads(archive.read(member))
    change(told)
    return rebuilt(PROGRAM, into, **{member: json.dumps(told).encode()})


def codes(path: Path) -> set[str]:
    return {finding.code for finding in verify(path).findings}


def test_what_it_says_of_itself() -> None:
    with open_checkpoint(PROGRAM) as opened:
        assert (opened.producer.framework, (opened.producer.version or "")[:2]) == ("pytorch", "2.")
        assert opened.metadata["models"]["model"]["inputs"] == ["inputs"]
        assert opened.metadata["sample_inputs"] == ["model.pt"]
        assert opened.metadata["extra_files"] == ["notes.txt"]


@pytest.mark.parametrize("path", [PROGRAM, OLD], ids=["new", "old"])
def test_every_record_is_covered(path: Path) -> None:
    with open_checkpoint(path) as opened, zipfile.ZipFile(path) as archive:
        assert {s.where: s.crc32 for s in opened.spans()} == {i.filename: i.CRC for i in archive.infolist()}


@pytest.mark.parametrize("name", ["program/data/aotinductor/model/m.so", "program/extra/x"])
def test_compiled_code(tmp_path: Path, name: str) -> None:
    path = rebuilt(PROGRAM, tmp_path, **{name: b"\x7fELF" + bytes(60)})
    assert verify(path).safety is Safety.UNSAFE
    assert "native-code" in codes(path)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (PROGRAM, "program/data/constants/custom_obj_0"),
        (PROGRAM, "program/extra/other.pkl"),
        (OLD, "extra_files/data/x"),
    ],
)
def test_a_pickle_anywhere_is_judged(tmp_path: Path, path: Path, name: str) -> None:
    assert verify(rebuilt(path, tmp_path, **{name: EVIL})).safety is Safety.UNSAFE


def test_a_pickle_in_the_sample_inputs_is_judged(tmp_path: Path) -> None:
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("archive/data.pkl", EVIL)
    name = "program/data/sample_inputs/model.pt"
    assert verify(rebuilt(PROGRAM, tmp_path, **{name: inner.read_bytes()})).safety is Safety.UNSAFE


def test_an_expression_that_would_run_something(tmp_path: Path) -> None:
    """PyTorch gives these to sympy.sympify, which evaluates them."""

    def change(program: Any) -> None:
        program["graph_module"]["x"] = {"as_expr": {"expr_str": "__import__('os').system('id')"}}

    path = edited(tmp_path, MODEL, change)
    assert verify(path).safety is Safety.UNSAFE
    assert "unsafe-expression" in codes(path)


def test_guards_that_would_run_something(tmp_path: Path) -> None:
    path = edited(tmp_path, MODEL, lambda program: program.update(guards_code=["exec('import os')"]))
    assert "unsafe-expression" in codes(path)


def test_arithmetic_is_harmless() -> None:
    cases = [
        "2*s0 + 1",
        "Symbol('s85', positive=True, integer=True)",
        "Max(1, FloorDiv(s0, 2))",
        "L['args'][0][0].size()[0] >= 2",
        "Eq(Mod(s0*s1, 8), 0)",
        "Float('0.5', precision=53)",
        "L['kwargs']['a key: 1/2 (b)'].size()[0] >= 2",
    ]
    for text in cases:
        assert objection(text) is None, text


def test_all_else_is_not() -> None:
    cases = [
        "eval('1')",
        "().__class__.__bases__",
        "lambda: 0",
        "[x for x in y]",
        "s0.__class__",
        "getattr(s0, 'x')",
        "f'{s0}'",
        "Max(*[1])",
        "(Max)(1)(2)",
        "import os",
        "(" * 1000 + "1" + ")" * 1000,
        "1" * 100_000,
        "s0 := 3",
        "Max('f(1)', 1)",
        "Max(b'f(1)', 1)",
        "L['\"'] == 1",
        "L['\\\\'] == 1",
        "max((1, 2), key=exec)",
        "Max(1, exec)",
        "Symbol('__import__')",
        "9**9**9**9",
        "9^9^9",
        "Pow(9, Pow(9, 9))",
        "1 << 10000000000",
        "floor(exp(100000))",
        "floor(1e100000)",
        "Rational('1e-100000')",
        "Float('0.1', precision=100000)",
        "(2**64)**64",
        "exp(exp(1))",
        "",
    ]
    for text in cases:
        assert objection(text) is not None, text


def test_arithmetic_that_may_not_end_soon() -> None:
    cases = [
        "2**s0",
        "Max(" + "s0, " * 20 + "1)",
        "FloorDiv((a + b + c)**60, a)",
        "(a + b)*(a + c)*(a + d)*(a + e)*(a + f)*(a + g)*(a + h)*(a + i)",
        "a" + " + a" * 1000,
    ]
    for text in cases:
        with pytest.raises(UnboundedError):
            objection(text)


def test_targets_that_are_no_overloads(tmp_path: Path) -> None:
    cases = [
        "torch.ops.aten.add.__init__",
        "torch.ops.aten.__init__",
        "torch.ops.aten.add.overloads",
        "torch.ops.aten.add",
        "torch.ops.aten.add.Tensor.redispatch",
        "torch.ops.load_library",
        "torch.ops.load_library.__func__",
        "torch.os.mkdir",
        "torchscript.os.mkdir",
        "_operator.call",
        "mathematics.ceil",
    ]
    for target in cases:

        def change(program: Any, target: str = target) -> None:
            _graph(program)["nodes"][-1]["target"] = target

        assert verify(edited(tmp_path, MODEL, change)).safety is Safety.UNSAFE, target


def _graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


def _renamed(program: Any, old: str, new: str) -> Any:
    return json.loads(json.dumps(program).replace(json.dumps(old), json.dumps(new)))


def _size_of(program: Any, text: str) -> Any:
    tensors = _graph(program)["tensor_values"]
    tensors["inputs"]["sizes"][0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}
    return program


def _input(program: Any, name: str) -> Any:
    tensors = _graph(program)["tensor_values"]
    tensors[name] = tensors.pop("inputs")
    text = json.dumps(program).replace('{"name": "inputs"}', json.dumps({"name": name}))
    return json.loads(text)


BECOME_CODE: dict[str, Callable[[Any, str], Any]] = {
    "input": lambda program, run: _input(program, f"inputs={run}"),
    "parameter": lambda program, run: _renamed(program, "kept", f'kept"+str({run})+"'),
    "size": lambda program, run: _size_of(program, f"Max({run!r}, 1)"),
    "guard": lambda program, run: program | {"guards_code": [f"L[{f'+str({run})+'!r}] if 0 else 1"]},
}
"""Texts of a program that PyTorch makes code of: how each may hold an expression, ``run``."""

_LOADING = """
import sys, torch, warnings
warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    try:
        torch.export.load(path).module()(torch.ones(2, 4))
    except Exception as failure:
        print(path, repr(failure)[:300])
"""


@pytest.mark.framework
def test_names_that_become_code(tmp_path: Path) -> None:
    """PyTorch writes them into source code, which it executes."""
    paths = {}
    for kind, change in BECOME_CODE.items():
        directory = tmp_path / kind
        directory.mkdir()
        run = f"open('ran-{kind}','w')"
        with zipfile.ZipFile(PROGRAM) as archive:
            told = {name: json.loads(archive.read(name)) for name in (MODEL, WEIGHTS)}
        told[MODEL] = change(told[MODEL], run)
        if kind == "parameter":
            told[WEIGHTS] = change(told[WEIGHTS], run)
        paths[kind] = rebuilt(
            PROGRAM, directory, **{name: json.dumps(one).encode() for name, one in told.items()}
        )
        assert "unsafe-expression" in codes(paths[kind]), kind
    told = python_with_frameworks("-c", _LOADING, *paths.values(), cwd=tmp_path)
    assert {path.name for path in tmp_path.glob("ran-*")} == {f"ran-{kind}" for kind in paths}, told


def _enum(of: str) -> str:
    return json.dumps({"__enum__": True, "fqn": of, "name": "A"})


def _factory(module: str, name: str) -> Any:
    return {"default_factory_module": module, "default_factory_name": name, "dict_context": []}


def test_structures_that_import_a_module(tmp_path: Path) -> None:
    """PyTorch imports what the contexts of its trees name, and takes a class or a function of it."""
    cases = [
        (_enum("antigravity:A"), Safety.UNSAFE, "unsafe-import"),
        (_enum("os.path:A"), Safety.UNSAFE, "unsafe-import"),
        (json.dumps({"deep": [json.loads(_enum("antigravity:A"))]}), Safety.UNSAFE, "unsafe-import"),
        (_factory("builtins", "breakpoint"), Safety.UNSAFE, "unsafe-import"),
        (_factory("torch.hub", "list"), Safety.UNSAFE, "unsafe-import"),
        (_enum("my_package.kinds:Kind"), Safety.UNKNOWN, "unknown-class"),
        (json.dumps(["x': f(), 'y"]), Safety.UNSAFE, "unsafe-expression"),
        (json.dumps({"x': f(), 'y": 1}), Safety.UNSAFE, "unsafe-expression"),
        (json.dumps(["a key: 1/2 (b)"]), Safety.SAFE, None),
        ("[" * 100_000, Safety.UNKNOWN, "unknown-class"),
        (_enum("torch.nn.attention:SDPBackend"), Safety.SAFE, None),
        (_factory("builtins", "list"), Safety.SAFE, None),
    ]
    for context, safety, code in cases:

        def change(program: Any, context: str = context) -> None:
            signature = program["graph_module"]["module_call_graph"][0]["signature"]
            version, spec = json.loads(signature["in_spec"])
            signature["in_spec"] = json.dumps([version, {**spec, "context": context}])

        path = edited(tmp_path, MODEL, change)
        assert verify(path).safety is safety, context
        assert code is None or code in codes(path), context


def test_operators_of_others(tmp_path: Path) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.mine.read.default"

    path = edited(tmp_path, MODEL, change)
    assert verify(path).safety is Safety.UNKNOWN
    assert "custom-ops" in codes(path)


def test_a_weight_that_the_graph_needs_is_missing(tmp_path: Path) -> None:
    path = edited(tmp_path, WEIGHTS, lambda told: told["config"].pop("kept"))
    assert "weight-missing" in codes(path)


def bad_meta(key: str, value: object) -> Callable[[Any], None]:
    return lambda told: told["config"]["kept"]["tensor_meta"].update({key: value})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (bad_meta("dtype", 99), "unknown-dtype"),
        (bad_meta("dtype", 8), "tensor-bounds"),
        (bad_meta("sizes", [{"as_int": 1 << 62}]), "tensor-bounds"),
        (bad_meta("sizes", [{"as_expr": {}}]), "tensor-damaged"),
        (bad_meta("storage_offset", {"as_int": 1}), "tensor-bounds"),
        (bad_meta("strides", 3), "tensor-damaged"),
        (lambda told: told["config"]["kept"].update(path_name="weight_99"), "storage-missing"),
        (lambda told: told["config"].update(kept=None), "tensor-damaged"),
        (lambda told: told.update(config=[]), "program-malformed"),
    ],
)
def test_a_weight_that_makes_no_sense(tmp_path: Path, change: Callable[[Any], None], code: str) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(edited(tmp_path, WEIGHTS, change))
    assert caught.value.code == code


@pytest.mark.framework
def test_what_a_graph_computes_is_told(tmp_path: Path) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.slope = slope

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.leaky_relu(x, self.slope) * 2

    told = []
    for slope in (0.1, 0.1, 0.2):
        torch.export.save(torch.export.export(Net(slope), (torch.ones(3),)), tmp_path / "net.pt2")
        with open_checkpoint(tmp_path / "net.pt2") as opened:
            told.append(opened.metadata["models"]["model"])
    assert told[0] == told[1]
    changed = {name for name, one in told[0]["operators"].items() if told[2]["operators"][name] != one}
    assert changed == {"aten.leaky_relu.default"}
    assert told[0]["graph"] != told[2]["graph"]


@pytest.mark.parametrize("path", [PROGRAM, OLD])
def test_other_records_are_told(path: Path, tmp_path: Path) -> None:
    root = "program/" if path == PROGRAM else ""
    with open_checkpoint(rebuilt(path, tmp_path, **{f"{root}extra/x.txt": b"abc"})) as opened:
        assert opened.metadata["other records"]["extra/x.txt"] == "<3 bytes, CRC-32 352441c2>"

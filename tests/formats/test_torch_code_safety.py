"""What TorchScript archives and exported programs do when they are loaded or run, told without running it.

The attacks are made and run by PyTorch in a process of its own; all that they do is to make one file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool import Safety, Severity, verify
from ckpttool.formats.torch.torch_operators import OPERATORS
from ckpttool.formats.torch.torchscript_code import (
    MAX_TEXT,
    CodeReferences,
    code_tokens,
    judge_byte_code,
    judge_loops,
    judge_text,
)
from tests.support.frameworks import python_with_frameworks

CALLS = {
    "plain": 'torch.save(x, "MADE")',
    "spaces": 'torch . save(x, "MADE")',
    "form feed": 'torch\x0c.\x0bsave(x, "MADE")',
    "continued line": 'torch\\\n.save(x, "MADE")',
    "carriage return": 'torch.save(x, "MADE")\r',
    "parentheses": '(torch).save(x, "MADE")',
    "line break": '(torch\n  .save)(x, "MADE")',
    "comment": '(torch # so\n  .save)(x, "MADE")',
    "type comment": '# type: (Tensor) -> Tensor\n    torch.save(x, "MADE")',
    "namespace": 'ops.aten.save(x, "MADE")',
    "namespace in parentheses": '(ops .aten) . save(x, "MADE")',
    "another name": 't = torch\n    t.save(x, "MADE")',
    "another name with a type": 't : int = torch\n    t.save(x, "MADE")',
    "another name of the operator": 's = torch.save\n    s(x, "MADE")',
    "another name of the namespace": 'o = ops.aten\n    o.save(x, "MADE")',
    "attribute by text": 'getattr(torch, "save")(x, "MADE")',
    "attribute by texts": 'getattr(torch, "sa" "ve")(x, "MADE")',
    "attribute by escapes": 'getattr(torch, "sa\\166e")(x, "MADE")',
    "autograd": 'torch.autograd.save(x, "MADE")',
    "autograd anywhere": 'ops.other.autograd.save(x, "MADE")',
    "is nottorch": 'print(1 is nottorch.save(x, "MADE"))',
    "comprehension": '[torch.save(a, "MADE") for a in [x]]',
    "another thread": 'torch.wait(fork(torch.save, x, "MADE"))',
    "behind a long string": '""" \\""" torch """\n    torch.save(x, "MADE")',
    "behind an escape": "y = '\\\\'\n    torch.save(x, \"MADE\")",
    "from_file": 'x = torch.add(x, torch.sum(torch.from_file("MADE", True, 4)))',
}
"""Statements that PyTorch compiles to a call which makes a file."""

MAKING = """
import io, json, os, sys, zipfile
import torch

def records(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}

def write(path, held):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)

def tried(name, load):
    try:
        load(name)
    except Exception:  # whatever it thinks of the file afterwards
        pass
    return os.path.exists(name + ".made")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return torch.add(x, self.w)
"""

SCRIPTS = """
class Loaded(torch.nn.Module):
    def __init__(self, path: str):
        super().__init__()
        self.path = path
    def forward(self, x):
        return x
    @torch.jit.export
    def __getstate__(self):
        return self.path
    @torch.jit.export
    def __setstate__(self, path: str):
        torch.save(torch.ones(1), path)
        self.path = path

calls = json.loads(sys.argv[1])
torch.jit.script(Net()).save("base.pt")
base = records("base.pt")
code = "base/code/__torch__.py"
head = base[code].decode().partition("    w = ")[0]
found = {}
for name, call in calls.items():
    path = name + ".pt"
    call = call.replace("MADE", os.path.abspath(path + ".made"))
    write(path, base | {code: (head + "    " + call + "\\n    return torch.add(x, 1)\\n").encode()})
    found[path] = tried(path, lambda path: torch.jit.load(path)(torch.ones(1)))
torch.jit.script(Loaded(os.path.abspath("state.pt.made"))).save("state.pt")
found["state.pt"] = tried("state.pt", torch.jit.load)
from torch.jit.mobile import _load_for_lite_interpreter
torch.jit.load("plain.pt")._save_for_lite_interpreter("lite.ptl")
lite = records("lite.ptl")
write("lite.ptl", {n: d for n, d in lite.items() if "/code/" not in n})
os.remove("plain.pt.made")
made = tried("plain.pt", lambda _: _load_for_lite_interpreter("lite.ptl")(torch.ones(1)))
found["lite.ptl"] = made
print(json.dumps(found))
"""


def run(source: str, cwd: Path, *args: str) -> dict[str, bool]:
    """Return which of the files that a child made did what they should when PyTorch took them."""
    (cwd / "attacks.py").write_text(MAKING + source)  # TorchScript looks for its sources
    told = python_with_frameworks("attacks.py", *args, cwd=cwd)
    found: dict[str, bool] = json.loads(told.splitlines()[-1])
    return found


@pytest.mark.framework
def test_scripts_that_make_a_file(tmp_path: Path) -> None:
    ran = run(SCRIPTS, tmp_path, json.dumps(CALLS))
    assert len(ran) == len(CALLS) + 2
    assert [name for name, made in ran.items() if not made] == []
    for made in tmp_path.glob("*.made"):
        made.unlink()
    verdicts = {name: verify(tmp_path / name).safety for name in ran}
    assert {name: safety for name, safety in verdicts.items() if safety is not Safety.UNSAFE} == {}
    assert list(tmp_path.glob("*.made")) == []


# Exported programs ------------------------------------------------------------------------------------

PROGRAMS = r"""
torch.export.save(torch.export.export(Net(), (torch.ones(3),)), "e.pt2")
base = records("e.pt2")
MODEL, CONSTANTS = "e/models/model.json", "e/data/constants/model_constants_config.json"
found = {}

def attack(name, run=False, edit=None, **more):
    path = name + ".pt2"
    made = os.path.abspath(path + ".made")
    program = json.loads(base[MODEL])
    if edit:
        edit(program, made)
    calling = b"cos\nmkdir\n(V%s\ntR." % made.encode("raw_unicode_escape")
    held = {n: calling if d == "CALL" else d for n, d in more.items()}
    write(path, base | {MODEL: json.dumps(program).encode()} | held)
    load = (lambda p: torch.export.load(p).module()(torch.ones(3))) if run else torch.export.load
    found[path] = tried(path, load)

def reads(program, made):
    node = program["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.ops.aten.from_file.default"
    given = {"filename": {"as_string": made}, "shared": {"as_bool": True}, "size": {"as_int": 3}}
    node["inputs"] = [{"name": name, "arg": arg, "kind": 1} for name, arg in given.items()]

def imports(program, made):
    with open("own_module.py", "w") as file:
        file.write("import enum\nopen(%r, 'w').close()\nclass E(enum.Enum):\n  A = 1\n" % made)
    sys.path.insert(0, os.getcwd())
    signature = program["graph_module"]["module_call_graph"][0]["signature"]
    version, spec = json.loads(signature["in_spec"])
    key = json.dumps([{"__enum__": True, "fqn": "own_module:E", "name": "A"}]).replace("__en", "\\u005f_en")
    layout = {"type": "builtins.dict", "context": key, "children_spec": [spec]}
    signature["in_spec"] = json.dumps([version, layout])

def config(name):
    entry = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    return json.dumps({"config": {"q": entry}}).encode()

def raw(name):
    meta = {"dtype": 2, "sizes": [{"as_int": 1}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}}
    meta |= {"layout": 7, "requires_grad": False, "device": {"type": "cpu", "index": None}}
    entry = {"path_name": name, "is_param": False, "use_pickle": False, "tensor_meta": meta}
    return json.dumps({"config": {"q": entry}}).encode()

attack("operator", True, reads)
program = json.loads(base[MODEL])
reads(program, os.path.abspath("suffix.pt2.made"))
data = {name: held for name, held in base.items() if "/data/" in name}
more = {name.replace("model.pt", "more.pt").replace("model_", "more_"): held for name, held in data.items()}
write("suffix.pt2", base | more | {"e/models/more_____": json.dumps(program).encode()})
found["suffix.pt2"] = tried("suffix.pt2", lambda path: next(
    program.module()(torch.ones(3)) for name, program in
    torch.export.pt2_archive._package.load_pt2(path).exported_programs.items() if name == "more"))
attack("enumeration", edit=imports)
attack("opaque", **{CONSTANTS: config("opaque_obj_0"), "e/data/constants/opaque_obj_0": "CALL"})
attack("tensor", **{CONSTANTS: config("tensor_0"), "e/data/constants/tensor_0": "CALL"})
attack("constants", **{"e/data/constants/model.pt": "CALL"})
attack("weights", **{"e/data/weights/model.pt": "CALL"})
attack("inputs", **{"e/data/sample_inputs/model.pt": "CALL"})
other = "e/data/constants/other_constants_config.json"
attack("covered", **{"e/data/constants/model.pt": "CALL", other: raw("model.pt")})
print(json.dumps(found))
"""


@pytest.mark.framework
def test_exported_programs_that_make_a_file(tmp_path: Path) -> None:
    ran = run(PROGRAMS, tmp_path)
    assert [name for name, made in ran.items() if not made] == []
    for made in tmp_path.glob("*.made"):
        made.rmdir() if made.is_dir() else made.unlink()
    verdicts = {name: verify(tmp_path / name).safety for name in ran}
    # Only who has a module of that name knows what importing it does.
    assert verdicts.pop("enumeration.pt2") is Safety.UNKNOWN
    assert {name: safety for name, safety in verdicts.items() if safety is not Safety.UNSAFE} == {}
    assert list(tmp_path.glob("*.made")) == []


# Tokens -----------------------------------------------------------------------------------------------


def test_a_call_is_seen() -> None:
    for call in CALLS.values():
        assert Severity.ERROR in {finding.severity for finding in judge_text(call.encode(), "code")}, call


def test_what_is_named_without_harm() -> None:
    cases = [
        b'y = torch.tensor("torch.save(x)")',
        b"# torch.save(x)\nops.prim.data(x)",
        b"'''torch.save(x)''' ",
        b"torch : __torch__.torch.nn.modules.linear.Linear\nself.torch.save(x)",
        b"def f(self, torch: int, print: int=3) -> int:\n  f(torch=3)",
        b"_0 = __torch__.torch.nn.functional.relu\n_0(x)",
        b"import __torch__.torch.nn\ngetattr(self, '0')",
        b"p : __torch__.torch.classes.quantized.LinearPackedParamsBase",
        b"torch.autograd.backward([x], )",
        b'"\\"torch.save(x)"',
        b"",
        b"\n \n",
    ]
    for text in cases:
        assert list(judge_text(text, "code")) == [], text


def test_what_is_told_of_a_text() -> None:
    cases = [
        (b"ops.torchvision.nms(x)", "custom-ops", Severity.WARNING),
        (b"torch.newer(x)", "custom-ops", Severity.WARNING),
        (b"__torch__.torch.classes.mine.Reader('x')", "custom-ops", Severity.WARNING),
        (b"p : __torch__.torch.classes.mkldnn.ConvOpContext", "unchecked-ops", Severity.WARNING),
        (b"c = __torch__.torch\nc.classes.mine.Reader('x')", "unsafe-op", Severity.ERROR),
        (b"getattr(__torch__, 'torch')", "unsafe-op", Severity.ERROR),
        (b"ops.prim.PythonOp(x)", "unsafe-op", Severity.ERROR),
        (b"ops.prim.rpc_sync('w', f)", "unsafe-op", Severity.ERROR),
        (b"print(x)", "unsafe-op", Severity.WARNING),
        (b"x; torch.save(x)", "not-scanned", Severity.WARNING),
        (b"0x1torch.save(x)", "not-scanned", Severity.WARNING),
        (b'"torch.save(x)', "not-scanned", Severity.WARNING),
        (b"t\xf6rch.save(x)", "not-scanned", Severity.WARNING),
        (b"'" + b"\\'" * 2000 + b"'", "not-scanned", Severity.WARNING),
        (b" " * (MAX_TEXT + 1), "not-scanned", Severity.WARNING),
    ]
    for text, code, severity in cases:
        assert [(one.code, one.severity) for one in judge_text(text, "code")] == [(code, severity)], text


def test_a_path_of_any_length() -> None:
    found = CodeReferences(b"torch" + b".autograd" * 100_000 + b".save(x)")
    assert found.unresolved


LOOP = b"def spin(n: int) -> int:\n  while True:\n    pass\n"


def test_loops_that_loading_runs() -> None:
    cases = [
        (b"while True:\n      pass", "a.py"),
        (b"for i in range(9):\n      pass", "a.py"),
        (b"_0 = (self).spin(n, )", "b.py"),
        (b"_0 = __torch__.spin(n, )", "b.py"),
        (b"_0 = __torch__.spin\n    _0(n, )", "b.py"),
        (b"_0 = (self).step(n, )", "b.py"),
        (b"_0 = getattr(self, 'sp' 'in')(n)", "b.py"),
        (b"m = self.m\n    _0 = m(n)", "c.py"),
        (b"_0 = n + n", ""),
        (b"_0 = (p).unpack()", ""),
        (b"_0 = ops.quantized.linear_prepack(n, None)\n    self.n = torch.add(n, 1)", ""),
        (b"self.n = n", ""),
    ]
    for body, looping in cases:
        text = b"class A(Module):\n  def  __setstate__(self, n: int) -> NoneType:\n    " + body
        text += b"\n  def step(self, n: int):\n    return __torch__.spin(n)"
        text += b"\n  def f(self):\n    for i in n:\n      pass"
        called = b"class B(Module):\n  def forward(self, n: int):\n    while True:\n      pass\n"
        texts = {"a.py": text, "b.py": LOOP, "c.py": called}
        files = [(name, code_tokens(one)[0]) for name, one in texts.items()]
        found = {finding.where for finding in judge_loops(files)}
        assert (looping in found) if looping else not found, body


def test_casts() -> None:
    cases = [
        ("b = unchecked_cast(Tuple[int, int], a)", ""),
        (
            "b : Optional[Tuple[int, int]] = a\n    b = a\n    if torch.__isnot__(b, None):\n"
            "      c = unchecked_cast(Tuple[int, int], b)",
            "",
        ),
        ("b = unchecked_cast(Dict[str, List[Tensor]], n)", ""),
        ("b = unchecked_cast(Tuple[int, int], n)", "Tuple[int, int]"),
        ("b = unchecked_cast(Tuple[int], a)", "Tuple[int]"),
        ("b = unchecked_cast(__torch__.A, n)", "__torch__.A"),
        ("a = n\n    b = unchecked_cast(Tuple[int, int], a)", "Tuple[int, int]"),
        ("(a, c) = n\n    b = unchecked_cast(Tuple[int, int], a)", "Tuple[int, int]"),
        ("c, a, = n\n    b = unchecked_cast(Tuple[int, int], a)", "Tuple[int, int]"),
        ("for a in n:\n      b = unchecked_cast(Tuple[int, int], a)", "Tuple[int, int]"),
        (
            "b : Optional[Tuple[int, int]] = a\n    b = a if n else n\n"
            "    c = unchecked_cast(Tuple[int, int], b)",
            "Tuple[int, int]",
        ),
        ("b = unchecked_cast\n    b(Tuple[int, int], a)", "a type that can't be read"),
        ("unchecked_cast(" + "List[" * 500, "a type that can't be read"),
    ]
    for body, cast in cases:
        text = f"def f(a: Optional[Tuple[int, int]], n: int) -> int:\n    {body}\n    return 1\n"
        found = [finding.message for finding in judge_text(text.encode(), "a.py")]
        assert found == ([f"its code casts values to {cast} unchecked"] if cast else []), body


def test_what_byte_code_names() -> None:
    cases = [
        (["aten::linear", "Tensor", "__torch__.Net.forward", "__torch__", "torch"], []),
        (["aten::save"], ["unsafe-op"]),
        (["mine::read"], ["custom-ops"]),
        (["List[__torch__ . torch.classes.mine.Reader]"], ["custom-ops"]),
        (["__torch__ def", "__torch__.torch.classes.mine.Reader"], ["custom-ops"]),
    ]
    for texts, codes in cases:
        found = [finding.code for finding in judge_byte_code(texts, "bytecode.pkl")]
        assert found == ["unchecked-ops", *codes], texts


# The lists --------------------------------------------------------------------------------------------


def test_each_danger_is_of_a_known_operator() -> None:
    """A typing error would make a danger harmless."""
    from fnmatch import fnmatchcase

    lost = [
        glob
        for _, glob, _ in OPERATORS.dangers
        if not any(fnmatchcase(n, glob) for n in OPERATORS.registered)
    ]
    assert lost == []


@pytest.mark.framework
def test_all_operators_of_pytorch_are_known() -> None:
    """In a process of its own: other tests register operators, and have PyTorch register more."""
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=True)
    arguments: dict[str, list[str]] = json.loads(done.stdout)
    assert len(arguments) > 2000
    assert arguments.keys() - OPERATORS.registered == set()
    taking = {name for name, names in arguments.items() if any(map(_is_path, names))}
    assert {name for name in taking if OPERATORS.danger(name) is None} == {"aten::einsum"}


REGISTERED = """
import json, torch
from torch._ops import _higher_order_ops
found = {f"higher_order::{name}": [] for name in _higher_order_ops}
for schema in torch._C._jit_get_all_schemas():
    found.setdefault(schema.name, []).extend(one.name for one in schema.arguments)
print(json.dumps(found))
"""


def _is_path(argument: str) -> bool:
    return any(part in argument for part in ("file", "path", "url", "command"))

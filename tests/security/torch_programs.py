"""Attacks of TorchScript archives, lite ones, and exported programs, and what PyTorch does with them.

``python -m tests.security.torch_programs DIRECTORY`` writes and proves them, each in a forked process;
with ``--write`` it only writes them.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.security.truth import Attack, prove_all, tell_all

FILES = Path(__file__).parents[2] / "fixtures" / "files"
EXPORTED, SCRIPTED = FILES / "torch-export" / "program.pt2", FILES / "torchscript" / "scripted.pt"
GRAPH, CONSTANTS = "program/models/model.json", "program/data/constants/model_constants_config.json"
CODE = "scripted/code/__torch__/fixture_models.py"
SECONDS = 3
"""How long a load may take until it counts as a hang."""

EXPRESSIONS = {
    "power": "9**9**9**9",
    "power.call": "Pow(9, Pow(9, Pow(9, 9)))",
    "power.caret": "9^9^9^9",
    "power.left": "((((9**64)**64)**64)**64)**64",
    "power.product": "(9**99)**(9**7)",
    "power.two": "2**10000000000",
    "power.symbol": "9**9**9**9 + s85",
    "floor.exp": "floor(exp(100000000000))",
    "floor.text": "floor(Float('1e1000000000'))",
    "floor.literal": "floor(1e1000000000)",
    "rational": "Rational('1e1000000000')",
    "rational.small": "Rational('1e-1000000000')",
    "precision": "Float('0.1', precision=10000000000)",
    "gcd": "FloorDiv((a+b+c+d+e)**60, (a+b+c+d+f)**60)",
    "gcd.product": "FloorDiv((a+b+c+d)**30*(a+c+e+f)**30, (a+b+c+d)**30*(a+e+f)**29)",
    "remainder": "Mod((a+b+c+d+e)**60, (a+b+c+d+f)**60)",
    "maximum": f"Max({', '.join(f'a{i}' for i in range(1500))})",
    "maximum.products": f"Max({', '.join(f'a{i}*b{i}' for i in range(700))})",
    "minimum": f"Min({', '.join(f'Max(a{i}, b{i})' for i in range(300))})",
    "factors": "*".join(f"(a{i}+1)" for i in range(900)),
    "exponentials": "exp(" * 45 + "1" + ")" * 45,
    "exponentials.compared": "exp(exp(exp(exp(5)))) > 2",
    "root": f"sqrt({'9' * 4000})",
    "root.compared": "sqrt(10**4000+1) > 3",
    "root.equal": "Eq(sqrt(10**3000+1), sqrt(10**3000+2))",
    "root.floor": "floor(sqrt(10**4000+1))",
}
"""Sizes that SymPy doesn't end computing."""

TARGETS = {
    "os": "torch.os.mkdir",
    "os.other_root": "torchscript.os.mkdir",
    "os.of_utils": "torch.utils.data.os.mkdir",
    "os.path": "torch.serialization.os.makedirs",
    "shutil": "torch.serialization.shutil.os.mkdir",
    "operators.os": "torch.ops.os.mkdir",
    "ops_module": "torch._ops.os.mkdir",
    "hub": "torch.hub.os.mkdir",
    "builtins": "torch.builtins.open",
    "math": "mathx.__loader__.load_module",
    "bare_init": "torch.ops.aten.add.__init__",
    "load_library": "torch.ops.load_library",
    "load_library.func": "torch.ops.load_library.__func__",
    "namespace": "torch.ops.aten.__init__",
    "sympy": "torch.utils._sympy.functions.os.mkdir",
}
"""Targets of a graph's nodes, each called with the name of a file or directory to make."""


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive(held: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name, data in held.items():
            target.writestr(name, data)
    return out.getvalue()


def program(edit: Callable[[Any], None] | None = None, **more: bytes) -> bytes:
    """Return the exported program of the fixtures with an edited graph, and more records."""
    held = members(EXPORTED)
    graph = json.loads(held[GRAPH])
    if edit:
        edit(graph)
    return archive(held | {GRAPH: json.dumps(graph).encode()} | more)


def sized(text: str) -> bytes:
    """Return a program in which a size is an expression."""

    def edit(graph: Any) -> None:
        sizes = graph["graph_module"]["graph"]["tensor_values"]["inputs"]["sizes"]
        sizes[0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}

    return program(edit)


def targeted(target: str, text: str) -> bytes:
    """Return a program whose first node calls a target with a text."""

    def edit(graph: Any) -> None:
        node = graph["graph_module"]["graph"]["nodes"][-1]
        node["target"] = target
        node["inputs"] = [{"name": "", "arg": {"as_string": text}, "kind": 1}]

    return program(edit)


def compiled(made: str) -> bytes:
    """Return a package of a model that loading compiles, with flags that are commands."""
    lists = ("include_dirs", "definitions", "libraries_dirs", "libraries", "cflags", "ldflags")
    switches = ("use_relative_path", "use_mmap_weights", "use_absolute_path")
    flags = {
        **{name: [] for name in (*lists, "passthough_args", "passthrough_args")},
        **dict.fromkeys(switches, False),
        "compiler": f"touch {made} ;",
        "aot_mode": True,
        "compile_only": True,
    }
    parts = {
        "wrapper.cpp": b"",
        "wrapper_metadata.json": json.dumps({"AOTI_DEVICE_KEY": "cpu"}).encode(),
        "wrapper_compile_flags.json": json.dumps(flags).encode(),
        "wrapper_linker_flags.json": json.dumps(flags).encode(),
    }
    held = {f"program/data/aotinductor/model/c.{name}": data for name, data in parts.items()}
    return archive(members(EXPORTED) | held)


def exported(made: str) -> Iterator[tuple[str, bytes]]:
    """Yield attacks of ``torch.export.load``, and of running what it gives."""
    calling = b"cos\nmkdir\n(S'%s'\ntR." % made.encode()
    for name, text in EXPRESSIONS.items():
        yield f"expression/{name}", sized(text)
    for name, target in TARGETS.items():
        yield f"target/{name}", targeted(target, made)
    config = {"path_name": "", "is_param": False, "use_pickle": True, "tensor_meta": None}
    for record in ("custom_obj_0", "opaque_obj_0", "tensor_9", "weight_0"):
        entry = json.dumps({"config": {"q": {**config, "path_name": record}}}).encode()
        more = {CONSTANTS: entry, f"program/data/constants/{record}": calling}
        yield f"pickle/{record}", program(None, **more)
    for record in ("constants/model.pt", "weights/model.pt", "sample_inputs/model.pt"):
        yield f"pickle/{record}", program(None, **{f"program/data/{record}": calling})
    for key in ("guards_code",):
        text = f"__import__('os').mkdir({made!r}) or True"
        yield f"code/{key}", program(lambda graph, t=text, k=key: graph.update({k: [t]}))
    hidden = f"().__class__.__base__.__subclasses__() and __import__('os').mkdir({made!r})"
    yield "code/expression", sized(hidden)
    yield "code/symbol", sized(f"Symbol('x', **{{__import__('os').mkdir({made!r}): 1}})")

    yield "compiled/flags", compiled(made)

    def guard(graph: Any) -> None:
        graph["guards_code"] = ["9**9**9**9 > L['args'][0][0].size()[0]"]

    yield "guard/power", program(guard)


STATEMENTS = {
    "save": "torch.save(x, MADE)",
    "save.ops": "ops.aten.save(x, MADE)",
    "save.tab": "torch\t.\tsave(x, MADE)",
    "save.in_list": "_9 = [torch.save(x, MADE)]",
    "save.in_tuple": "_9 = (torch.save(x, MADE), 1)",
    "save.in_if": "if True:\n      torch.save(x, MADE)\n    else:\n      pass",
    "save.in_loop": "for i in range(1):\n      torch.save(x, MADE)",
    "save.in_while": "while torch.numel(x) > 9999:\n      pass\n    torch.save(x, MADE)",
    "save.in_with": "_8 = annotate(List[Tensor], [])\n    torch.save(x, MADE)",
    "save.annotated": "_9 = annotate(NoneType, torch.save(x, MADE))",
    "save.ternary": "_9 = torch.save(x, MADE) if True else None",
    "save.unchecked": "_9 = unchecked_cast(NoneType, torch.save(x, MADE))",
    "save.getattr": "getattr(ops.aten, 'save')(x, MADE)",
    "save.getattr_torch": "getattr(torch, 'sa' 've')(x, MADE)",
    "save.joined_name": "_9 = MADE\n    torch.save(x, _9)",
    "save.semicolon": "pass;\n    torch.save(x, MADE)",
    "save.crlf": "torch.save(x, MADE)\r\n",
    "save.comment": "# '''\n    torch.save(x, MADE)\n    # '''",
    "save.string": "'''\n  '''\n    torch.save(x, MADE)",
    "save.assert": "assert torch.save(x, MADE) is None",
    "save.fork": "_9 = fork(torch.save, x, MADE)\n    _8 = torch.wait(_9)",
    "save.lambda_default": "_9 = torch.len([torch.save(x, MADE)])",
    "from_file": "x = torch.from_file(MADE, True, 4)",
    "from_file.keywords": "x = torch.from_file(shared=True, size=4, filename=MADE)",
    "from_file.ops": "x = ops.aten.from_file(MADE, True, 4)",
    "reshape.read": "x = torch.add(x, torch.sum(torch._reshape_alias(x, [400000000], [1])))",
    "reshape.write": "_9 = torch.fill_(torch._reshape_alias(x, [400000000], [1]), 7.)",
    "reshape.ops": "x = torch.add(x, torch.sum(ops.aten._reshape_alias(x, [4], [400000000])))",
    "reshape.copy": "x = torch.add(x, torch.sum(torch._reshape_alias_copy(x, [4], [400000000])))",
    "segment": "x = torch._segment_reduce_backward(x, x, x, 'sum', lengths=torch.tensor([100000000, 3]))",
    "csr": "x = torch._convert_indices_from_csr_to_coo(torch.tensor([0, 400000000000]), torch.tensor([0]))",
    "coo": "x = torch._convert_indices_from_coo_to_csr(torch.tensor([400000000000, 4]), 3)",
    "sparse": "x = torch.to_dense(torch._sparse_csr_tensor_unsafe("
    "torch.tensor([0, 1, 2]), torch.tensor([400000000, 1]), torch.rand([2]), [2, 2]))",
    "cdist": "x = torch._cdist_backward(x, torch.rand([90000, 2]), torch.rand([90000, 2]), 1., x)",
    "cholesky": "x = torch._cholesky_solve_helper(torch.rand([90, 1, 900]), torch.rand([2, 2]), True)",
    "sobol": "x = torch._sobol_engine_initialize_state_(torch.zeros([2, 3], dtype=4), 400000)",
    "embedding": "x = torch.embedding_dense_backward(x, torch.tensor([400000000000]), 3, -1, True)",
    "division": "x = torch.add(x, torch.__round_to_zero_floordiv(torch.numel(x), 0))",
}
"""Statements at the head of a method in TorchScript."""

LOOPS = {
    "while": ("while n > 0: n += 1", "", ""),
    "for": ("for i in range(9223372036854775807): n += i", "", ""),
    "method": ("self.spin(n)", "def spin(self, n: int):\n        while n > 0: n += 1", ""),
    "function": ("n = spin(n)", "", "def spin(n: int) -> int:\n    while n > 0: n += 1\n    return n"),
}
"""Statements of a method that loading runs, another method of its class, and a function."""
LOOPING = """
import torch

class Looping{number}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 1
    def forward(self, x):
        return x
    @torch.jit.export
    def __getstate__(self):
        return self.n
    @torch.jit.export
    def __setstate__(self, n: int):
        {statement}
        self.n = n
    @torch.jit.export
    {method}

{function}
"""

CASTS = {
    "cast": "return torch.add(x, unchecked_cast(__torch__.CLASSES.Point, self.empty).h59)",
    "alias": "cast = unchecked_cast\n    return torch.add(x, cast(__torch__.CLASSES.Point, self.empty).h59)",
    "list": "y = unchecked_cast(List[__torch__.CLASSES.Point], [self.empty])\n"
    "    return torch.add(x, (y)[0].h59)",
    "optional": "y : Optional[__torch__.CLASSES.Point] = None\n    y = self.empty\n"
    "    return torch.add(x, unchecked_cast(__torch__.CLASSES.Point, y).h59)",
}
"""Bodies of a method that take an object of one class for one of another, which has more attributes."""
CONFUSIONS = {
    "attribute": ("Point", "Point()", "x + self.held.h59"),
    "optional": ("Optional[Point]", "Point()", "x + torch.jit._unwrap_optional(self.held).h59"),
    "list": ("List[Point]", "[Point()]", "x + self.held[0].h59"),
    "dictionary": ("Dict[str, Point]", "{'a': Point()}", "x + self.held['a'].h59"),
    "tuple": ("Tuple[Point, int]", "(Point(), 1)", "x + self.held[0].h59"),
    "named": ("Pair", "Pair(Point(), 1)", "x + self.held.point.h59"),
    "deep": ("Dict[str, List[Tuple[int, Point]]]", "{'a': [(1, Point())]}", "x + self.held['a'][0][1].h59"),
    "any": ("Any", "[Point()]", "x + points(self.held)[0].h59"),
}
"""Types, values and uses of an attribute of which the pickle holds objects of another class."""
STATE = """
    @torch.jit.export
    def __getstate__(self) -> Tuple[List[Point], Empty, bool]:
        return self.held, self.empty, self.training
    @torch.jit.export
    def __setstate__(self, state: Tuple[List[Point], Empty, bool]):
        self.held, self.empty, self.training = state
"""
HOLDING = """
from typing import Any, Dict, List, NamedTuple, Optional, Tuple
import torch

@torch.jit.script
class Empty:
    def __init__(self):
        pass

@torch.jit.script
class Point:
    def __init__(self):
        {slots}

class Pair(NamedTuple):
    point: Point
    n: int

def points(held: Any) -> List[Point]:
    assert isinstance(held, List[Point])
    return held

class Holder(torch.nn.Module):
    held: {type}
    empty: Empty
    def __init__(self):
        super().__init__()
        self.held = {value}
        self.empty = Empty()
    def forward(self, x):
        return {use}
    {methods}
"""


def confusing(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield archives whose objects aren't of the classes that their code declares."""
    makers = {name: (*parts, "") for name, parts in CONFUSIONS.items()}
    for name, parts in (makers | {"state": (*CONFUSIONS["list"], STATE)}).items():
        held, module = holding(directory, name, *parts)
        yield f"confused/{name}", archive(held | with_empty(held, module))
    held, module = holding(directory, "attribute", *makers["attribute"])
    code = f"archive/code/__torch__/{module}.py"
    head, separator, rest = held[code].decode().partition(") -> Tensor:\n")
    method, _, classes = rest.partition("class ")
    for name, body in CASTS.items():
        text = f"{head}{separator}    {body.replace('CLASSES', module)}\nclass {classes}"
        yield f"cast/{name}", archive(held | {code: text.encode()})
    declaration = f"  held : __torch__.{module}.Point\n"
    text = f"{head.replace(declaration, '')}{separator}{method}{declaration}class {classes}"
    yield "confused/behind_methods", archive(held | with_empty(held, module) | {code: text.encode()})


def with_empty(held: dict[str, bytes], module: str) -> dict[str, bytes]:
    """Return the record of the objects, with one of a class without attributes for the first of another."""
    point, empty = (f"c__torch__.{module}\n{kind}\n".encode() for kind in ("Point", "Empty"))
    assert point in held["archive/data.pkl"]
    return {"archive/data.pkl": held["archive/data.pkl"].replace(point, empty, 1)}


def holding(
    directory: Path, name: str, type: str, value: str, use: str, methods: str
) -> tuple[dict[str, bytes], str]:
    """Return the records of an archive with an object that holds another, and the module of their classes."""
    import torch

    module = f"holding_{name}"
    slots = "\n        ".join(f"self.h{number} = torch.ones(1)" for number in range(60))
    parts = {"type": type, "value": value, "use": use, "methods": methods, "slots": slots}
    (directory / f"{module}.py").write_text(HOLDING.format(**parts))
    path = directory / "holding.pt"
    torch.jit.script(importlib.import_module(module).Holder()).save(str(path))
    return {f"archive/{name.partition('/')[2]}": data for name, data in members(path).items()}, module


def scripted(made: str) -> Iterator[tuple[str, bytes]]:
    """Yield attacks of ``torch.jit.load``, and of running what it gives."""
    held = members(SCRIPTED)
    code = held[CODE].decode()
    head, separator, rest = code.partition(") -> Tensor:\n")
    for name, statement in STATEMENTS.items():
        statement = statement.replace("MADE", json.dumps(made))
        changed = f"{head}{separator}    {statement}\n{rest}"
        yield f"script/{name}", archive(held | {CODE: changed.encode()})


def looping(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield archives whose loading doesn't end."""
    import torch

    for number, (name, (statement, method, function)) in enumerate(LOOPS.items()):
        method = method or "def nothing(self):\n        pass"
        parts = {"number": number, "statement": statement, "method": method, "function": function}
        (directory / f"looping{number}.py").write_text(LOOPING.format(**parts))
        module = importlib.import_module(f"looping{number}")
        out = io.BytesIO()
        torch.jit.save(torch.jit.script(getattr(module, f"Looping{number}")()), out)
        yield f"loading/{name}", out.getvalue()


def lite(made: str, directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield attacks of the lite interpreter: archives of byte code without its source."""
    import torch

    for name, data in scripted(made):
        path = directory / "whole.pt"
        path.write_bytes(data)
        try:
            torch.jit.load(str(path))._save_for_lite_interpreter(str(path))
        except RuntimeError:  # no byte code for it
            continue
        left = {record: text for record, text in members(path).items() if "/code/" not in record}
        yield name.replace("script/", "lite/"), archive(left)


RELU, LOADED = ("aten::relu", "", 1), ("LOAD", 2, 0)
UNCHECKED = {
    "operator": ([LOADED, ("OP", 1 << 20, 0)], [RELU], [], []),
    "operator.far": ([LOADED, ("OP", 1 << 30, 0)], [RELU], [], []),
    "attribute": ([("LOAD", 1, 0), ("GET_ATTR", 1 << 20, 0)], [], [], []),
    "attribute.far": ([("LOAD", 1, 0), ("GET_ATTR", 1 << 30, 0)], [], [], []),
    **{
        f"warning.{number}": ([("WARN", number, 0), LOADED], [], [], [])
        for number in (0, -1, 100, -100, 1 << 20, 1 << 30)
    },
    **{
        f"{kind.lower()}.{number}": ([LOADED, (kind, 0, number)], [], [], [type])
        for kind, type in (("LIST_CONSTRUCT", "List[Tensor]"), ("NAMED_TUPLE_CONSTRUCT", "Tensor"))
        for number in (100, 1000, -1, -100)
    },
    **{
        f"{name.rpartition(':')[2]}.{number}.{len(loads)}": (
            [*loads, ("OP", 0, 0)], [(name, "", number) if number is not None else (name, "")], [], [],
        )
        for name, numbers in {"aten::linear": (None, -1, 5, 100), "aten::__is__": (None, 0, 1, 100)}.items()
        for number in numbers
        for loads in ([], [LOADED])
        if name != "aten::linear" or not loads
    },
    "jump": ([("JMP", 0, 0)], [], [], []),
    "jump.back": ([("LOADC", 0, 0), ("JF", -1, 0)], [], [False], []),
}  # fmt: skip
"""Instructions, operators, constants and types that the lite interpreter runs, whatever they are."""


def byte_code(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield lite archives whose byte code no compiler made."""
    import torch

    path = directory / "honest.ptl"
    torch.jit.script(torch.nn.ReLU())._save_for_lite_interpreter(str(path))
    held = {name: data for name, data in members(path).items() if "/code/" not in name}
    version, (name, _, schema) = pickle.loads(held["honest/bytecode.pkl"])
    for attack, (instructions, operators, constants, types) in UNCHECKED.items():
        parts = {
            "instructions": (("STOREN", 1, 2), *instructions, ("RET", 0, 0)),
            "operators": tuple(operators),
            "constants": tuple(constants),
            "types": tuple(types),
            "register_size": 4,
        }
        code = (version, (name, tuple(parts.items()), schema))
        record = {"honest/bytecode.pkl": pickle.dumps(code, protocol=2)}
        yield f"bytecode/{attack}", archive(held | record)


def attacks(directory: Path) -> Iterator[Attack]:
    """Write the attacks, each into a directory of its own below one, where it makes a file if it runs."""
    sys.path.insert(0, str(directory))
    makers: dict[Callable[[str], Iterator[tuple[str, bytes]]], str] = {
        exported: ".pt2",
        scripted: ".pt",
        lambda _: looping(directory): ".pt",
        lambda _: confusing(directory): ".pt",
        lambda made: lite(made, directory): ".ptl",
        lambda _: byte_code(directory): ".ptl",
    }
    for maker, suffix in makers.items():
        for name, data in maker("MARKER"):
            path = directory / name.replace("/", "-") / f"a{suffix}"
            path.parent.mkdir()
            path.write_bytes(data)
            yield Attack(name, path, partial(load, path), path.parent, is_alone=True)


def load(path: Path) -> None:
    """Load an attack as its users do, and run it."""
    import torch

    inputs = torch.ones(2, 3)
    if any("/aotinductor/" in name for name in members(path)):
        torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    elif path.suffix == ".pt2":
        torch.export.load(path).module()(torch.ones(2, 4))
    elif path.suffix == ".pt":
        torch.jit.load(str(path))(inputs)
    else:
        from torch.jit.mobile import _load_for_lite_interpreter

        _load_for_lite_interpreter(str(path))(inputs)


def main(directory: Path) -> None:
    """Prove the attacks."""
    import torch

    torch.export.load(EXPORTED)  # imports what the forks need
    torch.set_num_threads(1)
    prove_all(attacks(directory), seconds=SECONDS)


if __name__ == "__main__":
    if "--write" in sys.argv:
        tell_all(attacks(Path(sys.argv[1]).resolve()))
    else:
        main(Path(sys.argv[1]).resolve())

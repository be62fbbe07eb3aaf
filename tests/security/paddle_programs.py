"""Hostile and honest Paddle programs, written and run with Paddle.

``python -m tests.security.paddle_programs OUT`` proves that attacks make a file outside, or return the
content of one, by each of Paddle's loaders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.security.truth import Attack, prove_all

OUT = Path(sys.argv[1]).resolve()
SECRET = np.array([42.0, 43.0], "float32")
Adding = Callable[[Any, Any, str], Any]
"""Adds operators to a block, which take a variable and a path; returns what is to be told."""


def save(block: Any, x: Any, path: str) -> None:
    block.append_op(type="save", inputs={"X": [x]}, attrs={"file_path": path})


def save_combined(block: Any, x: Any, path: str) -> None:
    out = block.create_var(name="combined", type=paddle.base.core.VarDesc.VarType.RAW)
    attributes = {"file_path": path}
    block.append_op(type="save_combine", inputs={"X": [x]}, outputs={"Y": [out]}, attrs=attributes)


def check(block: Any, x: Any, path: str) -> None:
    outputs = {
        "stats": [block.create_var(name="s", dtype="int64")],
        "values": [block.create_var(name="v", dtype="float32")],
    }
    attributes = {"op_type": "a", "var_name": "x", "check_nan_inf_level": 3, "stack_height_limit": 1}
    attributes["output_dir"] = path
    block.append_op(type="check_numerics", inputs={"tensor": [x]}, outputs=outputs, attrs=attributes)


def load(block: Any, x: Any, path: str) -> Any:
    out = block.create_var(name="read", dtype="float32", shape=[2])
    block.append_op(type="load", outputs={"Out": [out]}, attrs={"file_path": path})
    return out


def load_combined(block: Any, x: Any, path: str) -> Any:
    out = block.create_var(name="read", dtype="float32", shape=[2])
    block.append_op(type="load_combine", outputs={"Out": [out]}, attrs={"file_path": path})
    return out


def read(block: Any, x: Any, path: str) -> Any:
    out = block.create_var(name="read", dtype="uint8", shape=[-1])
    block.append_op(type="read_file", outputs={"Out": [out]}, attrs={"filename": path})
    return out


def in_branch(add: Adding) -> Adding:
    def adding(block: Any, x: Any, path: str) -> None:
        def branch() -> None:
            add(paddle.static.default_main_program().current_block(), x, path)

        paddle.static.nn.cond(paddle.mean(x) > -1e9, branch, None)

    return adding


def in_loop(add: Adding) -> Adding:
    def adding(block: Any, x: Any, path: str) -> None:
        def body(at: Any) -> list[Any]:
            add(paddle.static.default_main_program().current_block(), x, path)
            return [at + 1]

        start = paddle.full([1], 0, "int64")
        paddle.static.nn.while_loop(lambda at: at < 1, body, [start])

    return adding


def in_case(add: Adding) -> Adding:
    def adding(block: Any, x: Any, path: str) -> None:
        def branch() -> Any:
            add(paddle.static.default_main_program().current_block(), x, path)
            return x + 0.0

        index = paddle.full([1], 0, "int32")
        paddle.static.nn.switch_case(index, {0: branch, 1: lambda: x + 1.0})

    return adding


def deep(add: Adding) -> Adding:
    return in_branch(in_loop(add))


WRITING: dict[str, Adding] = {"save": save, "save_combine": save_combined, "check_numerics": check}
READING: dict[str, Adding] = {"load": load, "load_combine": load_combined, "read_file": read}
NESTED: dict[str, Callable[[Adding], Adding]] = {
    "flat": lambda add: add, "branch": in_branch, "loop": in_loop, "case": in_case, "deep": deep,
}  # fmt: skip
LOADERS = ("static", "fluid", "jit")


def attempt(name: str, add: Adding, loader: str, victim: str) -> Attack:
    """Save a program as a loader expects it; it is loaded in a new scope, and run."""
    directory = OUT / "beside" / name
    directory.mkdir(parents=True)
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    executor = paddle.static.Executor()
    target = OUT / "models" / name
    with paddle.static.scope_guard(paddle.static.Scope()), paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [2], "float32")
        block = main.global_block()
        weight = paddle.static.create_parameter([2], "float32", name="weight")
        y = x + weight
        told = add(block, x, victim or str(directory / "made"))
        executor.run(startup)
        target.mkdir(parents=True)
        prefix = str(target / "model")
        outputs = [y] if told is None else [y, told]
        # Paddle prunes what leads to no output: the program is written as it is.
        feed = main.clone()
        with paddle.static.program_guard(feed):
            names = [one.name for one in outputs]
            inner = [feed.global_block().var(one) for one in names]
            paddle.static.io.prepend_feed_ops(feed, ["x"])
            paddle.static.io.append_fetch_ops(feed, names)
        del inner
        (target / "model.pdmodel").write_bytes(feed.desc.serialize_to_string())
        paddle.static.io.save_to_file(
            prefix + ".pdiparams", paddle.static.io._serialize_persistables(main, executor)
        )
    if loader == "fluid":
        (target / "model.pdmodel").rename(target / "__model__")
        (target / "model.pdiparams").rename(target / "__params__")
        path = target
    else:
        path = target / "model.pdmodel"
    return Attack(name, path, partial(tells, target, loader), directory)


def tells(target: Path, loader: str) -> bool:
    """Load a program, run it, and return whether it told what is kept outside."""
    executor = paddle.static.Executor()
    ones = np.ones(2, "float32")
    if loader == "jit":
        paddle.disable_static()
        layer = paddle.jit.load(str(target / "model"))
        values = layer(paddle.to_tensor(ones))
        values = [one.numpy() for one in (values if isinstance(values, (list, tuple)) else [values])]
    else:
        with paddle.static.scope_guard(paddle.static.Scope()):
            names = {"model_filename": "__model__", "params_filename": "__params__"}
            program, _, fetched = paddle.static.load_inference_model(
                *([str(target), executor] if loader == "fluid" else [str(target / "model"), executor]),
                **(names if loader == "fluid" else {}),
            )
            values = executor.run(program, {"x": ones}, fetched)
    flat = b"".join(np.asarray(one).tobytes() for one in values)
    return SECRET.tobytes() in flat


def named_outside(name: str, variable: str) -> Attack:
    """Write a program without a file of parameters, one of whose variables is named like a file outside."""
    directory = OUT / "beside" / name
    directory.mkdir(parents=True)
    target = OUT / "models" / name
    target.mkdir(parents=True)
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.scope_guard(paddle.static.Scope()), paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [2], "float32")
        weight = paddle.static.create_parameter([2], "float32", name=variable)
        y = x * 0.0 + weight
        paddle.static.io.prepend_feed_ops(main, ["x"])
        paddle.static.io.append_fetch_ops(main, [y.name])
    (target / "__model__").write_bytes(main.desc.serialize_to_string())
    return Attack(name, target, partial(loads_what_it_names, target, y.name), directory)


def loads_what_it_names(target: Path, output: str) -> bool:
    """Load a program's variables by their names, run it, and return whether it told what is kept outside."""
    paddle.enable_static()
    executor = paddle.static.Executor()
    with paddle.static.scope_guard(paddle.static.Scope()):
        program = paddle.static.Program.parse_from_string((target / "__model__").read_bytes())
        paddle.static.io.load_vars(executor, str(target), program, predicate=_is_parameter)
        values = executor.run(program, {"x": np.ones(2, "float32")}, [output])
    return bool(values[0].tobytes() == SECRET.tobytes())


def _is_parameter(variable: Any) -> bool:
    return bool(variable.persistable) and variable.name not in ("feed", "fetch")


def victim_file() -> str:
    """Write a tensor outside of all models, and return its path."""
    path = str(OUT / "victim")
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        x = paddle.static.data("x", [2], "float32")
        save(main.global_block(), x, path)
    paddle.static.Executor().run(main, {"x": SECRET})
    return path


def attacks() -> Iterator[Attack]:
    """Write the programs; those whose names begin with ``honest`` are."""
    victim = victim_file()
    for loader in LOADERS:
        for place, nested in NESTED.items():
            for kind, add in WRITING.items():
                if kind != "check_numerics" or place == "flat":
                    yield attempt(f"{kind}-{place}-{loader}", nested(add), loader, "")
        for kind, add in READING.items():
            yield attempt(f"{kind}-{loader}", add, loader, victim)
        yield attempt(f"honest-{loader}", lambda block, x, path: paddle.nn.functional.relu(x), loader, "")
        yield attempt(f"honest-nested-{loader}", in_branch(lambda block, x, path: x + 1.0), loader, "")
    yield named_outside("named-above", "../../victim")
    yield named_outside("named-absolute", victim)


if __name__ == "__main__":
    prove_all(attacks())

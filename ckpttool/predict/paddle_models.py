"""What Paddle loads: inference models, Fluid's and today's, and parameters into a layer of the user's.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import re
import zlib  # noqa: F401 - before paddle, or its own copy of zlib answers Python's calls and crashes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from ckpttool.predict.interface import Arrays, CannotTrain, Loaded, LoadFailed
from ckpttool.predict.paddle_layers import parameters
from ckpttool.predict.request import InputSpec, Job
from ckpttool.report import counted, error

_JSON = ".json"
_BFLOAT16 = "uint16"
"""What Paddle calls it: NumPy has no such dtype."""
_UNNAMED = re.compile(r"save_infer_model/scale_(\d+)\.tmp_\d+")
"""What saving calls an output; the last number counts what the process saved before."""


class Program(Loaded):
    """A program with its variables in a scope of its own."""

    def __init__(self, program: Any, scope: Any) -> None:
        self._program = program
        self._scope = scope
        self._executor = paddle.static.Executor(paddle.CPUPlace())
        block = program.global_block()
        self._feeds = {name: block.var(name) for name in program.desc.get_feed_target_names()}
        self._fetches = [block.var(name) for name in program.desc.get_fetch_target_names()]
        self.versions = {"paddle": paddle.__version__}
        held = counted(sum(map(_is_stored, program.list_vars())), "variable")
        self.detail = f"Paddle {paddle.__version__}: inference program, {held}"

    def inputs(self) -> tuple[InputSpec, ...]:
        if not self._fetches:
            raise LoadFailed(error("no-output", "the program gives nothing: it has no fetch"))
        return tuple(
            InputSpec(name, _shape(one), _dtype(one), is_sequence=bool(one.lod_level))
            for name, one in self._feeds.items()
        )

    def run(self, inputs: Arrays) -> Arrays:
        feed = {name: _fed(array, self._feeds[name]) for name, array in inputs.items()}
        found = self._executor.run(
            self._program, feed=feed, fetch_list=self._fetches, scope=self._scope, return_numpy=False
        )
        pairs = zip(self._fetches, found, strict=True)
        return {_output(one.name): _array(tensor, _dtype(one)) for one, tensor in pairs}

    def train(self, inputs: Arrays) -> str:
        raise CannotTrain("an inference program has no backward part")


def _shape(one: Any) -> tuple[int | None, ...]:
    return tuple(None if size < 0 else int(size) for size in one.shape)


def _output(name: str) -> str:
    return _UNNAMED.sub(r"output_\1", name)


def _dtype(variable: Any) -> str:
    name = str(paddle.base.data_feeder.convert_dtype(variable.dtype))
    return "bfloat16" if name == _BFLOAT16 else name


def _fed(array: np.ndarray[Any, Any], variable: Any) -> Any:
    """Return an array as a program takes it; the rows of a ragged input are one sequence."""
    dtype = _dtype(variable)
    plain = array.view(np.uint16) if array.dtype.kind == "V" else array
    fed = np.ascontiguousarray(plain if dtype == "bfloat16" else plain.astype(dtype, copy=False))
    if not variable.lod_level:
        return fed
    lengths = [[1]] * (variable.lod_level - 1) + [[len(fed)]]
    return paddle.base.create_lod_tensor(fed, lengths, paddle.CPUPlace())


def _array(tensor: Any, dtype: str) -> np.ndarray[Any, Any]:
    array = np.array(tensor)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array


def _is_stored(variable: Any) -> bool:
    kinds = paddle.base.core.VarDesc.VarType
    around = (kinds.FEED_MINIBATCH, kinds.FETCH_LIST, kinds.READER, kinds.RAW)
    return variable.persistable and variable.type not in around


def _inference(job: Job) -> Loaded:
    """An inference model: the program, and its variables from one file or from one each."""
    program_path = job.options["program"]
    if program_path.endswith(_JSON):
        return _json(job, program_path)
    _read_old_programs()
    paddle.enable_static()
    paddle.set_device("cpu")
    scope = paddle.static.Scope()
    with open(program_path, "rb") as stream:
        program = paddle.static.deserialize_program(stream.read())
    with paddle.static.scope_guard(scope):
        _load_variables(program, job.options["directory"], job.options["combined"])
    return Program(program, scope)


def _read_old_programs() -> None:
    """Let Paddle 3 take the programs of before, for as long as this process lives."""
    if _is_paddle_3():
        paddle.pir_utils.OldIrGuard().__enter__()


def _load_variables(program: Any, directory: str, combined: str | None) -> None:
    # load_inference_model has a way to read a file a variable, which 2.6 leads to load_combine.
    stored = [one for one in program.list_vars() if _is_stored(one)]
    if stored:
        executor = paddle.static.Executor(paddle.CPUPlace())
        paddle.static.io.load_vars(executor, directory, program, vars=stored, filename=combined)


class Translated(Loaded):
    """A program of Paddle 3, which only its own loader reads."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.versions = {"paddle": paddle.__version__}
        held = counted(len(layer.state_dict()), "variable")
        self.detail = f"Paddle {paddle.__version__}: inference program, {held}"

    def inputs(self) -> tuple[InputSpec, ...]:
        return tuple(InputSpec(None, _shape(one), _name(one)) for one in self._layer._input_spec())

    def run(self, inputs: Arrays) -> Arrays:
        from ckpttool.predict.paddle_layers import run_layer

        return run_layer(self._layer, inputs)


def _is_paddle_3() -> bool:
    return int(paddle.__version__.partition(".")[0]) >= 3


def _name(spec: Any) -> str:
    return str(spec.dtype).rpartition(".")[2]


def _json(job: Job, program_path: str) -> Loaded:
    if not _is_paddle_3():
        message = f"a program in JSON needs PaddlePaddle 3; this is {paddle.__version__}"
        raise LoadFailed(error("framework-too-old", message, os.path.basename(program_path)))
    layer = paddle.jit.load(program_path.removesuffix(_JSON))
    layer.eval()
    return Translated(layer)


LOADERS: Mapping[str, Callable[[Job], Loaded]] = {"inference": _inference, "parameters": parameters}

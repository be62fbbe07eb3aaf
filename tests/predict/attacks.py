"""Files that run code where their framework loads them, to be put in the place of one that was judged.

Code here runs in ``watched_child.py``, which has ``Evil``, ``rewrite`` and ``module_beside``; all that a
payload does is to make the directory ``mark``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PADDLE = HERE / "write_paddle.py"
SIMPLE = {"model": f"{HERE / 'models' / 'nets.py'}:SimpleModel", "shapes": "1,10"}
LINEAR = {"model": "torch.nn:Linear", "model_args": {"in_features": 10, "out_features": 2}}
NET = {"model": f"{PADDLE}:Net", "shapes": "2,4"}


class Attack(NamedTuple):
    """One such file.

    Attributes:
        family: The framework that it is for.
        honest: A fixture, or a line break and the code that writes an honest file at ``path``.
        name: What is predicted is called.
        write: Code that writes the hostile one at ``path``.
        load: Code that loads that as its framework does.
        codes: What ckpttool says of it; nothing where it is read all the same.
        options: How it is predicted.
        at: Where the hostile file lies from there, if it isn't the same.
    """

    family: str
    honest: str
    name: str
    write: str
    load: str
    codes: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    at: str = ""


# PyTorch --------------------------------------------------------------------------------------------

SAVE = 'import torch; torch.save({"fc.weight": torch.ones(2, 10), "x": Evil(mark)}, path%s)'
LOAD = "import torch; torch.load(path, weights_only=False)"
PICKLE = "import pickle; path.write_bytes(pickle.dumps(%s, %d))"
UNPICKLE = "import pickle; pickle.loads(path.read_bytes())"
DCP = """
import shutil, torch, torch.distributed.checkpoint as dcp
shutil.rmtree(path, ignore_errors=True)
model = {"fc.weight": torch.ones(2, 10), "fc.bias": torch.ones(2)}
dcp.save({"model": model}, checkpoint_id=path)
"""
DCP_BESIDE = DCP.replace('{"model": model}', '{"model": model, "args": Evil(mark)}')
DCP_INSIDE = DCP.replace('{"model": model}', '{"model": {**model, "extra": Evil(mark)}}')
DCP_METADATA = """
import pickle
metadata = pickle.loads(path.read_bytes())
%s
path.write_bytes(pickle.dumps(metadata, %d))
"""
DCP_PLANNED = DCP_METADATA % ('metadata.planner_data["x"] = Evil(mark)', 2)
DCP_BEHIND = DCP_METADATA % ("metadata.storage_meta = Evil(mark)", 4)
DCP_ITSELF = DCP_METADATA % ("metadata = Evil(mark)", 0)
DCP_READ = "import torch.distributed.checkpoint as dcp; dcp.FileSystemReader(path.parent).read_metadata()"
DCP_LOAD = """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(path, mark.parent / "whole.pth")
"""
EXPORT_MEMBER = """
import torch
held = io.BytesIO()
torch.save((Evil(mark),), held)
rewrite(path, "%s", lambda data: held.getvalue())
"""
EXPORT_ENUM = """
def change(data):
    program = json.loads(data)
    signature = program["graph_module"]["module_call_graph"][0]["signature"]
    spec = json.loads(signature["in_spec"])
    spec[1]["context"] = json.dumps({"__enum__": True, "fqn": f"{module_beside(mark)}:A", "name": "A"})
    signature["in_spec"] = json.dumps(spec)
    return json.dumps(program).encode()
rewrite(path, "models/model.json", change)
"""
EXPORT_LOAD = "import torch; torch.export.load(path)"
BIN = "pytorch/trainer-bin/checkpoint-1"
TORCH = [
    Attack("torch", "pytorch/guide.pth", "m.pth", SAVE % "", LOAD, ("load-refused",), SIMPLE),
    Attack(
        "torch",
        "pytorch/guide.pth",
        "m.pth",
        SAVE % ", _use_new_zipfile_serialization=False",
        LOAD,
        ("load-refused",),
        SIMPLE,
    ),
    Attack(
        "torch",
        "pickle/protocol4.pkl",
        "m.pkl",
        PICKLE % ("Evil(mark)", 0),
        UNPICKLE,
        ("no-such-key",),
        LINEAR,
    ),
    Attack(
        "torch",
        "pickle/protocol4.pkl",
        "m.pkl",
        PICKLE % ('{"x": Evil(mark)}', 5),
        UNPICKLE,
        ("no-such-key",),
        LINEAR,
    ),
    Attack("torch", DCP, "m", DCP_PLANNED, DCP_READ, (), SIMPLE, ".metadata"),
    Attack("torch", DCP, "m", DCP_BEHIND, DCP_READ, ("load-failed",), SIMPLE, ".metadata"),
    Attack("torch", DCP, "m", DCP_ITSELF, DCP_READ, ("load-failed",), SIMPLE, ".metadata"),
    Attack("torch", DCP, "m", DCP_BESIDE, DCP_LOAD, (), SIMPLE),
    Attack("torch", DCP, "m", DCP_INSIDE, DCP_LOAD, ("load-refused",), SIMPLE),
    Attack("torch", BIN, "checkpoint-1", SAVE % "", LOAD, ("load-failed",), {}, "pytorch_model.bin"),
    Attack(
        "torch",
        BIN,
        "checkpoint-1",
        SAVE % "",
        LOAD,
        ("load-refused",),
        {"optimizer": "torch.optim:AdamW"},
        "optimizer.pt",
    ),
    *(
        Attack(
            "torch",
            f"torch-export/{name}",
            name,
            EXPORT_MEMBER % member,
            EXPORT_LOAD,
            ("load-refused",),
        )
        for name, member in (
            ("program.pt2", "data/sample_inputs/model.pt"),
            ("program_old.pt2", "serialized_example_inputs.pt"),
            ("program_old.pt2", "serialized_state_dict.pt"),
        )
    ),
    Attack("torch", "torch-export/program.pt2", "m.pt2", EXPORT_ENUM, EXPORT_LOAD, ("load-refused",)),
]

# Keras ----------------------------------------------------------------------------------------------

LAMBDA = """
import %s as keras
run = eval(f"lambda x: (__import__('os').makedirs({str(mark)!r}, exist_ok=True), x)[1]")
keras.Sequential([keras.layers.Input((3,)), keras.layers.Lambda(run)]).save(path)
mark.rmdir()
"""
OLD = """
import tf_keras
tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))]).save(path)
"""
OLD_MODULE = """
def change(data):
    config = json.loads(data)
    config |= {"class_name": "A", "module": module_beside(mark), "registered_name": "A"}
    return json.dumps(config).encode()
rewrite(path, "config.json", change)
"""
OLD_LOAD = "import tf_keras; tf_keras.models.load_model(path)"
OLD_TRUSTING = "import tf_keras; tf_keras.models.load_model(path, safe_mode=False)"
KERAS_LOAD = "import keras; keras.models.load_model(path, safe_mode=False)"
KERAS = [
    Attack("tensorflow", "keras/keras2.h5", "m.h5", LAMBDA % "tf_keras", OLD_LOAD, ("load-refused",)),
    Attack("tensorflow", OLD, "m.keras", OLD_MODULE, OLD_LOAD, ("load-refused",)),
    Attack("tensorflow", OLD, "m.keras", LAMBDA % "tf_keras", OLD_TRUSTING, ("load-failed",)),
    Attack("tensorflow", "keras/adam.keras", "m.keras", LAMBDA % "keras", KERAS_LOAD, ("load-failed",)),
    Attack("tensorflow", "keras/adam.h5", "m.h5", LAMBDA % "keras", KERAS_LOAD, ("load-failed",)),
]

# Paddle ---------------------------------------------------------------------------------------------

STATE = """
import paddle, pickle
paddle.disable_static()
state = paddle.load(str(path), return_numpy=True, keep_name_table=True)
state["x"] = Evil(mark)
path.write_bytes(pickle.dumps(state, %d))
"""
PADDLE_LOAD = "import paddle; paddle.disable_static(); paddle.load(str(path))"
JIT_LOAD = "import paddle; paddle.disable_static(); paddle.jit.load(str(path.parent / 'jit'))"
EVIL = PICKLE % ("Evil(mark)", 2)
NESTED = PICKLE % ('{"model": {"x": Evil(mark)}, "opt": {}, "epoch": 3}', 4)
WITH_ADAM = {**NET, "optimizer": "paddle.optimizer:Adam"}
PADDLES = [
    *(
        Attack("paddle", "", "net.pdparams", STATE % protocol, PADDLE_LOAD, ("load-refused",), NET)
        for protocol in (2, 4)
    ),
    Attack("paddle", "", "net.pdparams", EVIL, PADDLE_LOAD, ("no-state-dict",), NET),
    Attack("paddle", "", "nested.pdparams", NESTED, PADDLE_LOAD, ("load-refused",), NET),
    Attack(
        "paddle", "", "net.pdparams", STATE % 2, PADDLE_LOAD, ("load-refused",), WITH_ADAM, "../net.pdopt"
    ),
    Attack("paddle", "", "jit.pdmodel", EVIL, PADDLE_LOAD, ("load-failed",), {}, "../jit.pdiparams"),
    Attack("paddle", "", "jit.pdmodel", EVIL, JIT_LOAD, (), {}, "../jit.pdiparams.info"),
    Attack("paddle", "", "combined", EVIL, PADDLE_LOAD, ("load-failed",), {}, "__params__"),
    Attack("paddle", "", "separate", EVIL, PADDLE_LOAD, ("load-failed",), {}, "embedding_0.w_0"),
]
ATTACKS = [*TORCH, *KERAS, *PADDLES]

"""PyTorch's checkpoints run by PyTorch: what is fine passes, and each fault is one clear finding."""

from __future__ import annotations

import copy
import pickle
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.predictions import done_in_a_child, job_of, named, refusal_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.framework

NETS = f"{Path(__file__).parent / 'models' / 'nets.py'}"
SIMPLE = f"{NETS}:SimpleModel"
Write = Callable[[Path, dict[str, Any]], Path]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PyTorch will do away with one day
        yield


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Return a dict checkpoint of the guide's model after one step."""
    torch.manual_seed(1)
    model = named(SIMPLE)()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    """Return a recording of the guide's model, made by PyTorch alone."""
    values = np.linspace(-1, 1, 10, dtype=np.float32)[None]
    model = named(SIMPLE)()
    model.load_state_dict(state["model"])
    with torch.no_grad():
        output = model(torch.from_numpy(values)).numpy()
    path = tmp_path_factory.mktemp("golden") / "g.npz"
    np.savez(path, **{"input/0": values, "output/output": output})
    return path


def _zip(path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, path / "m.pth")
    return path / "m.pth"


def _legacy(path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, path / "m.pth", _use_new_zipfile_serialization=False)
    return path / "m.pth"


def _bare(path: Path, state: dict[str, Any]) -> Path:
    return _zip(path, state["model"])


def _pickled(path: Path, state: dict[str, Any]) -> Path:
    (path / "m.pkl").write_bytes(pickle.dumps(state))
    return path / "m.pkl"


def _arrays(path: Path, state: dict[str, Any]) -> Path:
    (path / "m.pkl").write_bytes(pickle.dumps({key: one.numpy() for key, one in state["model"].items()}))
    return path / "m.pkl"


def _safetensors(path: Path, state: dict[str, Any]) -> Path:
    pytest.importorskip("safetensors.torch").save_file(state["model"], path / "m.safetensors")
    return path / "m.safetensors"


def _sharded(path: Path, state: dict[str, Any]) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    names = {}
    for at, (key, one) in enumerate(state["model"].items(), 1):
        names[key] = f"model-0000{at}-of-00002.safetensors"
        save_file({key: one}, path / names[key])
    return _index(path, "model.safetensors.index.json", names)


def _sharded_pickles(path: Path, state: dict[str, Any]) -> Path:
    names = {}
    for at, (key, one) in enumerate(state["model"].items(), 1):
        names[key] = f"pytorch_model-0000{at}-of-00002.bin"
        torch.save({key: one}, path / names[key])
    return _index(path, "pytorch_model.bin.index.json", names)


def _index(path: Path, name: str, names: dict[str, str]) -> Path:
    import json

    (path / name).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def _dcp(path: Path, state: dict[str, Any]) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(copy.copy(state), checkpoint_id=path / "dcp")
    return path / "dcp"


def _lightning(path: Path, state: dict[str, Any]) -> Path:
    told = {"state_dict": {f"model.{key}": one for key, one in state["model"].items()}}
    torch.save({**told, "optimizer_states": [state["optimizer"]], "global_step": 1}, path / "m.ckpt")
    return path / "m.ckpt"


def _deepspeed(path: Path, state: dict[str, Any]) -> Path:
    (path / "global_step1").mkdir()
    told = {"module": state["model"], "optimizer": state["optimizer"], "dp_world_size": 1, "mp_world_size": 1}
    torch.save(told, path / "global_step1" / "mp_rank_00_model_states.pt")
    return path / "global_step1"


def _trainer(path: Path, state: dict[str, Any]) -> Path:
    directory = path / "checkpoint-1"
    directory.mkdir()
    torch.save(state["model"], directory / "pytorch_model.bin")
    (directory / "trainer_state.json").write_text('{"global_step": 1, "epoch": 1.0, "log_history": []}')
    model = named(SIMPLE)()
    optimizer = torch.optim.Adam([{"params": [model.fc.weight]}, {"params": [model.fc.bias]}])
    told = {**optimizer.state_dict(), "state": state["optimizer"]["state"]}
    torch.save(told, directory / "optimizer.pt")
    return directory


WITH_OPTIMIZER = (_zip, _legacy, _pickled, _dcp, _lightning, _deepspeed, _trainer)
ROWS = (*WITH_OPTIMIZER, _bare, _arrays, _safetensors, _sharded, _sharded_pickles)


@pytest.mark.parametrize("write", ROWS)
def test_a_row_passes_and_one_weight_off_by_a_percent_fails(
    write: Write, tmp_path: Path, state: dict[str, Any], golden: Path, predict: Any
) -> None:
    (tmp_path / "good").mkdir()
    told = predict(write(tmp_path / "good", state), model=SIMPLE, expect=golden)
    assert [code for code in told.codes if code != "wrapper-prefix"] == []
    assert told.predict.detail == "output 1×2 from the recorded input; exactly as recorded"
    other = copy.deepcopy(state)
    other["model"]["fc.weight"][1, 0] *= 1.01
    (tmp_path / "bad").mkdir()
    told = predict(write(tmp_path / "bad", other), model=SIMPLE, expect=golden)
    assert [code for code in told.codes if code != "wrapper-prefix"] == ["outputs-changed"]


@pytest.mark.parametrize("write", WITH_OPTIMIZER)
def test_training_can_go_on(write: Write, tmp_path: Path, state: dict[str, Any], predict: Any) -> None:
    options = {"model": SIMPLE, "optimizer": "torch.optim:Adam", "shapes": "1,10", "resume_step": True}
    told = predict(write(tmp_path, state), **options)
    assert told.load.detail.endswith("SimpleModel, 2 keys; Adam, state of 2 parameters")
    assert told.predict.detail.endswith("one step of Adam changed 2 of 2 parameters")
    assert [code for code in told.codes if code != "wrapper-prefix"] == []


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        (
            lambda s: {"fd.weight": s["fc.weight"], "fc.bias": s["fc.bias"]},
            {("missing-key", "fc.weight"), ("unexpected-key", "fd.weight")},
        ),
        (lambda s: {**s, "fc.weight": torch.ones(2, 11)}, {("shape-mismatch", "fc.weight")}),
        (lambda s: {**s, "fc.weight": torch.ones(2, 10, device="meta")}, {("no-values", "fc.weight")}),
        (lambda s: {**s, "fc.weight": [1.0]}, {("shape-mismatch", "fc.weight")}),
        (
            lambda s: {f"module.{key}": one for key, one in [*s.items(), ("x", s["fc.bias"])]},
            {("unexpected-key", "x")},
        ),
    ],
)
def test_a_state_dict_that_does_not_fit(
    change: Any, findings: set[tuple[str, str]], tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    told = predict(_zip(tmp_path, change(state["model"])), model=SIMPLE, shapes="1,10", state_key="")
    assert {(code, where) for code, _, _, where in told.load.findings} == findings
    assert told.predict.is_skipped


def test_a_weight_that_is_no_number(tmp_path: Path, state: dict[str, Any], predict: Any) -> None:
    other = copy.deepcopy(state)
    other["model"]["fc.weight"][0, 0] = float("nan")
    told = predict(_zip(tmp_path, other), model=SIMPLE, shapes="1,10")
    assert told.codes == ["output-not-finite"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"model": f"{NETS}:failing"}, "no-such-model"),
        ({"model": f"{NETS}:no_model"}, "no-such-model"),
        ({"model": f"{NETS}:Nothing"}, "no-such-model"),
        ({"model": "no_such_module:Model"}, "no-such-model"),
        ({"model": "none.py:Model"}, "no-such-model"),
        ({"model": SIMPLE, "model_args": {"wide": 3}}, "no-such-model"),
        ({"model": SIMPLE, "model_args": {"width": 3}}, "shape-mismatch"),
        ({"model": SIMPLE, "state_key": "modle"}, "no-such-key"),
        ({"model": SIMPLE, "state_key": "epoch"}, "no-state-dict"),
        ({"model": SIMPLE, "optimizer": "torch.optim:SGD"}, "optimizer-mismatch"),
        ({"model": SIMPLE, "optimizer": "torch.optim:Eve"}, "no-such-model"),
        ({"model": SIMPLE, "optimizer": "builtins:list"}, "no-such-model"),
        ({"model": SIMPLE, "shapes": "1,11"}, "input-rejected"),
        ({"model": SIMPLE, "shapes": "x=1,10 y=1,10"}, "input-unknown"),
        ({"model": SIMPLE, "shapes": "y=1,10"}, "input-unknown"),
        ({"model": SIMPLE, "shapes": "1,10:string"}, "input-unfit"),
        ({"model": SIMPLE, "expect": "none.npz"}, "recording-unreadable"),
    ],
)
def test_what_is_asked_for_is_not_there(
    options: dict[str, Any], code: str, tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    told = predict(_zip(tmp_path, state), **{"shapes": "1,10", **options})
    assert told.codes == [code]


MOVING = """
import os, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
        os.chdir("elsewhere")
    def forward(self, x):
        os.chdir("/")
        return self.fc(x)
"""


def test_a_model_that_changes_the_directory_changes_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predict: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "golden.npz").write_bytes(b"of another model")
    (tmp_path / "moving_net.py").write_text(MOVING, encoding="utf-8")
    torch.manual_seed(1)
    layer = torch.nn.Linear(4, 2)
    torch.save({f"fc.{name}": value for name, value in layer.state_dict().items()}, "m.pth")
    rows = np.ones((3, 4), np.float32)
    np.save("in.npy", rows)

    model = "moving_net.py:Net"
    assert predict(Path("m.pth"), model=model, input="in.npy", record="golden.npz").codes == []
    monkeypatch.chdir(tmp_path)
    assert predict(Path("m.pth"), model=model, expect="golden.npz").codes == []

    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "elsewhere" / "golden.npz").read_bytes() == b"of another model"
    with np.load("golden.npz") as golden:
        assert np.allclose(golden["output/output"], layer(torch.from_numpy(rows)).detach())


def test_a_missing_input(tmp_path: Path, state: dict[str, Any], predict: Any) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((1, 10), ">f4"), wave=np.ones(3, np.complex64))
    told = predict(_zip(tmp_path, state), model=f"{NETS}:Numbers", input=tmp_path / "in.npz")
    assert told.predict.detail == "no input 'on' is given (the model takes x, wave, on)"
    assert told.codes == ["input-missing"]


def test_a_recording_of_another_model(tmp_path: Path, golden: Path, predict: Any) -> None:
    path = _zip(tmp_path, torch.nn.Linear(10, 3).state_dict())
    told = predict(
        path, model="torch.nn:Linear", model_args={"in_features": 10, "out_features": 3}, expect=golden
    )
    assert told.codes == ["recording-mismatch"]


FORMS = {
    "dict": ["a", "b.c"],
    "tuple": ["0", "1.0"],
    "dataclass": ["logits", "extra.e", "count"],
    "named": ["first", "second"],
    "ordered": ["z"],
    "number": ["output"],
    "sparse": ["output"],
    "bfloat16": ["output"],
    "complex": ["output"],
}


@pytest.mark.parametrize(("form", "names"), FORMS.items())
def test_outputs_of_every_form(
    form: str, names: list[str], tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    path, options = _zip(tmp_path, state), {"model": f"{NETS}:Many", "model_args": {"form": form}}
    record = tmp_path / "g.npz"
    told = predict(path, **options, shapes="1,10", record=record)
    assert told.codes == (["recording-insensitive"] if form == "number" else [])
    with np.load(record) as found:
        assert [name for name in found.files if name.startswith("output/")] == [f"output/{n}" for n in names]
    assert predict(path, **options, expect=record).codes == []


def test_no_tensor_comes_out(tmp_path: Path, state: dict[str, Any], predict: Any) -> None:
    options = {"model": f"{NETS}:Many", "model_args": {"form": "nothing"}, "shapes": "1,10"}
    assert predict(_zip(tmp_path, state), **options).codes == ["no-output"]


@pytest.mark.parametrize(
    ("model", "shapes", "codes"),
    [
        ("InPlace", "1,10", []),
        ("Forces", "1,10", ["recording-insensitive"]),  # the gradient of a linear model is constant
        ("Numbers", "1,10 wave=3:complex64 on=4:bool", []),
        ("bare", "1,10", []),
        ("lazy", "1,10", []),
        ("half", "1,10:bfloat16", ["dtype-differs"]),
    ],
)
def test_models_of_every_kind_predict_the_same_again(
    model: str, shapes: str, codes: list[str], tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    path, record = _zip(tmp_path, state), tmp_path / "g.npz"
    assert predict(path, model=f"{NETS}:{model}", shapes=shapes, record=record).codes == codes
    told = predict(path, model=f"{NETS}:{model}", expect=record)
    assert told.codes == [code for code in codes if code != "recording-insensitive"]


def test_a_model_that_draws_numbers_is_not_recorded(
    tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    path, record = _zip(tmp_path, state), tmp_path / "g.npz"
    options = {"model": f"{NETS}:Random", "shapes": "64,10"}
    assert predict(path, **options).codes == ["runs-differ"]
    assert predict(path, **options, record=record).codes == ["runs-differ", "recording-not-written"]
    assert not record.exists()


def test_which_of_several_state_dicts_was_taken_is_told(
    tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    path = _zip(tmp_path, {"model_state_dict": state["model"], "ema_state_dict": state["model"]})
    for options, taken in (
        ({}, "model_state_dict"),
        ({"state_key": "ema_state_dict"}, "ema_state_dict"),
    ):
        told = predict(path, model=SIMPLE, shapes="1,10", **options)
        assert told.load.detail.endswith(f"SimpleModel, 2 keys of '{taken}'")
    told = predict(_zip(tmp_path, state), model=SIMPLE, shapes="1,10")
    assert told.load.detail.endswith("SimpleModel, 2 keys")


def test_tied_weights_may_be_stored_once(tmp_path: Path, predict: Any) -> None:
    model = named(f"{NETS}:Tied")()
    path = _safetensors(tmp_path, {"model": {"words.weight": model.words.weight.detach()}})
    options = {"shapes": "ids=1,5:int64:0..7 mask=1,5:bool", "resume_step": True}
    told = predict(path, model=f"{NETS}:Tied", **options)
    assert told.codes == ["tied-key"]
    assert told.predict.detail.endswith("one step of SGD changed 1 of 1 parameter")


def test_a_batch_that_cannot_be_trained_on(tmp_path: Path, predict: Any) -> None:
    model = named(f"{NETS}:Normed")()
    path = _zip(tmp_path, model.state_dict())
    told = predict(path, model=f"{NETS}:Normed", shapes="1,10", resume_step=True)
    assert told.codes == ["cannot-train"]
    assert predict(path, model=f"{NETS}:Normed", shapes="2,10", resume_step=True).codes == []


def _optimizer(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**state, "optimizer": {**copy.deepcopy(state["optimizer"]), **changes}}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda o: {**o, "state": {}}, "optimizer-without-state"),
        (lambda o: {**o, "state": {0: o["state"][0]}}, "optimizer-state-missing"),
        (lambda o: {**o, "state": {**o["state"], 7: o["state"][0]}}, "optimizer-mismatch"),
        (lambda o: {**o, "state": {**o["state"], 1: o["state"][0]}}, "optimizer-mismatch"),
        (lambda o: {**o, "state": {**o["state"], 1: {"step": torch.tensor(1.0)}}}, "optimizer-mismatch"),
        (lambda o: {**o, "param_groups": o["param_groups"] * 2}, "optimizer-mismatch"),
        (lambda o: {**o, "param_groups": [{**o["param_groups"][0], "params": [0]}]}, "optimizer-mismatch"),
        (lambda o: [o, o], "optimizer-mismatch"),
    ],
)
def test_an_optimizer_that_does_not_fit(
    change: Any, code: str, tmp_path: Path, state: dict[str, Any], predict: Any
) -> None:
    path = _zip(tmp_path, {**state, "optimizer": change(copy.deepcopy(state["optimizer"]))})
    told = predict(path, model=SIMPLE, optimizer="torch.optim:Adam", shapes="1,10")
    assert set(told.codes) == {code}


def test_several_state_dicts(tmp_path: Path, state: dict[str, Any], golden: Path, predict: Any) -> None:
    model = state["model"]
    averaged = _zip(tmp_path, {"model": model, "ema": {key: one * 2 for key, one in model.items()}})
    assert predict(averaged, model=SIMPLE, expect=golden).codes == []
    assert predict(averaged, model=SIMPLE, expect=golden, state_key="ema").codes == ["outputs-changed"]
    two = _zip(tmp_path, {"generator": model, "discriminator": model})
    assert "several state dicts: generator, discriminator" in refusal_of(two, model=SIMPLE, expect=golden)
    assert predict(two, model=SIMPLE, expect=golden, state_key="generator").codes == []


def test_only_plain_data_is_loaded_unless_trusted(
    tmp_path: Path, state: dict[str, Any], golden: Path, predict: Any
) -> None:
    path = _zip(tmp_path, {**state, "args": Namespace(lr=0.1)})
    told = predict(path, model=SIMPLE, expect=golden)
    assert (
        told.load.detail
        == f"{path.name}: torch.load refuses argparse.Namespace, whose code would run: --trust allows it"
    )
    assert told.codes == ["load-refused"]
    assert predict(path, model=SIMPLE, expect=golden, trust=True).codes == []


def test_a_distributed_checkpoint_of_more_than_plain_data(
    tmp_path: Path, state: dict[str, Any], golden: Path, predict: Any
) -> None:
    pair = named(f"{NETS}:Pair")(1, 2)
    path = _dcp(tmp_path, {**state, "args": pair})
    for trust in (False, True):
        assert predict(path, model=SIMPLE, expect=golden, trust=trust).codes == []
    told = predict(
        _dcp(tmp_path / "in", {"model": {**state["model"], "extra": pair}}), model=SIMPLE, expect=golden
    )
    assert told.codes == ["load-refused"]
    assert told.load.detail.startswith("model.extra: an object of ")
    assert told.load.detail.endswith("Pair, which is not known to be plain data: --trust allows it")


def test_a_compressed_file_is_not_mapped(files: Path, tmp_path: Path, predict: Any) -> None:
    options, record = {"model": SIMPLE}, tmp_path / "g.npz"
    assert predict(files / "pytorch" / "guide.pth", shapes="1,10", record=record, **options).codes == []
    assert predict(files / "pytorch" / "deflated.pth", expect=record, **options).codes == []


def test_a_whole_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Path, predict: Any) -> None:
    import __main__

    forces = named(f"{NETS}:Forces")
    with monkeypatch.context() as patch:
        patch.setattr(__main__, "Forces", forces, raising=False)
        patch.setattr(forces, "__module__", "__main__")
        torch.save({"net": forces()}, tmp_path / "m.pth")
    assert "--trust" in refusal_of(tmp_path / "m.pth", shapes="1,10")
    assert predict(tmp_path / "m.pth", shapes="1,10", trust=True).codes == ["load-failed"]
    lent = {"model": f"{NETS}:Forces", "trust": True}
    assert predict(tmp_path / "m.pth", shapes="1,10", resume_step=False, **lent).codes == []
    assert predict(tmp_path / "m.pth", expect=golden, **lent).codes == ["recording-mismatch"]


def test_a_whole_module_in_a_plain_pickle(tmp_path: Path, predict: Any) -> None:
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(torch.nn.Linear(10, 2)))
    assert "--trust" in refusal_of(tmp_path / "m.pkl", shapes="1,10")
    assert predict(tmp_path / "m.pkl", shapes="1,10", trust=True).codes == []


def test_a_file_named_like_a_module(tmp_path: Path, state: dict[str, Any], predict: Any) -> None:
    import json

    (tmp_path / "json.py").write_text(Path(NETS).read_text())
    told = predict(_zip(tmp_path, state), model=tmp_path / "json.py:SimpleModel", shapes="1,10")
    assert told.codes == []
    assert hasattr(json, "dumps") and __import__("json") is json


def test_zero_3(files: Path, predict: Any) -> None:
    step = files / "deepspeed" / "zero-3" / "global_step2"
    assert "zero_to_fp32" in refusal_of(step, model=SIMPLE, shapes="1,10")


# TorchScript and exported programs ------------------------------------------------------------------


def test_torchscript(tmp_path: Path, state: dict[str, Any], golden: Path, predict: Any) -> None:
    model = named(SIMPLE)()
    model.load_state_dict(state["model"])
    path = tmp_path / "m.pt"
    torch.jit.trace(model, torch.ones(1, 10)).save(path)
    assert predict(path, expect=golden).codes == []
    assert predict(path, shapes="x=1,10", resume_step=True).codes == []
    assert predict(path, shapes="y=1,10").codes == ["input-unknown"]
    told = predict(path, shapes="1,11").predict
    why = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x11 and 10x2)"
    assert told.detail == f"the model rejects the input 1×11 float32: {why}"
    with torch.no_grad():
        model.fc.weight[0, 0] *= 1.01
    torch.jit.trace(model, torch.ones(1, 10)).save(path)
    assert predict(path, expect=golden).codes == ["outputs-changed"]


def test_a_torchscript_that_keeps_state_is_recorded_as_it_is_loaded(tmp_path: Path, predict: Any) -> None:
    torch.jit.script(named(f"{NETS}:Averaging")()).save(tmp_path / "m.pt")
    record = tmp_path / "g.npz"
    told = predict(tmp_path / "m.pt", shapes="1,10", record=record)
    assert told.codes == ["keeps-state"]
    assert told.predict.detail.endswith("; recorded in g.npz")
    told = predict(tmp_path / "m.pt", expect=record)
    assert told.codes == ["keeps-state"]
    assert told.predict.detail.endswith("exactly as recorded")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("name", ["OnDevice", "ToDevice"])
def test_a_torchscript_that_asks_for_a_device(name: str, tmp_path: Path, predict: Any) -> None:
    torch.jit.script(named(f"{NETS}:{name}")()).save(tmp_path / "m.pt")
    told = predict(tmp_path / "m.pt", shapes="1,10")
    assert told.codes == ["device-missing"]
    said = "the program needs the device cuda:0, which PyTorch doesn't have here"
    assert told.predict.detail == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_an_exported_program_that_asks_for_a_device(tmp_path: Path, predict: Any) -> None:
    program = torch.export.export(named(f"{NETS}:OnDevice")("cpu"), (torch.ones(1, 10),))
    (node,) = [one for one in program.graph.nodes if "device" in one.kwargs]
    node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    torch.export.save(program, tmp_path / "m.pt2")
    assert predict(tmp_path / "m.pt2").codes == ["device-missing"]


def test_what_a_torchscript_raises_is_told_without_the_code_around_it(tmp_path: Path, predict: Any) -> None:
    torch.jit.script(named(f"{NETS}:Raises")()).save(tmp_path / "m.pt")
    told = predict(tmp_path / "m.pt", shapes="1,10")
    assert told.predict.detail == "builtins.ValueError: too small"


def test_an_exported_program_of_unknown_sizes(tmp_path: Path, predict: Any) -> None:
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length", min=2, max=12)
    given = (torch.ones(2, 6, 10),)
    program = torch.export.export(named(f"{NETS}:Mean")(), given, dynamic_shapes=[{0: rows, 1: length}])
    program._example_inputs = None
    torch.export.save(program, tmp_path / "m.pt2")
    assert predict(tmp_path / "m.pt2").predict.detail == "output 3×10 from generated input (3×3×10), seed 0"


def test_an_exported_program(files: Path, tmp_path: Path, predict: Any) -> None:
    path, record = files / "torch-export" / "program.pt2", tmp_path / "g.npz"
    told = predict(path, record=record)
    assert told.codes == []
    assert "the checkpoint's example input" in told.predict.detail
    assert predict(path, expect=record).codes == []
    assert predict(path, resume_step=True).codes == ["cannot-train"]


def test_an_exported_program_with_nested_inputs(tmp_path: Path, predict: Any) -> None:
    given = ({"x": torch.ones(1, 3)}, [torch.ones(1, 3), torch.full((2,), 0.5)])
    model = named(f"{NETS}:Nested")()
    program = torch.export.export(model, given, {"k": torch.ones(2, dtype=torch.int64), "n": 2})
    path, bare, record = tmp_path / "m.pt2", tmp_path / "bare.pt2", tmp_path / "g.npz"
    torch.export.save(program, path)
    assert predict(path, record=record).codes == []
    program._example_inputs = None
    torch.export.save(program, bare)
    assert predict(bare, expect=record).codes == []
    told = predict(bare)
    assert told.predict.detail == "y 1×2, z 2 from generated input, seed 0"
    told = predict(bare, shapes="0.x=1,3 1.0=1,3 k=2:int64")
    assert told.codes == ["input-missing"] and "'1.1'" in told.predict.detail


# Hugging Face ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["safetensors/trainer/checkpoint-4", "safetensors/sharded", "pytorch/trainer-bin/checkpoint-1"]
)
def test_a_directory_of_transformers(name: str, files: Path, tmp_path: Path, predict: Any) -> None:
    pytest.importorskip("transformers")
    record = tmp_path / "g.npz"
    told = predict(files / name, record=record)
    assert told.codes == []
    assert told.predict.detail.startswith("logits 3×5×16 from the checkpoint's example input")
    assert predict(files / name, expect=record).codes == []


def test_a_changed_directory_of_transformers(files: Path, tmp_path: Path, predict: Any) -> None:
    pytest.importorskip("transformers")
    import shutil

    from safetensors.torch import load_file, save_file

    path, record = tmp_path / "checkpoint-4", tmp_path / "g.npz"
    shutil.copytree(files / "safetensors" / "trainer" / "checkpoint-4", path)
    options = {"optimizer": "torch.optim:AdamW", "resume_step": True}
    assert predict(path, record=record, **options).codes == []
    weights = load_file(path / "model.safetensors")
    key, other = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight"
    changes: list[tuple[dict[str, Any], list[str]]] = [
        ({**weights, key: weights[key] * 1.01}, ["outputs-changed"]),
        ({one: value for one, value in weights.items() if one != key}, ["missing-key"]),
        ({**weights, other: torch.ones(3, 3)}, ["shape-mismatch"]),
        ({**weights, "more": torch.ones(3)}, ["unexpected-key"]),
    ]
    for changed, codes in changes:
        save_file(changed, path / "model.safetensors", {"format": "pt"})
        assert predict(path, expect=record).codes == codes


_STUB = """
import os
__version__ = "0.18.3"
def get_kernel(*_, **__):
    open(os.environ["FETCHED"], "w").close()
    raise RuntimeError
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return get_kernel
"""


def test_a_configuration_that_names_code_to_fetch(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import json
    import shutil

    path, stub, fetched = tmp_path / "m", tmp_path / "stub", tmp_path / "fetched"
    shutil.copytree(files / "safetensors" / "sharded", path)
    (stub / "kernels").mkdir(parents=True)
    (stub / "kernels" / "__init__.py").write_text(_STUB, encoding="utf-8")
    (stub / "kernels-0.18.3.dist-info").mkdir()
    (stub / "kernels-0.18.3.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.3\n")
    config = json.loads((path / "config.json").read_text())
    names = (
        "_attn_implementation",
        "attn_implementation",
        "_experts_implementation",
        "experts_implementation",
    )
    config |= dict.fromkeys(names, "some-org/attention")
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(str(stub))
    for name, value in (("USE_HUB_KERNELS", "YES"), ("HF_HUB_OFFLINE", "0"), ("FETCHED", str(fetched))):
        monkeypatch.setenv(name, value)
    job = job_of(path)
    assert job.framework == "transformers"
    answer = done_in_a_child(job)
    assert not fetched.exists()
    assert not (answer.load.findings or answer.predict.findings)

"""What inspect says of a model: its class, layers and signatures, as the framework that wrote it has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpttool import inspect


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_layers_and_what_they_call_their_weights(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    inner = keras.Sequential([keras.layers.Input((4, 3)), keras.layers.Dense(2)], name="inner")
    layers = [
        keras.layers.Input((4, 3)),
        inner,
        keras.layers.BatchNormalization(scale=False),
        keras.layers.LSTM(2),
    ]
    model = keras.Sequential(layers, name="outer")
    for name in ("m.keras", "m.h5"):
        model.save(tmp_path / name)
        architecture = inspect(str(tmp_path / name)).architecture
        classes = {layer.name: type(layer).__name__ for layer in [*model.layers]}
        classes |= {f"inner.{layer.name}": type(layer).__name__ for layer in inner.layers}
        assert architecture.model == "Sequential"
        assert {name: kind for name, kind in architecture.layers.items() if kind != "InputLayer"} == classes
    numbered = inspect(str(tmp_path / "m.keras"))
    shapes = {tensor.name: tensor.shape for tensor in numbered.tensors}
    told = sorted((word, shapes[name]) for name, word in numbered.architecture.weights.items())
    assert told == sorted((variable.name, tuple(variable.shape)) for variable in model.weights)


def test_signatures_of_a_saved_model(tmp_path: Path, run) -> None:
    tf = pytest.importorskip("tensorflow")
    module = tf.Module()
    module.w = tf.Variable(tf.ones((3, 2)))

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float32, name="x")])
    def score(x):
        return {"logits": x @ module.w, "rank": tf.rank(x)}

    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"score": score})
    (signature,) = inspect(str(tmp_path / "m")).architecture.signatures
    assert signature.name == "score"
    assert signature.inputs == {"x": "float32 ?×3"}
    assert signature.outputs == {"logits": "float32 ?×2", "rank": "int32 scalar"}
    line = "  signature      score: x float32 ?×3 → logits float32 ?×2, rank int32 scalar\n"
    assert line in run("inspect", tmp_path / "m").out
    document = json.loads(run("inspect", "--json", tmp_path / "m").out)["checkpoints"][0]["model"]
    assert document["signatures"] == {"score": {"inputs": signature.inputs, "outputs": signature.outputs}}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_script", [True, False])
def test_modules_of_pytorch(tmp_path: Path, is_script: bool) -> None:
    torch = pytest.importorskip("torch")
    inner = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU())
    model = torch.nn.Sequential(inner, torch.nn.Flatten(), torch.nn.Linear(8, 2))
    if is_script:
        torch.jit.save(torch.jit.script(model), tmp_path / "m.pt")
    else:
        torch.save(model, tmp_path / "m.pt")
    architecture = inspect(str(tmp_path / "m.pt")).architecture
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    assert architecture.model == classes.pop("")
    assert architecture.layers == classes


def test_a_model_of_hugging_face(files: Path, tmp_path: Path, run) -> None:
    checkpoint = files / "safetensors" / "trainer" / "checkpoint-2"
    architecture = inspect(str(checkpoint)).architecture
    assert (architecture.model, architecture.family) == ("GPT2LMHeadModel", "gpt2")
    assert "  model          GPT2LMHeadModel (gpt2)\n" in run("inspect", checkpoint / "model.safetensors").out
    beside = tmp_path / "model.safetensors"
    beside.write_bytes((checkpoint / "model.safetensors").read_bytes())
    for config in (b"", b"{", b"[]", b'{"model_type": 3}', b'{"model_type": "x", "architectures": [{}]}'):
        (tmp_path / "config.json").write_bytes(config)
        assert inspect(str(beside)).architecture.model == ""

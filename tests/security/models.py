"""Models whose code is in the file: Keras configurations, TorchScript, graphs of TensorFlow and Paddle."""

from __future__ import annotations

import base64
import io
import json
import marshal
import re
from collections.abc import Callable
from typing import Any

from fixtures import zip_raw
from fixtures.zip_raw import Member
from tests.security.archives import FIXTURES, Loaded, Variants
from tests.security.calls import Place

MODELS: dict[str, Callable[[Place], Variants]] = {}


def model(generator: Callable[[Place], Variants]) -> Callable[[Place], Variants]:
    """Add a class of attack."""
    MODELS[generator.__name__] = generator
    return generator


def _lambda_code(place: Place, arguments: int = 1) -> bytes:
    """Return marshalled code of a function that creates the file and returns its last argument."""
    scope: dict[str, Any] = {}
    names = ", ".join(["x", "y"][:arguments])
    exec(f"def f({names}):\n    open({place.marker!r}, 'w').close()\n    return {names[-1]}\n", scope)
    return marshal.dumps(scope["f"].__code__)


def _sequential(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a Keras 3 configuration of one layer behind an input of four."""
    first = {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": {"batch_shape": [None, 4], "dtype": "float32", "name": "in"},
        "registered_name": None,
    }
    return {
        "module": "keras",
        "class_name": "Sequential",
        "config": {"name": "s", "trainable": True, "layers": [first, layer], "build_input_shape": [None, 4]},
        "registered_name": None,
        "build_config": {"input_shape": [None, 4]},
    }


def _layer(class_name: str, config: dict[str, Any], module: str = "keras.layers") -> dict[str, Any]:
    whole = {"name": "l", "trainable": True, "dtype": "float32", **config}
    return {"module": module, "class_name": class_name, "config": whole, "registered_name": None}


def _lambda3(place: Place) -> dict[str, Any]:
    code = base64.b64encode(_lambda_code(place)).decode()
    function = {"class_name": "__lambda__", "config": {"code": code, "defaults": None, "closure": None}}
    return _layer("Lambda", {"function": function, "output_shape": [4], "arguments": {}})


def _empty_hdf5() -> bytes:
    """Return an HDF5 file without variables, in a group of each layer."""
    import h5py

    out = io.BytesIO()
    with h5py.File(out, "w") as file:
        for name in ("layers/lambda/vars", "vars"):
            file.create_group(name)
    return out.getvalue()


def _keras3(
    place: Place, config: dict[str, Any], *, extra: list[Member] | None = None
) -> Callable[[], Loaded]:
    def write() -> Loaded:
        metadata = {"keras_version": "3.0.0", "date_saved": "2026-01-01@00:00:00"}
        members = [
            Member("metadata.json", json.dumps(metadata).encode()),
            Member("config.json", json.dumps(config).encode()),
            Member("model.weights.h5", _empty_hdf5()),
        ]
        place.beside("a.keras", zip_raw.build([*members, *(extra or [])]))
        return "keras", "a.keras"

    return write


def _hdf5(place: Place, config: dict[str, Any], loader: str, version: str) -> Callable[[], Loaded]:
    def write() -> Loaded:
        import h5py

        out = io.BytesIO()
        with h5py.File(out, "w") as file:
            file.attrs["model_config"] = json.dumps(config)
            file.attrs["keras_version"] = version
            file.attrs["backend"] = "tensorflow"
            weights = file.create_group("model_weights")
            weights.attrs["layer_names"] = [b"l"]
            weights.attrs["keras_version"] = version
            weights.attrs["backend"] = "tensorflow"
            weights.create_group("l").attrs.create("weight_names", [], dtype="S1")
        place.beside("a.h5", out.getvalue())
        return loader, "a.h5"

    return write


@model
def keras_code(place: Place) -> Variants:
    """Lambda layers and functions by name, in files of Keras 3 and 2."""
    config = _sequential(_lambda3(place))
    yield "lambda.keras", _keras3(place, config)
    nested = _sequential(_layer("TimeDistributed", {"layer": _lambda3(place)}))
    nested["config"]["layers"][0]["config"]["batch_shape"] = [None, 4, 1]
    yield "lambda.in_wrapper", _keras3(place, nested)
    inner = _sequential(_sequential(_lambda3(place)))
    yield "lambda.nested_model", _keras3(place, inner)
    honest = _sequential(_layer("Activation", {"activation": "relu"}))
    duplicate = [Member("config.json", json.dumps(config).encode())]
    yield "duplicate_config", _keras3(place, honest, extra=duplicate)
    old = {
        "class_name": "Sequential",
        "config": {
            "name": "s",
            "layers": [
                {
                    "class_name": "InputLayer",
                    "config": {"batch_input_shape": [None, 4], "dtype": "float32", "name": "in"},
                },
                {
                    "class_name": "Lambda",
                    "config": {
                        "name": "l", "trainable": True, "dtype": "float32", "function_type": "lambda",
                        "function": [base64.b64encode(_lambda_code(place)).decode(), None, None],
                        "module": "x", "output_shape_type": "raw", "output_shape": None, "arguments": {},
                    },
                },
            ],
        },
    }  # fmt: skip
    yield "lambda.tf_keras", _hdf5(place, old, "tf_keras", "2.15.0")
    yield "lambda.h5", _hdf5(place, _sequential(_lambda3(place)), "keras", "3.0.0")


@model
def torchscript_code(place: Place) -> Variants:
    """Code of TorchScript that saves, however it is spaced."""
    spellings = {
        "plain": "torch.save({0}, {1})",
        "spaces": "torch . save({0}, {1})",
        "lines": "torch.save({0},\n      {1})",
        "ops": "ops.aten.save({0}, {1})",
        "ops_spaces": "ops . aten . save ( {0}, {1})",
        "assigned": "_9 = torch . save({0}, {1})",
        "comment": "torch.save({0}, {1}) # torch.add",
    }
    for name, template in spellings.items():
        yield name, _scripted(place, template.format("x", json.dumps(place.marker, ensure_ascii=False)))


def _scripted(place: Place, call: str) -> Callable[[], Loaded]:
    """Return what puts a call at the head of the forward method of an honest model."""

    def write() -> Loaded:
        members = zip_raw.members_of(FIXTURES / "torchscript" / "scripted.pt")
        place.beside("a.pt", zip_raw.build([_respelled(one, call) for one in members]))
        return "torchscript", "a.pt"

    return write


def _respelled(member: Member, call: str) -> Member:
    """Return a record of code with a call in its first method of the name forward."""
    if not member.name.endswith("fixture_models.py"):
        return member
    head = re.compile(r"def forward\(self[^)]*\) -> Tensor:\n")
    code = head.sub(lambda found: f"{found[0]}    {call}\n", member.data.decode(), count=1)
    return Member(member.name, code.encode())

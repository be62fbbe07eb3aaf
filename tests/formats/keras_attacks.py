"""Files that make Keras run, call or read something, and whether they do.

``write_all`` writes them, without any framework. ``python keras_attacks.py API DIRECTORY`` loads those that
are for an API, ``keras`` or ``tf_keras``, as users do, and prints as JSON which of them did what they are
for: they make a file beside them, read one, or hand on a function that nobody may call.
"""

from __future__ import annotations

import base64
import json
import marshal
import os
import pkgutil
import shutil
import sys
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Config = dict[str, Any]

SECRET = "secret.txt"
_CONSTANT = "_CONSTANT_VALUE"


class Attack(NamedTuple):
    """One file: for which API, with what in it, and what shows that it did something.

    Attributes:
        config: Of the model.
        shows: A file that is made, or None where the loaded model says it.
        is_safe: Whether the loader is called with its default, or with ``safe_mode=False``.
        name: Of the file; what is behind its dot says how it is written.
    """

    api: str
    name: str
    config: Config
    shows: str | None = None
    is_safe: bool = True


# Configurations -------------------------------------------------------------------------------------


def node(module: str | None, name: str, config: Any = None, **more: Any) -> Config:
    own = {"module": module, "class_name": name, "config": {} if config is None else config}
    return own | {"registered_name": None} | more


def function(module: str | None, name: str, **more: Any) -> Config:
    return node(module, "function", name, **more)


def sequential(*layers: Config) -> Config:
    first = node(
        "keras.layers", "InputLayer", {"batch_shape": [None, 3], "name": "given", "dtype": "float32"}
    )
    return node("keras", "Sequential", {"name": "model", "layers": [first, *layers]})


def sequential_2(*layers: Config) -> Config:
    """Return a model as Keras 2 reads it."""
    model = sequential(*layers)
    first = model["config"]["layers"][0]["config"]
    first["batch_input_shape"] = first.pop("batch_shape")
    return model


def called(layer: Config, argument: object, **kwargs: object) -> Config:
    """Return a model of Keras 2 that calls a layer, or what stands for one, with plain values."""
    first = node("keras.layers", "InputLayer", {"batch_input_shape": [None, 3], "name": "given"})
    nodes = [[_CONSTANT, -1, argument, kwargs]]
    layers = [
        first | {"name": "given", "inbound_nodes": []},
        layer | {"name": "called", "inbound_nodes": nodes},
    ]
    ends = [["given", 0, 0]]
    ends_2 = {"input_layers": ends, "output_layers": ends}
    return node("keras.src.engine.functional", "Functional", {"name": "m", "layers": layers} | ends_2)


def without_modules(tree: Any) -> Any:
    """Return a configuration as ``.h5`` has it."""
    if isinstance(tree, list):
        return [without_modules(one) for one in tree]
    if isinstance(tree, dict):
        return {
            key: without_modules(one) for key, one in tree.items() if key not in ("module", "registered_name")
        }
    return tree


def marking(mark: Path) -> str:
    """Return a Python expression that makes a file."""
    return f"open({str(mark)!r}, 'w').close()"


def code(mark: Path) -> str:
    source = compile(f"lambda x: ({marking(mark)}, x)[1]", "m", "eval").co_consts[0]
    return base64.b64encode(marshal.dumps(source)).decode()


def attacks(place: Path) -> Iterator[Attack]:
    """Yield them all."""
    yield from _of_keras_2(place)
    yield from _of_keras_3(place)


def _of_keras_2(place: Path) -> Iterator[Attack]:
    def mark(name: str) -> Path:
        return place / f"{name}.mark"

    def tf(name: str, config: Config, **more: Any) -> Attack:
        return Attack("tf_keras", name, config, **more)

    def marked(name: str, layer: Config, argument: Any, **kwargs: Any) -> Attack:
        return tf(f"{name}.keras", called(layer, argument, **kwargs), shows=mark(name).name)

    inner = "keras.src.layers.core.tf_op_layer"
    op = node("keras.layers", "TFOpLambda", {"name": "o", "function": "io.write_file"})
    yield marked("op", op, str(mark("op")), contents="x")
    yield marked("slicing", op | {"class_name": "SlicingOpLambda"}, str(mark("slicing")), contents="x")
    writing = {
        "filename": str(mark("raw_op")),
        "contents": "x",
    }  # it is called, and takes no text before them
    raw = op | {"config": {"name": "o", "function": "raw_ops.WriteFile"}}
    yield tf("raw_op.keras", called(raw, "", **writing))
    method = {"name": "o", "cls_symbol": "io.TFRecordWriter", "method_name": "__call__"}
    yield marked("method", node(inner, "ClassMethod", method), "", kwargs={"path": str(mark("method"))})
    for name, loss in _losses(inner, op["config"]).items():
        yield tf(f"{name}.keras", sequential_2() | {"compile_config": {"optimizer": "adam", "loss": loss}})
    secret = {"name": "o", "vocabulary": str(place / SECRET)}
    yield tf("vocabulary.keras", sequential_2(node("keras.layers", "StringLookup", secret)))
    yield tf("h5_op.h5", without_modules(called(op, str(mark("h5_op")), contents="x")), shows="h5_op.mark")
    lambda_ = {"name": "l", "function": [code(mark("h5_lambda")), None, None], "function_type": "lambda"}
    lambda_ |= {"output_shape": None, "output_shape_type": "raw", "output_shape_module": None, "module": "m"}
    yield tf(
        "h5_lambda.h5", without_modules(sequential_2(node(None, "Lambda", lambda_))), shows="h5_lambda.mark"
    )
    yield tf("savedmodel", {"class_name": "StringLookup", "config": secret})


def _losses(module: str, config: Config) -> dict[str, Config]:
    """Return what a loss may be for Keras 2, which hands on whatever it finds by any name."""
    lookup = "keras.src.layers.preprocessing.index_lookup"
    typespec = {
        "class_name": "__typespec__",
        "spec_name": "nothing",
        "module": "this",
        "registered_name": None,
    }
    return {
        "eval": function("builtins", "eval"),
        "registered_eval": function("builtins", "mine", registered_name="eval"),
        "system": function("os", "system"),
        "registered_system": function("os", "mine", registered_name="system"),
        "class_copyfile": node("shutil", "copyfile"),
        "registered_copyfile": node("shutil", "Mine", registered_name="copyfile"),
        "slice_copyfile": node("shutil", "__slice__", registered_name="copyfile"),
        "dotted_save": function(lookup, "np.save"),
        "dotted_class": node(lookup, "np.save"),
        "get_file": function("keras.utils", "get_file"),
        "load_model": function("keras.models", "load_model"),
        "model_from_json": function("keras.models", "model_from_json"),
        "deserialize": function("keras.layers", "deserialize"),
        "deserialize_by_name": function("keras.src.losses", "deserialize_keras_object"),
        "func_load": function("keras.src.utils.generic_utils", "func_load"),
        "class_func_load": node("keras.src.utils.generic_utils", "func_load"),
        "registered_func_load": node("keras.src.utils.generic_utils", "Dense", registered_name="func_load"),
        "registered_op": node(module, "Dense", config, registered_name="TFOpLambda"),
        "typespec": typespec | {"config": []},
    }


def _of_keras_3(place: Path) -> Iterator[Attack]:
    def kept(name: str, config: Config, **more: Any) -> Attack:
        return Attack("keras", name, config, **more)

    stored = {"class_name": "__lambda__", "config": {"code": "", "defaults": None, "closure": None}}
    for name in ("lambda3.keras", "twice.keras", "directory"):
        mark = place / f"{name}.mark"
        stored = stored | {"config": stored["config"] | {"code": code(mark)}}
        layer = node("keras.layers", "Lambda", {"name": "l", "function": stored})
        yield kept(name, sequential(layer), shows=mark.name, is_safe=False)
    setter = function("keras.config", "set_max_epochs")
    yield kept("setter.keras", sequential(node("keras.layers", "Lambda", {"name": "l", "function": setter})))
    yield kept("source_inputs.keras", sequential(node("keras.utils", "get_source_inputs")))
    lookup = node("keras.layers", "StringLookup", {"name": "l", "vocabulary": str(place / SECRET)})
    yield kept("vocabulary3.keras", sequential(lookup), is_safe=False)
    dense = node("keras.layers", "Dense", {"units": 1, "name": "inner"})
    called_class = {"class_name": "deserialize", "config": {"config": dense}}
    model = without_modules(sequential())
    model["config"]["layers"].append(called_class)
    yield kept("deserialize.h5", model)


# Writing --------------------------------------------------------------------------------------------


def write(attack: Attack, place: Path, saved: Path) -> None:
    path = place / attack.name
    if attack.name == "savedmodel":
        write_savedmodel(path, attack.config, saved)
    elif attack.name == "directory":
        path.mkdir()
        (path / "config.json").write_text(json.dumps(attack.config))
        (path / "metadata.json").write_text('{"keras_version": "3.0.0", "date_saved": ""}')
        write_weights(path / "model.weights.h5")
    elif path.suffix == ".h5":
        import h5py

        with h5py.File(path, "w") as file:
            file.attrs["model_config"] = json.dumps(attack.config)
            group = file.create_group("model_weights")
            group.attrs["layer_names"] = []
    else:
        write_zip(path, attack)


def write_weights(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for group in (
            "",
            "optimizer/",
            *(f"layers/{one}/" for one in ("input_layer", "string_lookup", "lambda")),
        ):
            file.create_group(f"{group}vars")
        file["layers/dense/vars/0"] = [1.0]


def write_zip(path: Path, attack: Attack) -> None:
    weights = path.with_suffix(".weights")
    write_weights(weights)
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("metadata.json", '{"keras_version": "3.0.0", "date_saved": ""}')
        if path.stem == "twice":
            archive.writestr("config.json", json.dumps(sequential()))
        archive.writestr("config.json", json.dumps(attack.config))
        archive.write(weights, "model.weights.h5")
    weights.unlink()


def write_savedmodel(path: Path, layer: Config, saved: Path) -> None:
    """Write a SavedModel in whose description one layer is another."""
    shutil.copytree(saved, path)
    data = (path / "keras_metadata.pb").read_bytes()
    parts = {
        "node_id": b"\x10\x01",
        "name": b"\x1a\x19root.layer_with_weights-0",
        "kind": b'"\x0f_tf_keras_layer',
    }
    told = json.dumps({"name": "out", "trainable": True, "dtype": "string"} | layer).encode()
    assert b"root.layer_with_weights-0" in data
    kept = [one for one in messages(data) if b"layer_with_weights-0" not in one[:64]]
    made = b"".join(parts.values()) + b"*" + varint(len(told)) + told + b"2\x04\x08\x02\x10\x01"
    content = b"".join(b"\n" + varint(len(one)) + one for one in [*kept, made])
    (path / "keras_metadata.pb").write_bytes(content)


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low]) if not high else bytes([low | 0x80]) + varint(high)


def messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        at, size, shift = at + 1, 0, 0
        while True:
            size |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                break
        yield data[at : at + size]
        at += size


# Loading --------------------------------------------------------------------------------------------


def shown(attack: Attack, place: Path, load: Callable[[], Any], api: Any) -> bool:
    """Load a file, and tell whether it did what it is made to do."""
    seen = _LOOKS.get(attack.name)
    try:
        model = load()
    except Exception as failure:  # noqa: BLE001  # most fail once the harm is done
        print(attack.name, type(failure).__name__, str(failure)[:300].replace("\n", " "), file=sys.stderr)
        model = failure
    if attack.shows is not None:
        return (place / attack.shows).exists()
    try:
        return bool(seen and seen(model, api))
    except AttributeError:  # it is no model
        return False


def is_loss(name: str) -> Callable[[Any, Any], bool]:
    return lambda model, api: getattr(model.loss, "__name__", type(model.loss).__name__) == name


_LOOKS: dict[str, Callable[[Any, Any], bool]] = {
    "raw_op.keras": lambda model, api: "write_file only takes" in str(model),
    "dotted_class.keras": lambda model, api: "'np.save' because the class is missing" in str(model),
    "typespec.keras": lambda model, api: "this" in sys.modules,
    "vocabulary.keras": lambda model, api: "word" in model.layers[-1].get_vocabulary(),
    "vocabulary3.keras": lambda model, api: "word" in model.layers[-1].get_vocabulary(),
    "savedmodel": lambda model, api: any("word" in one.get_vocabulary() for one in model.layers[-1:]),
    "setter.keras": lambda model, api: api.config.max_epochs() is not None,
    "source_inputs.keras": lambda model, api: "get_source_inputs" in str(model),
    "deserialize.h5": lambda model, api: "Model expected 1 layers" in str(model),
} | {
    f"{name}.keras": is_loss(loss)
    for loss, names in {
        "eval": ["eval", "registered_eval"],
        "system": ["system", "registered_system"],
        "copyfile": ["class_copyfile", "registered_copyfile", "slice_copyfile"],
        "save": ["dotted_save"],
        "func_load": ["func_load", "class_func_load", "registered_func_load"],
        "deserialize_keras_object": ["deserialize_by_name"],
        "TFOpLambda": ["registered_op"],
        **{name: [name] for name in ("get_file", "load_model", "model_from_json", "deserialize")},
    }.items()
    for name in names
}


def misnamed(api_name: str) -> Iterator[str]:
    """Yield where a name of our lists stands for anything but what it is on the list for.

    A configuration may name any module of a part of Keras, and so what stands there under such a name counts.
    """
    from importlib import import_module

    from ckpttool.formats.keras import names

    source = import_module(f"{api_name}.src")
    for found in pkgutil.walk_packages(source.__path__, f"{api_name}.src."):
        is_tested = found.name.endswith("_test") or "backend" in found.name
        if names.part_of_keras(found.name) not in names.PARTS or is_tested:
            continue
        module = import_module(found.name)
        for name in (names.CLASSES | names.FUNCTIONS | names.OPERATIONS) & vars(module).keys():
            value = vars(module)[name]
            own = getattr(value, "__name__", name)
            is_kerass = getattr(value, "__module__", "").partition(".")[0] in (api_name, "tensorflow")
            is_other = (
                not is_kerass or own in names.LOOKUPS or own in {*names.RUNNING, "Lambda", "TFOpLambda"}
            )
            if is_other and not isinstance(value, types.ModuleType):
                yield f"{found.name}.{name}"


def main(api_name: str, place: Path) -> None:
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    from importlib import import_module

    api = import_module(api_name)
    found = {}
    for attack in attacks(place):
        if attack.api == api_name:
            more = {} if attack.is_safe else {"safe_mode": False}
            load = api.models.load_model
            found[attack.name] = shown(attack, place, lambda: load(str(place / attack.name), **more), api)  # noqa: B023
    print(json.dumps([found, list(misnamed(api_name))]))


def write_all(place: Path, saved: Path) -> None:
    (place / SECRET).write_text("word\n")
    for attack in attacks(place):
        write(attack, place, saved)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

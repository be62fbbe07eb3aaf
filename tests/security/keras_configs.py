"""Keras configurations: code, files and endless work, in every kind of file that Keras 2 and 3 load."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

from fixtures import zip_raw
from fixtures.zip_raw import Member
from tests.security.archives import Loaded, Variants
from tests.security.calls import Place
from tests.security.models import _empty_hdf5, _hdf5, _lambda3, _lambda_code, _layer, _sequential, model

Config = dict[str, Any]
READ = "read.txt"
"""File in a case's directory that a loader shall not read."""


def _zip(
    config: object, loader: str, place: Place, *, extra: tuple[Member, ...] = ()
) -> Callable[[], Loaded]:
    """Return a writer of a ``.keras`` with a configuration, given as an object or as its bytes."""

    def write() -> Loaded:
        metadata = {"keras_version": "3.0.0", "date_saved": "2026-01-01@00:00:00"}
        members = [
            Member("metadata.json", json.dumps(metadata).encode()),
            Member("config.json", config if isinstance(config, bytes) else json.dumps(config).encode()),
            Member("model.weights.h5", _empty_hdf5()),
            *extra,
        ]
        place.beside("a.keras", zip_raw.build(members))
        return loader, "a.keras"

    return write


def _sequential_2(*layers: Config, shape: tuple[int | None, ...] = (None, 4)) -> Config:
    """Return a model as Keras 2 describes it."""
    first = {"batch_input_shape": list(shape), "dtype": "float32", "name": "in"}
    layers = ({"class_name": "InputLayer", "config": first}, *layers)
    return {"class_name": "Sequential", "config": {"name": "s", "layers": list(layers)}}


def _with_modules(tree: Any, module: str = "keras.layers") -> Any:
    """Return a configuration of Keras 2 as ``.keras`` has it."""
    if isinstance(tree, list):
        return [_with_modules(one, module) for one in tree]
    if not isinstance(tree, dict):
        return tree
    tree = {key: _with_modules(value, module) for key, value in tree.items()}
    return {"module": module, "registered_name": None, **tree} if "class_name" in tree else tree


def _wrapped_cell(kind: str, name: str, code: object) -> Config:
    """Return a layer that wraps a cell with a function, over two steps of two numbers."""
    cell = {"class_name": "SimpleRNNCell", "config": {"units": 2}}
    own = {"cell": cell, name: code, f"{name}_type": "lambda", f"{name}_module": "m"}
    own |= {"output_keep_prob": 0.9, "state_keep_prob": 0.9} if kind == "DropoutWrapper" else {}
    wrapped = {"class_name": kind, "config": own}
    reshape = {"class_name": "Reshape", "config": {"name": "r", "target_shape": [2, 2]}}
    return _sequential_2(reshape, {"class_name": "RNN", "config": {"name": "l", "cell": wrapped}})


def _codes(place: Place, arguments: int) -> dict[str, str]:
    """Return marshalled code in every spelling that ``func_load`` takes."""
    code = _lambda_code(place, arguments)
    text = base64.encodebytes(code).decode()
    return {
        "plain": text,
        "foreign_sign": f"!{text}",
        "spaced": " ".join(text),
        "raw": code.decode("raw_unicode_escape"),
    }


@model
def keras_functions_of_cells(place: Place) -> Variants:
    """Functions of wrapped cells, in the spellings that decoders take."""
    for kind, name, arguments in (("ResidualWrapper", "residual_fn", 2), ("DropoutWrapper", "dropout_fn", 1)):
        for spelling, code in _codes(place, arguments).items():
            config = _wrapped_cell(kind, name, [code, None, None])
            yield f"{name}.{spelling}.h5", _hdf5(place, config, "tf_keras", "2.15.0")
        inner = "keras.src.layers.rnn.cell_wrappers"
        config = _with_modules(
            _wrapped_cell(kind, name, [_codes(place, arguments)["foreign_sign"], None, None])
        )
        config["config"]["layers"][2]["config"]["cell"]["module"] = inner
        config["module"] = "keras"
        yield f"{name}.keras", _zip(config, "tf_keras", place)


@model
def keras_texts(place: Place) -> Variants:
    """A Lambda layer in every encoding and spelling that ``json.loads`` takes."""
    config = json.dumps(_sequential(_lambda3(place)))
    for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-le"):
        yield encoding, _zip(config.encode(encoding), "keras", place)
    escaped = config.replace('"Lambda"', '"\\u004cambda"').replace('"class_name"', '"class\\u005fname"')
    yield "escapes", _zip(escaped.encode(), "keras", place)
    yield (
        "constants",
        _zip(config.replace('"name": "s"', '"name": "s", "x": [NaN, -Infinity]').encode(), "keras", place),
    )
    twice = config.replace('"class_name": "Lambda"', '"class_name": "Dropout", "class_name": "Lambda"')
    yield "twice", _zip(twice.encode(), "keras", place)
    yield "raw_bytes", _zip(config.replace('"name": "s"', '"name": "s", "x": "é"').encode(), "keras", place)
    yield "blanks", _zip(b"\n\t " + config.encode() + b"\r\n", "keras", place)


def _code_object(place: Place, arguments: int = 1) -> Config:
    code = base64.b64encode(_lambda_code(place, arguments)).decode()
    return {
        "class_name": "__lambda__",
        "config": {"code": code, "value": code, "defaults": None, "closure": None},
    }


def _nested_lambdas(place: Place) -> Iterator[tuple[str, Config]]:
    """Yield models of Keras 3 with code in fields that hold other things in honest files."""
    code = _code_object(place)
    yield "activation_layer", _layer("Activation", {"activation": code})
    text = {"vocabulary": ["a"], "standardize": None, "split": None, "ngrams": None, "output_mode": "int"}
    yield "standardize", _layer("TextVectorization", text | {"standardize": code, "dtype": "string"})
    yield (
        "nested_value",
        _layer("Activation", {"activation": {"deep": code, "class_name": "__lambda__", **code}}),
    )


@model
def keras_code_in_fields(place: Place) -> Variants:
    """Code in the fields of layers that take functions, in the compile configuration, behind other names."""
    for name, layer in _nested_lambdas(place):
        yield f"{name}.keras", _zip(_sequential(layer), "keras", place)
    functional = _layer("Lambda", _lambda3(place)["config"], "keras.src.layers.core.lambda_layer")
    yield "source_module", _zip(_sequential(functional), "keras", place)
    yield (
        "top_module",
        _zip(_sequential(_layer("Lambda", _lambda3(place)["config"], "keras.layers")), "keras", place),
    )
    compiled = _sequential(_layer("Activation", {"activation": "relu"}))
    compiled["compile_config"] = {"optimizer": "adam", "loss": _code_object(place, 2)}
    yield "loss", _zip(compiled, "keras_fits", place)
    compiled = json.loads(json.dumps(compiled))
    compiled["compile_config"] = {"optimizer": "adam", "loss": "mse", "metrics": [[_code_object(place, 2)]]}
    yield "metric", _zip(compiled, "keras_fits", place)


def _called(layer: Config, argument: object, **kwargs: object) -> Config:
    """Return a model of Keras 2 that calls a layer, or a function in place of one, with plain values."""
    ends = [["in", 0, 0]]
    first = {"class_name": "InputLayer", "config": {"batch_input_shape": [None, 4], "name": "in"}}
    layers = [
        _with_modules(first) | {"name": "in", "inbound_nodes": []},
        layer | {"name": "called", "inbound_nodes": [["_CONSTANT_VALUE", -1, argument, kwargs]]},
    ]
    config = {"name": "m", "layers": layers, "input_layers": ends, "output_layers": ends}
    functional = {"class_name": "Functional", "config": config}
    return _with_modules(functional, "keras.src.engine.functional")


@model
def keras_tensorflow(place: Place) -> Variants:
    """Functions of TensorFlow that a model of Keras 2 calls with plain values."""
    for name in (
        "io.write_file",
        "compat.v1.write_file",
        "debugging.experimental.enable_dump_debug_info",
    ):
        for kind in ("TFOpLambda", "SlicingOpLambda"):
            layer = {
                "module": "keras.layers",
                "class_name": kind,
                "registered_name": None,
                "config": {"name": "called", "function": name},
            }
            argument, more = (place.marker, {"contents": "x"}) if "write" in name else (place.marker, {})
            yield f"{kind}.{name}", _zip(_called(layer, argument, **more), "tf_keras", place)


def _reads(place: Place) -> Iterator[tuple[str, Config]]:
    """Yield layers of Keras 2 and 3 that read a file."""
    path = f"{place.directory}/{READ}"
    text = {"standardize": None, "split": None, "ngrams": None, "output_mode": "int", "dtype": "string"}
    index = {"max_tokens": None, "num_oov_indices": 1, "mask_token": None, "oov_token": "[UNK]"}
    index |= {"vocabulary_dtype": "string"}
    for kind, more in (("StringLookup", {}), ("TextVectorization", text), ("IndexLookup", index)):
        yield kind, {"class_name": kind, "config": {"name": "l", "vocabulary": path, **more}}
    wrapped = {"class_name": "StringLookup", "config": {"name": "i", "vocabulary": path}}
    yield "in_wrapper", {"class_name": "TimeDistributed", "config": {"name": "l", "layer": wrapped}}
    nested = _sequential_2(wrapped)
    yield "in_model", nested


@model
def keras_reads(place: Place) -> Variants:
    """Layers and functions that read a file which the configuration names."""
    path = f"{place.directory}/{READ}"
    for name, layer in _reads(place):
        if name != "IndexLookup":
            config = _sequential_2(layer)
            yield f"{name}.h5", _hdf5(place, config, "tf_keras_reads", "2.15.0")
            yield f"{name}.keras", _zip(_with_modules(config) | {"module": "keras"}, "tf_keras_reads", place)
        module = "keras.src.layers.preprocessing.index_lookup" if name == "IndexLookup" else "keras.layers"
        three = _with_modules(layer, module)
        if name != "in_model":
            yield f"{name}.3.keras", _zip(_sequential(three), "keras_reads", place)
    for name in ("nn.fixed_unigram_candidate_sampler", "compat.v1.nn.fixed_unigram_candidate_sampler"):
        layer = {
            "module": "keras.layers",
            "class_name": "TFOpLambda",
            "registered_name": None,
            "config": {"name": "called", "function": name},
        }
        more = {"num_true": 1, "num_sampled": 1, "unique": True, "range_max": 2, "vocab_file": path}
        yield name, _zip(_called(layer, [[0]], **more), "tf_keras_reads", place)


def _work() -> Iterator[tuple[str, Config]]:
    """Yield models of Keras 3 of a few hundred bytes that take all time or memory."""
    huge = 1 << 40
    compiled = _sequential(_layer("Dense", {"units": 4}))
    for kind in ("AUC", "PrecisionAtRecall"):
        more = {"recall": 0.5} if kind == "PrecisionAtRecall" else {}
        metric = {"module": "keras.metrics", "class_name": kind, "registered_name": None}
        metric["config"] = {"name": "m", "num_thresholds": huge, **more}
        compile_config = {"optimizer": "adam", "loss": "mse", "metrics": [metric]}
        yield f"metric.{kind}", compiled | {"compile_config": compile_config}
    metric = {"module": "keras.metrics", "class_name": "MeanIoU", "registered_name": None}
    metric["config"] = {"name": "m", "num_classes": 1 << 20}
    yield (
        "metric.MeanIoU",
        compiled | {"compile_config": {"optimizer": "adam", "loss": "mse", "metrics": [metric]}},
    )
    for kind, own in (
        ("Dense", {"units": huge}),
        ("Embedding", {"input_dim": huge, "output_dim": 4}),
    ):
        yield f"layer.{kind}", _sequential(_layer(kind, own))
    evil = "(a+)+$"
    name = "a" * 40 + "!"
    muon = {"module": "keras.optimizers", "class_name": "Muon", "registered_name": None}
    muon["config"] = {"name": "muon", "learning_rate": 0.1, "exclude_layers": [evil]}
    model = _sequential(_layer("Dense", {"units": 4, "name": name}))
    yield "pattern.Muon", model | {"compile_config": {"optimizer": muon, "loss": "mse"}}


@model
def keras_half_characters(place: Place) -> Variants:
    """A Lambda layer beside half a character, which is no text that can be written."""
    config = _sequential(_lambda3(place))
    config["config"]["x"] = "\ud800"
    yield "surrogate", _zip(config, "keras", place)


@model
def keras_work(place: Place) -> Variants:
    """Sizes and patterns that a loader works through, or makes room for."""
    for name, config in _work():
        yield name, _zip(config, "keras_works", place)
    for name, config in _work_2():
        yield f"{name}.h5", _hdf5(place, config, "tf_keras_works", "2.15.0")


def _work_2() -> Iterator[tuple[str, Config]]:
    huge = 1 << 40
    for kind, own in (
        ("Dense", {"units": huge}),
        ("Embedding", {"input_dim": huge, "output_dim": 4}),
    ):
        yield f"layer.{kind}", _sequential_2({"class_name": kind, "config": {"name": "l", **own}})

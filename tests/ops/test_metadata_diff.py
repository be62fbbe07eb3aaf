"""What is not a tensor, and differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Checkpoint, Role, Tensor, TrainingState
from ckpttool.core.checkpoint import Producer
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.training import training_state
from ckpttool.formats.content.plain_data import KeyText
from ckpttool.ops.difference import ABSENT, ValueChange
from ckpttool.ops.metadata_diff import compare_metadata, partly_known

NAN = float("nan")


def checkpoint(
    metadata: Mapping[str, Any] = {},
    *,
    name: str = "",
    format: str = "pytorch",
    variant: str | None = None,
    producer: Producer | None = None,
    training: TrainingState | None = None,
    tensors: tuple[Tensor, ...] = (),
) -> Checkpoint:
    state = training_state(metadata, name=name) if training is None else training
    return Checkpoint(
        path=name or "m.pth",
        format=format,
        variant=variant,
        tensors=tensors,
        files=(),
        spans=lambda: iter(()),
        metadata=lambda: metadata,
        training=lambda: state,
        producer=producer or Producer(),
    )


def tensor(*path: str) -> Tensor:
    return Tensor(path=path, dtype=BY_NAME["float32"], shape=(1,), role=Role.WEIGHTS)


def differing(a: Any, b: Any, **more: Any) -> list[tuple[str, object, object]]:
    """Return what differs between two trees of one format, with nothing reported."""
    changes, reported = compare_metadata(checkpoint(a, **more), checkpoint(b, **more))
    assert reported == []
    return [(one.path, one.a, one.b) for one in changes]


# One format -----------------------------------------------------------------------------------------


def test_same_values_are_no_difference() -> None:
    tree = {"epoch": 3, "config": {"layers": [1, 2], "name": "x"}, "flag": True, "nothing": None, "nan": NAN}
    assert differing(tree, {**tree, "nan": float("nan"), "config": {"name": "x", "layers": [1.0, 2]}}) == []


def test_epoch_is_told_once_and_first() -> None:
    a = {"config": {"lr": 0.1}, "current_epoch": 3, "loss": 0.5}
    b = {"config": {"lr": 0.2}, "current_epoch": 4, "loss": 0.5}
    assert differing(a, b) == [
        ("epoch", 3, 4),
        ("learning_rate", 0.1, 0.2),
    ]


def test_what_one_side_lacks_is_absent() -> None:
    assert differing({"epoch": 3, "x": 1}, {"epoch": 3, "y": {"z": 2}}) == [
        ("x", 1, ABSENT),
        ("y", ABSENT, {"z": 2}),
    ]
    assert differing({"current_epoch": 3, "x": 1}, {"x": 1}) == [("epoch", 3, ABSENT)]


def test_epoch_under_another_key_is_the_same_epoch() -> None:
    assert differing({"epoch": 3, "x": 1}, {"current_epoch": 3, "x": 1}) == []


def test_equal_and_different_values() -> None:
    equal = [(1, 1.0), (NAN, float("nan")), (0.0, -0.0), ([], []), ([NAN], [float("nan")]), ("a", "a")]
    assert [pair for pair in equal if differing({"x": pair[0]}, {"x": pair[1]})] == []
    different: list[tuple[object, object]] = [
        *((1, True), (0, False), (1, "1"), (None, 0), ([], {}), ([1], [True]), ("a", "b"), (NAN, 1.0)),
        ({}, None),
    ]
    for x, y in different:
        ((path, a, b),) = differing({"x": x}, {"x": y})
        assert path == "x"
        assert repr((a, b)) == repr((x, y))


def test_number_and_text_are_two_keys() -> None:
    number, text = {"m": {KeyText("1"): 2, "x": 3}}, {"m": {"1": 2, "x": 3}}
    assert differing(number, text) == [("m.1", "key 1 (not a string)", "key '1'")]
    assert differing(text, number) == [("m.1", "key '1'", "key 1 (not a string)")]
    assert differing(number, {"m": {KeyText("1"): 2, "x": 3}}) == []
    other = checkpoint({"m": '{"1": 2, "x": 3}'}, format="safetensors")
    assert compare_metadata(checkpoint(number), other)[0] == []


def test_optimizer_groups_are_compared_key_by_key() -> None:
    a = {"optimizer": {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.999], "params": [0, 1]}]}}
    b = {"optimizer": {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.95], "params": [0, 1]}]}}
    assert differing(a, b) == [("optimizer.param_groups.0.betas", [0.9, 0.999], [0.9, 0.95])]


def test_learning_rate_is_told_by_its_own_name() -> None:
    a = {"optimizer": {"param_groups": [{"lr": 0.1}, {"lr": 0.2}]}}
    b = {"optimizer": {"param_groups": [{"lr": 0.3}, {"lr": 0.2}]}}
    assert differing(a, b) == [("learning_rate", 0.1, 0.3)]


def test_lists_of_other_lengths() -> None:
    a = {"groups": [{"x": 1}], "few": [1, 2]}
    b = {"groups": [{"x": 2}, {"x": 3}], "few": [1, 2, 3]}
    assert differing(a, b) == [
        ("groups", "1 item", "2 items"),
        ("groups.0.x", 1, 2),
        ("few", [1, 2], [1, 2, 3]),
    ]


def test_long_lists_are_counted() -> None:
    state = list(range(625))
    other = [*state[:3], -1, *state[4:600], *range(1, 26)]
    assert differing({"rng": state}, {"rng": other}) == [
        ("rng", "625 items", "625 items, 26 differ, the first at 3")
    ]
    assert differing({"rng": state}, {"rng": [*state, 1]}) == [
        ("rng", "625 items", "626 items, the first are the same")
    ]


def test_large_things_on_one_side_are_told_by_size() -> None:
    a = {"x": 1, "big": {str(key): key for key in range(1000)}, "long": [[1]] * 3}
    assert differing(a, {"x": 1}) == [("big", "1,000 keys", ABSENT), ("long", "3 items", ABSENT)]


def test_last_loss_of_a_list() -> None:
    assert differing({"losses": [3.0, 2.0]}, {"losses": [3.0, 2.0, 1.0]}) == [("loss", 2.0, 1.0)]
    assert differing({"losses": [3.0, 2.0]}, {"losses": [4.0, 2.0]}) == [("losses", [3.0, 2.0], [4.0, 2.0])]


def test_deep_trees_do_not_recurse() -> None:
    a: Any = 1
    b: Any = 2
    for _ in range(5_000):
        a, b = {"k": a}, {"k": b}
    ((path, *_),) = differing(a, b)
    assert path.count("k") == 5_000


def test_versions_and_times_are_reported() -> None:
    a = {"x": 1, "pytorch-lightning_version": "2.5", "saved_at": "2026-01-01", "config": {"timestamp": 1}}
    b = {"x": 1, "pytorch-lightning_version": "2.6", "saved_at": "2026-01-02", "config": {"timestamp": 2}}
    changes, reported = compare_metadata(checkpoint(a), checkpoint(b))
    assert changes == []
    assert [one.path for one in reported] == ["saved_at", "pytorch-lightning_version", "config.timestamp"]


def test_settings_that_merely_sound_like_bookkeeping_count() -> None:
    a = {"config": {"backend": "nccl", "dataset_version": 1, "time": 3, "format": "pt"}, "format": "mine"}
    b = {"config": {"backend": "gloo", "dataset_version": 2, "time": 4, "format": "np"}, "format": "yours"}
    assert [path for path, *_ in differing(a, b)] == [
        "config.backend",
        "config.dataset_version",
        "config.time",
        "config.format",
        "format",
    ]


OWN_KEYS = {
    "file": {"savedmodel"},
    "fingerprint": {"savedmodel"},
    "schema_version": {"savedmodel", "torch-export"},
    "opset_version": {"torch-export"},
    "backend": {"keras", "keras-h5"},
    "serial": {"fluid"},
    "StructuredToParameterName@@": {"paddle"},
}


def test_a_formats_own_keys_count_where_users_wrote_them() -> None:
    formats = {"savedmodel", "torch-export", "keras", "keras-h5", "fluid", "paddle", "pytorch", "pickle"}
    for key, writers in {**OWN_KEYS, "time": formats}.items():
        sides = ({"x": 1, key: {"a": 1}}, {"x": 1, key: {"a": 2}})
        for format in formats:
            told = compare_metadata(*(checkpoint(side, format=format) for side in sides))
            paths = [[one.path for one in part] for part in told]
            assert paths == ([[], [f"{key}.a"]] if format in writers else [[f"{key}.a"], []]), (key, format)


def test_a_key_of_one_sides_format_is_no_difference_to_the_users() -> None:
    a, b = checkpoint({"backend": "nccl"}), checkpoint({"backend": "jax"}, format="keras")
    for changes, reported in (compare_metadata(a, b), compare_metadata(b, a)):
        assert changes == []
        assert [one.path for one in reported] == ["format", "backend"]


def test_what_one_side_alone_tells_is_its_own_format_s_to_judge() -> None:
    users, keras = {"backend": "nccl"}, checkpoint({}, format="keras")
    _, reported = compare_metadata(checkpoint(users), keras)
    assert [one.path for one in reported] == ["format", "backend"]
    _, reported = compare_metadata(checkpoint({}), checkpoint(users, format="keras"))
    assert [one.path for one in reported] == ["format"]


def test_signatures_differ_by_what_callers_see() -> None:
    def graph(tensor: str, shape: list[int]) -> dict[str, Any]:
        inputs = {"x": {"name": tensor, "dtype": "float32", "shape": shape}}
        return {"meta_graphs": [{"signatures": {"serve": {"inputs": inputs}}}]}

    a, b = graph("in:0", [1, 3]), graph("in_1:0", [1, 4])
    changes, reported = compare_metadata(
        checkpoint(a, format="savedmodel"), checkpoint(b, format="savedmodel")
    )
    path = "meta_graphs.0.signatures.serve.inputs.x"
    assert changes == [ValueChange(f"{path}.shape", [1, 3], [1, 4])]
    assert reported == [ValueChange(f"{path}.name", "in:0", "in_1:0")]


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | st.text("ab", max_size=2)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)


def alike(x: Any, y: Any) -> bool:
    """Tell whether two trees say the same, as this module's docstring has it."""
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(alike(x[key], y[key]) for key in x)
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(alike(*pair) for pair in zip(x, y, strict=True))
    if isinstance(x, bool) != isinstance(y, bool):
        return False
    return bool(x == y) or (isinstance(x, float) and isinstance(y, float) and x != x and y != y)


@given(TREES, TREES)
def test_trees_differ_where_they_differ(x: Any, y: Any) -> None:
    a, b = ({"k": tree, "always": 1} for tree in (x, y))
    changes = differing(a, b)
    assert bool(changes) is not alike(x, y)
    assert all(path == "k" or path.startswith("k.") for path, *_ in changes)
    assert differing(a, json.loads(json.dumps(a))) == []


# Sides that tell less -------------------------------------------------------------------------------


FULL = {"epoch": 10, "optimizer": {"param_groups": [{"lr": 0.1}]}, "note": "x"}
LEFT = [
    ValueChange("epoch", 10, ABSENT),
    ValueChange("learning_rate", 0.1, ABSENT),
    ValueChange("optimizer", "1 key", ABSENT),
    ValueChange("note", "x", ABSENT),
]


def test_bare_state_dict_lacks_nothing() -> None:
    full = checkpoint(FULL, tensors=(tensor("model", "fc.weight"),))
    bare = checkpoint({}, tensors=(tensor("fc.weight"),))
    assert compare_metadata(full, bare) == ([], LEFT)
    assert len(compare_metadata(bare, full)[1]) == len(LEFT)


def test_what_is_built_alike_lacks_what_it_has_not() -> None:
    for path in (("model", "fc.weight"), ("fc.weight",)):
        full, less = (checkpoint(told, tensors=(tensor(*path),)) for told in (FULL, {}))
        changes, reported = compare_metadata(full, less)
        absent = [("epoch", ABSENT), ("optimizer", ABSENT), ("note", ABSENT)]
        assert [(one.path, one.b) for one in changes] == absent
        assert reported == []


def test_one_value_in_a_bare_state_dict_counts() -> None:
    a, b = (checkpoint(told, tensors=(tensor("w"),)) for told in ({"scale": 7.0}, {}))
    assert compare_metadata(a, b) == ([ValueChange("scale", 7.0, ABSENT, of_weights=True)], [])


def test_what_holds_no_tensor_is_no_bare_state_dict() -> None:
    metrics = checkpoint({"accuracy": 0.5}, tensors=(tensor("model", "w"),))
    assert compare_metadata(metrics, checkpoint({}))[0] == [ValueChange("accuracy", 0.5, ABSENT)]


def test_library_of_a_safetensors_file_is_no_data() -> None:
    a = checkpoint({"format": "pt", "epoch": "3"}, format="safetensors")
    b = checkpoint({"epoch": "3"}, format="safetensors")
    assert compare_metadata(a, b) == ([], [ValueChange("format", "pt", ABSENT)])
    c = checkpoint({"format": "tf", "epoch": "4"}, format="safetensors")
    assert compare_metadata(a, c) == ([ValueChange("epoch", 3, 4)], [ValueChange("format", "pt", "tf")])


def test_metadata_of_one_safetensors_file_counts() -> None:
    a = checkpoint({"format": "pt", "lr": "1", "note": "x"}, format="safetensors")
    changes, _ = compare_metadata(a, checkpoint({}, format="safetensors"))
    assert changes == [ValueChange("learning_rate", "1", ABSENT), ValueChange("note", "x", ABSENT)]


def test_sums_of_an_index_are_no_data() -> None:
    index = {"total_size": 80, "total_parameters": 20, "note": "x"}
    sharded = checkpoint(index, format="safetensors", variant="sharded")
    single = checkpoint({"note": "x"}, format="safetensors")
    changes, reported = compare_metadata(sharded, single)
    assert changes == []
    assert [one.path for one in reported] == ["format", "total_size", "total_parameters"]
    assert differing({"total_size": 80}, {"total_size": 81}) == [("total_size", 80, 81)]


def test_variants_for_weights_alone_lack_nothing() -> None:
    for format in ("fluid", "keras-h5", "paddle"):
        whole = checkpoint({"model_config": {"units": 3}}, format=format, variant="model")
        weights = checkpoint({}, format=format, variant="weights")
        changes, reported = compare_metadata(whole, weights)
        assert changes == [], format
        assert reported[-1] == ValueChange("model_config", {"units": 3}, ABSENT)
        other = checkpoint({"model_config": {"units": 4}}, format=format, variant="model")
        assert compare_metadata(whole, other)[0] == [ValueChange("model_config.units", 3, 4)]


def test_other_formats_are_compared_by_what_both_know() -> None:
    a = checkpoint({"epoch": 3, "loss": 0.5, "config": {"width": 4, "depth": 2}})
    b = checkpoint({"epoch": "4", "loss": "0.5", "step": "7"}, format="safetensors")
    changes, reported = compare_metadata(a, b)
    assert changes == [ValueChange("epoch", 3, 4)]
    assert reported == [
        ValueChange("format", "pytorch", "safetensors"),
        ValueChange("hyper_parameters.width", 4, ABSENT),
        ValueChange("hyper_parameters.depth", 2, ABSENT),
        ValueChange("step", ABSENT, 7),
    ]


def test_settings_of_other_formats_are_compared_one_by_one() -> None:
    a = checkpoint({"config": {"width": 4, "dims": [1, 2]}})
    b = checkpoint({"config": {"width": 5, "dims": [1, 2]}}, format="hdf5")
    assert compare_metadata(a, b)[0] == [ValueChange("hyper_parameters.width", 4, 5)]


def both_say(a: object, b: object) -> tuple[list[ValueChange], list[ValueChange]]:
    """Return how a value differs from a text under the same key, and what is reported besides formats."""
    changes, reported = compare_metadata(
        checkpoint({"classes": a}), checkpoint({"classes": b}, format="safetensors")
    )
    return changes, [one for one in reported if one.path != "format"]


SPELLED: list[tuple[object, object]] = [
    *((10, "10"), (10, " 10.0"), (0.7, ".7"), (NAN, "nan"), (float("inf"), "inf")),
    *((True, "True"), (False, "false"), (None, "None"), (None, "null"), ("gelu", "gelu")),
    *(([1, "x"], '[1, "x"]'), ([1.5, 2], ["1.5", "2"]), (2**80, str(2**80))),
    ({"a": {"b": [1, {"c": None}]}}, '{"a": {"b": [1, {"c": null}]}}'),
]
NOT_SPELLED: list[tuple[object, object]] = [
    *((10, "12"), (10, "ten"), (10, ""), (0.5, ".7"), (True, "1"), (None, "0"), ("gelu", "relu")),
    *((2**80, str(2**80 + 1)), (1, "9" * 5000), ([1, 2], "[1, 3]"), ([1, 2], "[1, 2")),
    *(({"a": 1}, "a"), ({"a": 1}, "[" * 100_000), (10, 12)),
]


def test_texts_spell_the_values_of_another_format() -> None:
    assert [pair for pair in SPELLED if both_say(*pair) != ([], [])] == []


def test_same_key_with_another_value_is_a_difference() -> None:
    for a, b in NOT_SPELLED:
        changes, reported = both_say(a, b)
        assert len(changes) == 1 and changes[0].path.startswith("classes"), (a, b)
        assert reported == [], (a, b)


@given(TREES.filter(lambda tree: isinstance(tree, dict | list)))
def test_json_of_a_tree_spells_it(tree: Any) -> None:
    assert both_say(tree, json.dumps(tree)) == ([], [])


def test_keys_below_a_shared_one_may_be_missing_in_another_format() -> None:
    changes, reported = both_say({"a": 1, "b": 2}, '{"b": 3, "c": 4}')
    assert changes == [ValueChange("classes.b", 2, 3)]
    assert reported == [ValueChange("classes.a", 1, ABSENT), ValueChange("classes.c", ABSENT, 4)]


def test_training_under_one_key_is_told_once_across_formats() -> None:
    a = checkpoint({"epoch": 3, "losses": [3.0, 2.0], "config": {"width": 4}, "val_acc": 0.5})
    told = {"epoch": "4", "losses": "[3.0, 1.0]", "config": '{"width": 5}', "val_acc": "0.6"}
    changes, _ = compare_metadata(a, checkpoint(told, format="safetensors"))
    assert [one.path for one in changes] == ["epoch", "metrics.val_acc", "losses", "config.width"]


def test_numbers_in_tensors_have_single_precision() -> None:
    for rate, is_same in ((0.10000000149011612, True), (0.1001, False), (1e300, False)):
        inside = TrainingState(learning_rate=rate, origin={"learning_rate": "tensor learning_rate"})
        a, b = checkpoint({"lr": 0.1}), checkpoint(format="tensorflow", training=inside)
        assert (compare_metadata(a, b)[0] == []) is is_same, rate


def test_both_sides_tensors_are_told_in_training_words() -> None:
    sides = [TrainingState(epoch=epoch, origin={"epoch": "tensor epoch"}) for epoch in (1, 2)]
    a, b = (checkpoint(format="numpy", training=side) for side in sides)
    assert compare_metadata(a, b) == ([ValueChange("epoch", 1, 2)], [])


def test_trainers_of_fluid_are_told_once() -> None:
    def serial(epoch: int) -> Checkpoint:
        state = TrainingState(epoch=epoch, origin={"epoch": "file trainer_0/epoch_id"})
        told = {"serial": epoch, "trainers": {"0": {"epoch_id": epoch}, "1": {"epoch_id": 5}}}
        return checkpoint(told, format="fluid", training=state)

    changes, reported = compare_metadata(serial(1), serial(2))
    assert changes == [ValueChange("epoch", 1, 2)]
    assert reported == [ValueChange("serial", 1, 2)]


def test_name_of_a_file_is_not_its_content() -> None:
    a, b = checkpoint(name="model_epoch_3.pth"), checkpoint(name="model_epoch_4.pth")
    assert a.training.epoch == 3
    assert compare_metadata(a, b) == ([], [])
    assert compare_metadata(checkpoint({"epoch": 3}), b) == ([ValueChange("epoch", 3, ABSENT)], [])


def test_format_and_variant_are_reported() -> None:
    a, b = checkpoint(variant="zip"), checkpoint(variant="legacy")
    assert compare_metadata(a, b) == ([], [ValueChange("format", "pytorch zip", "pytorch legacy")])


def test_producers_are_reported_where_they_say_more_than_the_format() -> None:
    for a, b, told in (
        (Producer("keras", "3.1"), Producer("keras", "3.2"), ("keras 3.1", "keras 3.2")),
        (Producer("keras", "3.1"), Producer("pytorch"), ("keras 3.1", "pytorch")),
        (Producer("keras"), Producer("pytorch"), None),
        (Producer("pytorch", "2.1"), Producer(), None),
        (Producer(), Producer(), None),
    ):
        reported = [ValueChange("producer", *told)] if told else []
        assert compare_metadata(checkpoint(producer=a), checkpoint(producer=b)) == ([], reported)


def test_mangled_names_of_torchscript_are_one_class() -> None:
    def model(name: str) -> Checkpoint:
        return checkpoint({"attributes": {"<class>": name}}, format="torchscript")

    a, b = model("__torch__.nn.___torch_mangle_1.Linear"), model("__torch__.nn.Linear")
    assert compare_metadata(a, b) == ([], [])
    assert compare_metadata(a, model("__torch__.nn.___torch_mangle_1.Conv"))[0] != []


# What is not compared -------------------------------------------------------------------------------


TOLD_IN_PART: list[object] = [
    "<2,000 bytes of data>",
    "<80,000,000 bytes of text>",
    "<12 bytes of a file that was not read>",
    "<NumPy array of |S5, shape [9]: 80,000,000 bytes of data>",
    "module.function(1, <80,000,000 bytes of data>)",
    "module.function(…)",
    "<Strange>",
    {"<class>": "numpy.ndarray", "dtype": "<U2", "shape": [2]},
    {"<dataset>": "compound", "shape": []},
]
TOLD_IN_FULL: list[object] = [
    *("<unk>", "<PAD>", "text", "", "<2 bytes: 00 ff>", "<16 bytes>", "(…)", "x" * 5000),
    "<1,000 bytes, CRC-32 0123abcd>",
    "<NumPy array of |S5, shape [9]: 45 bytes, CRC-32 0123abcd>",
    f"{'x' * 4096}… (5,000 characters, CRC-32 0123abcd)",
    {"<class>": "numpy.ndarray", "dtype": "<U2", "shape": [2], "CRC-32": "0123abcd"},
    {"<class>": "numpy.ndarray", "dtype": "<U2", "shape": [0, 2]},
    {"<dataset>": "compound", "shape": None},
]


def test_values_told_in_part_are_named() -> None:
    expected = ["config.blob: known only in part", "config.more.0: known only in part"]
    for told in TOLD_IN_PART:
        tree = {"config": {"blob": told, "more": [told]}}
        assert partly_known(checkpoint(tree), checkpoint(tree)) == expected, told
        assert partly_known(checkpoint(tree), checkpoint(tree, format="hdf5")) == expected, told


def test_values_told_in_full_need_no_note() -> None:
    noted = [one for one in TOLD_IN_FULL if partly_known(checkpoint({"x": one}), checkpoint({"x": one}))]
    assert noted == []


def test_programs_without_a_checksum_are_not_compared() -> None:
    for format, key in (("torchscript", "code"), ("torch-export", "models"), ("savedmodel", "graph")):
        assert len(partly_known(checkpoint(format=format), checkpoint(format=format))) == 1, format
        assert partly_known(checkpoint(format=format), checkpoint()) == [], format
        summed = checkpoint({key: [{"main": "<80 bytes, CRC-32 0123abcd>"}]}, format=format)
        assert partly_known(summed, summed) == [], format
        assert len(partly_known(summed, checkpoint(format=format))) == 1, format
        other = checkpoint({"note": "<80 bytes, CRC-32 0123abcd>"}, format=format)
        assert len(partly_known(other, other)) == 1, format

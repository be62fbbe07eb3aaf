"""Layout rules: what each layer of Keras and Paddle is in PyTorch, and where no rule applies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ckpttool import Checkpoint, open_checkpoint
from ckpttool.core.layers import LayerKind
from ckpttool.weights.pairing.layouts import RULES, LayoutItem, fuse_split_parameters, torch_layout_items
from ckpttool.weights.pairing.rearrangement import LayoutMismatch
from tests.support.checkpoints import checkpoint, numbers
from tests.support.frameworks import python_with_frameworks
from tests.support.tensors import Array
from tests.support.twins import FIXTURES

Arrays = Mapping[str, Array]


def turned(
    arrays: Arrays, layers: Mapping[str, str] | None = None, family: str = "keras"
) -> dict[str, tuple[Array, str | None]]:
    """Return what becomes of the weights of a checkpoint, by name."""
    return arrays_and_rules(torch_layout_items(checkpoint(arrays, family, layers)))


def arrays_and_rules(items: list[LayoutItem]) -> dict[str, tuple[Array, str | None]]:
    return {item.name: (item.tensor.array(), item.rule) for item in items}


def require(arrays: Arrays, expected: Arrays, *, rules: int = 1, **known: object) -> None:
    found = turned(arrays, **known)  # type: ignore[arg-type]
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name][0].shape == array.shape, name
        assert np.array_equal(found[name][0], array), name
    assert len({rule for _, rule in found.values()} - {None}) == rules


def untouched(arrays: Arrays, layers: Mapping[str, str] | None = None, family: str = "keras") -> None:
    items = torch_layout_items(checkpoint(arrays, family, layers))
    assert [item.name for item in items] == list(arrays)
    assert all(item.sources == (item.tensor,) and item.rule is None for item in items)


def gates(array: Array, order: tuple[int, ...], count: int) -> Array:
    """Return the rows of an array in the order of other gates."""
    parts = np.split(array, count)
    return np.concatenate([parts[at] for at in order])


# Keras, by the names of variables ---------------------------------------------------------------------


def test_dense() -> None:
    kernel, bias = numbers(3, 5), numbers(5)
    require({"a.kernel": kernel, "a.bias": bias}, {"a.weight": kernel.T, "a.bias": bias})
    require({"a/kernel:0": kernel}, {"a.weight": kernel.T})
    require({"a._kernel": numbers(4, 4)}, {"a.weight": numbers(4, 4).T})


def test_convolutions() -> None:
    cases = [((3, 4, 5), (2, 1, 0)), ((2, 3, 4, 5), (3, 2, 0, 1)), ((2, 3, 2, 4, 5), (4, 3, 0, 1, 2))]
    for shape, order in cases:
        kernel, bias = numbers(*shape), numbers(shape[-1])
        require({"c.kernel": kernel, "c.bias": bias}, {"c.weight": kernel.transpose(order), "c.bias": bias})


def test_transposed_convolution() -> None:
    kernel, bias = numbers(3, 3, 5, 2), numbers(5)
    expected = {"c.weight": kernel.transpose(3, 2, 0, 1), "c.bias": bias}
    require({"c.kernel": kernel, "c.bias": bias}, expected)
    require({"c.0": kernel, "c.1": bias}, expected, layers={"c.0": "Conv2DTranspose"})


def depthwise(kernel: Array) -> Array:
    """Return PyTorch's weight, built element by element."""
    height, width, channels, multiplier = kernel.shape
    weight = np.empty((channels * multiplier, 1, height, width), kernel.dtype)
    for channel in range(channels):
        for copy in range(multiplier):
            weight[channel * multiplier + copy, 0] = kernel[:, :, channel, copy]
    return weight


def test_depthwise_and_separable() -> None:
    kernel, point, bias = numbers(2, 3, 4, 2), numbers(1, 1, 8, 5), numbers(5)
    require({"d.depthwise_kernel": kernel}, {"d.weight": depthwise(kernel)})
    # Keras 3 calls it a kernel; the bias tells it from a convolution with two filters.
    require({"d.kernel": kernel, "d.bias": numbers(8)}, {"d.weight": depthwise(kernel), "d.bias": numbers(8)})
    require({"d.0": kernel}, {"d.weight": depthwise(kernel)}, layers={"d.0": "DepthwiseConv2D"})
    require(
        {"s.depthwise_kernel": kernel, "s.pointwise_kernel": point, "s.bias": bias},
        {
            "s.depthwise.weight": depthwise(kernel),
            "s.pointwise.weight": point.transpose(3, 2, 0, 1),
            "s.pointwise.bias": bias,
        },
    )
    long = numbers(3, 4, 2)
    expected = np.stack([long[:, at // 2, at % 2] for at in range(8)])[:, None]
    require({"d.depthwise_kernel": long}, {"d.weight": expected})


def test_a_batch_norm_without_some_of_its_weights() -> None:
    cases = [
        (("gamma",), ("bias", "running_mean", "running_var")),
        (("beta",), ("weight", "running_mean", "running_var")),
        (("gamma", "beta"), ("running_mean", "running_var")),
    ]
    for lacking, names in cases:
        values = {f"b.{at}": numbers(7, start=at) for at in range(len(names))}
        expected = {f"b.{name}": numbers(7, start=at) for at, name in enumerate(names)}
        require(values, expected, layers={"b.0": LayerKind("BatchNormalization", lacking)})


def test_norms_and_embedding() -> None:
    four = {name: numbers(3, start=at) for at, name in enumerate(("gamma", "beta", "moving_mean"))}
    four["moving_variance"] = numbers(3, start=9)
    names = ("weight", "bias", "running_mean", "running_var")
    expected = {f"n.{name}": array for name, array in zip(names, four.values(), strict=True)}
    require({f"n.{name}": array for name, array in four.items()}, expected)
    require({f"n.{at}": array for at, array in enumerate(four.values())}, expected)
    two = {"n.gamma": numbers(3), "n.beta": numbers(3, start=4)}
    require(two, {"n.weight": numbers(3), "n.bias": numbers(3, start=4)})
    require({"e.embeddings": numbers(7, 2)}, {"e.weight": numbers(7, 2)})
    require({"r.0": numbers(7)}, {"r.weight": numbers(7)}, layers={"r.0": "RMSNormalization"})


def test_lstm() -> None:
    for cell in ["", ".cell", ".lstm_cell", ".lstm_cell_1"]:
        kernel, recurrent, bias = numbers(3, 8), numbers(2, 8), numbers(8)
        stored = {f"l{cell}.kernel": kernel, f"l{cell}.recurrent_kernel": recurrent, f"l{cell}.bias": bias}
        expected = {"l.weight_ih_l0": kernel.T, "l.weight_hh_l0": recurrent.T, "l.bias_l0": bias}
        require(stored, expected)
        require({f"l{cell}.{at}": array for at, array in enumerate(stored.values())}, expected)


def test_gru() -> None:
    kernel, recurrent, bias = numbers(5, 6), numbers(2, 6), numbers(2, 6)
    stored = {"g.cell.kernel": kernel, "g.cell.recurrent_kernel": recurrent, "g.cell.bias": bias}
    expected = {
        "g.weight_ih_l0": gates(kernel.T, (1, 0, 2), 3),
        "g.weight_hh_l0": gates(recurrent.T, (1, 0, 2), 3),
        "g.bias_ih_l0": gates(bias[0], (1, 0, 2), 3),
        "g.bias_hh_l0": gates(bias[1], (1, 0, 2), 3),
    }
    require(stored, expected)
    # Without reset_after a bias is one, and PyTorch has no such GRU.
    untouched({**stored, "g.cell.bias": numbers(6)})


def test_simple_rnn_and_both_directions() -> None:
    kernel, recurrent, bias = numbers(5, 2), numbers(2, 2), numbers(2)
    stored = {"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}
    expected = {"weight_ih_l0": kernel.T, "weight_hh_l0": recurrent.T, "bias_l0": bias}
    for place, suffix in (("forward_layer", ""), ("backward_simple_rnn", "_reverse")):
        require(
            {f"b.{place}.simple_rnn_cell.{name}": array for name, array in stored.items()},
            {f"b.{name}{suffix}": array for name, array in expected.items()},
        )


def test_attention() -> None:
    cases = [
        ("query", "key", "value", "attention_output"),
        ("_query_dense", "_key_dense", "_value_dense", "_output_dense"),
    ]
    for parts in cases:
        embedded, heads, width = 6, 2, 3
        kernels = [numbers(embedded, heads, width, start=100 * at) for at in range(3)]
        biases = [numbers(heads, width, start=100 * at) for at in range(3)]
        out = numbers(heads, width, embedded)
        stored = {f"m.{part}.kernel": kernel for part, kernel in zip(parts, [*kernels, out], strict=True)}
        stored |= {f"m.{part}.bias": bias for part, bias in zip(parts, [*biases, numbers(6)], strict=True)}
        items = torch_layout_items(checkpoint(stored, "keras"))
        whole = np.concatenate([kernel.reshape(embedded, heads * width).T for kernel in kernels])
        found = arrays_and_rules(
            fuse_split_parameters(items, torch_layout_items(checkpoint({"m.in_proj_weight": whole})))
        )
        assert np.array_equal(found["m.in_proj_weight"][0], whole)
        assert np.array_equal(
            found["m.in_proj_bias"][0], np.concatenate([bias.reshape(-1) for bias in biases])
        )
        assert np.array_equal(found["m.out_proj.weight"][0], out.reshape(heads * width, embedded).T)
        assert len(found) == 4
        assert np.array_equal(
            arrays_and_rules(items)["m.k_proj.weight"][0], kernels[1].reshape(embedded, -1).T
        )


def test_dense_layers_that_are_called_as_the_parts_of_an_attention() -> None:
    stored = {f"self.{part}.kernel": numbers(4, 6) for part in ("query", "key", "value")}
    require(stored, {name.replace("kernel", "weight"): array.T for name, array in stored.items()})


# Keras, by what the files say, and by the shapes of numbered variables -----------------------------------


def test_flattened_dense() -> None:
    channels, height, width, units = 2, 3, 4, 5
    weight = numbers(units, channels * height * width)
    kernel = weight.reshape(units, channels, height, width).transpose(2, 3, 1, 0).reshape(-1, units)
    for name in ("f.0", "f.kernel"):
        require({name: kernel}, {"f.weight": weight}, layers={name: LayerKind("Dense", flattened=(3, 4, 2))})
    plain = {"f.kernel": LayerKind("Dense", flattened=(1, 1, 24))}
    require({"f.kernel": kernel}, {"f.weight": kernel.T}, layers=plain)


def test_the_kernel_of_a_dense_behind_a_flattened_sequence() -> None:
    steps, channels, units = 4, 6, 5
    weight = numbers(units, channels * steps)
    kernel = weight.reshape(units, channels, steps).transpose(2, 1, 0).reshape(-1, units)
    require({"f.0": kernel}, {"f.weight": weight}, layers={"f.0": LayerKind("Dense", flattened=(4, 6))})


def test_a_flattened_shape_that_does_not_fit_turns_nothing_wrong() -> None:
    cases = [(None, 0), (None, 7), (0, 4), (5, 5), (1 << 62, 1 << 62), (24, 24)]
    for shape in cases:
        kernel = numbers(24, 5)
        (item,) = torch_layout_items(
            checkpoint({"f.0": kernel}, "keras", {"f.0": LayerKind("Dense", flattened=shape)})
        )
        assert sorted(item.tensor.array().ravel()) == sorted(kernel.ravel())


def test_a_dense_behind_an_unknown_flatten_is_in_doubt() -> None:
    (item,) = torch_layout_items(
        checkpoint({"f.0": numbers(24, 5)}, "keras", {"f.0": LayerKind("Dense", flattened=())})
    )
    assert (item.name, item.tensor.shape) == ("f.weight", (5, 24))
    assert item.doubt is not None
    assert item.doubt.text == "it follows a Flatten of unknown shape"


def test_numbered_variables_whose_shapes_tell_the_layer() -> None:
    cases = [
        ([(3, 5), (5,)], ["weight", "bias"]),
        ([(4, 4), (4,)], ["weight", "bias"]),
        ([(3, 3, 2, 5), (5,)], ["weight", "bias"]),
        ([(3, 3, 2, 4), (8,)], ["weight", "bias"]),
        ([(4,), (4,), (4,), (4,)], ["weight", "bias", "running_mean", "running_var"]),
        ([(3, 8), (2, 8), (8,)], ["weight_ih_l0", "weight_hh_l0", "bias_l0"]),
        ([(3, 8), (2, 8)], ["weight_ih_l0", "weight_hh_l0"]),
    ]
    for shapes, leaves in cases:
        found = turned({f"x.{at}": numbers(*shape) for at, shape in enumerate(shapes)})
        assert [name.removeprefix("x.") for name in found] == leaves, shapes


def test_numbered_variables_that_several_layers_could_have() -> None:
    cases = [
        [(3, 5)],  # a Dense without bias, or an Embedding
        [(4, 4)],
        [(3, 3, 2, 5)],  # a convolution, maybe a depthwise one
        [(5,), (5,)],  # a LayerNormalization, or a BatchNormalization that neither scales nor centers
        [(5,), (5,), (5,)],
        [(2, 3, 5), (5,)],  # a Conv1D, or the output of an attention
        [(5, 3), (5,)],
        [(3, 3, 4, 1), (4,)],  # a depthwise convolution, or a transposed one
        [(3, 7), (2, 7), (7,)],
        [(3, 6), (2, 6), (6,)],
    ]
    for shapes in cases:
        untouched({f"x.{at}": numbers(*shape) for at, shape in enumerate(shapes)})


def test_what_the_files_say_counts_more_than_shapes() -> None:
    untouched({"x.0": numbers(3, 5), "x.1": numbers(5)}, {"x.0": "EinsumDense", "x.1": "EinsumDense"})
    untouched({"x.kernel": numbers(3, 5)}, {"x.kernel": "EinsumDense"})
    require({"x.0": numbers(3, 5)}, {"x.weight": numbers(3, 5)}, layers={"x.0": "Embedding"})


def test_lists_of_tensors_are_no_numbered_variables() -> None:
    for family in ["torch", "tensorflow"]:
        untouched({"x.0": numbers(3, 5), "x.1": numbers(5)}, family=family)


def test_a_cell_of_tensorflow_1_holds_both_kernels_in_one() -> None:
    untouched({"rnn/basic_lstm_cell/kernel": numbers(5, 8), "rnn/basic_lstm_cell/bias": numbers(8)})


def test_an_optimizer_has_no_layers() -> None:
    stored = checkpoint({"optimizer.kernel": numbers(3, 5)}, "keras", optimizer="optimizer")
    assert [item.rule for item in torch_layout_items(stored)] == [None]


def test_types_without_whole_bytes_stay_as_they_are() -> None:
    from ckpttool import Role, Tensor
    from ckpttool.core.dtypes import BY_NAME
    from tests.support.checkpoints import of_tensors

    four = Tensor(("d", "kernel"), BY_NAME["float4_e2m1fn"], (4, 2), Role.WEIGHTS)
    (item,) = torch_layout_items(of_tensors([four], "keras"))
    assert item.tensor is four and item.rule is None


# Paddle -------------------------------------------------------------------------------------------------


def test_paddle_linear() -> None:
    weight, bias = numbers(3, 5), numbers(5)
    expected = {"fc.weight": weight.T, "fc.bias": bias}
    require({"fc.weight": weight, "fc.bias": bias}, expected, family="paddle")
    require({"fc.w_0": weight, "fc.b_0": bias}, expected, family="paddle")
    require({"fc.w_0": weight}, {"fc.weight": weight.T}, family="paddle", layers={"fc.w_0": "linear"})


def test_paddle_matrices_of_unknown_layers_keep_their_layout() -> None:
    for known in (None, {"e.weight": "embedding"}):
        untouched({"e.weight": numbers(4, 4)}, known, "paddle")
    untouched({"e.weight": numbers(5, 3), "e.bias": numbers(5)}, family="paddle")
    untouched({"c.weight": numbers(2, 3, 3, 3), "c.bias": numbers(2)}, family="paddle")


def test_paddle_names() -> None:
    stored = {"n.w_0": numbers(3), "n.b_0": numbers(3), "n.w_1": numbers(3), "n.w_2": numbers(3)}
    names = ("weight", "bias", "running_mean", "running_var")
    require(stored, {f"n.{name}": numbers(3) for name in names}, family="paddle")
    kept = {f"n.{name}": numbers(3) for name in ("weight", "bias", "_mean", "_variance")}
    require(kept, {f"n.{name}": numbers(3) for name in names}, family="paddle")
    cell = {"r.w_0": numbers(8, 3), "r.w_1": numbers(8, 2), "r.b_0": numbers(8), "r.b_1": numbers(8)}
    found = turned(cell, dict.fromkeys(cell, "lstm_cell"), "paddle")
    assert list(found) == [f"r.{kind}_{part}_l0" for kind in ("weight", "bias") for part in ("ih", "hh")]
    untouched(cell, family="paddle")


# What one side has in one -------------------------------------------------------------------------------


def test_two_biases_are_summed_where_the_other_side_has_one() -> None:
    ih, hh = np.float32([1.5, 2, 3, 4]), np.float32([0.25, 1, 1, 1])
    lstm = {"l.weight_hh_l0": numbers(4, 1), "l.bias_ih_l0": ih, "l.bias_hh_l0": hh}
    other = torch_layout_items(checkpoint({"l.bias_l0": ih}))
    found = arrays_and_rules(fuse_split_parameters(torch_layout_items(checkpoint(lstm)), other))
    assert list(found) == ["l.weight_hh_l0", "l.bias_l0"]
    assert np.array_equal(found["l.bias_l0"][0], ih + hh)
    assert (
        len(fuse_split_parameters(torch_layout_items(checkpoint(lstm)), torch_layout_items(checkpoint(lstm))))
        == 3
    )
    gru = {"g.weight_hh_l0": numbers(6, 2), "g.bias_ih_l0": numbers(6), "g.bias_hh_l0": numbers(6)}
    assert len(fuse_split_parameters(torch_layout_items(checkpoint(gru)), other)) == 3


def test_parts_of_an_attention_of_different_shapes_stay_apart() -> None:
    stored = {f"m.{part}_proj.weight": numbers(4, at + 2) for at, part in enumerate("qkv")}
    other = torch_layout_items(checkpoint({"m.in_proj_weight": numbers(12, 4)}))
    assert [
        item.name for item in fuse_split_parameters(torch_layout_items(checkpoint(stored)), other)
    ] == list(stored)


# The way back -------------------------------------------------------------------------------------------


def require_back(items: list[LayoutItem]) -> None:
    """Require that what each item is made of comes back from it, to the last element."""
    for item in items:
        for at, source in enumerate(item.sources):
            made = item.to_source(item.tensor, at)
            assert made.path == source.path
            expected = source.array() if item.row is None else source.array()[item.row : item.row + 1]
            assert np.array_equal(made.array(), expected), (item.name, source.name)


def test_what_a_rule_made_comes_back() -> None:
    cases = [
        ({"d.kernel": numbers(3, 5)}, None),
        ({"c.kernel": numbers(2, 3, 4, 5), "c.bias": numbers(5)}, None),
        ({"c.kernel": numbers(3, 4, 5), "c.bias": numbers(5)}, None),
        ({"d.depthwise_kernel": numbers(2, 3, 4, 2)}, None),
        ({"n.gamma": numbers(3), "n.beta": numbers(3)}, None),
        (
            {
                "l.cell.kernel": numbers(3, 8),
                "l.cell.recurrent_kernel": numbers(2, 8),
                "l.cell.bias": numbers(8),
            },
            None,
        ),
        ({"g.kernel": numbers(5, 6), "g.recurrent_kernel": numbers(2, 6), "g.bias": numbers(2, 6)}, None),
        ({f"m.{part}.kernel": numbers(6, 2, 3) for part in ("query", "key", "value")}, None),
        ({"f.0": numbers(24, 5)}, {"f.0": LayerKind("Dense", flattened=(3, 4, 2))}),
        ({"f.0": numbers(24, 5)}, {"f.0": LayerKind("Dense", flattened=(None, 2))}),
        ({"f.0": numbers(24, 5)}, {"f.0": LayerKind("Dense", flattened=(2, 3, 2, 2))}),
    ]
    for stored, layers in cases:
        items = torch_layout_items(checkpoint(stored, "keras", layers))
        assert any(item.rule for item in items), layers
        require_back(items)


def test_what_was_put_together_comes_back() -> None:
    parts = {
        f"m.{part}.kernel": numbers(6, 2, 3, start=at) for at, part in enumerate(("query", "key", "value"))
    }
    other = torch_layout_items(checkpoint({"m.in_proj_weight": numbers(18, 6)}))
    (whole,) = fuse_split_parameters(torch_layout_items(checkpoint(parts, "keras")), other)
    require_back([whole])
    lstm = {"l.weight_hh_l0": numbers(4, 1), "l.bias_ih_l0": numbers(4), "l.bias_hh_l0": numbers(4, start=2)}
    bias = torch_layout_items(checkpoint({"l.bias_l0": numbers(4)}))
    summed = fuse_split_parameters(torch_layout_items(checkpoint(lstm)), bias)[1]
    assert np.array_equal(summed.to_source(summed.tensor, 0).array(), numbers(4) + numbers(4, start=2))
    assert np.array_equal(summed.to_source(summed.tensor, 1).array(), np.zeros(4, "f4"))


def test_the_way_back_takes_the_shape_of_its_item_alone() -> None:
    (item,) = torch_layout_items(checkpoint({"d.kernel": numbers(3, 5)}, "keras"))
    (other,) = torch_layout_items(checkpoint({"d.weight": numbers(3, 5)}))
    with pytest.raises(LayoutMismatch, match=r"shape \[3, 5\], not \[5, 3\]"):
        item.to_source(other.tensor)


def test_a_dense_behind_channels_alone() -> None:
    channels, places, units = 2, 12, 5
    weight = numbers(units, channels * places)
    kernel = weight.reshape(units, channels, places).transpose(2, 1, 0).reshape(-1, units)
    require({"f.0": kernel}, {"f.weight": weight}, layers={"f.0": LayerKind("Dense", flattened=(None, 2))})
    untouched_names = turned({"f.0": numbers(25, 5)}, {"f.0": LayerKind("Dense", flattened=(None, 2))})
    assert np.array_equal(untouched_names["f.kernel"][0], numbers(25, 5))


# Files --------------------------------------------------------------------------------------------------


def test_arrays_under_names_of_keras_become_those_of_the_twin() -> None:
    truth = np.load(FIXTURES / "twin.npz")
    with open_checkpoint(FIXTURES / "twin-keras.npz") as stored:
        found = arrays_and_rules(torch_layout_items(stored))
    for name, (array, _) in found.items():
        if name != "lstm.bias_l0":
            assert np.array_equal(array, truth[name.replace("/", ".")]), name
    assert np.array_equal(found["lstm.bias_l0"][0], truth["lstm.bias_ih_l0"] + truth["lstm.bias_hh_l0"])
    assert len(found) == 16


def opened(arrays: Arrays, path: Path) -> Checkpoint:
    np.savez(path, **arrays)
    return open_checkpoint(path)


def test_opening_and_arranging_reads_no_value(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with opened({"d/kernel": numbers(300, 200)}, path) as stored:
        (item,) = torch_layout_items(stored)
        whole = path.read_bytes()
        assert stored["d/kernel"].extent is not None
        at = stored["d/kernel"].extent.offset
        path.write_bytes(whole[:at] + bytes(240_000) + whole[at + 240_000 :])
        assert not item.tensor.array().any()


def test_every_rule_is_reached() -> None:
    """Each key of the table is a kind that some layer has; a key that nothing leads to would hide a gap."""
    from ckpttool.formats.keras import layers as keras_layers
    from ckpttool.weights.pairing import layers

    source = Path(layers.__file__).read_text() + Path(keras_layers.__file__).read_text()
    assert [kind for kind in RULES if f'"{kind}"' not in source] == []


FORWARD = """
import os, sys
import keras, numpy as np, torch

from ckpttool.weights.pairing.layouts import torch_layout_items
from ckpttool.weights.pairing.layouts import fuse_split_parameters
from ckpttool.formats import open_checkpoint

keras.utils.set_random_seed(5)
layers, nn = keras.layers, torch.nn
chance = np.random.default_rng(3)


def last(found):
    return found if not isinstance(found, tuple) else found[0]


def attend(module):
    return lambda x: module(x, x, x, need_weights=False)[0]


CASES = {
    "dense": (layers.Dense(4), nn.Linear(3, 4), (2, 3), None),
    "conv1d": (layers.Conv1D(4, 3), nn.Conv1d(2, 4, 3), (2, 7, 2), (0, 2, 1)),
    "conv2d": (layers.Conv2D(4, (3, 2)), nn.Conv2d(2, 4, (3, 2)), (2, 6, 5, 2), (0, 3, 1, 2)),
    "deconv": (layers.Conv2DTranspose(4, 3), nn.ConvTranspose2d(2, 4, 3), (2, 5, 5, 2), (0, 3, 1, 2)),
    "depth": (
        layers.DepthwiseConv2D(3, depth_multiplier=2),
        nn.Conv2d(2, 4, 3, groups=2),
        (2, 5, 5, 2),
        (0, 3, 1, 2),
    ),
    "norm": (layers.BatchNormalization(epsilon=1e-5), nn.BatchNorm1d(3), (4, 3), None),
    "gru": (layers.GRU(3, return_sequences=True), nn.GRU(2, 3, batch_first=True), (2, 4, 2), None),
    "lstm": (layers.LSTM(3, return_sequences=True), nn.LSTM(2, 3, batch_first=True), (2, 4, 2), None),
    "rnn": (layers.SimpleRNN(3, return_sequences=True), nn.RNN(2, 3, batch_first=True), (2, 4, 2), None),
    "both": (
        layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
        nn.LSTM(2, 3, batch_first=True, bidirectional=True),
        (2, 4, 2),
        None,
    ),
    "attention": (
        layers.MultiHeadAttention(2, 3), nn.MultiheadAttention(6, 2, batch_first=True), (2, 4, 6), None
    ),
}
for name, (own, module, shape, order) in CASES.items():
    inputs = keras.Input(shape[1:])
    outputs = own(inputs, inputs) if name == "attention" else own(inputs)
    model = keras.Model(inputs, outputs)
    model.set_weights([chance.normal(size=one.shape) ** 2 + 0.1 for one in model.weights])
    path = os.path.join(sys.argv[1], name + ".keras")
    model.save(path)
    with open_checkpoint(path) as stored:
        wanted = [type("Named", (), {"name": key}) for key in module.state_dict()]
        state = {
            item.name.split(".", 1)[1]: torch.from_numpy(np.array(item.tensor.array()))
            for item in fuse_split_parameters(torch_layout_items(stored), wanted)
        }
    for key in [key for key in state if key.startswith("bias_l0")]:  # the way back: the sum, and zeros
        total = state.pop(key)
        state[key.replace("_l0", "_ih_l0")], state[key.replace("_l0", "_hh_l0")] = total, total * 0
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"num_batches_tracked"}, (name, missing, unexpected)
    module.eval()
    given = chance.normal(size=shape).astype("float32")
    as_torch = torch.from_numpy(given if order is None else given.transpose(order).copy())
    found = last((attend(module) if name == "attention" else module)(as_torch)).detach().numpy()
    expected = np.array(model(given, training=False))
    if order is not None:
        expected = expected.transpose(order)
    assert np.abs(found - expected).max() < 1e-5, (name, np.abs(found - expected).max())
print("forward", len(CASES))
"""


@pytest.mark.framework
def test_what_the_rules_make_computes_the_same(tmp_path: Path) -> None:
    assert python_with_frameworks("-c", FORWARD, tmp_path).split() == ["forward", "11"]

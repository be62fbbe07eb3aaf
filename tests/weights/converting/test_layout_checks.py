"""Of which weights nothing says in which order their elements are."""

from __future__ import annotations

import pytest

from ckpttool import Checkpoint
from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
from ckpttool.weights.converting.layout_checks import refusal_text
from ckpttool.weights.pairing.layers import UNWIRED, layout_doubts
from tests.support.checkpoints import checkpoint, numbers
from tests.support.tensors import Array


def doubted(opened: Checkpoint) -> dict[str, str]:
    return {tensor.name: reason.text for tensor, reason in layout_doubts(opened)}


def unwired(**shapes: tuple[int, ...]) -> list[str]:
    weights = {f"{name}.kernel": numbers(*shape) for name, shape in shapes.items()}
    return list(doubted(checkpoint({"c.kernel": numbers(3, 3, 2, 4), **weights}, "keras")))


def test_weights_alone_do_not_say_what_stands_behind_a_flatten() -> None:
    assert unwired(a=(36, 8), b=(8, 2)) == ["a.kernel", "b.kernel"]
    assert unwired(a=(2, 80)) == ["a.kernel"]  # an image may be made of what it gives
    assert unwired(a=(4, 1)) == ["a.kernel"]  # two places with two channels
    assert unwired(a=(3, 3), b=(1, 2)) == []  # no image has as few elements
    assert list(doubted(checkpoint({"a.kernel": numbers(12, 3)}, "keras"))) == ["a.kernel"]


@pytest.mark.parametrize("family", ["torch", "paddle"])
def test_pytorchs_own_and_paddles_are_in_one_order(family: str) -> None:
    assert doubted(checkpoint({"a.weight": numbers(36, 8), "a.bias": numbers(8)}, family)) == {}


def wired(
    kind: LayerKind | str, weights: dict[str, Array], layers: dict[str, LayerKind | str]
) -> dict[str, str]:
    return doubted(checkpoint(weights, "keras", layers | {"a.kernel": kind}))


DENSE = {"a.kernel": numbers(36, 8), "a.bias": numbers(8)}


def test_a_configuration_says_how_layers_are_connected() -> None:
    cases = [
        ("Dense", None),
        (LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.UNWIRED)), UNWIRED.text),
        (LayerKind("Dense", flattened=(3, 3, 4)), None),
        (LayerKind("Dense", flattened=(None, 4)), None),
        (LayerKind("Dense", flattened=(1, 1, 36)), None),
        (LayerKind("Dense", flattened=()), "it follows a Flatten of unknown shape"),
        (
            LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Permute")),
            "it follows a Permute",
        ),
    ]
    for kind, why in cases:
        assert wired(kind, DENSE, {}) == ({} if why is None else {"a.kernel": why}), kind
        weights = {**DENSE, "strange.kernel": numbers(8, 8)}
        assert wired(kind, weights, {}).keys() == {"strange.kernel", *(["a.kernel"] if why else [])}, kind


def test_vectors_may_be_in_another_order() -> None:
    unlike = DoubtReason(LayoutDoubt.OUTPUT_ORDER, "a Reshape")
    weights = {**DENSE, "b.gamma": numbers(8), "b.beta": numbers(8)}
    layers = {
        "a.bias": LayerKind("Dense", doubt=unlike),
        **dict.fromkeys(("b.gamma", "b.beta"), LayerKind("BatchNormalization", doubt=unlike)),
    }
    assert wired(LayerKind("Dense", doubt=unlike), weights, layers) == dict.fromkeys(
        weights, "a Reshape uses its output"
    )


def test_a_gru_without_a_bias_is_not_known() -> None:
    kernels = {"g.kernel": numbers(4, 18), "g.recurrent_kernel": numbers(6, 18)}
    why = {"g.kernel": "a GRU without a bias does not show whether reset_after is set"}
    assert doubted(checkpoint(kernels, "keras")) == why
    assert doubted(checkpoint({**kernels, "g.bias": numbers(2, 18)}, "keras")) == {}
    opened = checkpoint(kernels, "keras", dict.fromkeys(kernels, "GRU"))
    opened.metadata = {"model_config": {"class_name": "Sequential"}}  # type: ignore[misc]
    assert doubted(opened) == {}
    early = checkpoint(kernels, "keras", dict.fromkeys(kernels, LayerKind("GRU", reset_after=False)))
    assert set(doubted(early).values()) == {"reset_after is not set"}
    assert refusal_text(layout_doubts(early)) == (
        "g.kernel, g.recurrent_kernel: reset_after is not set, but PyTorch's GRU sets it"
    )


def test_each_reason_is_said_with_its_weights_and_the_way_out() -> None:
    told = refusal_text(
        layout_doubts(checkpoint({f"{at}.kernel": numbers(6, 6) for at in range(5)}, "keras"))
    )
    assert told.startswith("0.kernel, 1.kernel, 2.kernel and 2 more: it may follow a Flatten or precede")
    assert "a whole Keras model" in told and 'rule = "dense"' in told

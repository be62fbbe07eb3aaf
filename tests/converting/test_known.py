"""Of which tensors nothing says how they lie."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.converting.known import maybe_flattened
from tests.pairing.checkpoints import checkpoint, numbers

CONV = {"c.kernel": numbers(3, 3, 2, 4), "c.bias": numbers(4)}


def flat(**shapes: tuple[int, ...]) -> list[str]:
    weights = {**CONV, **{f"{name}.kernel": numbers(*shape) for name, shape in shapes.items()}}
    return [one.name for one in maybe_flattened(checkpoint(weights, "keras"))]


def test_what_may_take_a_flattened_image() -> None:
    assert flat(a=(36, 8)) == ["a.kernel"]
    assert flat(a=(37, 8)) == ["a.kernel"]  # what is flattened may be joined with something else
    assert flat(a=(4, 8)) == []  # one place for each channel, or a mean over all
    assert flat(a=(3, 8)) == []
    assert flat(a=(36, 8), b=(8, 2)) == ["a.kernel"]
    assert flat(a=(36, 8), b=(36, 8)) == ["a.kernel", "b.kernel"]


def test_without_convolutions_there_is_no_image() -> None:
    weights = {"a.kernel": numbers(36, 8), "b.kernel": numbers(8, 2)}
    assert maybe_flattened(checkpoint(weights, "keras")) == []


@pytest.mark.parametrize(
    ("layers", "kind", "found"),
    [
        ([], "Dense", []),
        (["Flatten"], "Dense after Flatten (3, 3, 4)", []),
        (["Flatten"], "Dense", ["a.kernel"]),
        (["Reshape"], "Dense", ["a.kernel"]),
        (["Flatten", "Flatten"], "Dense after Flatten (3, 3, 4)", []),
    ],
)
def test_a_configuration_says_what_stands_behind_a_flatten(
    layers: list[str], kind: str, found: list[str]
) -> None:
    weights: dict[Any, Any] = {**CONV, "a.kernel": numbers(36, 8)}
    opened = checkpoint(weights, "keras", {"a.kernel": kind, "c.kernel": "Conv2D"})
    nodes = [{"class_name": name, "config": {}} for name in layers]
    opened.metadata = {"model_config": {"config": {"layers": nodes}}}  # type: ignore[misc]
    assert [one.name for one in maybe_flattened(opened)] == found

"""Another checkpoint's names, layouts and architecture, with the values of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from ckpttool import Role, UsageError, open_checkpoint
from ckpttool.containers.toml import parse_toml
from ckpttool.weights.converting.map_edits import rename_by_map
from ckpttool.weights.converting.template_model import follow_template
from ckpttool.weights.converting.weight_selection import only_weights
from ckpttool.weights.pairing.map_file import parse_map
from tests.support.checkpoints import checkpoint, numbers, of_tensors, tensor
from tests.support.contents import arrays, content_of
from tests.support.tensors import Array
from tests.support.twins import FIXTURES, unpacked


def followed(
    source: Path, model: Path, only: str = "all", text: str = ""
) -> tuple[dict[str, Array], list[str]]:
    with open_checkpoint(source) as opened, open_checkpoint(model) as other:
        content = content_of(opened)
        if only == "weights":
            content, _ = only_weights(content, opened)
        if text:
            content, _ = rename_by_map(content, parse_map("map.toml", parse_toml(text)))
        made, notes = follow_template(content, opened, other)
        assert made.tree is None and made.source_format == other.format
        return arrays(made), notes


def held(path: Path) -> dict[str, Array]:
    with open_checkpoint(path) as opened:
        return {one.name: one.array().copy() for one in opened.tensors}


def require_equal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape and np.array_equal(found[name], array), name


# The twins: what one framework wrote of the same network is what the other's file becomes ---------------


@pytest.mark.parametrize("source", ["twin", "twin-module", "twin-compiled", "twin-renamed"])
@pytest.mark.parametrize("model", ["twin-changed.keras", "twin-changed.h5", "twin-changed-keras2.h5"])
def test_keras_with_the_values_of_pytorch(twins: Path, source: str, model: str) -> None:
    found, notes = followed(FIXTURES / f"{source}.pth", twins / model)
    require_equal(found, held(twins / model.replace("-changed", "")))
    assert "Dense kernel (I, O) = Linear weight (O, I): 2 tensors" in notes
    assert notes[-1].endswith("bn1.num_batches_tracked")


@pytest.mark.parametrize("source", ["twin.keras", "twin.h5", "twin-keras2.h5"])
def test_pytorch_with_the_values_of_keras(twins: Path, source: str) -> None:
    model = held(FIXTURES / "twin-changed.pth")
    both = np.load(FIXTURES / "twin.npz")
    expected = {**model, **{name: both[name] for name in both}}
    expected["lstm.bias_ih_l0"] = both["lstm.bias_ih_l0"] + both["lstm.bias_hh_l0"]
    expected["lstm.bias_hh_l0"] = np.zeros_like(both["lstm.bias_hh_l0"])
    found, notes = followed(twins / source, FIXTURES / "twin-changed.pth")
    require_equal(found, expected)
    assert notes[-1] == "kept from the model: bn1.num_batches_tracked"


@pytest.mark.parametrize("source", ["twin.keras", "twin.h5", "twin.weights.h5"])
@pytest.mark.parametrize(
    "model", ["-tf/ckpt-1", "-functional-tf/ckpt-1", "-keras2-savedmodel", "-savedmodel"]
)
def test_tensorflow_with_the_values_of_keras(twins: Path, source: str, model: str) -> None:
    found, _ = followed(twins / source, twins / f"twin-changed{model}")
    require_equal(found, held(twins / f"twin{model}"))


@pytest.mark.parametrize("model", ["twin-changed-fluid", "twin-changed.pdparams"])
def test_paddle_with_the_values_of_pytorch(twins: Path, model: str) -> None:
    found, _ = followed(FIXTURES / "twin.pth", twins / model)
    require_equal(found, held(twins / model.replace("-changed", "")))


def test_a_zoo_of_layers_both_ways(twins: Path) -> None:
    found, _ = followed(twins / "zoo.keras", twins / "zoo.safetensors")
    require_equal(found, load_file(twins / "zoo.safetensors"))
    found, _ = followed(twins / "zoo.safetensors", twins / "zoo.keras")
    require_equal(found, held(twins / "zoo.keras"))


def test_a_dense_behind_a_flatten_is_not_guessed(twins: Path) -> None:
    for model in ("twin-tf/ckpt-1", "twin.weights.h5"):
        with pytest.raises(UsageError, match="may follow a Flatten"):
            followed(FIXTURES / "twin.pth", twins / model)
    text = "".join(
        f'[[tensor]]\nfrom = "{name}.weight"\nto = "model.{name}._kernel"\nrule = "dense"\n'
        for name in ("fc1", "fc2")
    )
    found, _ = followed(FIXTURES / "twin.pth", twins / "twin-changed-tf" / "ckpt-1", text=text)
    require_equal(found, held(twins / "twin-tf" / "ckpt-1"))


def test_a_map_gives_names_that_pair(twins: Path) -> None:
    parts = [f'"layers.*.{part}.weight" = "{part}*.kernel"' for part in "qkvo"]
    parts += [f'"layers.*.norm.{own}" = "norm*.{to}"' for own, to in (("weight", "gamma"), ("bias", "beta"))]
    many = unpacked("many", twins.parent / "many")
    found, _ = followed(many / "many.pth", many / "many-changed.h5", text="[names]\n" + "\n".join(parts))
    require_equal(found, held(many / "many.h5"))
    with pytest.raises(UsageError, match=r"many-changed\.h5: the model has no layers\.0\.q\.weight"):
        followed(many / "many.pth", many / "many-changed.h5")


# PyTorch and PyTorch ------------------------------------------------------------------------------------


def test_containers_and_types_of_the_source(tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2).half(), nn.Linear(3, 2)
    torch.save({"state_dict": source.state_dict(), "epoch": 3}, tmp_path / "a.pth")
    torch.save({"model": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "b.pth")
    found, notes = followed(tmp_path / "a.pth", tmp_path / "b.pth")
    require_equal(found, {name: one.numpy() for name, one in source.state_dict().items()})
    assert "kept the source's types: float16, but float32 in the model" in notes
    assert "non-tensor values left out: epoch" in notes


def test_layers_that_are_alike_are_paired_in_order_where_all_follow_each_other_so() -> None:
    weights = {f"{at}.weight": numbers(2, 2, start=10 * at) for at in range(3)}
    source = checkpoint({f"in.{name}": array for name, array in weights.items()})
    model = checkpoint({f"fc{at}.{leaf}": numbers(2, 2) for at in range(3) for leaf in ("weight",)})
    pairs = "in.0 → fc0, in.1 → fc1, in.2 → fc2"
    with pytest.raises(UsageError, match=rf"^layers are alike.*: {pairs} \(--by-order accepts"):
        follow_template(content_of(source), source, model)
    made, notes = follow_template(content_of(source), source, model, by_order=True)
    require_equal(arrays(made), {f"fc{at}.weight": weights[f"{at}.weight"] for at in range(3)})
    assert notes == [f"paired by the order of their layers alone, which are alike: {pairs}"]
    other = checkpoint({"a.weight": numbers(2, 2), "b.weight": numbers(2, 2), "c.weight": numbers(3, 2)})
    swapped = checkpoint({"x.weight": numbers(4, 2), "y.weight": numbers(2, 2), "z.weight": numbers(2, 2)})
    told = r'a, b and y, z are alike; .* --map with \[names\] "a\.weight" = "y\.weight"'
    with pytest.raises(UsageError, match=told):
        follow_template(content_of(other), other, swapped)


def test_content_pairs_nothing() -> None:
    source = checkpoint({"a.weight": numbers(2, 2), "b.weight": numbers(2, 2, start=5)})
    model = checkpoint({"x.weight": numbers(2, 2, start=5), "y.weight": numbers(2, 2)})
    made, notes = follow_template(content_of(source), source, model, by_order=True)
    require_equal(arrays(made), {"x.weight": numbers(2, 2), "y.weight": numbers(2, 2, start=5)})
    assert "by the order of their layers alone" in notes[0]


def test_ties_of_the_model(tmp_path: Path) -> None:
    shared = torch.zeros(3, 2)
    torch.save({"embed.weight": shared, "head.weight": shared}, tmp_path / "model.pth")
    tied = torch.randn(3, 2)
    torch.save({"embed.weight": tied, "head.weight": tied}, tmp_path / "tied.pth")
    torch.save({"embed.weight": tied, "head.weight": tied.clone()}, tmp_path / "twice.pth")
    torch.save({"embed.weight": tied, "head.weight": tied + 1}, tmp_path / "other.pth")
    for name in ("tied", "twice"):
        with (
            open_checkpoint(tmp_path / f"{name}.pth") as one,
            open_checkpoint(tmp_path / "model.pth") as model,
        ):
            made, _ = follow_template(content_of(one), one, model)
            assert [(t.name, t.shares_with) for t in made.tensors] == [
                ("embed.weight", None),
                ("head.weight", "embed.weight"),
            ]
            require_equal(arrays(made), dict.fromkeys(("embed.weight", "head.weight"), tied.numpy()))
    with pytest.raises(UsageError, match=r"head\.weight differs"):
        followed(tmp_path / "other.pth", tmp_path / "model.pth")


# Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "model", "told"),
    [
        ({"a.weight": (2, 3)}, {"a.weight": (3, 2)}, r"a\.weight: 2×3, but a\.weight of the model is 3×2"),
        ({"a.weight": (2, 3), "b.weight": (4,)}, {"a.weight": (2, 3)}, r"the model has no b\.weight"),
        ({"a.weight": (2, 3)}, {"a.weight": (2, 3), "b.weight": (4,)}, r"the source has no b\.weight"),
    ],
)
def test_what_does_not_fit(source: Any, model: Any, told: str) -> None:
    ours, theirs = (
        checkpoint({name: numbers(*shape) for name, shape in one.items()}) for one in (source, model)
    )
    with pytest.raises(UsageError, match=told):
        follow_template(content_of(ours), ours, theirs)


def test_a_kernel_that_nothing_is_known_of() -> None:
    source, model = checkpoint({"a.weight": numbers(4, 3)}), checkpoint({"a.weight": numbers(4, 3)}, "keras")
    with pytest.raises(UsageError, match=r"a\.weight: unknown layer type"):
        follow_template(content_of(source), source, model)
    square, other = checkpoint({"a.weight": numbers(3, 3)}), checkpoint({"a.weight": numbers(3, 3)}, "keras")
    with pytest.raises(UsageError, match=r"a\.weight: square, of an unknown layer type"):
        follow_template(content_of(square), square, other)


def test_an_optimizer_is_refused_and_the_models_left_out() -> None:
    state = replace(tensor("optimizer.m", numbers(3)), role=Role.OPTIMIZER)
    weights = tensor("a.weight", numbers(2))
    trained, plain = of_tensors([weights, state]), of_tensors([weights])
    with pytest.raises(UsageError, match=r"^optimizer\.m: .*--only weights"):
        follow_template(content_of(trained), trained, plain)
    made, notes = follow_template(content_of(plain), plain, trained)
    assert list(arrays(made)) == ["a.weight"]
    assert notes == ["the model's optimizer left out (1 tensor)"]


def test_the_architecture_comes_from_the_model() -> None:
    source, model = (
        checkpoint({"a.kernel": numbers(2, 3)}, "keras"),
        checkpoint({"a.kernel": numbers(2, 3)}, "keras"),
    )
    model.native = {"keras.config": b"{}", "keras.optimizer": b"x"}  # type: ignore[misc]
    made, _ = follow_template(content_of(source), source, model)
    assert made.native == {"keras.config": b"{}"}

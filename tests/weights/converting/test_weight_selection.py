"""The model's tensors alone: what is taken off their names, what stays, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool import UsageError, open_checkpoint
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.weight_selection import only_weights
from tests.support.checkpoints import numbers
from tests.support.contents import arrays, content_of, made_of


@contextmanager
def weights_of(held: Any, path: Path) -> Iterator[tuple[Content, list[str]]]:
    torch.save(held, path / "m.pth")
    with open_checkpoint(path / "m.pth") as opened:
        yield only_weights(content_of(opened), opened)


def require_model(content: Content, state: dict[str, torch.Tensor]) -> None:
    assert list(arrays(content)) == list(state)
    assert all(np.array_equal(array, state[name].numpy()) for name, array in arrays(content).items())
    assert content.tree is None and content.metadata == {}


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict", "model", "module", "net", "weights"])
def test_a_container_is_taken_off(key: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    held = {key: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    with weights_of(held, tmp_path) as (content, notes):
        require_model(content, model.state_dict())
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).load_state_dict(
            {name: torch.from_numpy(np.array(array)) for name, array in arrays(content).items()}
        )
    assert notes == [
        "left out 12 optimizer tensors",
        f"removed the prefix '{key}.' from all names",
    ]


@pytest.mark.parametrize("front", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_taken_off(front: str, tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    with weights_of({"state_dict": {front + name: one for name, one in state.items()}}, tmp_path) as made:
        require_model(made[0], state)
        assert made[1][-1] == f"removed the prefix '{front}' from all names"
    with weights_of({front + name: one for name, one in state.items()}, tmp_path) as made:
        require_model(made[0], state)


def test_a_prefix_that_one_weight_lacks_stays(tmp_path: Path) -> None:
    state = {"module.a.weight": torch.ones(2), "b.weight": torch.zeros(2)}
    with weights_of(state, tmp_path) as (content, notes):
        require_model(content, state)
        assert notes == []


def test_two_models_keep_what_tells_them_apart(tmp_path: Path) -> None:
    parts = {name: nn.Linear(2, 2).state_dict() for name in ("generator", "discriminator")}
    with weights_of({**parts, "epoch": 1}, tmp_path) as (content, notes):
        names = [f"{part}.{name}" for part in parts for name in ("weight", "bias")]
        assert list(arrays(content)) == names
        assert notes == ["2 models, with their prefixes kept: generator, discriminator"]


def test_ties_stay_and_find_another_owner(tmp_path: Path) -> None:
    shared = torch.randn(4, 2)
    state = {"embed.weight": shared, "head.weight": shared, "free.weight": torch.randn(2)}
    held = {"ema": {"embed.weight": shared}, "model": state}
    with weights_of(held, tmp_path) as (content, _):
        assert [one.shares_with for one in content.tensors] == [None, "embed.weight", None]
        require_model(content, state)


def test_weights_at_the_root_and_in_a_container_keep_their_names(tmp_path: Path) -> None:
    held = {"model": {"fc.weight": torch.ones(2)}, "head.weight": torch.ones(3)}
    with weights_of(held, tmp_path) as (content, _):
        assert list(arrays(content)) == ["model.fc.weight", "head.weight"]


def test_the_attributes_of_tensorflow_and_the_layers_of_keras() -> None:
    held = {("model", "fc", "kernel"): numbers(2, 3), ("model", "fc", "bias"): numbers(3)}
    content, opened = made_of(held, "tensorflow")
    graph = {"tensorflow.object_graph": b"graph", "keras.config": b"{}"}
    made, notes = only_weights(replace(content, native=graph), opened)
    assert [one.path for one in made.tensors] == [("fc", "kernel"), ("fc", "bias")]
    assert made.native == {"keras.config": b"{}"}
    assert notes[-1] == "TensorFlow's object graph left out: its names differ"
    content, opened = made_of(held, "keras")
    made, notes = only_weights(
        replace(content, native={"keras.config": b"{}", "keras.optimizer": b"x"}), opened
    )
    assert [one.path for one in made.tensors] == list(held)
    assert made.native == {"keras.config": b"{}"} and notes == []


def test_no_weights_and_two_of_one_name_are_refused() -> None:
    content, opened = made_of({"optimizer.step": numbers(2)}, optimizer="optimizer")
    with pytest.raises(UsageError, match="no weights among its 1 tensor"):
        only_weights(content, opened)
    content, opened = made_of({("model", "a.b"): numbers(2), ("model", "a", "b"): numbers(3)})
    with pytest.raises(UsageError, match=r"a\.b: two weights would have this name"):
        only_weights(content, opened)


# What lies in one state dict --------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers whose names are those of a training, too, and what a module's name says nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("rng_offset", torch.tensor([1, 2]))
        self.scheduler = nn.Linear(2, 1)


def trained() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Return a model, its state dict as a plain dictionary, and the state of its optimizer."""
    model = Counting()
    del model.rng_offset
    optimizer = torch.optim.Adam(model.parameters())
    model.scheduler(model.bn(model.fc(torch.randn(4, 3)))).sum().backward()
    optimizer.step()
    return model, dict(model.state_dict()), optimizer.state_dict()


def require_loads(content: Content, model: nn.Module) -> None:
    found = {name: torch.from_numpy(np.array(array)) for name, array in arrays(content).items()}
    wanted = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(found, strict=True)
    assert all(torch.equal(one, wanted[name]) for name, one in model.state_dict().items())


WHOLES = {
    "tuple": lambda state, optimizer: (state, optimizer),
    "list": lambda state, optimizer: [state, {"epoch": 1}],
    "top": lambda state, optimizer: {
        **state,
        "epoch": 4,
        "optimizer": optimizer,
        "rng_state": torch.get_rng_state(),
        "best_acc": torch.tensor(0.9),
        "step": torch.tensor(7),
    },
    "nested": lambda state, optimizer: {"checkpoint": {"model": {"state_dict": state}}, "rng": torch.ones(2)},
    "unknown": lambda state, optimizer: ({"Snapshot": state}, {"state_of_it": optimizer}),
}


@pytest.mark.parametrize("name", WHOLES)
def test_a_state_dict_stays_whole(name: str, tmp_path: Path) -> None:
    model, state, optimizer = trained()
    with weights_of(WHOLES[name](state, optimizer), tmp_path) as (content, notes):
        require_loads(content, model)
    gone = {"nested": "checkpoint.model.state_dict.", "unknown": "0.Snapshot.", "tuple": "0.", "list": "0."}
    assert (notes[-1] == f"removed the prefix {gone.get(name)!r} from all names") == (name in gone)


def test_a_key_within_a_container_stays_where_it_is_none(tmp_path: Path) -> None:
    _, state, _ = trained()
    with weights_of({"snapshot": {"layers": state}, "x": {"lr": torch.tensor(0.1)}}, tmp_path) as made:
        assert list(arrays(made[0])) == [f"layers.{name}" for name in state]
        assert made[1][-1] == "removed the prefix 'snapshot.' from all names"


def test_a_real_state_dict_is_the_model_whatever_its_tensors_are_called(tmp_path: Path) -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9).state_dict()
    top = model.state_dict()
    top["epoch"], top["optimizer"] = 4, optimizer
    wholes = [
        model.state_dict(),
        top,
        [model.state_dict(), {"epoch": 1}],
        {"stage": {"best": model.state_dict()}, "epoch": 3},
    ]
    for held in wholes[:3]:
        with weights_of(held, tmp_path) as (content, _):
            require_loads(content, model)
    with weights_of(wholes[3], tmp_path) as (content, _):
        assert list(arrays(content)) == [f"stage.best.{one}" for one in model.state_dict()]


def test_averages_losses_and_optimizers_are_no_second_model(tmp_path: Path) -> None:
    model = Counting()
    held = {
        "model": model.state_dict(),
        "ema": model.state_dict(),
        "loss_fn": model.state_dict(),
        "scaler": nn.BatchNorm1d(1).state_dict(),
    }
    with weights_of(held, tmp_path) as (content, _):
        require_loads(content, model)


def test_one_tensor_is_told_in_the_singular(tmp_path: Path) -> None:
    with weights_of({"model": {"fc.weight": torch.ones(2)}, "loss": torch.tensor(0.5)}, tmp_path) as made:
        assert made[1][0] == "left out 1 other tensor (loss)"


def test_a_long_name_loses_its_middle(tmp_path: Path) -> None:
    key = "EarlyStopping{'monitor': 'val_loss', 'mode': 'min', 'patience': 3, 'min_delta': 0.0}.best_score"
    held = {"model": {"fc.weight": torch.ones(2)}, "callbacks": {key: torch.tensor(0.5)}}
    with weights_of(held, tmp_path) as (_, notes):
        start, end = "callbacks.EarlyStopping{'monitor': 'val", "patience': 3, 'min_delta': 0.0}.best_score"
        assert notes[0].startswith(f"left out 1 other tensor ({start}") and notes[0].endswith(f"{end[-30:]})")
        assert len(notes[0]) < len(key) + 20

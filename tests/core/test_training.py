"""What a checkpoint says of its training, whatever keys it used."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Role
from ckpttool.core.result import document_of, dumps
from ckpttool.core.tensor import role_of
from ckpttool.core.training import training_state

KEYS = st.one_of(
    st.sampled_from(
        (
            *("epoch", "step", "global_step", "loss", "train_loss", "val_loss", "lr", "learning_rate"),
            *("metrics", "hparams", "args", "config", "state", "meta", "trainer_state", "log_history"),
            *("optimizer", "optimizer_states", "param_groups", "callbacks", "monitor", "best", "best_acc"),
            *("best_model_path", "best_model_score", "<class>", "0", "seed", "time"),
        )
    ),
    st.text(max_size=8),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.just("0.5"), st.just("7")
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@given(
    st.dictionaries(KEYS, TREES, max_size=6),
    st.dictionaries(
        st.lists(KEYS | st.integers(0, 3), min_size=1, max_size=3).map(tuple),
        st.one_of(st.none(), st.integers(), st.floats()),
        max_size=4,
    ),
    st.text(max_size=30),
)
def test_any_tree_gives_a_state_that_json_can_hold(
    tree: dict[str, Any], scalars: dict[Any, Any], name: str
) -> None:
    readers = {path: (lambda value=value: value) for path, value in scalars.items()}
    state = training_state(tree, readers, name)
    document = json.loads(dumps(document_of(state)))
    assert all(
        value is None or isinstance(value, int | float | str)
        for value in (document["epoch"], document["loss"])
    )
    assert state.step is None or type(state.step) is int
    known = {f"metrics.{metric}" for metric in state.metrics}
    assert known <= set(state.origin)
    for field in ("epoch", "step", "loss", "learning_rate", "best", "saved_at", "seed"):
        assert (getattr(state, field) is None) == (field not in state.origin)


@given(st.lists(st.text(max_size=20) | st.integers(), max_size=5).map(tuple), st.booleans())
def test_any_path_has_a_role(path: tuple[str | int, ...], is_scalar: bool) -> None:
    assert isinstance(role_of(path, () if is_scalar else (2, 2)), Role)


FIELDS: list[tuple[dict[str, Any], str, object, str | None]] = [
    ({"epoch": 10}, "epoch", 10, "key epoch"),
    ({"epoch": "7"}, "epoch", 7, "key epoch"),
    ({"epoch": 0}, "epoch", 0, "key epoch"),
    ({"epoch": 1.5}, "epoch", 1.5, "key epoch"),
    ({"epoch": True}, "epoch", None, None),
    ({"epoch": "soon"}, "epoch", None, None),
    ({"epoch": None}, "epoch", None, None),
    ({"global_step": 4}, "step", 4, "key global_step"),
    ({"step": 4.0}, "step", 4, "key step"),
    ({"step": float("inf")}, "step", None, None),
    ({"iteration": 9, "global_step": 8}, "step", 8, "key global_step"),
    ({"loss": 0.25}, "loss", 0.25, "key loss"),
    ({"train_loss": 0.25}, "loss", 0.25, "key train_loss"),
    ({"lr": 0.1}, "learning_rate", 0.1, "key lr"),
    ({"seed": 42}, "seed", 42, "key seed"),
    (
        {"optimizer": {"param_groups": [{"lr": 0.01}]}},
        "learning_rate",
        0.01,
        "key optimizer.param_groups[0].lr",
    ),
    ({"best_acc": 0.9}, "best", 0.9, "key best_acc"),
    ({"meta": {"epoch": 3}}, "epoch", 3, "key meta.epoch"),
    ({"epoch": 2, "meta": {"epoch": 3}}, "epoch", 2, "key epoch"),
]


def test_fields_and_where_they_come_from() -> None:
    for tree, field, value, origin in FIELDS:
        state = training_state(tree, {}, "model.pth")
        assert (getattr(state, field), state.origin.get(field)) == (value, origin), tree


def test_nothing_is_known_of_nothing() -> None:
    state = training_state({}, {}, "model.pth")
    assert (state.epoch, state.step, state.loss, dict(state.metrics), dict(state.origin)) == (
        None,
        None,
        None,
        {},
        {},
    )


def test_loss_that_is_nan_is_told() -> None:
    loss = training_state({"loss": float("nan")}, {}, "m.pth").loss
    assert loss is not None and loss != loss


def test_scalar_tensor_is_read_when_no_value_has_the_name() -> None:
    state = training_state({}, {("epoch",): lambda: 5}, "m.pth")
    assert (state.epoch, state.origin["epoch"]) == (5, "tensor epoch")


STEPS: list[tuple[list[Any], int | None]] = [
    ([("app", "train_state", "step")], 0),
    ([("run", "progress", "deep", "step")], 0),
    ([("run", "step"), ("run", "global_step")], 1),
    ([("run", "step"), ("other", "step")], None),
    ([("run", "step"), ("ema", "step"), ("lr_scheduler", "step")], 0),
    ([("optimizer", "state", "step")], None),
    ([("anything", 0, "step")], None),
    ([("run", "n_step")], None),
]


def test_step_is_that_of_the_only_tensor_called_so() -> None:
    for paths, step in STEPS:
        state = training_state({}, {path: (lambda at=at: at) for at, path in enumerate(paths)}, "m.pth")
        origin = None if step is None else f"tensor {'.'.join(paths[step])}"
        assert (state.step, state.origin.get("step")) == (step, origin), paths


def test_step_that_is_a_plain_setting_is_not_taken() -> None:
    assert training_state({"logging": {"step": 10}}, {}, "m.pth").step is None
    assert training_state({"step": 3}, {("run", "step"): lambda: 5}, "m.pth").step == 3


def test_level_of_nothing_but_tensors_is_looked_into() -> None:
    scalars = {("app", "train_state", "epoch"): lambda: 4, ("app", "train_state", "loss"): lambda: 0.5}
    state = training_state({}, scalars, "m.pth")
    assert (state.epoch, state.loss) == (4, 0.5)
    assert state.origin["epoch"] == "tensor app.train_state.epoch"


def test_name_is_asked_last() -> None:
    assert training_state({}, {}, "model_epoch_7.pth").epoch == 7
    assert training_state({"epoch": 8}, {}, "model_epoch_7.pth").epoch == 8


def test_metrics_are_gathered() -> None:
    state = training_state({"val_loss": 0.5, "metrics": {"accuracy": 0.9}, "note": "x"}, {}, "m.pth")
    assert dict(state.metrics) == {"val_loss": 0.5, "accuracy": 0.9}


ROLES = {
    ("model_state_dict", "fc.weight"): Role.WEIGHTS,
    ("state_dict", "optimizer_net.weight"): Role.WEIGHTS,
    ("optimizer_state_dict", "state", 0, "exp_avg"): Role.OPTIMIZER,
    ("optimizer_states", 0, "state", 0, "exp_avg"): Role.OPTIMIZER,
    ("rng_state",): Role.TRAINING,
    ("lr_schedulers", 0, "best"): Role.TRAINING,
    ("generator", "conv.weight"): Role.WEIGHTS,
    ("train_state", "params", "kernel"): Role.WEIGHTS,
    ("train_state", "opt_state", "mu"): Role.OPTIMIZER,
    ("app", "train_state", "step"): Role.TRAINING,
    ("state", "kernel"): Role.WEIGHTS,
    ("opt_g", "state", 0, "exp_avg"): Role.OPTIMIZER,
}


def test_roles() -> None:
    assert {path: role_of(path, (2, 2)) for path in ROLES} == ROLES

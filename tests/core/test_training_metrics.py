"""What a checkpoint was measured at, and whose a value is: checked on what Lightning wrote, and on dicts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpttool import list_checkpoints, open_checkpoint, prune
from ckpttool.core.training import is_metric, training_state


@pytest.mark.parametrize(
    ("name", "metrics", "logged_as"),
    [
        ("best/epoch=1-val_loss=0.25.ckpt", {"val_loss": 0.25}, 7),
        ("best/epoch=3-val_loss=0.38.ckpt", {"val_loss": 0.375}, 15),
        ("best/last.ckpt", {}, 15),
        ("every/epoch=0-step=3.ckpt", {}, 2),
        ("every/epoch=1-step=6.ckpt", {}, 5),
        ("every/epoch=2-step=9.ckpt", {}, 8),
        ("every/epoch=2-step=12.ckpt", {}, 11),
        ("every/epoch=3-step=15.ckpt", {}, 14),
    ],
)
def test_score_is_that_of_the_file_that_it_was_kept_for(
    files: Path, tmp_path: Path, name: str, metrics: dict[str, float], logged_as: int
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("epoch,step,logged\n" + "".join(f"0,{step},{step}\n" for step in range(18)))
    path = files / "metrics" / "lightning" / name
    rows = list_checkpoints(path.parent, metrics=[str(log)]).document()["checkpoints"]
    (found,) = (row for row in rows if row["path"] == str(path))
    assert (found["metrics"], found["loss"]) == (metrics | {"logged": logged_as}, None)


def test_one_that_is_slimmed_has_the_step_that_its_logger_counts(files: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    log = tmp_path / "log.csv"
    run = Path(shutil.copytree(files / "metrics" / "lightning", tmp_path / "run")) / "every"
    for path in run.glob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        content["optimizer_states"][0]["state"] = {0: {"exp_avg": torch.zeros(100)}}
        torch.save(content, path)
    log.write_text("epoch,step,logged\n" + "".join(f"0,{step},{step}\n" for step in range(18)))
    assert len(prune(run, full=1).plan.slimmed) == 4
    rows = list_checkpoints(run, metrics=[str(log)]).document()["checkpoints"]
    assert {row["step"]: row["metrics"]["logged"] for row in rows} == {3: 2, 6: 5, 9: 8, 12: 11, 15: 14}


def test_best_score_is_the_best_and_no_metric_of_this_one(files: Path) -> None:
    with open_checkpoint(files / "metrics" / "lightning" / "every" / "epoch=2-step=12.ckpt") as opened:
        training = opened.training
    assert (training.best, dict(training.metrics)) == (0.25, {})


def scored(name: str, *, epoch: int = 3, step: int = 16, **state: object) -> dict[str, float]:
    remembered = {
        "monitor": "val_loss",
        "best_model_path": "d/a.ckpt",
        "current_score": 0.4,
        "last_model_path": "",
    }
    tree = {"epoch": epoch, "global_step": step, "callbacks": {"ModelCheckpoint": remembered | state}}
    found = training_state(tree, {}, name).metrics
    return {metric: value for metric, value in found.items()}


def test_renamed_file_is_known_by_its_step_or_as_the_only_writer() -> None:
    kept = {"d/epoch=1-step=8.ckpt": 0.2, "d/epoch=3-step=16.ckpt": 0.4}
    assert scored("mine.ckpt", best_k_models=kept) == {"val_loss": 0.4}
    assert scored("mine.ckpt", best_k_models=kept, step=8, epoch=1) == {"val_loss": 0.2}
    assert scored("mine.ckpt", best_k_models=kept, step=12, epoch=2) == {}
    assert scored("mine.ckpt", best_k_models={"d/epoch=3.ckpt": 0.4}) == {"val_loss": 0.4}
    assert scored("mine.ckpt", best_k_models={"d/epoch=2.ckpt": 0.4}) == {}
    assert scored("mine.ckpt") == {"val_loss": 0.4}  # of a Lightning that kept no scores


@pytest.mark.parametrize("name", ["last.ckpt", "last-v1.ckpt", "newest.ckpt"])
def test_last_file_may_be_of_an_epoch_that_was_not_kept(name: str) -> None:
    assert scored(name, last_model_path=f"d/{name}") == {}


def test_score_of_one_of_several_callbacks_is_not_ascribed() -> None:
    one = {"monitor": "val_loss", "best_model_path": "d/a.ckpt", "current_score": 0.4}
    other = {"monitor": None, "best_model_path": "d/b.ckpt", "current_score": None}
    assert dict(training_state({"callbacks": {"a": one, "b": other}}, {}, "b.ckpt").metrics) == {}


@pytest.mark.parametrize(
    ("tree", "metrics", "origin"),
    [
        ({"val_loss": 0.5}, {"val_loss": 0.5}, "key val_loss"),
        ({"metrics": {"f1": 0.5, "epoch": 3}}, {"f1": 0.5}, "key metrics.f1"),
        ({"val": {"loss": 0.5, "size": 10}}, {"val_loss": 0.5}, "key val.loss"),
        ({"eval": {"eval_loss": 0.5}}, {"eval_loss": 0.5}, "key eval.eval_loss"),
        ({"results": {"val": {"acc": 0.5}}}, {"val_acc": 0.5}, "key results.val_acc"),
        ({"history": {"val_loss": [0.7, 0.5]}}, {"val_loss": 0.5}, "key history.val_loss[-1]"),
        ({"val_losses": [0.7, 0.5]}, {"val_losses": 0.5}, "key val_losses[-1]"),
        ({"trainer": {"metrics": {"acc": 0.5}}}, {"acc": 0.5}, "key trainer.metrics.acc"),
        ({"per_class_ap": [0.1, 0.2], "history": {"epoch": [1, 2]}}, {}, None),
        ({"loss_weight": 2.0, "score_threshold": 0.5, "num_errors_every": 3, "loss_fn": 1}, {}, None),
    ],
)
def test_metrics_of_dicts(tree: dict[str, Any], metrics: dict[str, float], origin: str | None) -> None:
    state = training_state(tree, {}, "m.pth")
    assert dict(state.metrics) == metrics
    assert [state.origin[f"metrics.{name}"] for name in metrics] == [origin] * len(metrics)


def test_metrics_that_are_tensors() -> None:
    scalars = {
        ("metrics", "val_loss"): lambda: 0.25,
        ("val", "acc"): lambda: 0.5,
        ("val", "size"): lambda: 10,
        ("trainer", "metrics", "f1"): lambda: 0.75,
        ("best_acc",): lambda: 0.9,
        ("model", "loss", "deep"): lambda: 1.0,
    }
    state = training_state({"epoch": 1}, scalars, "m.pth")
    assert dict(state.metrics) == {"val_loss": 0.25, "val_acc": 0.5, "f1": 0.75, "best_acc": 0.9}
    assert (state.best, state.origin["metrics.f1"]) == (0.9, "tensor trainer.metrics.f1")


@pytest.mark.framework
def test_zero_dimensional_numbers_of_torch_and_numpy(tmp_path: Path) -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    metrics = {
        "val_loss": torch.tensor(0.25),
        "f1": np.float64(0.5),
        "acc": np.float32(0.75),
        "n": np.array(0.5),
    }
    weights = {"fc.weight": torch.zeros(2, 2)}
    torch.save({"model": weights, "epoch": torch.tensor(4), "metrics": metrics}, tmp_path / "m.pth")
    (found,) = list_checkpoints(tmp_path).document()["checkpoints"]
    assert (found["epoch"], found["metrics"]) == (4, {"val_loss": 0.25, "f1": 0.5, "acc": 0.75, "n": 0.5})


@pytest.mark.parametrize(
    ("tree", "name", "loss"),
    [
        ({"loss": 0.5}, "m.pth", 0.5),
        ({"val_loss": 0.5}, "m.pth", None),
        ({"best_loss": 0.5}, "m.pth", None),
        ({}, "m_loss_0.5_epoch_3.pth", 0.5),
        ({}, "m_val_loss_0.5_epoch_3.pth", None),
    ],
)
def test_loss_of_a_series_is_the_training_loss_alone(
    tmp_path: Path, tree: dict[str, Any], name: str, loss: float | None
) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": {"fc.weight": torch.zeros(2)}} | tree, tmp_path / name)
    (found,) = list_checkpoints(tmp_path).document()["checkpoints"]
    assert found["loss"] == loss


@pytest.mark.parametrize(("key", "expected"), [("val_loss", True), ("loss_scale", False), (3, False)])
def test_settings_are_no_metrics(key: object, expected: bool) -> None:
    assert is_metric(key) is expected

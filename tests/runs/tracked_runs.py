"""Runs that MLflow and Weights & Biases tracked, made by both: ``python tracked_runs.py mlflow|wandb DIR``.

Two trials, ``slow`` and ``fast``, write three checkpoints each; that of step 20 becomes a model with a name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TRIALS = {"slow": 0.1, "fast": 0.5}
STEPS = (10, 20, 30)


def _save(name: str, rate: float, step: int) -> Path:
    import torch

    path = Path("runs", name, f"step_{step}.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"w": torch.full((4,), rate * step)}, "step": step}, path)
    return path


def mlflow(uri: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("digits")
    for name, rate in TRIALS.items():
        with mlflow.start_run(run_name=name) as run:
            mlflow.log_params({"lr": rate, "seed": 7})
            for step in STEPS:
                path = _save(name, rate, step)
                mlflow.log_metrics({"val/loss": rate / step, "epoch": step / 10}, step=step)
                mlflow.log_metric("bad", float("nan"), step=step)
                mlflow.log_artifact(str(path), "checkpoints")
    client = mlflow.MlflowClient()
    client.create_registered_model("net")
    source = f"{run.info.artifact_uri}/checkpoints/step_20.pt"
    version = client.create_model_version("net", source, run.info.run_id)
    client.set_registered_model_alias("net", "champion", version.version)


def wandb() -> None:
    import wandb

    for name, rate in TRIALS.items():
        settings = wandb.Settings(
            silent=True, disable_git=True, x_disable_stats=True, x_disable_meta=True, console="off"
        )
        config = {"lr": rate, "seed": 7, "opt": {"name": "sgd"}}
        run = wandb.init(mode="offline", project="digits", name=name, config=config, settings=settings)
        for step in STEPS:
            path = _save(name, rate, step)
            run.log({"val_loss": rate / step, "val": {"acc": step / 100}, "note": "x" * 40_000}, step=step)
            if step < 30:
                artifact = wandb.Artifact(f"net-{name}", type="model")
                artifact.add_file(str(path), name="renamed.pt" if name == "fast" else None)
                run.log_artifact(artifact, aliases=["best"])
        run.finish()
    wandb.teardown()  # its service process has written all by then


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    if sys.argv[1] == "wandb":
        wandb()
    else:
        mlflow(sys.argv[3])

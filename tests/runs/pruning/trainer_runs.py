"""Runs of real trainers that are pruned and renamed in between: each a child of test_trainers.py.

Usage: ``python trainer_runs.py huggingface|lightning|accelerate DIRECTORY``. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpttool
from tests.support.changes import empty_trash

warnings.simplefilter("ignore")


def thinned(directory: Path, keep: int) -> list[str]:
    """Prune a directory; return the names of what is left in it, without what is hidden."""
    request = ckpttool.PruneRequest(directory=str(directory), policy=ckpttool.Policy(keep_last=keep))
    pruned = ckpttool.prune(request)
    assert pruned.plan.removals, pruned
    assert not pruned.problems, pruned
    return names(directory)


def names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def renamed(directory: Path, template: str) -> list[str]:
    """Rename the checkpoints of a directory; return the names that lie there then."""
    done = ckpttool.rename(ckpttool.RenameRequest(directory=str(directory), template=template))
    assert done.renames and not done.failed, done
    return names(directory)


def newest(directory: Path) -> str:
    path = ckpttool.latest(directory).path
    assert path is not None
    return path


def huggingface(root: Path) -> dict[str, Any]:
    """Train 12 steps, prune, resume to 18 with a limit of 3; and the same without interruption."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    def trainer(out: Path, steps: int, limit: int | None = None) -> Trainer:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
        rows = [
            {"input_ids": torch.randint(0, 20, (6,)), "labels": torch.tensor(row % 2)} for row in range(32)
        ]
        arguments = TrainingArguments(
            str(out),
            max_steps=steps,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            logging_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            save_total_limit=limit,
            metric_for_best_model="eval_loss",
        )
        return Trainer(
            BertForSequenceClassification(config), arguments, train_dataset=rows, eval_dataset=rows[:8]
        )

    run = root / "run"
    trainer(run, 12).train()
    left = thinned(run, 2)
    verdict = ckpttool.latest(run).resume
    resumed = trainer(run, 18, limit=3)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer(root / "whole", 18)
    whole.train()
    state, other = resumed.model.state_dict(), whole.model.state_dict()
    return {
        "left": left,
        "after": names(run),
        "step": resumed.state.global_step,
        "resumes": str(verdict),
        "equal": all(torch.equal(value, other[name]) for name, value in state.items()),
    }


def lightning(root: Path) -> dict[str, Any]:
    """Train 6 epochs keeping the 4 best, prune, rename, resume to 9; and the same without interruption."""
    import logging

    logging.disable(logging.WARNING)
    import lightning
    import torch

    torch.set_num_threads(1)
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)

        def loss(self, batch: Any) -> Any:
            return (self.fc(batch[0]) - batch[1]).square().mean()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.loss(batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

    def fitted(out: Path, epochs: int, top: int, path: str | None = None) -> tuple[Net, ModelCheckpoint]:
        torch.manual_seed(0)
        x = torch.randn(16, 4)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        callback = ModelCheckpoint(
            out, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=top, save_last="link"
        )
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=[callback],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        net = Net()
        loaders = (DataLoader(data, batch_size=8) for _ in range(2))
        trainer.fit(net, *loaders, ckpt_path=path, weights_only=False)
        return net, callback

    run = root / "run"
    fitted(run, 6, 4)
    left = thinned(run, 2)
    named = renamed(run, "net-e{epoch:02d}")
    resumed, callback = fitted(run, 9, 4, newest(run))
    whole, _ = fitted(root / "whole", 9, -1)
    return {
        "left": left,
        "named": named,
        "after": names(run),
        "best": os.path.basename(callback.best_model_path),
        "link": os.path.basename(os.readlink(run / "last.ckpt")),
        "equal": all(
            torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items()
        ),
    }


def accelerate(root: Path) -> dict[str, Any]:
    """Save 6 states, pin, prune, undo, try to rename; Accelerate goes on after each, at last with a limit."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    torch.set_num_threads(1)

    class Steps:
        made = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.made}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.made = state["step"]

    def saved(first: int, count: int, limit: int | None = None, *, resumes: bool = True) -> int:
        """Load the newest state, save others, and return the step that was loaded."""
        setup = ProjectConfiguration(
            project_dir=str(root), automatic_checkpoint_naming=True, total_limit=limit, iteration=first
        )
        accelerator = Accelerator(cpu=True, project_config=setup)
        model = torch.nn.Linear(2, 2)
        steps = Steps()
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        accelerator.register_for_checkpointing(steps)
        if resumes:
            accelerator.load_state()
        loaded = steps.made
        for _ in range(count):
            steps.made += 1
            accelerator.save_state()
        return loaded

    checkpoints = root / "checkpoints"
    saved(0, 6, resumes=False)
    ckpttool.pin([checkpoints / "checkpoint_2"])
    loaded = [saved(6, 1)]
    request = ckpttool.PruneRequest(
        directory=str(checkpoints), policy=ckpttool.Policy(keep_last=2), series=("checkpoint_*",)
    )
    assert not ckpttool.prune(request, trash=True).problems
    left = names(checkpoints)
    loaded.append(saved(7, 1))
    ckpttool.undo(str(checkpoints))
    loaded.append(saved(8, 1))
    template = ckpttool.RenameRequest(directory=str(checkpoints), template="n{number:03d}_{run}")
    assert not ckpttool.rename(template).renames
    loaded.append(saved(9, 1))
    assert not ckpttool.prune(request, trash=True).problems
    empty_trash(checkpoints)
    loaded.append(saved(10, 2, limit=3))
    return {"left": left, "loaded": loaded, "after": sorted(os.listdir(checkpoints))}


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "huggingface": huggingface,
    "lightning": lightning,
    "accelerate": accelerate,
}


if __name__ == "__main__":
    told = RUNS[sys.argv[1]](Path(sys.argv[2]))
    print(f"\n{json.dumps(told)}")

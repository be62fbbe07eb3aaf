"""How a training resumes: what frameworks' own files hold, and what taking parts away changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import latest, open_checkpoint
from ckpttool.ops.resume import ResumeLevel, ResumeVerdict, resume_verdict
from tests.support.commands import Run, Terminal

FILES = Path(__file__).parents[2] / "fixtures" / "files"
EXACT, BOTH, WEIGHTS = ResumeLevel.EXACT, ResumeLevel.WEIGHTS_AND_OPTIMIZER, ResumeLevel.WEIGHTS
RNG, DATA = "RNG state", "data loader state"


def verdict_of(path: Path) -> ResumeVerdict:
    with open_checkpoint(path) as checkpoint:
        return resume_verdict(checkpoint)


@pytest.mark.parametrize(
    ("name", "level", "missing"),
    [
        ("safetensors/trainer/checkpoint-4", EXACT, ()),
        ("pytorch/trainer-bin/checkpoint-1", EXACT, ()),
        ("ranks/trainer-2/checkpoint-2", BOTH, (RNG, DATA)),
        ("pytorch/lightning/epoch=1-step=4.ckpt", BOTH, (RNG, DATA)),
        ("pytorch/guide.pth", BOTH, (RNG, DATA)),
        ("pytorch/module.pth", WEIGHTS, ("optimizer", "step or epoch", "scheduler", RNG, DATA)),
        ("pytorch/metrics_only.pth", ResumeLevel.NONE, ("weights",)),
        ("deepspeed/zero-2/global_step2", BOTH, (RNG, DATA)),
        ("keras/adam.keras", BOTH, (RNG, DATA)),
        ("tensorflow/keras3", BOTH, (RNG, DATA)),
        ("fluid/guide/checkpoint_0", BOTH, ("scheduler", RNG, DATA)),
        ("torch-dcp/two-ranks", BOTH, (RNG, DATA)),
    ],
)
def test_files_of_frameworks(name: str, level: ResumeLevel, missing: tuple[str, ...]) -> None:
    verdict = verdict_of(FILES / name)
    assert (verdict.level, verdict.missing) == (level, missing)


# A training with everything ---------------------------------------------------------------------------


class Training:
    """A loop whose order of data and noise come from generators, all of which it saves."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.sampler = torch.Generator().manual_seed(seed)
        self.data = torch.arange(64.0).reshape(16, 4) / 64
        self.step = 0

    @classmethod
    def after(cls, steps: int) -> Training:
        """Return one that has made some steps: before the first, AdamW has no state."""
        training = cls(steps)
        training.run(steps)
        return training

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = self.data[torch.randperm(16, generator=self.sampler)[:4]]
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "lr_scheduler": self.scheduler.state_dict(),
            "rng_state": torch.get_rng_state(),
            "sampler_state": self.sampler.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.scheduler.load_state_dict(state["lr_scheduler"])
        torch.set_rng_state(state["rng_state"])
        self.sampler.set_state(state["sampler_state"])


def saved(path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, path)
    return path


def test_what_resumes_exactly_does(tmp_path: Path) -> None:
    first = Training(1)
    first.run(3)
    path = saved(tmp_path / "whole.pth", first.state())
    expected = first.run(4)
    assert str(verdict_of(path)) == "exactly"
    second = Training(2)
    second.load(torch.load(path))
    assert second.run(4) == expected


_PARTS = {
    "step": "step or epoch",
    "optimizer_state_dict": "optimizer",
    "lr_scheduler": "scheduler",
    "rng_state": RNG,
    "sampler_state": DATA,
}
_ORDER = [WEIGHTS, BOTH, EXACT]


@settings(max_examples=60, deadline=None)
@given(taken=st.sets(st.sampled_from(sorted(_PARTS))), more=st.sampled_from(sorted(_PARTS)))
def test_each_part_that_is_taken_away_is_missing_and_raises_no_level(
    taken: set[str], more: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, state = tmp_path_factory.mktemp("parts"), Training.after(3).state()
    verdicts = []
    for number, without in enumerate((taken, taken | {more})):
        left = {key: value for key, value in state.items() if key not in without}
        verdicts.append(verdict_of(saved(folder / f"{number}.pth", left)))
    assert set(verdicts[0].missing) == {_PARTS[key] for key in taken}
    assert _ORDER.index(verdicts[1].level) <= _ORDER.index(verdicts[0].level)
    assert set(verdicts[0].missing) <= set(verdicts[1].missing)


def test_without_a_scheduler_none_is_missing(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum, its state has no tensors
    state = {"epoch": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert verdict_of(saved(tmp_path / "plain.pth", state)).missing == (RNG, DATA)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state["optimizer"] = optimizer.state_dict()
    assert verdict_of(saved(tmp_path / "lost.pth", state)).missing == ("scheduler", RNG, DATA)


@pytest.mark.parametrize(
    ("settings_", "is_needed"),
    [({"fp16": True}, True), ({"fp16": False}, False), ({"precision": "16-mixed"}, True), ({}, False)],
)
def test_float16_needs_its_scaler(settings_: dict[str, Any], is_needed: bool, tmp_path: Path) -> None:
    state = Training.after(4).state() | {"args": settings_}
    assert ("gradient scaler" in verdict_of(saved(tmp_path / "half.pth", state)).missing) is is_needed
    state["scaler"] = {"scale": 65536.0, "growth_tracker": 3}
    assert verdict_of(saved(tmp_path / "scaled.pth", state)).level is EXACT


@pytest.mark.parametrize("empty", [None, {}, [], False])
def test_an_empty_place_holds_no_state(empty: object, tmp_path: Path) -> None:
    state = Training.after(5).state() | {"rng_state": empty}
    assert verdict_of(saved(tmp_path / "empty.pth", state)).missing == (RNG,)


@pytest.mark.parametrize(
    "rng", [torch.empty(0, dtype=torch.uint8), {"cpu": torch.empty(0, dtype=torch.uint8), "cuda": []}]
)
def test_a_generator_without_bytes_holds_no_state(rng: object, tmp_path: Path) -> None:
    state = Training.after(3).state() | {"rng_state": rng}
    assert verdict_of(saved(tmp_path / "empty.pth", state)).missing == (RNG,)


_MODEL = torch.nn.Linear(2, 1)
_SGD, _MOMENTUM = (partial(torch.optim.SGD, lr=0.1, momentum=momentum) for momentum in (0, 0.9))


def optimizer_state(make: Callable[..., torch.optim.Optimizer], *, steps: int) -> dict[str, Any]:
    optimizer = make(_MODEL.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        _MODEL(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("key", ["optimizer", "optimizers", "adam", "trainer_d"])
@pytest.mark.parametrize(
    ("make", "steps", "epoch", "is_held"),
    [
        (torch.optim.Adam, 2, 4, True),
        (torch.optim.Adam, 0, 4, False),  # its state was lost, or never saved
        (torch.optim.Adam, 0, 0, True),
        (torch.optim.RMSprop, 0, 4, False),
        (torch.optim.Rprop, 0, 4, False),
        (torch.optim.LBFGS, 0, 4, False),
        (torch.optim.Adagrad, 0, 4, True),  # it makes its state at once
        (_SGD, 2, 4, True),
        (_SGD, 0, 4, True),
        (_MOMENTUM, 2, 4, True),
        (_MOMENTUM, 0, 4, False),
    ],
)
def test_an_optimizer_is_one_by_its_state(
    make: Callable[..., torch.optim.Optimizer],
    steps: int,
    epoch: int,
    is_held: bool,
    key: str,
    tmp_path: Path,
) -> None:
    found = optimizer_state(make, steps=0 if make is torch.optim.LBFGS else steps)
    held = [found] if key == "optimizers" else found
    path = saved(tmp_path / "m.pth", {"epoch": epoch, "model": _MODEL.state_dict(), key: held})
    assert ("optimizer" in verdict_of(path).found) is is_held


def test_of_two_optimizers_neither_may_lack_its_state(tmp_path: Path) -> None:
    both = [optimizer_state(torch.optim.Adam, steps=steps) for steps in (2, 0)]
    state = {"epoch": 4, "model": _MODEL.state_dict(), "optimizer_states": both}
    assert "optimizer" in verdict_of(saved(tmp_path / "gan.pth", state)).missing


def test_a_step_in_the_name_alone_is_none(tmp_path: Path) -> None:
    state = Training.after(6).state()
    del state["step"]
    assert verdict_of(saved(tmp_path / "model_step_3.pth", state)).missing == ("step or epoch",)


# Commands -------------------------------------------------------------------------------------------


@pytest.fixture
def run_of_two(tmp_path: Path) -> Path:
    """Return a run whose newest checkpoint lacks the states of its generators."""
    for step in (1, 2):
        state = Training.after(step).state()
        if step == 2:
            del state["rng_state"], state["sampler_state"]
        saved(tmp_path / f"model_step_{step}.pth", state)
    return tmp_path


def test_latest_that_resumes_exactly(run_of_two: Path, run: Run) -> None:
    newest, exact = (str(run_of_two / f"model_step_{step}.pth") for step in (2, 1))
    assert run("latest", run_of_two) == (0, f"{newest}\n", "")
    answer = run("latest", run_of_two, "--resume-exact")
    why = "skipped: it doesn't resume exactly: no RNG state, no data loader state"
    assert answer == (0, f"{exact}\n", f"ckpttool: warning: {newest}: {why}\n")
    found = latest(run_of_two)
    assert found.resume is not None and found.resume.level is BOTH


def test_none_that_resumes_exactly(files: Path, run: Run) -> None:
    answer = run("latest", files / "series", "--resume-exact")
    assert (answer.status, answer.out) == (1, "")
    assert "no intact checkpoint from which a training resumes exactly" in answer.err


def test_a_terminal_is_told(run_of_two: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    run("latest", run_of_two)
    words = "with weights and optimizer; no RNG state, no data loader state"
    assert screen.getvalue() == f"ckpttool: {run_of_two / 'model_step_2.pth'} resumes {words}\n"

"""How a training resumes: what frameworks' own files hold, and what taking parts away changes."""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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


def test_files_of_frameworks() -> None:
    cases = [
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
    ]
    for name, level, missing in cases:
        verdict = verdict_of(FILES / name)
        assert (verdict.level, verdict.missing) == (level, missing), name


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


@settings(deadline=None)
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


def test_float16_needs_its_scaler(tmp_path: Path) -> None:
    cases = [({"fp16": True}, True), ({"fp16": False}, False), ({"precision": "16-mixed"}, True), ({}, False)]
    for settings_, is_needed in cases:
        state = Training.after(4).state() | {"args": settings_}
        assert ("gradient scaler" in verdict_of(saved(tmp_path / "half.pth", state)).missing) is is_needed, (
            settings_
        )
        state["scaler"] = {"scale": 65536.0, "growth_tracker": 3}
        assert verdict_of(saved(tmp_path / "scaled.pth", state)).level is EXACT, settings_


def test_an_empty_place_holds_no_state(tmp_path: Path) -> None:
    for empty in [None, {}, [], False]:
        state = Training.after(5).state() | {"rng_state": empty}
        assert verdict_of(saved(tmp_path / "empty.pth", state)).missing == (RNG,), empty


def test_a_generator_without_bytes_holds_no_state(tmp_path: Path) -> None:
    cases = [torch.empty(0, dtype=torch.uint8), {"cpu": torch.empty(0, dtype=torch.uint8), "cuda": []}]
    for rng in cases:
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


def test_an_optimizer_is_one_by_its_state(tmp_path: Path) -> None:
    optimizers = [
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
    ]
    for key in ["optimizer", "optimizers", "adam", "trainer_d"]:
        for make, steps, epoch, is_held in optimizers:
            found = optimizer_state(make, steps=0 if make is torch.optim.LBFGS else steps)
            held = [found] if key == "optimizers" else found
            path = saved(tmp_path / "m.pth", {"epoch": epoch, "model": _MODEL.state_dict(), key: held})
            assert ("optimizer" in verdict_of(path).found) is is_held, (key, make)


def test_of_two_optimizers_neither_may_lack_its_state(tmp_path: Path) -> None:
    cases_lost = [{"state": {}}, {"state": {0: {"step": 2}}}, {"state": None}]
    for lost in cases_lost:
        for is_nested in [True, False]:
            first = optimizer_state(torch.optim.Adam, steps=2)
            both = [first, first | lost]
            state = Training.after(3).state() | (
                {"optimizers": both} if is_nested else {"g": both[0], "d": both[1]}
            )
            verdict = verdict_of(saved(tmp_path / "gan.pth", state))
            # The training's own AdamW has four.
            assert str(verdict) == "with weights and optimizer; no optimizer state for 2 of 8 parameters", (
                lost
            )


def test_some_parameters_without_state_are_told(tmp_path: Path) -> None:
    cases = [
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        _MOMENTUM,
    ]
    for make in cases:
        state = Training.after(3).state() | {"optimizer_state_dict": optimizer_state(make, steps=2)}
        del state["lr_scheduler"]
        assert str(verdict_of(saved(tmp_path / "whole.pth", state))) == "exactly", make
        del state["optimizer_state_dict"]["state"][1]
        words = "with weights and optimizer; no optimizer state for 1 of 2 parameters"
        assert str(verdict_of(saved(tmp_path / "some.pth", state))) == words, make


def test_a_step_alone_is_no_state_of_a_parameter(tmp_path: Path) -> None:
    state = Training.after(3).state()
    kept = state["optimizer_state_dict"]["state"]
    for one in kept.values():
        del one["exp_avg"], one["exp_avg_sq"]
    assert verdict_of(saved(tmp_path / "m.pth", state)).missing == ("optimizer",)


def test_groups_may_lie_apart_from_the_state(tmp_path: Path) -> None:
    state = Training.after(3).state()
    optimizer = state["optimizer_state_dict"]
    state["optimizer_tensors"] = [one["exp_avg"] for one in optimizer.pop("state").values()]
    assert verdict_of(saved(tmp_path / "m.pth", state)).level is EXACT


def test_lbfgs_keeps_its_state_with_the_first_parameter(tmp_path: Path) -> None:
    optimizer = torch.optim.LBFGS(_MODEL.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _MODEL(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = Training.after(3).state() | {"optimizer_state_dict": optimizer.state_dict()}
    assert "optimizer" in verdict_of(saved(tmp_path / "m.pth", state)).found
    assert "optimizer" not in str(verdict_of(saved(tmp_path / "m.pth", state)).missing)


# States and settings ------------------------------------------------------------------------------------


_SETTINGS = {
    "lr_scheduler": "cosine",
    "scheduler": {"name": "StepLR", "step_size": 10, "last_epoch": 5, "gamma": 0.1},
    "rng_seed": 42,
    "random_state": 42,
    "scaler": {"growth_tracker": 1},
    "amp_backend": "x",
    "dataloader_num_workers": 4,
    "sampler": {"index": 1},
}


def test_settings_are_no_state(tmp_path: Path) -> None:
    cases = [
        *({key: _SETTINGS} for key in ("config", "hyper_parameters", "args", "train_cfg", "training_args")),
        {"args": argparse.Namespace(**_SETTINGS)},
        {"opt": argparse.Namespace(**_SETTINGS)},
        {key: one for key, one in _SETTINGS.items() if not isinstance(one, dict)},
        {"trainer": {"config": _SETTINGS}},
    ]
    for settings_ in cases:
        whole = Training.after(3).state()
        state = {key: whole[key] for key in ("step", "model_state_dict", "optimizer_state_dict")} | settings_
        verdict = verdict_of(saved(tmp_path / "m.pth", state))
        assert verdict == (BOTH, ("weights", "optimizer", "step or epoch"), ("scheduler", RNG, DATA)), (
            settings_
        )


def test_a_trainers_directory_without_a_file(tmp_path: Path) -> None:
    cases = [("scheduler.pt", "scheduler"), ("rng_state.pth", RNG), ("training_args.bin", DATA)]
    for at, (lost, missing) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        directory = folder / "checkpoint-4"
        shutil.copytree(FILES / "safetensors/trainer/checkpoint-4", directory)
        (directory / lost).unlink()
        assert verdict_of(directory).missing == (missing,), lost


def _of_schedule(make: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(_MODEL.parameters(), lr=0.1, momentum=0.9)
    return make(optimizer).state_dict()


_SCHEDULES = torch.optim.lr_scheduler
_GENERATOR = np.random.default_rng(1)
_SCHEDULER, _SCALER = "scheduler", "gradient scaler"


def test_a_state_is_told_by_its_layout(tmp_path: Path) -> None:
    cases = [
        (_SCHEDULER, "scheduler", _of_schedule(lambda one: _SCHEDULES.StepLR(one, 2))),
        (_SCHEDULER, "lr_sched", _of_schedule(lambda one: _SCHEDULES.LambdaLR(one, lambda _: 1.0))),
        (_SCHEDULER, "scheduler", _of_schedule(lambda one: _SCHEDULES.OneCycleLR(one, 1.0, 10))),
        (_SCHEDULER, "scheduler", _of_schedule(_SCHEDULES.ReduceLROnPlateau)),
        (_SCHEDULER, "lr_schedulers", [_of_schedule(lambda one: _SCHEDULES.CosineAnnealingLR(one, 5))]),
        (
            _SCHEDULER,
            "schedulers",
            _of_schedule(lambda one: _SCHEDULES.ChainedScheduler([_SCHEDULES.StepLR(one, 2)])),
        ),
        (
            _SCHEDULER,
            "scheduler",
            _of_schedule(
                lambda one: _SCHEDULES.SequentialLR(
                    one, [_SCHEDULES.ConstantLR(one), _SCHEDULES.StepLR(one, 2)], [3]
                )
            ),
        ),
        (RNG, "rng_state", torch.get_rng_state()),
        (RNG, "rng", [{"python": random.getstate()}]),
        (RNG, "rng_states", {"numpy": np.random.get_state()}),
        (RNG, "numpy_rng_state", _GENERATOR.bit_generator.state),
        (RNG, "rng", np.random.Generator(np.random.Philox(1)).bit_generator.state),
        (_SCALER, "scaler", torch.amp.GradScaler("cpu").state_dict()),
        (_SCALER, "MixedPrecision", torch.amp.GradScaler("cpu").state_dict()),
        (_SCALER, "amp", {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}),
        (DATA, "sampler", {"epoch": 3, "seed": 0}),
        (DATA, "dataloader", {"_snapshot": {}, "_steps_since_snapshot": 2, "_iterator_finished": False}),
        (DATA, "sampler", torch.randperm(16)),
        (DATA, "sampler", torch.Generator().get_state()),
        (DATA, "consumed_train_samples", 64),
        (DATA, "args", argparse.Namespace(consumed_train_samples=64)),
    ]
    for part, key, value in cases:
        state = {"model": _MODEL.state_dict(), key: value}
        assert verdict_of(saved(tmp_path / "m.pth", state)).found == ("weights", part), (part, value)


def test_what_is_laid_out_otherwise_is_no_state(tmp_path: Path) -> None:
    cases = [
        ("scheduler", {"type": "StepLR", "step_size": 3, "last_epoch": -1}),
        ("scheduler", [{}, None]),
        ("noise_scheduler", {"num_train_timesteps": 1000, "betas": [0.1, 0.2]}),
        ("rng", {"seed": 42}),
        ("rng_state", "numpy"),
        ("rng_state", torch.ones(3)),
        ("scaler", {"mean": torch.ones(3), "scale": torch.ones(3)}),
        ("scaler", {"growth_factor": 2.0, "growth_interval": 2000}),
        ("amp", "O1"),
        ("dataloader", {"batch_size": 4, "num_workers": 2, "seed": 1, "epochs": 9, "batch": 16}),
        ("sampler", "random"),
        ("sampler_net", {"weight": torch.ones(2, 2), "bn": {"num_batches_tracked": torch.tensor(3)}}),
        ("args", argparse.Namespace(consumed_train_samples=0)),
    ]
    for key, value in cases:
        state = {"model": _MODEL.state_dict(), key: value}
        assert verdict_of(saved(tmp_path / "m.pth", state)).found == ("weights",), (key, value)


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
    # Where reading takes long, its progress is shown before.
    assert screen.getvalue().endswith(f"ckpttool: {run_of_two / 'model_step_2.pth'} resumes {words}\n")

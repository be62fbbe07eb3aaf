"""What stands in the way of an answer, and what is said beside it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from ckpttool import AccessDenied, CheckpointError, NotFound, latest, list_checkpoints
from tests.support.moments import refuse_opening
from tests.support.saves import HOUR, Facts, save, save_all

CLOSED = PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_what_may_not_be_looked_at_is_not_what_is_not_there(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epoch in range(2, 11):
        refuse_opening(monkeypatch, f"model_epoch_{epoch}.pth", CLOSED)
    assert latest(series).path == str(series / "model_epoch_1.pth")
    refuse_opening(monkeypatch, "model_epoch_1.pth", CLOSED)
    with pytest.raises(AccessDenied) as error:
        latest(series)
    assert error.value.path == str(series)
    assert "permission denied (and 9 more)" in error.value.reason


def test_a_directory_that_may_not_be_read_may_hold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "closed").mkdir(parents=True)
    assert latest(tmp_path / "run", recursive=True).path is None
    refuse_opening(monkeypatch, "closed", CLOSED)
    with pytest.raises(AccessDenied, match="closed: permission denied"):
        latest(tmp_path / "run", recursive=True)


def test_a_link_that_leads_nowhere_is_no_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("elsewhere")
    for path in (tmp_path / "run", tmp_path / "run" / "exp1"):
        with pytest.raises(NotFound, match="a link to elsewhere, which does not exist"):
            latest(path)
    with pytest.raises(NotFound, match="directory not found"):
        latest(tmp_path / "none" / "exp1")
    assert latest(tmp_path / "none" / "exp1", missing_ok=True).path is None


# Which series one would resume from ------------------------------------------------------------------

FULL: Facts = {"state": True}
OPTIMIZER: Facts = {"weights": None, "state": True}
NEITHER: Facts = {"weights": None}
OTHER: Facts = {"weights": "other"}
DAMAGED: Facts = {"damaged": True}


@pytest.mark.parametrize(
    ("wanted", "other"),
    [
        (("checkpoint-300", FULL), ("training_args.bin", NEITHER)),
        (("checkpoint-300", FULL), ("model.bin", OTHER)),
        (("model_epoch_3.pth", {}), ("test_embeddings.pt", OTHER)),
        (("model_epoch_3.pth", {}), ("history.pkl", NEITHER)),
        (("model_3.pt", {}), ("optim_3.pt", OPTIMIZER)),
        (("model.pt", {}), ("optim_3.pt", OPTIMIZER)),
        (("optim_3.pt", OPTIMIZER), ("rng_epoch_9.pt", NEITHER)),
        (("model_3.pt", {}), ("user_9.pt", OTHER)),
        (("model_3.pt", {}), ("model_4_ema.pt", OTHER)),
        (("model.pt", {}), ("model_epoch_9.pt", DAMAGED)),
    ],
    ids=str,
)
def test_what_there_is_to_resume_from_comes_before_time(tmp_path: Path, wanted, other) -> None:
    save(tmp_path / wanted[0], **wanted[1])
    save(tmp_path / other[0], **other[1], modified=1000 * HOUR)
    assert latest(tmp_path).path == str(tmp_path / wanted[0])


@pytest.mark.parametrize(
    "newest_first",
    [("a_epoch_9.pt", "b_epoch_5.pt", "a_epoch_1.pt"), ("b_epoch_5.pt", "a_epoch_3.pt", "c.pt")],
)
def test_series_as_good_as_each_other_compete(tmp_path: Path, newest_first: tuple[str, ...]) -> None:
    save_all(tmp_path, {name: {} for name in newest_first})
    for name in newest_first:
        assert latest(tmp_path).path == str(tmp_path / name)
        (tmp_path / name).unlink()


# What is said beside the answer -----------------------------------------------------------------------


def _saves(run: Path, *told: Facts) -> None:
    """Save an hour apart."""
    for number, one in enumerate(told, 1):
        save(run / f"m_epoch_{number}.pt", modified=number * HOUR, **one)


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("valid_loss_min", (0.9, 0.4, 0.2, 0.2, 0.2), 3),
        ("valid_loss", (0.9, 0.4, 0.2, 0.2, 0.2), 3),
        ("valid_loss", (0.9, 0.2, 0.4, 0.2, 0.3), 4),
    ],
)
def test_a_best_value_that_is_carried_on_is_that_of_the_oldest(tmp_path: Path, metric, values, best) -> None:
    _saves(tmp_path, *({"epoch": epoch, metric: value} for epoch, value in enumerate(values, 1)))
    assert latest(tmp_path, best=metric, mode="min").path == str(tmp_path / f"m_epoch_{best}.pt")
    (listed,) = list_checkpoints(tmp_path, best=metric, mode="min").series
    assert listed.best is not None
    assert listed.best.entry.name == f"m_epoch_{best}.pt"


def test_names_that_go_on_while_epochs_inside_begin_again(tmp_path: Path) -> None:
    _saves(tmp_path, *({"epoch": epoch} for epoch in (1, 2, 3, 1, 2)))
    found = latest(tmp_path)
    assert found.path == str(tmp_path / "m_epoch_5.pt")
    assert any("disagree about the order; the names decide" in one for one in found.warnings)


def test_what_is_newer_and_holds_too_little_is_told(trainer: Path) -> None:
    (trainer / "checkpoint-10" / "optimizer.pt").unlink()
    found = latest(trainer)
    assert found.path == str(trainer / "checkpoint-8")
    assert [(one.path, one.message) for one in found.passed_over] == [
        (str(trainer / "checkpoint-10"), "it is newer, but has only weights, no optimizer state")
    ]
    (trainer / "checkpoint-4" / "optimizer.pt").unlink()
    assert latest(trainer).passed_over == found.passed_over
    assert latest(trainer, before=10).passed_over == ()


def test_what_is_being_written_does_not_compete(trainer: Path) -> None:
    os.rename(trainer / "checkpoint-10", trainer / "tmp-checkpoint-10")
    found = latest(trainer)
    assert (found.path, found.warnings) == (str(trainer / "checkpoint-8"), ())
    shutil.copytree(trainer / "checkpoint-8", trainer / "other-8")
    assert "found 2 series" in "".join(latest(trainer).warnings)


def test_an_error_of_a_survey_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointError):
        latest(tmp_path / "file" / "run")

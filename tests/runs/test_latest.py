"""What stands in the way of an answer, and what is said beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import AccessDenied, CheckpointError, NotFound, latest, list_checkpoints
from ckpttool.formats import discovery
from ckpttool.formats.interface import Probe
from ckpttool.runs.members.look import look_for
from ckpttool.runs.surveying import look_workers


def refused(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the system refuse to open what has one of some names."""

    def refusing(look: Callable[[str], object]) -> Callable[[str], object]:
        def refuse(path: str) -> object:
            if os.path.basename(path) in names:
                raise AccessDenied(path, "permission denied")
            return look(path)

        return refuse

    monkeypatch.setattr(discovery, "Probe", refusing(Probe))
    monkeypatch.setattr(look_workers, "look_for", refusing(look_for))


def test_what_may_not_be_looked_at_is_not_what_is_not_there(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(monkeypatch, *os.listdir(series))
    with pytest.raises(AccessDenied) as error:
        latest(series)
    assert error.value.path == str(series)
    assert "permission denied (and 9 more)" in error.value.reason
    refused(monkeypatch, *(name for name in os.listdir(series) if name != "model_epoch_1.pth"))
    assert latest(series).path == str(series / "model_epoch_1.pth")


def test_a_directory_that_may_not_be_read_may_hold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "closed").mkdir(parents=True)
    assert latest(tmp_path / "run", recursive=True).path is None
    refused(monkeypatch, "closed")
    with pytest.raises(AccessDenied, match="closed: permission denied"):
        latest(tmp_path / "run", recursive=True)


def test_a_link_that_leads_nowhere_is_no_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("elsewhere")
    for path in (tmp_path / "run", tmp_path / "run" / "exp1"):
        with pytest.raises(NotFound, match="a link to elsewhere, which does not exist"):
            latest(path)
    with pytest.raises(NotFound, match="no such directory"):
        latest(tmp_path / "none" / "exp1")
    assert latest(tmp_path / "none" / "exp1", missing_ok=True).path is None


def _saves(run: Path, *told: dict[str, object]) -> None:
    """Save as PyTorch does, an hour apart."""
    import torch

    for number, one in enumerate(told, 1):
        path = run / f"m_epoch_{number}.pt"
        torch.save({"model": {"w": torch.ones(2)}, **one}, path)
        os.utime(path, (1_700_000_000 + number * 3600, 1_700_000_000 + number * 3600))


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
        (str(trainer / "checkpoint-10"), "it is newer, but weights alone, without an optimizer's state")
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

"""What trainers and people have written between a renaming and its undo."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ckpttool import pin, undo
from tests.support.renamings import renamed


def test_newer_states_that_name_the_best_are_told(trainer: Path) -> None:
    renamed(trainer, "a-s{step}")
    shutil.copytree(trainer / "a-s10", trainer / "checkpoint-12")
    (trainer / "best.txt").write_text("a-s4\n")
    (trainer.parent / "notes.md").write_text("trainer/a-s6 was fine\n")
    (trainer.parent / "others.md").write_text("other/a-s6, or a-s8\n")
    (trainer / "other.txt").write_text("a-s44\n")
    told = "it still names a-s4, which is checkpoint-4 again (to keep it, pin checkpoint-4)"
    for dry_run in (True, False):
        problems = undo(str(trainer), dry_run=dry_run).problems
        assert {os.path.relpath(one.path, trainer): one.message for one in problems} == {
            "checkpoint-12/trainer_state.json": told,
            "best.txt": told,
            "../notes.md": told.replace("a-s4", "a-s6").replace("n-4", "n-6").replace("t-4", "t-6"),
        }
    state = json.loads((trainer / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == "trainer/checkpoint-4"


def test_nothing_is_told_where_nothing_came_since(short: Path) -> None:
    (short / "best.json").write_text('{"best": "model_epoch_9.pth"}')
    (short / "README.md").write_text("model_epoch_9.pth\nand so on\n")
    renamed(short)
    assert undo(str(short), dry_run=True).problems == ()
    assert undo(str(short)).problems == ()


def test_a_pin_that_was_set_since_is_told(short: Path) -> None:
    pin([str(short / "model_epoch_9.pth")])
    renamed(short)
    new = sorted(path.name for path in short.glob("*.pth"))
    pin([str(short / new[-1])])
    (problem,) = undo(str(short)).problems
    assert problem.path == str(short / ".ckpttool-pins.toml")
    assert problem.message.startswith(f"it still names {new[-1]}, which is model_epoch_10.pth again")


def test_a_pin_that_went_with_its_checkpoint_is_not(short: Path) -> None:
    pin([str(short / "model_epoch_9.pth")])
    renamed(short)
    assert undo(str(short), dry_run=True).problems == ()
    assert undo(str(short)).problems == ()


def test_a_pin_in_a_list_above_is_told_too(short: Path) -> None:
    renamed(short)
    new = max(path.name for path in short.glob("*.pth"))
    above = short.parent / ".ckpttool-pins.toml"
    above.write_text(f'pinned = ["{short.name}/{new}"]\n')
    for dry_run in (True, False):
        (problem,) = undo(str(short), dry_run=dry_run).problems
        assert os.path.samefile(problem.path, above)
        assert problem.message.startswith(f"it still names {new}, which is model_epoch_10.pth again")


def test_a_list_above_that_follows_is_not(short: Path) -> None:
    above = short.parent / ".ckpttool-pins.toml"
    above.write_text(f'pinned = ["{short.name}/model_epoch_9.pth"]\n')
    renamed(short)
    assert undo(str(short), dry_run=True).problems == ()
    assert undo(str(short)).problems == ()
    assert "model_epoch_9.pth" in above.read_text()

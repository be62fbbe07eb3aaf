"""What undo prints."""

from __future__ import annotations

from ckpttool.render.text_moves import undo_text
from ckpttool.series.undoing.undo import RestoredCheckpoint, Undone

IDENTITY = "20260102T030405.000006Z-0123abcd"


def test_a_renaming() -> None:
    restored = (
        RestoredCheckpoint("run/ckpt-9", "run/model-9"),
        RestoredCheckpoint("run/ckpt-10", "run/model-10"),
    )
    done = Undone(IDENTITY, "rename", restored, ("run/模型.txt",))
    assert undo_text(done) == (
        "rename of 2026-01-02 03:04:05 UTC\n"
        "  run/ckpt-9    was model-9\n"
        "  run/ckpt-10   was model-10\n"
        "  run/模型.txt  rewritten\n"
        "restored 2 checkpoints"
    )


def test_one_out_of_the_trash() -> None:
    done = Undone(IDENTITY, "trash", (RestoredCheckpoint("run/a\nb.pt", "run/x"),), dry_run=True)
    assert undo_text(done) == (
        "prune --trash of 2026-01-02 03:04:05 UTC\n  run/a\\nb.pt  from the trash\nwould restore 1 checkpoint"
    )


def test_pointers_alone() -> None:
    done = Undone(IDENTITY, "rename", pointers=("run/latest",))
    assert undo_text(done) == (
        "rename of 2026-01-02 03:04:05 UTC\n"
        "  run/latest  rewritten\n"
        "restored 1 pointer; no checkpoint had moved"
    )

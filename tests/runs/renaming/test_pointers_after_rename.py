"""Pointers in pickles, which no rename changes: its records say what they mean now."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.changes import empty_trash
from tests.support.renamings import renamed
from tests.support.saves import protected_in, skipped_in


@pytest.fixture
def lightning(files: Path, tmp_path: Path) -> Path:
    """Return a run of three checkpoints that call ``epoch=1-step=4.ckpt`` the best."""
    run = tmp_path / "run"
    run.mkdir()
    content = (files / "pytorch" / "lightning" / "epoch=1-step=4.ckpt").read_bytes()
    for step in (2, 4, 6):
        path = run / f"epoch=1-step={step}.ckpt"
        path.write_bytes(content)
        os.utime(path, (step, step))
    return run


def _best(run: Path) -> tuple[list[str], list[str]]:
    """Return what is protected as the best, and why the series is left alone."""
    best = [name for name, reasons in protected_in(run).items() if "best_model_path" in reasons]
    return sorted(best), [*skipped_in(run).values()]


def test_the_best_is_known_by_its_new_name(lightning: Path) -> None:
    assert _best(lightning) == (["epoch=1-step=4.ckpt"], [])
    warning = renamed(lightning, "a-{name}").planned.warnings[0]
    assert "best_model_path in it keeps the old name" in warning and "--empty-trash" in warning
    assert _best(lightning) == (["a-epoch=1-step=4.ckpt"], [])
    renamed(lightning, "b-{name}")
    assert _best(lightning) == (["b-a-epoch=1-step=4.ckpt"], [])
    copy = lightning.with_name("copy")
    shutil.copytree(lightning, copy)
    assert _best(copy) == (["b-a-epoch=1-step=4.ckpt"], [])
    shutil.rmtree(copy / ".ckpttool-trash")
    assert "doesn't exist" in _best(copy)[1][0]


def test_another_sibling_of_the_old_name_is_not_meant(lightning: Path) -> None:
    shutil.copytree(lightning, lightning.with_name("before"))
    renamed(lightning, "a-{name}")
    assert _best(lightning) == (["a-epoch=1-step=4.ckpt"], [])


def test_what_has_taken_the_new_name_is_not_the_best(lightning: Path) -> None:
    renamed(lightning, "a-{name}")
    os.utime(lightning / "a-epoch=1-step=4.ckpt", (9, 9))
    best, skipped = _best(lightning)
    assert best == [] and len(skipped) == 1


def test_without_records_a_link_says_which_it_is(lightning: Path) -> None:
    renamed(lightning, "a-{name}")
    empty_trash(lightning)
    best, (why,) = _best(lightning)
    assert best == [] and why.endswith("(create a symlink of that name to the best checkpoint)")
    (lightning / "epoch=1-step=4.ckpt").symlink_to("a-epoch=1-step=4.ckpt")
    assert _best(lightning)[1] == []
    assert "a-epoch=1-step=4.ckpt" in protected_in(lightning)

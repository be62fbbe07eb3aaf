"""A symlink takes up no place in a rule: if it leads out, its bytes are somebody else's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import prune
from tests.support.checkpoints import numbers

NAME = "model_epoch_{}.npz"
T0 = 1_700_000_000


def save(path: Path, epoch: int) -> Path:
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, w=numbers(3), loss=np.float64(1 / epoch))
    os.utime(path, (T0 + 3600 * epoch,) * 2)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run of four checkpoints; two more, of later epochs, lie in the directory ``out`` beside it."""
    for epoch in range(1, 5):
        save(tmp_path / "run" / NAME.format(epoch), epoch)
    for epoch in (8, 9):
        save(tmp_path / "out" / NAME.format(epoch), epoch)
    return tmp_path / "run"


def absolute(run: Path) -> None:
    (run / NAME.format(9)).symlink_to(run.parent / "out" / NAME.format(9))


def relative(run: Path) -> None:
    (run / NAME.format(9)).symlink_to(f"../out/{NAME.format(9)}")


def several(run: Path) -> None:
    relative(run)
    (run / NAME.format(8)).symlink_to(f"../out/{NAME.format(8)}")


def chain(run: Path) -> None:
    (run.parent / "out" / "again.npz").symlink_to(NAME.format(9))
    (run / NAME.format(9)).symlink_to("../out/again.npz")


def older_than_all(run: Path) -> None:
    save(run.parent / "out" / NAME.format(1), 1)
    (run / NAME.format(0)).symlink_to(f"../out/{NAME.format(1)}")


def to_a_directory(run: Path) -> None:
    (run / "epoch_9").symlink_to("../out")


def planned(run: Path, **rules: object) -> tuple[set[str], set[str]]:
    """Return the names that stay and that go."""
    groups = prune(run, dry_run=True, **rules).plan.groups
    kept = {one.entry.name for group in groups for one in group.keep}
    return kept, {entry.name for group in groups for entry in group.remove}


RULES = [
    {"keep_last": 1},
    {"keep_best": 1, "metric": "loss", "mode": "min"},
    {"max_size": 600},
    {"keep_within": 60.0},
    {"keep_daily": 1},
]


LINKS = (absolute, relative, several, chain, older_than_all, to_a_directory)
PAIRS = [(link, RULES[0]) for link in LINKS] + [(several, rules) for rules in RULES[1:]]


@pytest.mark.parametrize(("link", "rules"), PAIRS)
def test_a_link_out_of_the_directory_changes_nothing_for_the_others(
    run_dir: Path, link: Callable[[Path], None], rules: dict[str, object]
) -> None:
    real = {path.name for path in run_dir.iterdir()}
    kept, removed = planned(run_dir, **rules)
    assert kept and removed and kept | removed == real
    link(run_dir)
    links = {path.name for path in run_dir.iterdir()} - real
    now_kept, now_removed = planned(run_dir, **rules)
    assert now_removed == removed
    assert kept <= now_kept <= kept | links

"""Distributed checkpoints of Megatron: what lies beside the shards is part of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import open_checkpoint, verify
from tests.formats.test_torch_dcp import FILES, rewritten

COMMON = FILES.parent / "pytorch" / "metrics_only.pth"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
Change = Callable[[Path], object]


def marked(into: Path) -> Path:
    """Return a directory as Megatron's planner leaves it, without what it writes beside."""
    return rewritten(into, lambda state: state.update(mcore_data={}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a whole one."""
    directory = marked(tmp_path)
    shutil.copy(COMMON, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(CONFIG), "utf-8")
    return directory


def codes(directory: Path) -> list[tuple[str, str | None]]:
    return [(one.code, one.where) for one in verify(directory).findings if one.check == "structure"]


def test_what_is_not_sharded_is_part_of_it(saved: Path) -> None:
    assert codes(saved) == []
    with open_checkpoint(saved) as checkpoint, open_checkpoint(COMMON) as common:
        assert {Path(one.path).name for one in checkpoint.files} >= {"common.pt", "metadata.json"}
        assert common.metadata
        own = common.metadata.keys() - {"epoch", "step"}  # which the fixture's shards hold, too
        assert {key: checkpoint.metadata[key] for key in own} == {key: common.metadata[key] for key in own}
        assert str(saved / "common.pt") in checkpoint.judged


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda one: (one / "common.pt").unlink(), "part-missing", "common.pt"),
        (lambda one: (one / "metadata.json").unlink(), "part-missing", "metadata.json"),
        (lambda one: (one / "common.pt").write_bytes(COMMON.read_bytes()[:-40]), "part-damaged", "common.pt"),
        (lambda one: (one / "common.pt").write_bytes(b""), "part-damaged", "common.pt"),
        (lambda one: (one / "metadata.json").write_text('{"sharded_ba'), "part-damaged", "metadata.json"),
        (lambda one: (one / "metadata.json").write_text(""), "part-damaged", "metadata.json"),
        (lambda one: (one / "metadata.json").write_text("{}"), "part-damaged", "metadata.json"),
        (lambda one: (one / "metadata.json").write_text("[1]"), "part-damaged", "metadata.json"),
    ],
)
def test_what_is_missing_or_cut_short_is_an_error(saved: Path, change: Change, code: str, where: str) -> None:
    change(saved)
    assert codes(saved) == [(code, where)]
    with open_checkpoint(saved) as checkpoint:
        assert not checkpoint.complete


def test_both_are_missed_where_only_the_metadata_tells_who_wrote_it(tmp_path: Path) -> None:
    found = codes(marked(tmp_path))
    assert found == [("part-missing", "metadata.json"), ("part-missing", "common.pt")]


def test_the_files_tell_where_the_metadata_does_not(tmp_path: Path) -> None:
    directory = rewritten(tmp_path, lambda state: None)
    (directory / "metadata.json").write_text(json.dumps(CONFIG), "utf-8")
    assert codes(directory) == [("part-missing", "common.pt")]
    (directory / "metadata.json").write_text(json.dumps(CONFIG | {"common_backend": "torch_dist"}), "utf-8")
    assert codes(directory) == []


def test_somebody_elses_files_are_no_parts(tmp_path: Path) -> None:
    directory = rewritten(tmp_path, lambda state: None)
    shutil.copy(COMMON, directory / "common.pt")
    (directory / "metadata.json").write_text('{"tags": [', "utf-8")
    assert codes(directory) == []

"""Snapshots: one answer to each question, whatever others change meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from ckpttool.core.errors import CheckpointError
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.source import NotRegular
from tests.support.memory import MemoryBucket, memory_stores


def filled(directory: Path) -> None:
    (directory / "run").mkdir()
    (directory / "run" / "a.pt").write_bytes(b"12345")
    (directory / "best").symlink_to("run/a.pt")
    (directory / "lost").symlink_to("run/none")


def answers(seen: Snapshot, root: str) -> dict[str, object]:
    """Return all that a snapshot says of a directory."""
    found: dict[str, object] = {
        "names": sorted(seen.names(root)),
        "inside": sorted(seen.names(f"{root}/run")),
    }
    for name in ("run", "run/a.pt", "best", "lost", "none"):
        path = f"{root}/{name}"
        found[name] = seen.exists(path), seen.lexists(path), seen.isdir(path), seen.realpath(path)
    for name in ("run", "run/a.pt", "best", "lost", "none"):
        try:
            found[f"{name}: text"] = seen.read(f"{root}/{name}", 3)
        except OSError as error:
            found[f"{name}: text"] = type(error), error.errno
    for name in ("best", "run"):
        try:
            found[f"{name}: link"] = seen.readlink(f"{root}/{name}")
        except OSError as error:
            found[f"{name}: link"] = error.errno
    return found


def test_what_it_says_is_what_the_system_says(tmp_path: Path) -> None:
    filled(tmp_path)
    found, real = answers(Snapshot(), str(tmp_path)), os.path.realpath(tmp_path)
    assert found["names"] == sorted(os.listdir(tmp_path)) and found["inside"] == ["a.pt"]
    assert found["run"] == (True, True, True, f"{real}/run")
    assert found["best"] == (True, True, False, f"{real}/run/a.pt")
    assert found["lost"] == (False, True, False, f"{real}/run/none")
    assert found["none"] == (False, False, False, f"{real}/none")
    assert found["run/a.pt: text"] == found["best: text"] == b"1234"
    assert found["best: link"] == "run/a.pt"
    with pytest.raises(NotRegular):
        Snapshot().read(f"{tmp_path}/run", 3)


def test_it_stays_what_it_was(tmp_path: Path) -> None:
    filled(tmp_path)
    seen = Snapshot()
    before = answers(seen, str(tmp_path))
    (tmp_path / "run" / "a.pt").unlink()
    (tmp_path / "best").unlink()
    (tmp_path / "none").write_text("new")
    assert answers(seen, str(tmp_path)) == before
    assert answers(Snapshot(), str(tmp_path).rstrip("/") + "/.") != before


def test_each_question_is_asked_once() -> None:
    with memory_stores():
        bucket = MemoryBucket()
        bucket.put("run/a.pt", b"12345")
        seen = Snapshot()
        for _ in range(3):
            fs.refresh(bucket.url())  # so that nothing but the snapshot remembers
            assert list(seen.names(bucket.url("run"))) == ["a.pt"]
            assert seen.exists(bucket.url("run/a.pt")) and not seen.exists(bucket.url("run/none"))
            assert seen.read(bucket.url("run/a.pt"), 3) == b"1234"
        assert max(Counter(bucket.calls).values()) <= 2, bucket.calls


def test_errors_are_answers() -> None:
    with memory_stores():
        bucket = MemoryBucket()
        bucket.put("run/a.pt", b"12345")
        bucket.refuse("status|listing", 503)
        seen = Snapshot()
        for _ in range(2):
            with pytest.raises(OSError, match="503"):
                seen.names(bucket.url("run"))
            with pytest.raises(CheckpointError, match="503"):
                seen.exists(bucket.url("run/a.pt"))
            bucket.obey()
            fs.refresh(bucket.url())

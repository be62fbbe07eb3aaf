"""``ckpttool copy``: what is copied where, what is left alone, and what it says."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

import ckpttool
from ckpttool.storage import fs, remote
from tests.support.commands import Run
from tests.support.faults import fill_disk
from tests.support.memory import MemoryBucket

SERIES = [f"model_epoch_{number}.pth" for number in range(1, 4)]


@pytest.fixture
def runs(files: Path, tmp_path: Path) -> Path:
    """Return a directory of three checkpoints in two runs."""
    directory = tmp_path / "runs"
    for name in SERIES[:2]:
        (directory / "a").mkdir(parents=True, exist_ok=True)
        shutil.copy2(files / "series" / name, directory / "a" / name)
    (directory / "b").mkdir()
    shutil.copy2(files / "series" / SERIES[2], directory / "b" / SERIES[2])
    return directory


@pytest.fixture(params=["disk", "store"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "copies" / "runs")
    bucket: MemoryBucket = request.getfixturevalue("bucket")
    return bucket.url("copies/runs")


def content(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_directory_is_copied_and_nothing_is_sent_again(
    run: Run, runs: Path, destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = content(runs)
    assert run("copy", "runs", destination) == (
        0,
        "copied  runs/a/model_epoch_1.pth  4.1 kB\n"
        "copied  runs/a/model_epoch_2.pth  4.1 kB\n"
        "copied  runs/b/model_epoch_3.pth  4.1 kB\n"
        "copied 3 of 3 checkpoints (12 kB)\n",
        "",
    )
    again = run("copy", "runs", destination)
    assert again.status == 0 and again.out.count("already there  runs/") == 3
    assert again.out.endswith("copied 0 of 3 checkpoints (0 B), 3 already there\n")
    shutil.rmtree(runs)
    assert run("copy", destination, "runs").status == 0
    assert content(runs) == before


def test_checkpoint_keeps_its_name(run: Run, runs: Path, destination: str) -> None:
    assert run("copy", runs / "a" / SERIES[0], runs / "b", destination).status == 0
    found = json.loads(run("list", "--json", destination).out)
    assert len(found["checkpoints"]) == 2
    assert run("verify", f"{destination}/{SERIES[0]}", f"{destination}/{SERIES[2]}").status == 0


def test_manifest_travels(run: Run, runs: Path, destination: str, tmp_path: Path) -> None:
    path = runs / "b" / SERIES[2]
    assert run("verify", "--write-manifest", path).status == 0
    assert run("copy", runs, destination).status == 0
    verdict = json.loads(run("verify", "--json", f"{destination}/b/{SERIES[2]}").out)["checkpoints"][0]
    assert {check["name"]: check["status"] for check in verdict["checks"]}["manifest"] == "passed"


def test_times_travel_to_a_disk(run: Run, runs: Path, tmp_path: Path) -> None:
    os.utime(runs / "b" / SERIES[2], (1_600_000_000, 1_600_000_000))
    assert run("copy", runs, tmp_path / "copies").status == 0
    assert (tmp_path / "copies" / "b" / SERIES[2]).stat().st_mtime == 1_600_000_000


def test_damaged_one_is_named_and_not_copied(run: Run, runs: Path, destination: str) -> None:
    path = runs / "a" / SERIES[0]
    path.write_bytes(path.read_bytes()[:-100])
    answer = run("copy", runs, destination)
    assert answer.status == 1
    line = next(line for line in answer.out.splitlines() if SERIES[0] in line)
    assert line.startswith("not copied  ") and "  invalid: " in line
    assert answer.out.endswith("copied 2 of 3 checkpoints (8.1 kB), 1 not copied\n")
    assert run("copy", runs / "b", destination, "--quiet") == (0, "", "")


@pytest.mark.parametrize(("depth", "status"), [("full", 1), ("quick", 0)])
def test_how_it_is_verified(run: Run, runs: Path, destination: str, depth: str, status: int) -> None:
    path = runs / "b" / SERIES[2]
    data = bytearray(path.read_bytes())
    data[data.index(b"/data/0") + 80] ^= 1  # in the bytes of a tensor
    path.write_bytes(data)
    assert run("copy", runs, destination, "--verify", depth).status == status


def test_different_one_is_left_unless_forced(run: Run, runs: Path, destination: str) -> None:
    assert run("copy", runs, destination).status == 0
    shutil.copy2(runs / "a" / SERIES[0], runs / "b" / SERIES[2])
    answer = run("copy", runs, destination)
    assert answer.status == 1
    assert "differs        " in answer.out and "another file has its name" in answer.out
    remote.forget()
    assert run("diff", runs / "b" / SERIES[2], f"{destination}/b/{SERIES[2]}").status == 1
    assert run("copy", runs, destination, "--force").status == 0
    remote.forget()
    assert run("diff", runs / "b" / SERIES[2], f"{destination}/b/{SERIES[2]}").status == 0


def test_dry_run_changes_nothing(run: Run, runs: Path, tmp_path: Path, bucket: MemoryBucket) -> None:
    answer = run("copy", runs, bucket.url("x"), "-n")
    assert answer.status == 0 and answer.out.count("would copy  ") == 3
    assert answer.out.endswith("would copy 3 of 3 checkpoints (12 kB)\n")
    assert run("copy", runs, tmp_path / "x", "-n").status == 0
    assert bucket.keys() == [] and not (tmp_path / "x").exists()


def test_document(run: Run, runs: Path, destination: str) -> None:
    path = runs / "a" / SERIES[0]
    path.write_bytes(b"")
    answer = run("copy", runs, destination, "--json")
    assert answer.status == 1
    assert (
        answer.err
        == f"ckpttool: error: {path}: not copied: the file is empty; expected a PyTorch checkpoint\n"
    )
    document = json.loads(answer.out)
    rows = document.pop("checkpoints")
    assert document == {
        "schema": "ckpttool.copy/1",
        "destination": destination,
        "dry_run": False,
        "complete": False,
        "left_out": [],
        "pruned": None,
        "errors": [],
    }
    assert [row["status"] for row in rows] == ["invalid", "copied", "copied"]
    assert rows[1] == {
        "path": str(runs / "a" / SERIES[1]),
        "target": f"{destination}/a/{SERIES[1]}",
        "status": "copied",
        "bytes": 4065,
        "sent_bytes": 4065,
        "reason": None,
    }
    assert ckpttool.copy(runs, destination).to_dict()["checkpoints"][1]["status"] == "present"


def test_what_cannot_be_asked(run: Run, runs: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((runs, runs / "copies"), "is inside"),
        ((runs / "a" / SERIES[0], runs / "a"), "would be copied to itself"),
        ((runs / "a", runs / "a"), "is inside"),
        ((tmp_path / "nothing", tmp_path / "copies"), "no such file"),
        ((tmp_path, tmp_path.parent / "copies", "--exclude", "*"), "no checkpoint in this directory"),
    ):
        answer = run("copy", *arguments)
        assert (answer.status, message in answer.err + answer.out) == (2, True), (arguments, answer)
    (runs / "c").mkdir()
    shutil.copy2(runs / "a" / SERIES[1], runs / "c" / SERIES[0])
    answer = run("copy", runs / "a", runs / "c", tmp_path / "copies")
    assert answer.status == 2 and "would both be" in answer.err


def test_sources_are_left_as_they_are(run: Run, runs: Path, destination: str) -> None:
    before = {path: path.stat() for path in runs.rglob("*")}
    run("copy", runs, destination)
    run("copy", runs, destination, "--force")
    after = {path: path.stat() for path in runs.rglob("*")}
    assert {path: (one.st_ino, one.st_mtime_ns) for path, one in before.items()} == {
        path: (one.st_ino, one.st_mtime_ns) for path, one in after.items()
    }


# A policy at the destination ------------------------------------------------------------------------


def test_destination_keeps_a_policy(run: Run, files: Path, tmp_path: Path, destination: str) -> None:
    runs, copies = tmp_path / "runs", destination
    runs.mkdir()
    for number in range(1, 4):
        shutil.copy2(files / "series" / f"model_epoch_{number}.pth", runs)
    answer = run("copy", runs, copies, "--keep", "2", "--yes")
    assert answer.status == 0
    assert "copied 2 of 2 checkpoints (8.1 kB), 1 not selected\n" in answer.out
    for number in range(4, 6):
        shutil.copy2(files / "series" / f"model_epoch_{number}.pth", runs)
    answer = run("copy", runs, copies, "--keep", "2", "--yes")
    assert answer.status == 0 and "removed 2 of 4 checkpoints" in answer.out
    remote.forget()
    assert sorted(fs.listdir(copies)) == ["model_epoch_4.pth", "model_epoch_5.pth"]
    assert len(content(runs)) == 5
    answer = run("copy", runs, copies, "--keep", "2", "--json")
    assert answer.status == 0 and json.loads(answer.out)["pruned"]["schema"].startswith("ckpttool.prune/")


# Faults ---------------------------------------------------------------------------------------------


def test_full_disk_ends_it_and_leaves_nothing(
    run: Run, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    answer = run("copy", runs, tmp_path / "copies")
    assert answer.status == 2
    assert (
        "no space left on device" in answer.out
        and answer.out.count("not tried after the previous failure") == 2
    )
    assert content(tmp_path / "copies") == {}


@pytest.mark.parametrize("status", [403, 503])
def test_store_that_refuses_ends_it(run: Run, runs: Path, bucket: MemoryBucket, status: int) -> None:
    bucket.refuse("write", status)
    answer = run("copy", runs, bucket.url("runs"))
    assert answer.status == 2
    assert f"{bucket.url('runs/a')}/{SERIES[0]}: " in answer.out and str(status) in answer.out
    assert answer.out.count("not tried after the previous failure") == 2


def test_what_a_pin_keeps_in_the_source_stays_there_too(run: Run, files: Path, tmp_path: Path) -> None:
    runs, copies = tmp_path / "runs", tmp_path / "copies"
    runs.mkdir()
    for number in range(1, 5):
        shutil.copy2(files / "series" / f"model_epoch_{number}.pth", runs)
    assert run("pin", runs / "model_epoch_1.pth").status == 0
    for _ in range(2):
        assert run("copy", runs, copies, "--keep", "1", "--yes").status == 0
        assert sorted(content(copies)) == ["model_epoch_1.pth", "model_epoch_4.pth"]


def test_rules_are_refused_where_nothing_is_removed(run: Run, runs: Path) -> None:
    answer = run("copy", runs, "memory://copies", "--keep", "1")
    assert answer.status == 2 and "can't prune such a store" in answer.err


def test_a_host_that_nobody_knows_is_an_error(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")

    def refuse(*place: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    answer = run("copy", runs, "ftp://nowhere/copies", "--keep", "1")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == "ckpttool: error: ftp://nowhere/copies: Name or service not known\n"


def test_other_file_systems_are_destinations_too(run: Run, files: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    source = files / "torch-dcp" / "two-ranks"
    try:
        assert run("copy", source, "memory://copies").status == 0
        assert run("copy", source, "memory://copies").out.startswith("already there")
        assert run("copy", "memory://copies/two-ranks", tmp_path).status == 0
    finally:
        fsspec.filesystem("memory").store.clear()
    assert content(tmp_path / "two-ranks") == content(source)


def test_a_name_that_is_a_path_elsewhere_is_not_copied_from_a_store(
    bucket: MemoryBucket, run: Run, tmp_path: Path, files: Path
) -> None:
    data = (files / "safetensors" / "dtypes.safetensors").read_bytes()
    for name in ("m.safetensors", "..\\evil.safetensors"):
        bucket.put(f"run/{name}", data)
    status, _, err = run("copy", bucket.url("run"), tmp_path / "there")
    assert (status, [one.name for one in (tmp_path / "there").iterdir()]) == (2, ["m.safetensors"])
    assert "evil.safetensors: its name contains a backslash" in err

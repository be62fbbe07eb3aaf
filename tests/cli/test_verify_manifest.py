"""``ckpttool verify --write-manifest``, and manifests that lie beside checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def guide(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint in the current directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "guide.pth").name)


@pytest.fixture
def runs(files: Path, tmp_path: Path) -> Path:
    """Return a directory of ten epochs."""
    return Path(shutil.copytree(files / "series", tmp_path / "runs"))


LINE = "✓ valid    guide.pth  pytorch  4.0 kB  8 tensors"


def test_written_checked_and_left_alone(run, guide: Path) -> None:
    names = "guide.pth.sha256, guide.pth.digests.json"
    assert run("verify", guide, "--write-manifest") == (0, f"{LINE}\nwrote: {names}\n", "")
    done = subprocess.run(["sha256sum", "-c", "guide.pth.sha256"], capture_output=True, text=True, check=True)
    assert done.stdout == "guide.pth: OK\n"
    whole = f"{LINE}, manifest ok\n"
    assert run("verify", guide) == (0, whole, "")
    assert run("verify", guide, "--write-manifest") == (0, f"{whole}already there: {names}\n", "")
    assert run("verify", guide, "--write-manifest", "--quiet") == (0, "", "")


def test_json(run, guide: Path) -> None:
    status, out, err = run("verify", "--json", guide, "--write-manifest")
    (told,) = json.loads(out)["checkpoints"]
    written = ["guide.pth.sha256", "guide.pth.digests.json"]
    assert (status, err) == (0, "")
    assert told["manifest"] == {"written": True, "files": written, "refused": None}
    (told,) = json.loads(run("verify", "--json", guide).out)["checkpoints"]
    assert "manifest" not in told
    assert told["checks"][-1] == {"name": "manifest", "status": "passed", "detail": "1 file"}


def test_a_change_is_named(run, guide: Path) -> None:
    run("verify", guide, "--write-manifest")
    data = bytearray(guide.read_bytes())
    data[data.index(b"data/0") + 128] ^= 1
    guide.write_bytes(data)
    status, out, err = run("verify", guide, "-v")
    assert (status, err) == (1, "")
    assert "manifest   failed   2 findings in 1 file" in out
    assert "error manifest-mismatch [guide.pth]: SHA-256 is " in out
    assert "error manifest-mismatch [model_state_dict.fc.weight]: its elements differ" in out
    status, out, err = run("verify", guide, "--write-manifest", "--force")
    assert (status, err) == (1, "ckpttool: error: guide.pth: no manifest written: it is not valid\n")


def test_quick_says_that_it_skips_it(run, guide: Path) -> None:
    run("verify", guide, "--write-manifest")
    status, out, _ = run("verify", guide, "--quick")
    assert status == 0
    assert out.endswith("  only structure and safety\n")
    assert run("verify", guide, "--only", "manifest", "--json").status == 0


def test_only_manifest_where_there_is_none(run, guide: Path) -> None:
    status, out, _ = run("verify", guide, "--only", "manifest", "-v")
    assert status == 1
    assert "manifest   skipped  no manifest next to it" in out
    assert "error nothing-checked: no requested check could finish (manifest was skipped: no" in out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--write-manifest", "--quick"), "--write-manifest needs all checks (omit --quick and --only)"),
        (("--write-manifest", "--only", "values"), "--write-manifest needs all checks"),
        (("--force",), "--force is only valid with --write-manifest"),
    ],
)
def test_options_that_contradict_each_other(run, guide: Path, options: tuple[str, ...], why: str) -> None:
    status, out, err = run("verify", guide, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"ckpttool: error: {why}")
    assert os.listdir() == ["guide.pth"]


def test_one_that_lists_more_is_refused(run, guide: Path) -> None:
    Path("notes").write_text("notes")
    with open("guide.pth.sha256", "wb") as manifest:
        subprocess.run(["sha256sum", "guide.pth", "notes"], stdout=manifest, check=True)
    status, _, err = run("verify", guide, "--write-manifest")
    why = "guide.pth.sha256 already exists and differs for notes; --force replaces it"
    assert (status, err) == (1, f"ckpttool: error: guide.pth: no manifest written: {why}\n")
    assert run("verify", guide, "--write-manifest", "--force").status == 0
    assert "notes" not in Path("guide.pth.sha256").read_text()


def test_a_full_disk(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, out, err = run("verify", guide, "--write-manifest")
    assert (status, out) == (2, f"{LINE}\n")
    why = "guide.pth.digests.json: no space left on device"
    assert err == f"ckpttool: error: guide.pth: no manifest written: {why}\n"
    assert os.listdir() == ["guide.pth"]


def test_a_whole_directory(run, runs: Path) -> None:
    names = sorted(os.listdir(runs))
    status, out, _ = run("verify", runs, "--write-manifest")
    assert (status, out.count("wrote: ")) == (0, len(names))
    assert run("verify", runs).out.count("manifest ok") == len(names)
    listed = json.loads(run("list", runs, "--json").out)["checkpoints"]
    assert sorted(os.path.basename(one["path"]) for one in listed) == names


def test_pruning_takes_manifests_along(run, runs: Path) -> None:
    run("verify", runs, "--write-manifest")
    assert run("prune", runs, "--keep", "2", "--yes").status == 0
    kept = ("model_epoch_9.pth", "model_epoch_10.pth")
    endings = ("", ".sha256", ".digests.json")
    assert sorted(os.listdir(runs)) == sorted(name + ending for name in kept for ending in endings)
    assert run("verify", runs).status == 0


def test_a_manifest_makes_no_checkpoint_newer(run, runs: Path) -> None:
    for path in runs.glob("*.pth"):
        os.utime(path, (1_000_000, 1_000_000))
    oldest = runs / "model_epoch_1.pth"
    before = json.loads(run("list", runs, "--json").out)["checkpoints"]
    run("verify", oldest, "--write-manifest")
    after = json.loads(run("list", runs, "--json").out)["checkpoints"]
    assert [one["modified"] for one in after] == [one["modified"] for one in before]


def test_names_are_escaped(run, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "new\nline\\.pth"
    shutil.copy(files / "pytorch" / "guide.pth", path)
    status, out, _ = run("verify", path, "--write-manifest")
    assert (status, out.count("\n")) == (0, 2)
    command = ["sha256sum", "-c", "--strict", f"{path.name}.sha256"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    assert run("verify", path).out.endswith(", manifest ok\n")

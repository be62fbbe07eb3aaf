"""``ckpttool list``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

KEYS = [
    "path",
    "format",
    "group",
    "complete",
    "epoch",
    "step",
    "loss",
    "metrics",
    "bytes",
    "modified",
    "protected",
    "fault",
]


@pytest.fixture
def series(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of ten epochs, below the working directory."""
    shutil.copytree(files / "series", tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000 + 7_200.0)
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_text(run, series: Path) -> None:
    for epoch in range(3, 10):
        (series / f"model_epoch_{epoch}.pth").unlink()
    (series / "latest").write_text("model_epoch_2.pth")
    answer = run("list", series)
    assert answer == (
        0,
        "checkpoint              format   epoch  metrics        size  age  state\n"
        "run/model_epoch_1.pth   pytorch      1  loss 0.5638  4.1 kB  2 h  readable\n"
        "run/model_epoch_2.pth   pytorch      2  loss 0.4431  4.1 kB  2 h  readable; latest\n"
        "run/model_epoch_10.pth  pytorch     10  loss 0.0421  4.1 kB  2 h  readable\n",
        "",
    )


def test_json(run, series: Path) -> None:
    status, out, err = run("list", series, "--json")
    document = json.loads(out)
    assert (status, err, document["schema"], len(document["checkpoints"])) == (0, "", "ckpttool.list/1", 10)
    assert list(document["checkpoints"][0]) == KEYS
    newest = document["checkpoints"][-1]
    assert newest["path"] == "run/model_epoch_10.pth"
    assert newest["group"] == "run/model_epoch_*.pth"
    assert (newest["format"], newest["complete"], newest["epoch"], newest["step"]) == (
        "pytorch",
        True,
        10,
        None,
    )
    assert (newest["bytes"], newest["modified"]) == (4079, "2023-11-14T22:13:20Z")


def test_it_descends_as_far_as_asked(run, series: Path) -> None:
    shutil.copytree(series, "deep/er/run")
    assert len(json.loads(run("list", ".", "--json").out)["checkpoints"]) == 20
    assert len(json.loads(run("list", ".", "--json", "--max-depth", 1).out)["checkpoints"]) == 10
    assert len(json.loads(run("list", "--json", "--exclude", "deep").out)["checkpoints"]) == 10


def test_null_ends_paths_byte_for_byte(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(series)
    name = b"model\n\x1b[31m\xff_epoch_3.pth"
    os.rename(b"model_epoch_3.pth", name)
    for epoch in (1, 2, 4, 5, 6, 7, 8, 9):
        os.unlink(f"model_epoch_{epoch}.pth")
    command = [sys.executable, "-c", "from ckpttool.__main__ import main; main()", "list", "-0"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert sorted(done.stdout.split(b"\0")) == [b"", name, b"model_epoch_10.pth"]


def test_names_are_escaped(run, series: Path) -> None:
    os.rename(series / "model_epoch_3.pth", series / "model\n\x1b[31m_epoch_3.pth")
    answer = run("list", series)
    assert "\x1b" not in answer.out
    assert r"run/model\n\x1b[31m_epoch_3.pth" in answer.out


def test_a_name_that_is_no_text_is_json_all_the_same(run, series: Path) -> None:
    os.rename(os.fsencode(series / "model_epoch_3.pth"), os.fsencode(series) + b"/m\xff_epoch_3.pth")
    answer = run("list", series, "--json")
    paths = [one["path"] for one in json.loads(answer.out)["checkpoints"]]
    assert os.fsdecode(b"run/m\xff_epoch_3.pth") in paths


def test_names_that_differ_in_case_alone(run, series: Path) -> None:
    try:
        os.link(series / "model_epoch_3.pth", series / "MODEL_EPOCH_3.pth")
    except FileExistsError:
        pytest.skip("the file system takes them for one")
    answer = run("list", series, "--json")
    groups = {one["group"] for one in json.loads(answer.out)["checkpoints"]}
    assert groups == {"run/model_epoch_*.pth", "run/MODEL_EPOCH_*.pth"}


def test_a_damaged_one_is_listed_and_told(run, series: Path) -> None:
    content = (series / "model_epoch_3.pth").read_bytes()
    (series / "model_epoch_3.pth").write_bytes(content[:1000])
    status, out, err = run("list", series)
    assert status == 1
    (line,) = [line for line in out.splitlines() if "_3.pth" in line]
    assert line.endswith("incomplete: 1,000 bytes of a zip that ends before its directory")
    assert err.startswith("ckpttool: warning: run/model_epoch_3.pth: incomplete: ")
    assert err.count("\n") == 1


def test_a_run_of_a_trainer(run, files: Path) -> None:
    status, out, _ = run("list", files / "safetensors" / "trainer", "--json")
    first, second = json.loads(out)["checkpoints"]
    assert status == 0
    assert (os.path.basename(first["path"]), first["step"], second["step"]) == ("checkpoint-2", 2, 4)
    assert second["protected"] == ["best_model_checkpoint"]


def test_a_journal_that_waits_is_told(run, series: Path) -> None:
    stage = series / ".ckpttool-0123abcd"
    stage.mkdir()
    (stage / "journal.json").write_text('{"schema": "ckpttool.journal/1", "rewrites": [], "removals": []}')
    status, out, err = run("list", series)
    assert (status, out.count("\n")) == (0, 11)
    assert err == (
        "ckpttool: warning: run: a prune was interrupted here; the next one settles it "
        "(run/.ckpttool-0123abcd/journal.json)\n"
    )


def test_the_size_of_a_symlink_is_that_of_its_file(run, series: Path, tmp_path: Path) -> None:
    away = (series / "model_epoch_3.pth").rename(tmp_path / "away.pth")
    (series / "model_epoch_3.pth").symlink_to(away)
    found = json.loads(run("list", series, "--json").out)["checkpoints"]
    (one,) = (each for each in found if each["epoch"] == 3)
    assert one["bytes"] == away.stat().st_size


def test_quiet(run, series: Path) -> None:
    (series / "model_epoch_3.pth").write_bytes(b"PK\3\4 and no more")
    assert run("list", series, "-q") == (1, "", "")


def test_nothing_there(run, tmp_path: Path) -> None:
    assert run("list", tmp_path) == (0, "", f"{tmp_path}: no checkpoint\n")
    answer = run("list", tmp_path, "--json")
    assert (answer.status, json.loads(answer.out)["checkpoints"]) == (0, [])


def test_no_such_directory(run, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert run("list", missing) == (2, "", f"ckpttool: error: {missing}: no such file or directory\n")


def test_no_numpy_and_no_rich(series: Path) -> None:
    code = "import atexit, sys; from ckpttool.__main__ import main; "
    code += "atexit.register(lambda: print({'numpy', 'rich'} & set(sys.modules))); main()"
    command = [sys.executable, "-c", code, "list", str(series)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.endswith("\nset()\n")

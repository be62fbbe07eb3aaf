"""``verify --sample``: a part is read in full, another each day, and nothing else is called so."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.runs import flip_value

COUNT = 10
DAY = 86_400


@pytest.fixture
def runs(files: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    directory.mkdir()
    for number in range(COUNT):
        shutil.copy(files / "pytorch" / "guide.pth", directory / f"m_{number}.pth")
    return directory


def read_in_full(document: str) -> set[str]:
    rows = json.loads(document)["checkpoints"]
    return {os.path.basename(row["path"]) for row in rows if "sampled out" not in str(row["checks"])}


def sampled(run: Run, runs: Path, text: str, patch: pytest.MonkeyPatch, day: int) -> set[str]:
    with patch.context() as context:
        context.setattr(time, "time", lambda: 1_800_000_000.0 + day * DAY)
        context.setattr(time, "gmtime", lambda real=time.gmtime: real(1_800_000_000 + day * DAY))
        return read_in_full(run("verify", runs, "--json", "--sample", text).out)


def test_what_is_sampled_out_is_not_called_valid(run: Run, runs: Path) -> None:
    run("verify", runs, "--write-manifest")
    flip_value(runs / "m_9.pth")
    status, out, _ = run("verify", runs, "--sample", "30%")
    lines = out.splitlines()
    assert (status, len(lines)) == (0, COUNT + 1)
    assert [line[:11].rstrip() for line in lines[:-1]] == ["✓ valid"] * 3 + ["– sampled"] * 7
    assert lines[9].endswith("sampled out: only structure and safety")
    assert lines[-1] == "10 checkpoints: 3 valid, 7 sampled out; full: 3 of 10"


def test_the_document_says_what_was_read(run: Run, runs: Path) -> None:
    run("verify", runs, "--write-manifest")
    document = json.loads(run("verify", runs, "--sample", "10%", "--json").out)
    assert document["sampled"] == {"full": 1, "of": COUNT}
    full, *others = document["checkpoints"]
    assert {check["status"] for check in full["checks"]} == {"passed"}
    told = {check["name"]: (check["status"], check["detail"]) for check in others[0]["checks"]}
    left = ("skipped", "sampled out")
    assert (told["checksum"], told["values"], told["manifest"]) == (left, left, left)
    assert told["structure"][0] == told["safety"][0] == "passed"


def test_the_least_recently_read_come_first(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("verify", runs, "--write-manifest")
    days = [sampled(run, runs, "30%", monkeypatch, day) for day in range(4)]
    assert days[0] | days[1] | days[2] | days[3] == {f"m_{number}.pth" for number in range(COUNT)}
    assert [len(day) for day in days] == [3, 3, 3, 3]
    head = (runs / "m_3.pth.digests.json").read_text().splitlines()
    assert head[1:3] == [
        ' "schema": "ckpttool.digests/1",',
        ' "verified": {"at": "2027-01-16T08:00:00Z", "depth": "full"},',
    ]


def test_a_manifest_stays_what_it_is(run: Run, runs: Path) -> None:
    run("verify", runs, "--write-manifest")
    before = {path.name: path.read_text() for path in runs.iterdir() if path.suffix == ".json"}
    run("verify", runs, "--sample", "100%")
    run("verify", runs, "--sample", "100%")
    for name, text in before.items():
        first, schema, verified, *rest = (runs / name).read_text().splitlines(keepends=True)
        assert '"verified"' in verified
        assert "".join([first, schema, *rest]) == text
    status, out, _ = run("verify", runs, "--write-manifest")
    assert (status, out.count("already there:")) == (0, COUNT)


def test_a_manifest_in_a_directory_remembers_too(run: Run, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "fluid" / "guide", tmp_path / "guide")
    assert run("verify", tmp_path / "guide", "--write-manifest").status == 0
    assert run("verify", tmp_path / "guide", "--sample", "100%").status == 0
    (record,) = (tmp_path / "guide").rglob(".*.digests.json")
    assert '"verified"' in record.read_text()


def test_what_is_damaged_is_read_again_each_time(
    run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("verify", runs, "--write-manifest")
    flip_value(runs / "m_0.pth")
    for day in range(3):
        assert "m_0.pth" in sampled(run, runs, "20%", monkeypatch, day)
    assert run("verify", runs, "--sample", "20%").status == 1


def test_without_manifests_all_are_read_in_the_course_of_days(
    run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [sampled(run, runs, "25%", monkeypatch, day) for day in range(4)]
    assert sum(map(len, days)) == len(set().union(*days)) == COUNT
    assert sampled(run, runs, "25%", monkeypatch, 4) == days[0]


def test_a_manifest_that_cannot_be_written_is_told(run: Run, runs: Path) -> None:
    run("verify", runs / "m_0.pth", "--write-manifest")
    record = runs / "m_0.pth.digests.json"
    document = record.read_text()
    record.write_text(json.dumps(json.loads(document)))  # not as it was written: it has no record
    status, out, err = run("verify", runs / "m_0.pth", "--sample", "100%")
    assert (status, err) == (0, "")
    assert out.endswith("1 checkpoint: 1 valid; full: 1 of 1\n")
    assert "verified" not in record.read_text()


def test_samples_of_parts_are_added(run: Run, runs: Path) -> None:
    parts = []
    for number in (1, 2):
        parts.append(runs.parent / f"{number}.json")
        arguments = ("--part", f"{number}/2", "--sample", "50%")
        parts[-1].write_text(run("verify", runs, "--json", *arguments).out)
    merged = json.loads(run("verify", "--merge", *parts, "--json").out)
    assert merged["sampled"]["of"] == COUNT
    assert merged["sampled"]["full"] == len(read_in_full(json.dumps(merged)))


@pytest.mark.parametrize(
    "more", [("--quick",), ("--only", "values"), ("--write-manifest",), ("--predict",)], ids=" ".join
)
def test_a_sample_needs_all_checks(run: Run, runs: Path, more: tuple[str, ...]) -> None:
    status, _, err = run("verify", runs, "--sample", "5%", *more)
    assert (status, "--sample needs a PATH, and can't be combined with --quick" in err) == (2, True)

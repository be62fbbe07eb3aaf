"""How often a series is saved: known times, what can't be told, and Young's formula."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.runs.cadence import best_interval, cadence_of
from tests.support.commands import Run, refusals, transcript
from tests.support.directories import file_of, make_entry
from tests.support.golden import Golden

SERIES = Path(__file__).parents[2] / "fixtures" / "files" / "series"
START = 1_700_000_000
DAY = 86_400


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run of ten saves, one each ten minutes, with a pause; each takes twelve seconds."""
    for number in range(1, 11):
        save = tmp_path / "run" / f"step_{500 * number}"
        save.mkdir(parents=True)
        begun = START + 600 * number + (7200 if number > 6 else 0)
        for seconds, name in ((0, "model.pth"), (12, "optim.pth")):
            shutil.copy(SERIES / "model_epoch_1.pth", save / name)
            os.utime(save / name, (begun + seconds, begun + seconds))
    usage = shutil._ntuple_diskusage(10**9, 0, 8_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_text(saves: Path, run: Run, golden: Golden) -> None:
    golden(transcript(run, (0, "list run --cadence --mtbf 24h"), (0, "list run --cadence --save-time 1min")))


def test_json(saves: Path, run: Run) -> None:
    document = json.loads(run("list", saves, "--cadence", "--mtbf", "24h", "--json").out)
    cadence = document["series"][0]["cadence"]
    assert (cadence["interval"], cadence["steps"], cadence["pauses"]) == (600, 500, 1)
    assert (cadence["save_time"], cadence["share_of_time"]) == (12, 0.02)
    assert cadence["best_interval"] == math.sqrt(2 * 12 * DAY)
    assert cadence["best_steps"] == pytest.approx(500 * math.sqrt(2 * 12 * DAY) / 600)
    assert "cadence" not in json.loads(run("list", saves, "--json").out)["series"][0]


def test_what_can_not_be_told(tmp_path: Path, run: Run) -> None:
    shutil.copytree(SERIES, tmp_path / "run", copy_function=shutil.copy)
    lines = run("list", tmp_path / "run", "--cadence", "--mtbf", "24h").out.splitlines()
    assert "  saved every    unknown: all were written within a minute, as if copied" in lines
    assert "  a save takes   unknown (set --save-time)" in lines
    assert not any("best" in line or "full" in line for line in lines[1:])


def test_what_can_not_be_asked(run: Run, golden: Golden) -> None:
    options = ("--mtbf 24h", "--save-time 2s", "--cadence --mtbf 0", "--cadence --mtbf soon")
    golden(refusals(run, *(f"list {SERIES} {one}" for one in options)))


def test_without_a_series_there_is_none(tmp_path: Path, run: Run) -> None:
    shutil.copy(SERIES / "model_epoch_1.pth", tmp_path)
    assert run("list", tmp_path, "--cadence").err == "no series with several checkpoints\n"


_SECONDS = st.floats(0.01, 1e7)


@given(_SECONDS, _SECONDS, st.floats(1.1, 100))
def test_the_best_interval_grows_with_the_root_of_both(save: float, mtbf: float, times: float) -> None:
    root = best_interval(save, mtbf) * math.sqrt(times)
    assert best_interval(times * save, mtbf) == pytest.approx(root)
    assert best_interval(save, times * mtbf) == pytest.approx(root)


@given(st.integers(61, 100_000), st.integers(3, 20), st.integers(1, 10**12))
def test_growth_is_what_is_saved_a_day(interval: int, count: int, nbytes: int) -> None:
    entries = [
        make_entry(
            f"step_{number}.pt",
            files=[file_of("f", number, nbytes, modified=(START + interval * number) * 10**9)],
            counts_inside=(None, number),
            directory=".",
        )
        for number in range(count)
    ]
    cadence = cadence_of(entries)
    assert (cadence.interval, cadence.pauses, cadence.steps) == (interval, 0, 1)
    assert cadence.daily_bytes == pytest.approx(nbytes * DAY / interval)

"""What people say of checkpoints: kept in the list of pins, moved by renaming; and until when a pin holds."""

from __future__ import annotations

import json
import shutil
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttool import CheckpointError, Policy, list_checkpoints, pin, rename, undo, unpin
from ckpttool.containers.toml import parse_toml, quote
from ckpttool.runs.pointers.pin_lists import (
    NO_REMARK,
    Remark,
    merged,
    remarks_in,
    rename_remarks,
    with_remark,
)
from tests.support.commands import Run
from tests.support.retention import dry_run, kept_reasons

SERIES = Path(__file__).parents[3] / "fixtures" / "files" / "series"
LIST = ".ckpttool-pins.toml"
DAY = 86_400
NOW = 1_790_000_000.0
TODAY = date.fromtimestamp(NOW)


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(time, "time", lambda: NOW)
    return Path(shutil.copytree(SERIES, tmp_path / "run"))


def reasons(series: Path) -> dict[str, tuple[str, ...]]:
    return kept_reasons(dry_run(series, policy=Policy(keep_last=1)))


def said(series: Path) -> dict[str, Any]:
    """Return what ``list`` tells that people say of checkpoints, by name."""
    rows = json.loads(json.dumps(list_checkpoints(series).document()))["checkpoints"]
    return {Path(row["path"]).name: row["about"] for row in rows if "about" in row}


def test_a_pin_has_a_note_and_an_end(series: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    until = date.fromtimestamp(NOW + 3 * DAY)
    path = series / "model_epoch_3.pth"
    assert run("pin", path, "-m", "figure 2", "--until", until.isoformat()).out == f"pinned {path}\n"
    assert parse_toml((series / LIST).read_text()) == {
        "pinned": [path.name],
        "about": {path.name: {"note": "figure 2", "until": until}},
    }
    assert reasons(series)[path.name] == (f"pinned: figure 2 (until {until})",)
    monkeypatch.setattr(time, "time", lambda: NOW + 3 * DAY)  # its last day
    assert path.name in reasons(series)
    monkeypatch.setattr(time, "time", lambda: NOW + 4 * DAY)
    assert path.name not in reasons(series)
    told = f"ckpttool: warning: {path}: its pin expired on {until}\n"
    assert run("pin", "--list", series) == (0, f"{path}\n", told)


def test_pinning_again_changes_note_and_end(series: Path) -> None:
    path = series / "model_epoch_3.pth"
    pin([path], note="figure 2", until=date(2030, 1, 1))
    pin([path], until=date(2031, 1, 1))
    assert said(series) == {path.name: {"note": "figure 2", "until": "2031-01-01", "facts": {}}}
    unpin([path])  # a note says something without a pin, too
    assert said(series) == {path.name: {"note": "figure 2", "until": None, "facts": {}}}
    assert path.name not in reasons(series)


def test_a_note_follows_a_renaming_and_its_undoing(series: Path, run: Run) -> None:
    pin([series / "model_epoch_3.pth"], note="figure 2", until=date(2030, 1, 1))
    noted = run("card", series / "model_epoch_4.pth", "--note", "for the talk", "--set", "data=CIFAR-10")
    assert noted.status == 0
    before = (series / LIST).read_text()
    rename(str(series), "net-{epoch}")
    assert said(series) == {
        "net-3.pth": {"note": "figure 2", "until": "2030-01-01", "facts": {}},
        "net-4.pth": {"note": "for the talk", "until": None, "facts": {"data": "CIFAR-10"}},
    }
    assert reasons(series)["net-3.pth"] == ("pinned: figure 2 (until 2030-01-01)",)
    undo(str(series))
    assert (series / LIST).read_text() == before


@pytest.mark.parametrize("until", ["soon", "2026-02-30", "2020-01-01", "99999999999d"])
def test_what_is_no_end(until: str, series: Path, run: Run) -> None:
    answer = run("pin", series / "model_epoch_3.pth", "--until", until)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"ckpttool: error: --until {until}: ")
    assert not (series / LIST).exists()


def test_an_end_in_so_many_days(series: Path, run: Run) -> None:
    run("pin", series / "model_epoch_3.pth", "--until", "90d")
    assert said(series)["model_epoch_3.pth"]["until"] == str(date.fromtimestamp(NOW + 90 * DAY))


def test_an_end_that_is_no_date_protects_with_a_warning(series: Path) -> None:
    text = 'pinned = ["model_epoch_3.pth"]\n\n[about."model_epoch_3.pth"]\nuntil = "soon"\nnote = 7\n'
    (series / LIST).write_text(text)
    planned = dry_run(series, policy=Policy(keep_last=1))
    assert kept_reasons(planned)["model_epoch_3.pth"] == ("pinned",)
    assert any("until is not a date; the pin doesn't expire" in warning for warning in planned.warnings)


@pytest.mark.parametrize(
    "text",
    [
        "[about]\n",
        "about = 3\n",
        "[[about]]\n",
        '[about."model_epoch_3.pth"]\nnote = """\n[about."model_epoch_3.pth"]\n"""\n',
        '[about."model_epoch_3.pth"]\nlist = ["kept", "by", "somebody"]\n',
        'about = {"model_epoch_3.pth" = {note = "x"}}\n',
    ],
)
def test_what_somebody_wrote_otherwise_is_kept(text: str, series: Path) -> None:
    (series / LIST).write_text(text)
    try:
        pin([series / "model_epoch_3.pth"], note="mine")
    except CheckpointError:
        assert (series / LIST).read_text() == text
    else:
        assert said(series)["model_epoch_3.pth"]["note"] == "mine"


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_NAMES = _TEXTS.filter(bool)
_FACTS = st.dictionaries(st.sampled_from(["data", "license", "base_model", "seed"]), _TEXTS.filter(bool))
_REMARKS = st.builds(
    Remark, st.one_of(st.none(), _NAMES), st.one_of(st.none(), st.dates()), _FACTS, st.none()
)


@given(st.lists(st.tuples(_NAMES, _REMARKS), max_size=4), st.sampled_from(["\n", "\r\n"]))
def test_what_is_said_is_read_back_and_all_else_stays(said: list[tuple[str, Remark]], newline: str) -> None:
    text = newline.join(["# mine", 'pinned = ["a"]', "", "[other]", "x = [1, 2]  # kept", ""])
    expected: dict[str, Remark] = {}
    for name, one in said:
        text = with_remark(text, name, one)
        expected[name] = one
        assert {key: value for key, value in remarks_in(text).items() if not value.is_empty} == {
            key: value for key, value in expected.items() if not value.is_empty
        }
    assert "# mine" in text and "x = [1, 2]  # kept" in text
    assert {**parse_toml(text), "about": None} == {
        **parse_toml('pinned = ["a"]\n[other]\nx = [1, 2]'),
        "about": None,
    }


@given(st.dictionaries(_NAMES, _REMARKS, min_size=1, max_size=4), st.data())
def test_remarks_may_swap_names(said: dict[str, Remark], data: st.DataObject) -> None:
    assume(all(not one.is_empty for one in said.values()))
    text = ""
    for name, one in said.items():
        text = with_remark(text, name, one)
    names = list(said)
    others = data.draw(st.permutations(names))
    renamed = dict(zip(names, others, strict=True))
    assert remarks_in(rename_remarks(text, renamed)) == {renamed[name]: one for name, one in said.items()}


def test_comments_in_a_table_stay() -> None:
    text = f'[about.{quote("a")}]\n# of the paper\nnote = "x"\n'
    assert "# of the paper" in with_remark(text, "a", Remark("y"))


def test_an_empty_note_and_an_empty_fact_go() -> None:
    old = Remark("x", date(2030, 1, 1), {"data": "a", "seed": "1"})
    assert merged(old, Remark(""), {"data": None}) == Remark(None, date(2030, 1, 1), {"seed": "1"})
    assert merged(NO_REMARK, Remark("n"), {"seed": "2"}) == Remark("n", None, {"seed": "2"})

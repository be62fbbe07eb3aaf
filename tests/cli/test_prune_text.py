"""What people read of ``prune``: long series, narrow terminals, failed runs, and what --explain says."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import Run, refusals, transcript
from tests.support.golden import Golden

LONG = "resnet50_imagenet_finetuned_epoch={:03d}.npz"


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of a hundred epochs, a day apart, to be copied."""
    place = tmp_path_factory.mktemp("hundred")
    for epoch in range(1, 101):
        path = place / LONG.format(epoch)
        np.savez(path, weight=np.full(4, float(epoch), np.float32))
        os.utime(path, (1_760_000_000 + epoch * 86_400,) * 2)
    return place


@pytest.fixture
def long(hundred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of it, below the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    return Path(shutil.copytree(hundred, "run"))


def test_of_a_long_series_the_first_few_are_shown(run: Run, long: Path, golden: Golden) -> None:
    """Of what stays for one reason, and of what goes."""
    golden(transcript(run, (0, "prune run --keep 2 -n")))
    shown = run("prune", long, "--keep", 2, "-n", "-v").out
    assert shown.count("\n  remove  resnet50") == 98
    assert "…" not in shown
    (long / "best").symlink_to(LONG.format(60))
    golden(transcript(run, (0, "prune run --keep 90 -n")))


def test_how_many_more_there_are_widens_no_column(run, tmp_path: Path) -> None:
    for epoch in range(40):
        np.savez(tmp_path / f"e{epoch}.npz", w=np.zeros(2), epoch=epoch)
    lines = run("prune", tmp_path, "--keep", 1, "-n").out.splitlines()
    assert lines[1] == "  keep    e39.npz  newest, last 1"
    assert lines[2].startswith("  remove  e38.npz  ")
    assert lines[7].startswith("  remove  … 33 more, ")


def test_a_name_that_begins_as_a_note_does_is_a_name(run, series: Path) -> None:
    for path in series.iterdir():
        path.rename(path.with_name(path.name.replace("model", "…")))
    out = run("prune", series, "--keep", "1", "-n").out
    assert "\n  keep    …_epoch_10.pth  newest, last 1\n  remove  …_epoch_9.pth   4.1 kB\n" in out


def test_what_a_rule_keeps_beside_what_fits_is_told(run: Run, series: Path, golden: Golden) -> None:
    rules = "prune run --keep-best 1 --metric loss --mode max --max-size 9kB -n"
    golden(transcript(run, (0, rules)))  # there would be room for it
    document = json.loads(run(*rules.split(), "--json").out)
    (one,) = document["groups"]
    sizes = [os.path.getsize(kept["path"]) for kept in one["keep"]]
    assert (one["excess_bytes"], document["excess_bytes"]) == (sum(sizes) - 9000, 0)
    assert {gone["unfitting"] for gone in one["remove"]} == {
        "--max-size 9 kB: the oldest are removed until the rest fits"
    }


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_a_terminal_gets_no_line_that_is_too_long(
    run, long: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rules = ["--keep-daily", 3, "--keep-weekly", 2, "--keep-monthly", 2, "--keep-within", "2d"]
    lines = run("prune", long, *rules, "-n").out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    for epoch in (100, 99, 98):
        assert f"epoch={epoch:03d}.npz" in text  # what tells names apart is never cut
    newest = 1_760_000_000 + 100 * 86_400
    assert f"newest, daily {np.datetime64(newest, 's').astype('M8[D]')}, weekly" in text


def test_narrow_names_lose_what_they_begin_with(run, long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    lines = run("prune", long, "--keep-within", "2d", "--keep-name", "*=010.npz", "-n").out.splitlines()
    names = [line.split()[1] for line in lines[1:4]]
    assert [name[0] for name in names] == ["…"] * 3
    assert [LONG.format(epoch).endswith(name[1:]) for name, epoch in zip(names, (100, 99, 98), strict=True)]
    assert len({len(name) for name in names}) == 1


def test_headings_and_notes_fit_a_terminal(
    run: Run, series: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    logs = Path("lightning_logs", "version_0", "checkpoints", "and", "more")
    for rate in ("0.01", "0.001"):
        shutil.copytree(series, Path(f"lr{rate}") / logs)
        shutil.copy(series / "model_epoch_1.pth", f"lr{rate}/last.pth")
    golden(transcript(run, (0, "prune . -r --keep 1 -n")))
    assert max(map(len, run("prune", ".", "-r", "--keep", 1, "-n").out.splitlines())) <= 60


def test_a_pipe_gets_whole_lines(run, long: Path) -> None:
    rules = ["--keep-daily", 3, "--keep-weekly", 2, "--keep-monthly", 2, "--keep-yearly", 2]
    (first, *_) = run("prune", long, *rules, "-n").out.splitlines()[1:]
    assert len(first) > 120
    assert first.startswith(f"  keep    {LONG.format(100)}  newest, daily 2026-01-17, weekly ")


def test_names_of_several_directories_are_paths(run: Run, series: Path, golden: Golden) -> None:
    (series / "a").mkdir()
    (series / "b").mkdir()
    for path in sorted(series.glob("*.pth")):
        path.rename(series / ("a" if int(path.stem[-1]) % 2 else "b") / path.name)
    golden(transcript(run, (0, "prune run -r --group-by none --keep 2 -n")))


# Failed runs ----------------------------------------------------------------------------------------


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return two trials, of which the second has diverged."""
    monkeypatch.chdir(tmp_path)
    for trial in ("a", "b"):
        Path("search", trial).mkdir(parents=True)
        for epoch in range(1, 4):
            weight = np.full(4, float(epoch), np.float32)
            if (trial, epoch) == ("b", 3):
                weight[1] = np.nan
            np.savez(Path("search", trial, f"model_epoch_{epoch}.npz"), weight=weight)
    return Path("search")


def test_failed_runs_are_listed(run: Run, search: Path, golden: Golden) -> None:
    golden(transcript(run, (0, "prune search -r --failed list")))
    assert len(list(search.rglob("*.npz"))) == 6
    document = json.loads(run("prune", search, "-r", "--failed", "list", "--json").out)
    assert [group["failed"] is None for group in document["groups"]] == [True, False]
    assert [group["policy"] for group in document["groups"]] == [None, None]


def test_failed_runs_go_into_the_trash_but_for_what_is_good(run: Run, search: Path, golden: Golden) -> None:
    for rules, left in (("", [2]), (" --keep 3", [1, 2])):
        golden(transcript(run, (0, f"prune search -r --failed remove{rules}")))
        places = {epoch: search / "b" / f"model_epoch_{epoch}.npz" for epoch in (1, 2, 3)}
        assert [epoch for epoch, path in places.items() if path.exists()] == left
        assert len(list(search.glob("a/*.npz"))) == 3
        assert run("undo", search / "b").status == 0
        assert len(list(search.glob("b/*.npz"))) == 3


def test_a_failed_run_without_anything_good_goes_whole(run, search: Path) -> None:
    for epoch in (1, 2):
        shutil.copy(search / "b" / "model_epoch_3.npz", search / "b" / f"model_epoch_{epoch}.npz")
    assert run("prune", search, "-r", "--failed", "remove", "-q").status == 0
    assert sorted(path.parent.name for path in search.glob("*/*.npz")) == ["a", "a", "a"]


# Limits ---------------------------------------------------------------------------------------------


def test_limits_that_can_not_be_met_are_told(run: Run, series: Path, golden: Golden) -> None:
    for epoch in range(1, 11):
        when = 1_760_000_000 + epoch * 3600
        os.utime(series / f"model_epoch_{epoch}.pth", (when, when))
    total = "prune run --max-total-size 1kB -n"
    golden(transcript(run, (1, "prune run --keep 1 --max-size 1kB -n"), (1, total)))
    document = json.loads(run(*total.split(), "--json").out)
    assert (document["excess_bytes"], document["groups"][0]["excess_bytes"]) == (3079, 0)
    limits = ("6", "60%")
    golden(refusals(run, *(f"prune run --keep 3 --max-delete {limit}" for limit in limits)))
    assert len(list(series.iterdir())) == 10
    assert run("prune", series, "--keep", 4, "--max-delete", "60%", "-q").status == 0
    assert len(list(series.iterdir())) == 4


# Explaining -----------------------------------------------------------------------------------------


def test_why_one_stays_or_goes(run: Run, series: Path, golden: Golden) -> None:
    one = "--explain run/model_epoch_4.pth"
    golden(transcript(run, (0, f"prune run --keep 3 {one}"), (0, f"prune run --keep 3 --json {one}")))
    (series / "best").symlink_to("model_epoch_4.pth")
    golden(transcript(run, (0, f"prune --keep 3 {one}"), (0, f"prune . --keep 3 {one}")))
    other = "prune --keep 3 --explain run/nix.pth"
    golden(refusals(run, other, f"prune . --no-recursive --keep 3 {one}"))
    assert len(list(series.glob("*.pth"))) == 10


def test_a_part_and_a_link_are_explained_by_their_checkpoint(
    run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (2, 4):
        shutil.copytree(
            files / "safetensors" / "trainer" / "checkpoint-4", tmp_path / f"hf/checkpoint-{step}"
        )
    (tmp_path / "best").symlink_to("hf/checkpoint-2")
    for path in ("hf/checkpoint-2/model.safetensors", "best"):
        out = run("prune", "hf", "--keep", 1, "--explain", path).out
        out = run("prune", "hf", "--keep", 1, "--explain", path).out
        assert out.startswith(f"{path} belongs to hf/checkpoint-2\nhf/checkpoint-2 "), out


# The trash ------------------------------------------------------------------------------------------


def test_the_trash_is_told_in_all_tenses(run: Run, series: Path, golden: Golden) -> None:
    commands = (
        *((0, "prune run --keep 3 --trash -n"), (0, "prune run --keep 3 --trash")),
        *((0, "prune run --empty-trash --older-than 1d"), (0, "prune run --empty-trash -n")),
        *((1, "prune -r --empty-trash --check"), (0, "prune run --empty-trash")),
        (0, "prune run --empty-trash"),
    )
    golden(transcript(run, *commands))
    assert sorted(os.listdir(series)) == [f"model_epoch_{epoch}.pth" for epoch in (10, 8, 9)]


def test_the_trash_as_documents(run, series: Path) -> None:
    size = sum((series / f"model_epoch_{epoch}.pth").stat().st_size for epoch in range(1, 8))
    dry = json.loads(run("prune", series, "--keep", 3, "--trash", "-n", "--json").out)
    assert (dry["trash"], dry["trashed_bytes"], dry["freed_bytes"]) == (None, size, 0)
    done = json.loads(run("prune", series, "--keep", 3, "--trash", "--json").out)
    assert (len(os.listdir(series / ".ckpttool-trash")), done["trashed_bytes"]) == (1, size)
    assert [done["trash"]] == os.listdir(series / ".ckpttool-trash")
    emptied = json.loads(run("prune", series, "--empty-trash", "--json").out)
    assert emptied["freed_bytes"] == size
    assert sorted(emptied["emptied"]) == [f"run/model_epoch_{epoch}.pth" for epoch in range(1, 8)]
    assert (emptied["groups"], emptied["errors"]) == ([], [])


def test_what_does_not_go_with_the_trash(run: Run, series: Path, golden: Golden) -> None:
    options = ("--empty-trash --keep 3", "--empty-trash --trash", "--older-than 3m")
    golden(refusals(run, *(f"prune run {one}" for one in (*options, "--empty-trash --older-than soon"))))
    assert len(os.listdir(series)) == 10


@pytest.mark.parametrize(("text", "status", "left"), [("y\n", 0, 0), ("n\n", 1, 1)])
def test_it_asks_before_the_trash_is_emptied(
    run, series: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: int, left: int
) -> None:
    import sys

    assert run("prune", series, "--keep", 3, "--trash", "-q").status == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    answer = run("prune", series, "--empty-trash")
    assert (answer.status, len(list(series.glob(".ckpttool-trash")))) == (status, left)
    assert answer.err == "Delete 7 checkpoints (28 kB) from the trash for good? [y/N] "
    assert answer.out == ("removed 7 checkpoints from the trash, 28 kB freed\n" if status == 0 else "")

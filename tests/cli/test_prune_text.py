"""What people read of ``prune``: long series, narrow terminals, failed runs, and what --explain says."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

LONG = "resnet50_imagenet_finetuned_epoch={:03d}.npz"


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of a hundred epochs, a day apart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    run = Path("run")
    run.mkdir()
    for epoch in range(1, 101):
        path = run / LONG.format(epoch)
        np.savez(path, weight=np.full(4, float(epoch), np.float32))
        os.utime(path, (1_760_000_000 + epoch * 86_400,) * 2)
    return run


@pytest.fixture
def series(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of ten epochs, below the working directory."""
    shutil.copytree(files / "series", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_of_a_long_series_the_first_few_are_shown(run, long: Path) -> None:
    out = run("prune", long, "--keep", 2, "-n").out
    size = os.path.getsize(long / LONG.format(1))
    each = f"{size} B"
    gone = [f"  remove  {LONG.format(epoch)}  {each}" for epoch in (98, 97, 96, 95, 94)]
    assert out.splitlines() == [
        "run/resnet50_imagenet_finetuned_epoch=*.npz",
        f"  keep    {LONG.format(100)}  newest, last 2",
        f"  keep    {LONG.format(99)}  last 2",
        *gone,
        f"  remove  … 92 more, {92 * size / 1000:.0f} kB (-v shows them)",
        f"  remove  {LONG.format(1)}  {each}",
        "",
        f"would remove 98 of 100 checkpoints and free {98 * size / 1000:.0f} kB",
    ]
    shown = run("prune", long, "--keep", 2, "-n", "-v").out
    assert shown.count("\n  remove  resnet50") == 98
    assert "…" not in shown


def test_of_many_that_stay_for_one_reason_the_first_few_are_shown(run, long: Path) -> None:
    (long / "best").symlink_to(LONG.format(60))
    size = os.path.getsize(long / LONG.format(1))
    lines = run("prune", long, "--keep", 90, "-n").out.splitlines()
    kept = [line for line in lines if line.startswith("  keep")]
    assert kept == [
        f"  keep    {LONG.format(100)}  newest, last 90",
        *(f"  keep    {LONG.format(epoch)}  last 90" for epoch in (99, 98, 97, 96, 95)),
        f"  keep    … 33 more, {33 * size / 1000:.2g} kB (-v shows them)",
        f"  keep    {LONG.format(61)}  last 90",
        f"  keep    {LONG.format(60)}  last 90, symlink best",
        *(f"  keep    {LONG.format(epoch)}  last 90" for epoch in (59, 58, 57, 56, 55)),
        f"  keep    … 43 more, {43 * size / 1000:.2g} kB (-v shows them)",
        f"  keep    {LONG.format(11)}  last 90",
    ]


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


def test_what_a_rule_keeps_beside_what_fits_is_told(run, series: Path) -> None:
    rules = ["--keep-best", 1, "--metric", "loss", "--mode", "max", "--max-size", "9kB"]
    status, out, err = run("prune", series, *rules, "-n")
    assert (status, err) == (0, "")  # there would be room for it
    told = re.sub(r"[\d,]+ bytes|0\.\d+", "N", out).splitlines()[1:5]
    assert told == [
        "  too large: N stay of it, N more than --max-size 9 kB",
        "  keep    model_epoch_10.pth  newest",
        "  keep    model_epoch_9.pth   fits 9 kB",
        "  keep    model_epoch_1.pth   best 1 by loss (N)",
    ]
    document = json.loads(run("prune", series, *rules, "-n", "--json").out)
    (one,) = document["groups"]
    sizes = [os.path.getsize(kept["path"]) for kept in one["keep"]]
    assert (one["excess_bytes"], document["excess_bytes"]) == (sum(sizes) - 9000, 0)
    assert {gone["unfitting"] for gone in one["remove"]} == {
        "--max-size 9 kB: the oldest go until the rest fits"
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


def test_headings_and_notes_fit_a_terminal(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    logs = Path("lightning_logs", "version_0", "checkpoints", "and", "more")
    for rate in ("0.01", "0.001"):
        shutil.copytree(series, Path(f"lr{rate}") / logs)
        shutil.copy(series / "model_epoch_1.pth", f"lr{rate}/last.pth")
    out = run("prune", ".", "-r", "--keep", 1, "-n").out
    assert "lr0.01/…/model_epoch_*.pth\n" in out
    assert "lr0.001/…/model_epoch_*.pth\n" in out
    assert "2 single checkpoints kept (-v shows them; --series GLOB\nmakes some of them one series)\n" in out
    assert max(map(len, out.splitlines())) <= 60


def test_a_pipe_gets_whole_lines(run, long: Path) -> None:
    rules = ["--keep-daily", 3, "--keep-weekly", 2, "--keep-monthly", 2, "--keep-yearly", 2]
    (first, *_) = run("prune", long, *rules, "-n").out.splitlines()[1:]
    assert len(first) > 120
    assert first.startswith(f"  keep    {LONG.format(100)}  newest, daily 2026-01-17, weekly ")


def test_names_of_several_directories_are_paths(run, series: Path, tmp_path: Path) -> None:
    (series / "a").mkdir()
    (series / "b").mkdir()
    for path in sorted(series.glob("*.pth")):
        path.rename(series / ("a" if int(path.stem[-1]) % 2 else "b") / path.name)
    out = run("prune", series, "-r", "--group-by", "none", "--keep", 2, "-n").out
    assert "  keep    run/b/model_epoch_10.pth  newest, last 2\n" in out
    assert "  keep    run/a/model_epoch_9.pth   last 2\n" in out
    assert out.endswith("would remove 8 of 10 checkpoints and free 33 kB\n")


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


def test_failed_runs_are_listed(run, search: Path) -> None:
    size = sum(path.stat().st_size for path in search.glob("b/*"))
    status, out, err = run("prune", search, "-r", "--failed", "list")
    assert (status, err) == (0, "")
    assert out == (
        "search/b/model_epoch_*.npz\n"
        "  failed: its newest, model_epoch_3.npz, has NaN: weight: 1 of 4 values are NaN\n"
        f"  3 checkpoints, {size} B\n"
        "\n"
        "1 of 2 series failed; nothing removed (6 checkpoints)\n"
    )
    assert len(list(search.rglob("*.npz"))) == 6
    document = json.loads(run("prune", search, "-r", "--failed", "list", "--json").out)
    assert [group["failed"] is None for group in document["groups"]] == [True, False]
    assert [group["policy"] for group in document["groups"]] == [None, None]


@pytest.mark.parametrize(("rules", "left"), [([], [2]), (["--keep", 3], [1, 2])])
def test_failed_runs_go_into_the_trash_but_for_what_is_good(
    run, search: Path, rules: list[object], left: list[int]
) -> None:
    sizes = {epoch: (search / "b" / f"model_epoch_{epoch}.npz").stat().st_size for epoch in (1, 2, 3)}
    status, out, err = run("prune", search, "-r", "--failed", "remove", *rules)
    assert (status, err) == (0, "")
    gone = [size for epoch, size in sizes.items() if epoch not in left]
    assert out.endswith(
        f"\nmoved {len(gone)} of 6 checkpoints to the trash ({sum(gone)} B)\n"
        "to restore them: ckpttool undo search/b\n"
        "to free the space: ckpttool prune --empty-trash search/b\n"
    )
    assert [epoch for epoch in sizes if (search / "b" / f"model_epoch_{epoch}.npz").exists()] == left
    assert len(list(search.glob("a/*.npz"))) == 3
    assert run("undo", search / "b").status == 0
    assert len(list(search.glob("b/*.npz"))) == 3


def test_a_failed_run_without_anything_good_goes_whole(run, search: Path) -> None:
    for epoch in (1, 2):
        shutil.copy(search / "b" / "model_epoch_3.npz", search / "b" / f"model_epoch_{epoch}.npz")
    assert run("prune", search, "-r", "--failed", "remove", "-q").status == 0
    assert sorted(path.parent.name for path in search.glob("*/*.npz")) == ["a", "a", "a"]


# Limits ---------------------------------------------------------------------------------------------


def test_a_size_that_can_not_be_met_is_told(run, series: Path) -> None:
    status, out, err = run("prune", series, "--keep", 1, "--max-size", "1kB", "-n")
    told = "4,079 bytes stay of it, 3,079 bytes more than --max-size 1 kB"
    assert status == 1
    assert f"\n  too large: {told}\n" in out
    assert err == f"ckpttool: error: run/model_epoch_*.pth: {told}\n"


def test_a_size_of_all_that_can_not_be_met_is_told(run, series: Path) -> None:
    for epoch in range(1, 11):
        when = 1_760_000_000 + epoch * 3600
        os.utime(series / f"model_epoch_{epoch}.pth", (when, when))
    status, out, err = run("prune", series, "--max-total-size", "1kB", "-n")
    told = "4,079 bytes stay in all, 3,079 bytes more than --max-total-size 1 kB"
    assert (status, err) == (1, f"ckpttool: error: run: {told}\n")
    assert out.endswith(f" and free 37 kB\ntoo large: {told}\n")
    document = json.loads(run("prune", series, "--max-total-size", "1kB", "-n", "--json").out)
    assert (document["excess_bytes"], document["groups"][0]["excess_bytes"]) == (3079, 0)


@pytest.mark.parametrize("limit", ["6", "60%"])
def test_more_than_is_allowed_changes_nothing(run, series: Path, limit: str) -> None:
    said = f"7 of 10 checkpoints would go, more than --max-delete {limit} allows; nothing was removed"
    assert run("prune", series, "--keep", 3, "--max-delete", limit) == (2, "", f"ckpttool: error: {said}\n")
    assert len(list(series.iterdir())) == 10
    assert run("prune", series, "--keep", 4, "--max-delete", limit, "-q").status == 0
    assert len(list(series.iterdir())) == 4


# Explaining -----------------------------------------------------------------------------------------


def test_why_one_stays_or_goes(run, series: Path) -> None:
    path = series / "model_epoch_4.pth"
    answer = run("prune", series, "--keep", 3, "--explain", path)
    assert answer == (
        0,
        "run/model_epoch_4.pth would be removed\n"
        "  run/model_epoch_*.pth: 7th newest of 10\n"
        "  for      nothing: no rule keeps it, nothing refers to it, it isn't pinned\n"
        "  against  7th newest, not one of the last 3\n",
        "",
    )
    (series / "best").symlink_to("model_epoch_4.pth")
    answer = run("prune", "--keep", 3, "--explain", path)
    assert answer.out.startswith("run/model_epoch_4.pth would be kept\n")
    assert "\n  for      symlink best" in answer.out
    assert "\n  against  7th newest, not one of the last 3\n" in answer.out
    assert len(list(series.glob("*.pth"))) == 10


def test_an_explanation_as_a_document(run, series: Path) -> None:
    document = json.loads(
        run("prune", series, "--keep", 3, "--json", "--explain", series / "model_epoch_4.pth").out
    )
    assert document["explained"] == {
        "path": "run/model_epoch_4.pth",
        "group": "run/model_epoch_*.pth",
        "stays": False,
        "slims": False,
        "place": ["7th newest of 10"],
        "reasons": [],
        "against": ["7th newest, not one of the last 3"],
    }
    assert document["dry_run"] is True
    assert len(document["groups"][0]["remove"]) == 7


def test_only_what_is_looked_at_can_be_explained(run, series: Path) -> None:
    said = "ckpttool: error: run/nix.pth is none of the checkpoints that were looked at\n"
    assert run("prune", "--keep", 3, "--explain", "run/nix.pth") == (2, "", said)
    said = "ckpttool: error: run/model_epoch_4.pth is in none of these directories: .\n"
    assert run("prune", ".", "--no-recursive", "--keep", 3, "--explain", "run/model_epoch_4.pth") == (
        2,
        "",
        said,
    )
    assert run("prune", ".", "--keep", 3, "--explain", "run/model_epoch_4.pth").status == 0


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


def test_the_trash_is_told_in_all_tenses(run, series: Path) -> None:
    plan = run("prune", series, "--keep", 3, "--trash", "-n").out
    assert plan.endswith("\nwould move 7 of 10 checkpoints to the trash (28 kB)\n")
    assert len(list(series.iterdir())) == 10
    done = run("prune", series, "--keep", 3, "--trash").out
    hints = "to restore them: ckpttool undo run\nto free the space: ckpttool prune --empty-trash run\n"
    assert done == plan.replace("would move", "moved") + hints
    assert run("prune", series, "--empty-trash", "--older-than", "1d") == (
        0,
        "nothing to remove from the trash\n",
        "",
    )
    would = "would remove 7 checkpoints from the trash and free 28 kB\n"
    assert run("prune", series, "--empty-trash", "-n") == (0, would, "")
    assert run("prune", "-r", "--empty-trash", "--check") == (1, would, "")
    gone = "removed 7 checkpoints from the trash, 28 kB freed\n"
    assert run("prune", series, "--empty-trash") == (0, gone, "")
    assert sorted(os.listdir(series)) == [f"model_epoch_{epoch}.pth" for epoch in (10, 8, 9)]
    assert run("prune", series, "--empty-trash") == (0, "nothing to remove from the trash\n", "")


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--empty-trash", "--keep", 3], "--empty-trash looks at no checkpoint (leave --keep out)"),
        (["--empty-trash", "--trash"], "--empty-trash looks at no checkpoint (leave --trash out)"),
        (["--older-than", "3m"], "--older-than: '3m' could be minutes or months (say min or mo)"),
        (["--empty-trash", "--older-than", "soon"], "--older-than: no duration: 'soon'"),
    ],
)
def test_what_does_not_go_with_the_trash(run, series: Path, options: list[object], said: str) -> None:
    status, out, err = run("prune", series, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"ckpttool: error: {said}")
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

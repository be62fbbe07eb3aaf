"""``ckpttool list``: stdout, stderr and exit status together."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from ckpttool.cli import progress
from tests.support.commands import Run, refusals, transcript
from tests.support.configs import write
from tests.support.golden import Golden
from tests.support.thorough import sampled

LEFT = (1, 2, 10)


@pytest.fixture
def series(series: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of ten epochs of two hours ago, below the working directory."""
    for path in series.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000 + 7_200.0)
    return series


@pytest.fixture
def short(series: Path) -> Path:
    """Return a directory of three epochs, of which a pointer names the second."""
    for epoch in set(range(1, 11)) - set(LEFT):
        (series / f"model_epoch_{epoch}.pth").unlink()
    (series / "latest").write_text("model_epoch_2.pth")
    return series


@pytest.fixture
def terminal(run, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what makes a terminal of some columns of where the output goes, without colour."""

    def make(columns: int) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return make


def names(out: str) -> list[str]:
    """Return the base names of the paths that ``list -0`` printed."""
    return [os.path.basename(path) for path in out.split("\0")[:-1]]


def test_text(run: Run, short: Path, golden: Golden, terminal: Callable[[int], None]) -> None:
    """A terminal gets headings; what is no series comes last."""
    golden(transcript(run, (0, "list run --flat"), (0, "list run --grouped")))
    for name in ("best", "alone"):
        (short / name).mkdir()
        shutil.copy2(short / "model_epoch_2.pth", short / name / "weights.pth")
    golden(transcript(run, (0, "list run --grouped")))
    grouped = run("list", short, "--grouped")
    terminal(80)
    assert run("list", short) == grouped
    assert run("list", short, "--flat").out.startswith("checkpoint ")


def test_programs_get_fields_between_tabs(
    run: Run, short: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short / "model_epoch_2.pth").write_bytes(b"PK\3\4")
    os.utime(short / "model_epoch_2.pth", (1_700_000_000, 1_700_000_000))
    status, out, _ = run("list", short, "--keep", 1)
    rows = [line.split("\t") for line in out.splitlines()]
    when = datetime.fromtimestamp(1_700_000_000).astimezone().isoformat(" ")
    assert (status, [len(row) for row in rows], {row[5] for row in rows}) == (1, [10] * 3, {when})
    golden(re.sub(r"(loss=0\.\d{6})\d+", r"\1…", out.replace(when, "WHEN")))


def test_json(run: Run, short: Path, golden: Golden) -> None:
    status, out, err = run("list", short, "--json")
    assert (status, err) == (0, "")
    golden(re.sub(r"(\"loss\": 0\.\d{6})\d+", r"\1…", json.dumps(json.loads(out), indent=1)))


def test_it_descends_as_far_as_asked(run, series: Path) -> None:
    shutil.copytree(series, "deep/er/run")
    assert len(json.loads(run("list", ".", "--json").out)["checkpoints"]) == 20
    assert len(json.loads(run("list", ".", "--json", "--max-depth", 1).out)["checkpoints"]) == 10
    assert len(json.loads(run("list", "--json", "--exclude", "deep").out)["checkpoints"]) == 10


def test_several_directories(run, series: Path) -> None:
    shutil.copytree(series, "other")
    paths = [one["path"] for one in json.loads(run("list", "other", "run", "--json").out)["checkpoints"]]
    assert [os.path.dirname(path) for path in paths] == ["other"] * 10 + ["run"] * 10
    assert len(json.loads(run("list", ".", "run", "./other/", "--json").out)["checkpoints"]) == 20
    status, out, err = run("list", "missing", "run", "-0")
    assert (status, len(names(out))) == (2, 10)
    assert err == "ckpttool: error: missing: no such file or directory\n"
    kept = run("list", "run", "other", "--keep", 3, "--json").out
    assert [bool(one["kept"]) for one in json.loads(kept)["checkpoints"]] == ([False] * 7 + [True] * 3) * 2


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
    *_, state, _, note, _ = line.split("\t")
    assert (state, note) == ("incomplete", "1,000 bytes of a zip that ends before its directory")
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
    assert (status, out.count("\n")) == (0, 10)
    assert err == (
        "ckpttool: warning: run: a command was interrupted here; "
        "the next command that changes this directory recovers it "
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


def test_no_numpy_and_no_rich(series: Path) -> None:
    code = "import atexit, sys; from ckpttool.__main__ import main; "
    code += "atexit.register(lambda: print({'numpy', 'rich'} & set(sys.modules))); main()"
    command = [sys.executable, "-c", code, "list", str(series)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.endswith("\nset()\n")


# The order ------------------------------------------------------------------------------------------


@pytest.fixture
def measured(series: Path) -> Path:
    """Return a directory of five: names, metrics, times and sizes each in an order of their own."""
    for epoch in range(6, 11):
        (series / f"model_epoch_{epoch}.pth").unlink()
    for epoch, accuracy in ((1, "0.7"), (2, "0.9"), (3, "0.8"), (4, None), (5, "0.9")):
        told = "" if accuracy is None else f"_val_acc={accuracy}"
        path = (series / f"model_epoch_{epoch}.pth").rename(series / f"model_epoch_{epoch}{told}.pth")
        os.utime(path, (1_700_000_000 - 60 * (epoch % 3), 1_700_000_000 - 60 * (epoch % 3)))
    return series


def epochs(out: str) -> list[int]:
    """Return the epochs in the names that ``list -0`` printed."""
    return [int(re.findall(r"epoch_(\d+)", name)[0]) for name in names(out)]


def test_sorted(run: Run, measured: Path) -> None:
    for arguments, expected in (
        ([], [1, 2, 3, 4, 5]),
        (["--reverse"], [5, 4, 3, 2, 1]),
        (["--sort", "epoch", "--reverse"], [5, 4, 3, 2, 1]),
        (["--sort", "age"], [3, 1, 4, 2, 5]),
        (["--sort", "name"], [1, 2, 3, 4, 5]),
        (["--sort", "loss"], [5, 4, 3, 2, 1]),
        (["--sort", "val_acc"], [1, 3, 2, 5, 4]),
        (["--sort", "val_acc", "--reverse"], [2, 5, 3, 1, 4]),
    ):
        answer = run("list", measured, "--series", "model_epoch_*", "-0", *arguments)
        assert (answer.status, epochs(answer.out)) == (0, expected), arguments


def test_sorted_by_size_across_series(run, measured: Path) -> None:
    answer = run("list", measured, "--sort", "size", "--json")
    sizes = [one["bytes"] for one in json.loads(answer.out)["checkpoints"]]
    assert sizes == sorted(path.stat().st_size for path in measured.iterdir())


def test_numbers_in_names_are_numbers(run, series: Path) -> None:
    assert epochs(run("list", series, "--sort", "name", "-0").out) == [*range(1, 11)]


def test_directories_are_sorted_as_people_count(run, short: Path) -> None:
    paths = ["run_2/a/m.pth", "run_2/m.pth", "run_2-b/m.pth", "run_10/m.pth"]
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(short / "model_epoch_1.pth", path)
    shutil.rmtree(short)
    assert run("list", ".", "-0").out.split("\0")[:-1] == paths
    assert [one["path"] for one in json.loads(run("verify", ".", "--json").out)["checkpoints"]] == paths


def test_series_come_in_the_order_of_their_first_rows(run, series: Path) -> None:
    for epoch in (1, 2):
        (series / f"model_epoch_{epoch}.pth").rename(series / f"zoo_epoch_{epoch}.pth")
    keys = ["run/zoo_epoch_*.pth", "run/model_epoch_*.pth"]
    for order, expected in ((["--sort", "epoch"], keys), (["--sort", "loss"], keys[::-1])):
        lines = run("list", series, "--grouped", *order).out.splitlines()
        assert [line for line in lines if line in keys] == expected


def test_a_series_of_several_directories(run, short: Path) -> None:
    shutil.copytree(short, short / "again")
    lines = run("list", short, "--group-by", "none", "--grouped").out.splitlines()
    assert lines[1].startswith("  6 checkpoints in run, pytorch, 24 kB, epochs 1–10, newest 2 h ago, ")
    rows = sorted(line.split()[0] for line in lines[3:9])
    own = [f"model_epoch_{epoch}.pth" for epoch in LEFT]
    assert rows == sorted([*own, *(f"again/{name}" for name in own)])


# The best -------------------------------------------------------------------------------------------


def test_best_of_a_series_is_marked(run: Run, measured: Path) -> None:
    for metric, mode, best in (("val_acc", "max", 5), ("val_acc", "min", 1), ("loss", "min", 5)):
        given = ("list", measured, "--series", "model_epoch_*", "--best", metric, "--mode", mode)
        out = run(*given, "--flat").out
        (line,) = (line for line in out.splitlines() if f"best {metric}" in line)
        assert f"_epoch_{best}" in line
        assert out.splitlines()[0].split()[3] == metric
        found = json.loads(run(*given, "--json").out)
        assert [one["epoch"] for one in found["checkpoints"] if one["best"]] == [best]
        assert f"best {metric} " in run(*given, "--grouped").out.splitlines()[1]


def test_what_is_damaged_is_not_the_best(run, measured: Path) -> None:
    for epoch in (2, 5):
        path = measured / f"model_epoch_{epoch}_val_acc=0.9.pth"
        path.write_bytes(path.read_bytes()[:1000])
    found = json.loads(run("list", measured, "--best", "val_acc", "--mode", "max", "--json").out)
    assert [one["epoch"] for one in found["checkpoints"] if one["best"]] == [3]


def test_what_is_refused(run: Run, measured: Path, golden: Golden) -> None:
    Path("notes.svg").write_text("mine")
    options = (
        *("--sort bleu", "--mode min --best bleu", "--mode min", "--keep 0", "--plot notes.svg"),
        "--plot a.pdf",
    )
    golden(refusals(run, *(f"list run {one}" for one in options), "list missing"))
    assert Path("notes.svg").read_text() == "mine"


def test_what_is_alone_is_the_best_of_nothing(run, measured: Path, tmp_path: Path) -> None:
    first = sorted(measured.iterdir())[0]
    (tmp_path / "alone").mkdir()
    shutil.copy(first, tmp_path / "alone")
    asked = ["--best", "val_acc", "--mode", "max"]
    (one,) = json.loads(run("list", tmp_path / "alone", *asked, "--json").out)["checkpoints"]
    assert "val_acc" in one["metrics"]
    assert one["best"] is False
    assert "best" not in run("list", tmp_path / "alone", *asked).out.split()


def test_what_is_dated_ahead_lies_in_the_future(run, measured: Path) -> None:
    for path in measured.iterdir():
        os.utime(path, (4e9, 4e9))
    (heading,) = (
        line for line in run("list", measured, "--grouped").out.splitlines() if "checkpoints," in line
    )
    assert "newest dated in the future, " in heading
    assert run("list", measured, "--flat").out.count("  future  ") == len(list(measured.iterdir()))


def test_the_name_of_a_metric_says_which_values_are_good(run, series: Path) -> None:
    told = run("list", series, "--best", "loss")
    assert told.err == "ckpttool: loss: lower is better (--mode max otherwise)\n"
    assert told.out == run("list", series, "--best", "loss", "--mode", "min").out


def test_metrics_of_a_log(run, short: Path) -> None:
    Path("log.csv").write_text("epoch,val_f1\n1,0.25\n2,0.75\n10,0.5\n")
    out = run("list", short, "--metrics", "log.csv", "--best", "val_f1", "--mode", "max", "--flat").out
    assert [line.split()[3] for line in out.splitlines()] == ["val_f1", "0.25", "0.75", "0.50"]
    assert out.splitlines()[2].endswith("readable  best val_f1, latest")


# How far it was looked at ---------------------------------------------------------------------------


def test_intact_is_said_of_what_was_read(run, short: Path) -> None:
    content = bytearray((short / "model_epoch_2.pth").read_bytes())
    content[content.index(b"data/0") + 128] ^= 1
    (short / "model_epoch_2.pth").write_bytes(content)
    os.utime(short / "model_epoch_2.pth", (1_700_000_000, 1_700_000_000))
    quick = json.loads(run("list", short, "--json").out)["checkpoints"]
    assert [one["state"] for one in quick] == ["readable"] * 3
    status, out, err = run("list", short, "--json", "--verify", "full")
    full = json.loads(out)["checkpoints"]
    assert (status, [one["state"] for one in full]) == (1, ["intact", "damaged", "intact"])
    assert err.startswith("ckpttool: warning: run/model_epoch_2.pth: damaged: ")
    assert full[1]["fault"].startswith("damaged: ")
    heading = run("list", short, "--grouped", "--verify", "full").out.splitlines()[1]
    assert heading.endswith("2 intact, 1 damaged")


def test_many_faults_do_not_push_the_list_away(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch in range(1, 5):
        for copy in range(5):
            (series / f"copy{copy}_epoch_{epoch}.pth").write_bytes(b"PK\3\4")
    assert run("list", series).err.count("\n") == 20
    monkeypatch.setattr(progress, "PATIENCE", float("inf"))
    monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda stream: True)
    lines = run("list", series, "--color", "never").err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "ckpttool: warning: 10 more problems (-v shows all)"
    assert run("list", series, "-v").err.count("\n") == 20


# Room -----------------------------------------------------------------------------------------------


@pytest.fixture
def wordy(series: Path) -> Path:
    """Return a directory of long names and many metrics."""
    told = {"val_loss": 0.1, "val_acc": 0.2, "val_f1": 0.3, "train_loss": 0.4, "bleu": 0.5}
    words = "-".join(f"{name}={value}" for name, value in told.items())
    for path in list(series.iterdir()):
        path.rename(series / f"a-model-of-many-words_{path.stem[6:]}-{words}.pth")
    (series / ("l" * 60)).symlink_to(next(path.name for path in series.iterdir() if "epoch_3" in path.name))
    return series


def test_it_fits_a_terminal(run: Run, wordy: Path, terminal: Callable[[int], None]) -> None:
    for columns in (60, 80, 100, 140, 200):
        terminal(columns)
        for view in ("--grouped", "--flat"):
            out = run("list", wordy, view, "--best", "val_f1", "--mode", "max").out
            lines = out.splitlines()
            table = [line for line in lines if "…" in line or ".pth" in line]
            assert len(table) >= 10
            assert max(map(len, lines)) <= columns
            assert "val_f1" in out and "\nnot shown (use -v): " in out


def test_elsewhere_nothing_is_shortened(run, wordy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("list", wordy, "--flat").out.splitlines()
    paths = {str(path) for path in wordy.iterdir() if not path.is_symlink()}
    assert {line.split("\t")[0] for line in run("list", wordy).out.splitlines()} == paths
    assert {line.split()[0] for line in lines[1:]} == paths
    assert set(lines[0].split()) >= {"val_loss", "val_acc", "val_f1", "train_loss", "bleu"}


def test_long_shows_what_is_known(run, short: Path, terminal: Callable[[int], None]) -> None:
    terminal(60)
    (short / "model_epoch_1.pth").write_bytes(b"PK\3\4")
    lines = run("list", short, "-l").out.splitlines()
    lines = lines[lines.index(next(line for line in lines if "changed" in line)) :]
    assert lines[0].split() == ["checkpoint", "epoch", "loss", "size", "changed", "holds", "state", "notes"]
    assert lines[1].endswith(
        "damaged   it is a ZIP archive with other content; expected a PyTorch checkpoint"
    )
    assert re.search(
        r"2023-11-1\d \d\d:\d\d:20[+-]\d\d:\d\d  full, \d+ tensors of weights, \d+ parameters", lines[2]
    )


# What a policy would keep ---------------------------------------------------------------------------


def test_what_rules_would_keep(run: Run, series: Path, golden: Golden) -> None:
    before = sorted(series.iterdir())
    golden(transcript(run, (0, "list run --keep 2 --grouped")))
    assert sorted(series.iterdir()) == before
    found = json.loads(run("list", series, "--keep", 2, "--json").out)["checkpoints"]
    assert [one["kept"] for one in found[:8]] == [[]] * 8
    assert found[8]["kept"] == ["last 2"]
    assert "newest" in found[9]["kept"] and "last 2" in found[9]["kept"]


def test_the_best_by_the_metric_that_marks_it(run, measured: Path) -> None:
    given = ("--series", "model_epoch_*", "--best", "loss", "--mode", "max", "--keep-best", 2)
    found = json.loads(run("list", measured, *given, "--json").out)["checkpoints"]
    kept = [one["epoch"] for one in found if any("best 2" in reason for reason in one["kept"])]
    assert kept == [1, 2]
    assert [one["epoch"] for one in found if one["best"]] == [1]


def test_rules_of_a_configuration(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own.toml").write_text("[retention]\nkeep-last = 4\n")
    found = json.loads(run("list", series, "--config", "own.toml", "--json").out)["checkpoints"]
    assert [bool(one["kept"]) for one in found] == [False] * 6 + [True] * 4


# The configuration ----------------------------------------------------------------------------------


@pytest.fixture
def project(files: Path, home: None) -> Callable[[str], None]:
    """Return what writes the configuration of the working directory, in which two runs lie."""
    for name in ("exp", "final"):
        shutil.copytree(files / "series", Path("runs", name))
    return lambda text: write(Path("ckpttool.toml"), text) and None


def both(run, *options: object) -> tuple[dict[str, bool], dict[str, bool]]:
    """Return which checkpoints ``list`` says would stay, and which ``prune`` says."""
    listed = json.loads(run("list", *options, "--json").out)["checkpoints"]
    groups = json.loads(run("prune", *options, "--dry-run", "--json", "--verify", "quick").out)["groups"]
    told = {one["path"]: True for group in groups for one in group["keep"]}
    return {one["path"]: bool(one["kept"]) for one in listed}, told | {
        one["path"]: False for group in groups for one in group["remove"]
    }


POLICIES = {
    "one directory": """
        [retention]
        paths = ["runs/exp"]
        keep-last = 2
        min-age = "1d"
    """,
    "no descending": '[retention]\npaths = ["runs"]\nkeep-last = 1\nrecursive = false',
    "descending": """
        [retention]
        paths = ["runs", "runs/exp"]
        recursive = true
        exclude = ["*_5.pth"]
        series = ["model_*"]
        keep-last = 1
    """,
    "several rules": """
        [retention]
        paths = ["runs/final", "runs/exp"]
        group-by = "none"
        keep-last = 4
        [[retention.rule]]
        path = "runs/exp"
        keep-every-epochs = 5
    """,
}


OPTIONS = ("", "--config ckpttool.toml", "-r", "runs --keep 3 -r")


@pytest.mark.parametrize(("options", "policy"), sampled(itertools.product(OPTIONS, POLICIES), 6))
def test_it_says_what_prune_would_do(run: Run, project, options: str, policy: str) -> None:
    project(POLICIES[policy])
    listed, pruned = both(run, *options.split())
    assert listed == pruned
    assert bool(listed) != (policy == "no descending" and "-r" not in options.split())


def test_a_named_directory_needs_no_configuration(run: Run, project, golden: Golden) -> None:
    project('[retention]\npaths = ["runs/exp"]\nkeep-last = 2\n')
    golden(run("list").err)
    assert run("list", "--quiet") == run("list", ".", "--quiet") == (0, "", "")
    everything = run("list", ".", "-0")
    assert (len(names(everything.out)), everything.err) == (20, "")
    assert len(names(run("list", ".", "-r", "-0").out)) == 20


def test_what_prune_would_refuse_is_told(run: Run, project, golden: Golden) -> None:
    text = '[retention]\npaths = ["runs/exp", "runs/final", "nowhere"]\nkeep-last = 2\nmax-delete = 3\n'
    project(text)
    answer = run("list", "--config", "ckpttool.toml", "-0")
    assert (answer.status, len(names(answer.out))) == (2, 20)
    golden(answer.err)
    project(text.replace(', "nowhere"', "") + "[[retention.rule]]\npath = 'runs/lost'\nkeep-last = 9\n")
    status, out, err = run("list", "--json")
    assert (status, {one["kept"] is None for one in json.loads(out)["checkpoints"]}) == (1, {True})
    golden(err)


def test_what_matches_in_one_of_the_directories_matches(run, project) -> None:
    Path("runs", "exp", "model_epoch_5.pth").unlink()
    project('[retention]\npaths = ["runs/exp", "runs/final"]\nexclude = ["*_5.pth"]\nkeep-last = 1\n')
    assert "matched nothing" not in run("list").err
    Path("runs", "final", "model_epoch_5.pth").unlink()
    assert run("list").err.count("'*_5.pth' matched nothing") == 1


def test_a_metric_need_not_be_known_in_every_directory(run, project) -> None:
    for path in Path("runs", "final").iterdir():
        path.unlink()
    shutil.copy(Path("runs", "exp", "model_epoch_1.pth"), Path("runs", "final", "acc=0.5.pth"))
    project('[retention]\npaths = ["runs/exp", "runs/final"]\n')
    rows = json.loads(run("list", "--sort", "acc", "--json").out)["checkpoints"]
    assert rows[0]["path"] == "runs/final/acc=0.5.pth"


# Pictures -------------------------------------------------------------------------------------------


def test_picture(run, series: Path) -> None:
    name = "series.svg"
    status, out, err = run("list", series, "--keep", 2, "--plot", name)
    assert (status, err, out.count("\n")) == (0, "", 10)
    first = Path(name).read_bytes()
    assert run("list", series, "--keep", 2, "--plot", name, "-q") == (0, "", "")
    assert Path(name).read_bytes() == first


def test_no_picture_of_nothing(run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    picture = tmp_path / "a.svg"
    assert run("list", tmp_path / "empty", "--plot", picture).status == 0
    assert not picture.exists()

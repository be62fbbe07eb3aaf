"""``ckpttool diff`` on real files: stdout, stderr and exit status together."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpttool.core.plugins import install_command
from tests.support.commands import Run, refusals, transcript
from tests.support.golden import Golden

EQUAL, DIFFERENT, FAILED = 0, 1, 2


@pytest.fixture
def work(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory: two epochs of a run, and one tensor changed in a safetensors file."""
    shutil.copytree(files / "series", tmp_path / "runs")
    for name, epoch in (("a.pth", 1), ("b.pth", 2)):
        shutil.copy(files / "series" / f"model_epoch_{epoch}.pth", tmp_path / name)
    weights = {
        "fc.weight": np.arange(20, dtype=np.float32).reshape(2, 10),
        "fc.bias": np.zeros(2, np.float32),
    }
    save_file(weights, tmp_path / "one.safetensors")
    weights["fc.weight"][1, 3] += 0.5
    save_file(weights, tmp_path / "two.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Two ------------------------------------------------------------------------------------------------


def test_two(work: Path, run: Run, golden: Golden) -> None:
    shutil.copy("a.pth", "copy.pth")
    pair = "one.safetensors two.safetensors"
    golden(
        transcript(
            run,
            (EQUAL, "diff a.pth copy.pth"),
            (EQUAL, "diff a.pth a.pth"),
            (DIFFERENT, f"diff {pair}"),
            (DIFFERENT, "diff a.pth b.pth"),
            (DIFFERENT, "diff --stat a.pth b.pth"),
            (DIFFERENT, "diff --only weights a.pth b.pth"),
            (DIFFERENT, f"diff --name-only {pair}"),
            (EQUAL, "diff --name-only a.pth a.pth"),
            (DIFFERENT, "diff a.pth /dev/null"),
            (DIFFERENT, "diff /dev/null a.pth"),
        )
    )
    for options, status in (
        ("", DIFFERENT),
        ("--atol 0.5", EQUAL),
        ("--rtol 0.01", DIFFERENT),
        ("--ignore *.weight", EQUAL),
    ):
        assert run("diff", "-q", *options.split(), *pair.split()) == (status, "", ""), options


def test_document(work: Path, run: Run) -> None:
    status, out, err = run("diff", "--json", "one.safetensors", "two.safetensors")
    assert (status, err) == (DIFFERENT, "")
    document = json.loads(out)
    assert document["schema"] == "ckpttool.diff/1"
    (changed,) = document["changed"]
    a, b = (load_file(f"{name}.safetensors")["fc.weight"].astype(np.float64) for name in ("one", "two"))
    assert changed["name"] == "fc.weight"
    assert (changed["count"], changed["max_abs"], changed["where"]) == (1, 0.5, [1, 3])
    assert changed["l2"] == pytest.approx(np.linalg.norm(b - a), rel=1e-12)
    assert changed["max_rel"] == pytest.approx(0.5 / 13, rel=1e-12)


def test_bits(work: Path, run: Run) -> None:
    save_file({"w": np.zeros(2, np.float32)}, "plus.safetensors")
    save_file({"w": -np.zeros(2, np.float32)}, "minus.safetensors")
    assert run("diff", "-q", "plus.safetensors", "minus.safetensors").status == EQUAL
    assert run("diff", "-q", "--bitwise", "plus.safetensors", "minus.safetensors").status == DIFFERENT


def test_rename(work: Path, run: Run, golden: Golden) -> None:
    weights = load_file("one.safetensors")
    renamed = {name.replace("fc", "head"): array for name, array in weights.items()}
    save_file(renamed, "renamed.safetensors")
    pair = "one.safetensors renamed.safetensors"
    golden(transcript(run, (DIFFERENT, f"diff {pair}"), (DIFFERENT, f"diff --no-rename {pair}")))


# What git hands over --------------------------------------------------------------------------------


# Three or more --------------------------------------------------------------------------------------


def test_series(work: Path, run: Run, golden: Golden) -> None:
    paths = [f"runs/model_epoch_{epoch}.pth" for epoch in (1, 2, 3)]
    golden(transcript(run, (DIFFERENT, f"diff {' '.join(paths)}"), (EQUAL, "diff a.pth a.pth a.pth")))
    document = json.loads(run("diff", "--json", *paths).out)
    assert document["schema"] == "ckpttool.diff/1"
    assert [(step["a"], step["b"]) for step in document["steps"]] == [*itertools.pairwise(paths)]


SORTED = [f"runs/model_epoch_{epoch}.pth" for epoch in (1, 10, 2, 3)]
TRAINED = [SORTED[0], *SORTED[2:], SORTED[1]]
SAID = "compared in training order, not in the order of the names\n"


def test_names_that_a_shell_sorted_go_as_training_did(work: Path, run: Run) -> None:
    for paths, compared, said in (
        (SORTED, TRAINED, SAID),
        ([SORTED[1], SORTED[0], *SORTED[2:]], TRAINED, SAID),
        (TRAINED, TRAINED, ""),
        (TRAINED[::-1], TRAINED[::-1], ""),
        ([SORTED[0], SORTED[3], SORTED[2]], [SORTED[0], SORTED[3], SORTED[2]], ""),
        ([*SORTED[:2], SORTED[1]], [*SORTED[:2], SORTED[1]], ""),
    ):
        status, out, err = run("diff", "--json", *paths)
        assert (status, err) == (DIFFERENT, said)
        assert [one["path"] for one in json.loads(out)["checkpoints"]] == compared
        assert run("diff", "-q", *paths) == (DIFFERENT, "", "")


def test_names_that_count_nothing_stay_in_the_order_given(work: Path, run: Run) -> None:
    paths = [f"{name}.pth" for name in "xyz"]
    for path, epoch in zip(paths, (2, 2, 1), strict=True):
        shutil.copy(f"runs/model_epoch_{epoch}.pth", path)
    status, out, err = run("diff", "--json", *paths)
    assert (status, err) == (DIFFERENT, "")
    assert [one["path"] for one in json.loads(out)["checkpoints"]] == paths


def test_directory_of_a_series_is_compared_in_training_order(work: Path, run: Run) -> None:
    status, out, err = run("diff", "runs", "--json")
    assert (status, err) == (DIFFERENT, "")
    paths = [f"runs/model_epoch_{epoch}.pth" for epoch in range(1, 11)]
    assert [one["path"] for one in json.loads(out)["checkpoints"]] == paths


def test_directory_of_two_compares_them(work: Path, run: Run) -> None:
    for path in work.glob("runs/model_epoch_[3-9].pth"):
        path.unlink()
    (work / "runs" / "model_epoch_10.pth").unlink()
    assert run("diff", "runs") == run("diff", "runs/model_epoch_1.pth", "runs/model_epoch_2.pth")


def test_one_beside_the_series_is_named(work: Path, run: Run) -> None:
    shutil.copy("a.pth", "runs/best.pth")
    status, out, err = run("diff", "runs")
    assert (status, err) == (DIFFERENT, "ckpttool: not in the series, and not compared: runs/best.pth\n")
    assert out.startswith("10 checkpoints: ") and "best.pth" not in out


def test_a_damaged_one_of_the_series_is_an_error(work: Path, run: Run) -> None:
    (work / "runs" / "model_epoch_3.pth").write_bytes(b"PK")
    status, out, err = run("diff", "runs")
    assert (status, out) == (FAILED, "")
    assert err.startswith("ckpttool: error: runs/model_epoch_3.pth: ")


def test_each_of_several_series_gets_a_line_to_copy(work: Path, run: Run, golden: Golden) -> None:
    for name in ("it's 2", "1"):
        shutil.copytree("runs", work / "all" / name)
    shutil.copytree(work / "all" / "1", work / "all" / "mixed")
    for epoch in (1, 2):
        shutil.copy(f"runs/model_epoch_{epoch}.pth", work / "all" / "mixed" / f"other_epoch_{epoch}.pth")
    golden("\n".join(sorted(transcript(run, (FAILED, "diff all")).splitlines())))


# What it refuses ------------------------------------------------------------------------------------


WRONG = """
a.pth
best
--stat runs
saved
--json --stat a.pth b.pth
--stat --name-only a.pth b.pth
--stat a.pth b.pth a.pth
--bitwise --rtol 1 a.pth b.pth
--rtol nan a.pth b.pth
--atol inf a.pth b.pth
a.pth none.pth
a.pth b.pth none.pth
--plot a.pdf a.pth b.pth
--plot none/a.svg one.safetensors two.safetensors
empty a.pth
"""


def test_refused(work: Path, run: Run, files: Path, golden: Golden) -> None:
    (work / "best").mkdir()
    shutil.copy("a.pth", "best")
    (work / "empty").mkdir()
    shutil.copytree(files / "savedmodel" / "keras2", work / "saved")
    golden(
        refusals(
            run, *(f"diff {arguments}" for arguments in WRONG.split("\n")[1:-1]), "diff /dev/null /dev/null"
        )
    )
    assert run("diff", "best", "a.pth").status == EQUAL


def test_directory_of_several_is_refused_with_candidates(work: Path, run: Run) -> None:
    status, out, err = run("diff", "runs", "a.pth")
    names = ", ".join(f"model_epoch_{epoch}.pth" for epoch in range(1, 11))
    assert (status, out) == (FAILED, "")
    assert sorted(err.removesuffix(")\n").partition("name one: ")[2].split(", ")) == sorted(names.split(", "))
    assert err.startswith("ckpttool: error: runs: 10 checkpoints in it (name one: ")


# Damage ---------------------------------------------------------------------------------------------


@pytest.fixture
def flipped(work: Path) -> str:
    """Return a copy of ``a.pth`` in which one bit of one tensor is another, and its checksum isn't."""
    data = bytearray(Path("a.pth").read_bytes())
    data[data.index(b"data/0") + 128] ^= 0x10
    Path("flipped.pth").write_bytes(data)
    return "flipped.pth"


def test_damage_is_no_difference(flipped: str, run: Run) -> None:
    status, out, err = run("diff", "a.pth", flipped)
    assert (status, out) == (FAILED, "")
    assert err.startswith("ckpttool: error: flipped.pth[model_state_dict.fc.weight]: ")


@pytest.mark.parametrize("is_first", [True, False])
def test_going_on_tells_what_could_be_compared(flipped: str, run: Run, is_first: bool) -> None:
    paths = [flipped, "a.pth"] if is_first else ["a.pth", flipped]
    status, out, err = run("diff", "--keep-going", *paths)
    assert status == FAILED
    assert "1 tensor could not be compared" in out.splitlines()[0]
    assert f"! model_state_dict.fc.weight of {'A' if is_first else 'B'}: " in out
    assert err.startswith("ckpttool: error: flipped.pth[model_state_dict.fc.weight]: ")
    assert len(err.splitlines()) == 1
    document = json.loads(run("diff", "--keep-going", "--json", *paths).out)
    assert [one["side"] for one in document["broken"]] == ["a" if is_first else "b"]
    assert document["equal"] is False


def test_quiet_says_errors(flipped: str, run: Run) -> None:
    status, out, err = run("diff", "--keep-going", "-q", "a.pth", flipped)
    assert (status, out, len(err.splitlines())) == (FAILED, "", 1)


# Pictures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_picture(work: Path, run: Run, kind: str) -> None:
    name = f"moved.{kind}"
    status, out, err = run("diff", "--plot", name, "one.safetensors", "two.safetensors")
    assert (status, err) == (DIFFERENT, "")
    assert out.startswith("1 of 2 tensors changed")
    first = Path(name).read_bytes()
    assert len(first) > 1000
    assert run("diff", "--plot", name, "one.safetensors", "two.safetensors").status == DIFFERENT
    assert Path(name).read_bytes() == first


def test_picture_of_a_series(work: Path, run: Run) -> None:
    paths = [f"runs/model_epoch_{epoch}.pth" for epoch in (1, 2, 3)]
    assert run("diff", "-q", "--plot", "drift.html", *paths) == (DIFFERENT, "", "")
    page = Path("drift.html").read_text("utf-8")
    assert "model_state_dict.fc.weight" in page and "<td>model_epoch_3.pth</td>" in page


def test_nothing_but_an_earlier_picture_is_replaced(work: Path, run: Run, golden: Golden) -> None:
    foreign = {
        "a.svg": b"<svg/>",
        "a.png": b"\x89PNG\r\n\x1a\n somebody's photograph",
        "a.html": b"<!doctype html><p>mine",
    }
    for name, content in foreign.items():
        Path(name).write_bytes(content)
    golden(refusals(run, *(f"diff --plot {name} a.pth b.pth" for name in foreign)))
    assert {name: Path(name).read_bytes() for name in foreign} == foreign
    shutil.copy("a.pth", "b.svg")
    golden(refusals(run, "diff --plot b.svg b.svg b.pth"))
    assert Path("b.svg").read_bytes() == Path("a.pth").read_bytes()


def test_picture_needs_matplotlib(work: Path, run: Run, without_matplotlib: None) -> None:
    assert run("diff", "--plot", "a.svg", "a.pth", "b.pth") == (
        FAILED,
        "",
        f"ckpttool: error: a.svg: plots need matplotlib ({install_command('plot')})\n",
    )

"""``ckpttool inspect``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ckpttool import inspect, open_checkpoint
from ckpttool.ops.inspect import inspection
from tests.support.commands import Run, refusals, transcript
from tests.support.golden import FILES, Golden
from tests.support.moments import after_a_look, before_statistics


@pytest.fixture
def guide(files: Path) -> Path:
    return files / "pytorch" / "guide.pth"


@pytest.fixture
def many(files: Path) -> Path:
    """Return a checkpoint of 110 tensors."""
    return files / "pytorch" / "dtypes.pth"


# The answer -----------------------------------------------------------------------------------------


def test_text(run: Run, guide: Path, many: Path, golden: Golden) -> None:
    answers = ("", "--filter model_state_dict.* ", "--stats ")
    golden(transcript(run, *((0, f"inspect {options}{guide}") for options in answers)))
    short, whole = run("inspect", many).out, run("inspect", "--all", many).out
    golden(short.rstrip().splitlines()[-1])
    assert "--all" not in whole
    assert len(whole.splitlines()) >= len(short.splitlines()) + 69
    assert len(json.loads(run("inspect", "--json", many).out)["checkpoints"][0]["tensors"]) == 110


def test_json(run: Run, guide: Path, many: Path, golden: Golden) -> None:
    status, out, err = run("inspect", "--json", guide)
    assert (status, err, out.count("\n")) == (0, "", 1)
    document = json.loads(out)
    golden(json.dumps(document, indent=1).replace(str(FILES), "FILES"))
    assert document["checkpoints"][0]["files"] == [{"path": str(guide), "bytes": guide.stat().st_size}]
    both = json.loads(run("inspect", "--json", guide, many).out)
    assert [told["path"] for told in both["checkpoints"]] == [str(guide), str(many)]


def test_json_offset_is_where_the_values_lie(run, guide: Path) -> None:
    _, out, _ = run("inspect", "--json", guide)
    tensor = json.loads(out)["checkpoints"][0]["tensors"][0]
    truth = json.loads(guide.with_name("guide.pth.expected.json").read_text("utf-8"))["tensors"][0]
    raw = Path(tensor["file"]).read_bytes()[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
    assert np.frombuffer(raw, "<f4")[:4].tolist() == truth["first"]


def test_tied_tensors_name_the_first(run, files: Path) -> None:
    _, out, _ = run("inspect", "--json", files / "pytorch" / "views.pth")
    tied = {told["name"]: told["shares_with"] for told in json.loads(out)["checkpoints"][0]["tensors"]}
    assert (tied["tied.a"], tied["tied.b"]) == (None, "tied.a")


def test_filter_that_matches_nothing_says_which_would(run: Run, guide: Path, golden: Golden) -> None:
    for glob in ("no such *", "fc*", "model_state_dict.fc.wieght"):
        status, out, err = run("inspect", "--filter", glob, guide)
        assert status == 1
        assert out.startswith(f"{guide}: pytorch (zip)\n") and "weight  " not in out
        golden(err)
        assert run("inspect", "--filter", glob, "--quiet", guide) == (1, "", "")


def test_stats_are_numpys(run, guide: Path) -> None:
    status, out, err = run("inspect", "--json", "--stats", guide)
    assert (status, err) == (0, "")
    for tensor in json.loads(out)["checkpoints"][0]["tensors"]:
        raw = guide.read_bytes()[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
        values = np.frombuffer(raw, "<f4").astype("f8")
        stats = tensor["stats"]
        assert (stats["min"], stats["max"]) == (values.min(), values.max())
        assert stats["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert stats["std"] == pytest.approx(values.std(), rel=1e-9, abs=1e-15)
        assert (stats["zeros"], stats["nan"], stats["inf"]) == (int((values == 0).sum()), 0, 0)


def test_stats_tell_how_many_bytes_they_have_read(guide: Path) -> None:
    steps: list[int] = []
    totals: list[int] = []

    @contextmanager
    def progress(total: int) -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield steps.append

    with open_checkpoint(guide) as checkpoint:
        inspection(checkpoint, stats=True, progress=progress)
        assert totals == [sum(tensor.nbytes for tensor in checkpoint.tensors)] == [sum(steps)]


def test_stats_leave_nan_and_infinity_out(run, files: Path) -> None:
    status, out, err = run("inspect", "--json", "--stats", files / "pytorch" / "nan.pth")
    assert (status, err) == (0, "")
    stats = {told["name"]: told.get("stats") for told in json.loads(out)["checkpoints"][0]["tensors"]}
    assert (stats["float32"]["nan"], stats["float32"]["inf"]) == (1, 2)
    assert stats["float8_e4m3fn"]["max"] == 448.0
    assert stats["complex64"] is None


def test_without_stats_no_value_is_read(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool import Tensor

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    monkeypatch.setattr(Tensor, "tobytes", refuse)
    before_statistics(monkeypatch, refuse)
    assert run("inspect", "--json", guide).status == 0


def test_fields(run: Run, guide: Path, files: Path, golden: Golden) -> None:
    fields = (
        "training.epoch",
        "format",
        "training.loss",
        "training.step",
        "complete",
        "tensors.0.name",
        "tensors.0.shape",
        "values.epoch",
    )
    golden(transcript(run, *((0, f"inspect --field {key} {guide}") for key in fields)))
    wrong = (
        "no.such",
        "training.epoch.more",
        "tensors.99.name",
        "''",
        "tensors.-1",
        "epoch",
        "parametres",
        "training.los",
    )
    golden(refusals(run, *(f"inspect --field {key} {guide}" for key in wrong)))


def test_field_of_several_paths_prints_a_line_each(run, files: Path) -> None:
    paths = [files / "series" / f"model_epoch_{epoch}.pth" for epoch in (3, 10)]
    assert run("inspect", "--field", "training.epoch", *paths) == (0, "3\n10\n", "")


# Directories ----------------------------------------------------------------------------------------


def test_directories(run: Run, files: Path, guide: Path, tmp_path: Path, golden: Golden) -> None:
    """Of several the newest is shown, which is said; of one that is shown."""
    shutil.copytree(files / "series", tmp_path / "above" / "runs")
    (tmp_path / "one").mkdir()
    shutil.copy(guide, tmp_path / "one" / "only.pth")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("no checkpoint")
    places = ("above/runs", "above", "one")
    golden(transcript(run, *((0, f"inspect --field path {tmp_path}/{place}") for place in places)))
    newest = str(tmp_path / "above" / "runs" / "model_epoch_10.pth")
    assert inspect(tmp_path / "above" / "runs").checkpoint.path == newest
    golden(refusals(run, f"inspect {tmp_path}/none"))


# What can't be done ---------------------------------------------------------------------------------


def test_what_can_not_be_shown(run: Run, guide: Path, files: Path, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "notes.txt").write_text("hello, world")
    links = {"latest": tmp_path / "gone.pth", "a": tmp_path / "b.pth", "b": tmp_path / "a.pth", "good": guide}
    for name, target in links.items():
        (tmp_path / f"{name}.pth").symlink_to(target)
    (tmp_path / "half.pth").write_bytes(guide.read_bytes()[:2000])
    names = ("missing.pth", "notes.txt", "latest.pth", "a.pth", "half.pth")
    pointer = files / "lfs" / "model.safetensors"
    several = f"--json {guide} {tmp_path}/missing.pth"
    places = (*(f"{tmp_path}/{name}" for name in names), pointer, several)
    golden(refusals(run, *(f"inspect {place}" for place in places)))
    assert run("inspect", "--field", "training.epoch", tmp_path / "good.pth") == (0, "10\n", "")


def test_file_that_cannot_be_opened(run: Run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for failure, said in (
        (PermissionError(13, "Permission denied"), "permission denied"),
        (FileNotFoundError(2, "No such file or directory"), "no such file or directory"),
        (OSError(24, "Too many open files"), "too many open files"),
        (IsADirectoryError(21, "Is a directory"), "is a directory"),
    ):

        def refuse(path: object, *_: object, failure: OSError = failure, **__: object) -> int:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr("ckpttool.storage.source.os.open", refuse)
            answer = run("inspect", guide)
        assert answer == (2, "", f"ckpttool: error: {guide}: {said}\n")


def test_file_that_shrinks_while_it_is_read(
    run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shrinks.pth"
    shutil.copy(guide, path)
    before_statistics(monkeypatch, lambda: os.truncate(path, 100))
    status, out, err = run("inspect", "--stats", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ckpttool: error: {path}")
    assert "the file ends at byte 100 (3953 when it was opened)" in err


def test_file_that_vanishes_after_it_was_looked_at(
    run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "vanishes.pth"
    shutil.copy(guide, path)
    after_a_look(monkeypatch, path.unlink)
    assert run("inspect", path) == (2, "", f"ckpttool: error: {path}: no such file or directory\n")


# Hostile names --------------------------------------------------------------------------------------


def test_names_from_files_are_escaped(run: Run, files: Path) -> None:
    """JSON is read on terminals too; read by a program, the names are what they are in the file."""
    for path in (files / "hostile" / "names.pth", files / "hostile" / "names.safetensors"):
        for options in (["--all"], ["--json"], *(["--field", f"tensors.{index}.name"] for index in range(3))):
            status, out, err = run("inspect", *options, path)
            assert (status, err) == (0, "")
            assert all(character.isprintable() or character == "\n" for character in out)
        assert "\\x1b" in run("inspect", "--all", path).out
        (told,) = json.loads(run("inspect", "--json", path).out)["checkpoints"]
        assert any("\x1b" in one["name"] for one in told["tensors"])


def test_path_with_controls_is_escaped(run, guide: Path, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mb\nc.pth"
    shutil.copy(guide, path)
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path}/a\\x1b[31mb\\nc.pth: pytorch (zip)\n")
    missing = tmp_path / "\x1b[31m\n.pth"
    told = f"{tmp_path}/\\x1b[31m\\n.pth: no such file or directory"
    hint = f"did you mean {tmp_path}/a\\x1b[31mb\\nc.pth?"
    assert run("inspect", missing) == (2, "", f"ckpttool: error: {told} ({hint})\n")


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_path_that_is_no_utf8(guide: Path, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.pth"
    shutil.copy(os.fsencode(guide), path)
    code = (
        "import sys, ckpttool.cli as c; sys.exit(max(c.run(['inspect', *o, sys.argv[1]]) for o in OPTIONS))"
    )
    options = repr([[], ["--json"], ["--field", "path"]])
    command = [sys.executable, "-c", code.replace("OPTIONS", options), path]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, check=False, env=strict)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout

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
from tests.support.moments import after_a_look, before_statistics

KEYS = [
    "path",
    "format",
    "variant",
    "complete",
    "granularity",
    "bytes",
    "files",
    "producer",
    "training",
    "parameters",
    "tensors",
    "values",
    "findings",
]
TENSOR_KEYS = ["name", "path", "role", "dtype", "shape", "bytes", "file", "offset", "shares_with"]


@pytest.fixture
def guide(files: Path) -> Path:
    return files / "pytorch" / "guide.pth"


@pytest.fixture
def many(files: Path) -> Path:
    """Return a checkpoint of 110 tensors."""
    return files / "pytorch" / "dtypes.pth"


# The answer -----------------------------------------------------------------------------------------


def test_text_says_what_it_is(run, guide: Path) -> None:
    status, out, err = run("inspect", guide)
    assert (status, err) == (0, "")
    told = [" ".join(line.split()) for line in out.splitlines()]
    assert told[:8] == [
        f"{guide}: pytorch (zip)",
        "size 4.0 kB",
        "holds full: 8 tensors (2 weights, 6 optimizer)",
        "epoch 10",
        "loss 0.02",
        "learning rate 0.001 (key optimizer_state_dict.param_groups[0].lr)",
        "resumes with weights and optimizer; no RNG state, no data loader state",
        "parameters 22 (float32)",
    ]
    assert "fc.weight" not in told[9] and "weight float32 2×10 80 B" in told


def test_json_has_the_keys_of_the_contract(run, guide: Path) -> None:
    status, out, err = run("inspect", "--json", guide)
    assert (status, err) == (0, "")
    assert out.startswith('{"schema": "ckpttool.inspect/1", "checkpoints": [') and out.count("\n") == 1
    (told,) = json.loads(out)["checkpoints"]
    assert [key for key in told if key in KEYS] == KEYS
    assert told["files"] == [{"path": str(guide), "bytes": guide.stat().st_size}]
    assert told["producer"] == {"framework": "pytorch", "version": None}
    assert (told["training"]["epoch"], told["training"]["origin"]["epoch"]) == (10, "key epoch")
    assert {key: told[key] for key in ("complete", "granularity", "parameters")} == {
        "complete": True,
        "granularity": "full",
        "parameters": 22,
    }
    assert (told["values"]["epoch"], told["values"]["loss"], told["findings"]) == (10, 0.02, [])
    tensor = told["tensors"][0]
    assert [key for key in tensor if key in TENSOR_KEYS] == TENSOR_KEYS
    assert tensor["path"] == ["model_state_dict", "fc.weight"]
    assert (tensor["name"], tensor["role"]) == ("model_state_dict.fc.weight", "weights")
    assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == ("float32", [2, 10], 80)


def test_json_offset_is_where_the_values_lie(run, guide: Path) -> None:
    _, out, _ = run("inspect", "--json", guide)
    tensor = json.loads(out)["checkpoints"][0]["tensors"][0]
    truth = json.loads(guide.with_name("guide.pth.expected.json").read_text("utf-8"))["tensors"][0]
    raw = Path(tensor["file"]).read_bytes()[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
    assert np.frombuffer(raw, "<f4")[:4].tolist() == truth["first"]


def test_json_of_several_paths_is_one_document(run, guide: Path, many: Path) -> None:
    status, out, err = run("inspect", "--json", guide, many)
    assert (status, err) == (0, "")
    assert [told["path"] for told in json.loads(out)["checkpoints"]] == [str(guide), str(many)]


def test_tied_tensors_name_the_first(run, files: Path) -> None:
    _, out, _ = run("inspect", "--json", files / "pytorch" / "views.pth")
    tied = {told["name"]: told["shares_with"] for told in json.loads(out)["checkpoints"][0]["tensors"]}
    assert (tied["tied.a"], tied["tied.b"]) == (None, "tied.a")


def test_the_table_is_cut_and_counts_the_rest(run, many: Path) -> None:
    status, out, err = run("inspect", many)
    assert (status, err) == (0, "")
    assert out.rstrip().endswith("… and 70 weight tensors (305 B); --all shows them")


def test_all_shows_every_tensor(run, many: Path) -> None:
    status, short, _ = run("inspect", many)
    status, out, err = run("inspect", "--all", many)
    assert (status, err) == (0, "")
    assert "--all" not in out
    assert len(out.splitlines()) >= len(short.splitlines()) + 69


def test_json_is_never_cut(run, many: Path) -> None:
    _, out, _ = run("inspect", "--json", many)
    assert len(json.loads(out)["checkpoints"][0]["tensors"]) == 110


def test_filter_selects_tensors_by_glob(run, guide: Path) -> None:
    status, out, err = run("inspect", "--json", "--filter", "model_state_dict.*", guide)
    assert (status, err) == (0, "")
    (told,) = json.loads(out)["checkpoints"]
    assert [tensor["name"] for tensor in told["tensors"]] == [
        "model_state_dict.fc.weight",
        "model_state_dict.fc.bias",
    ]
    assert told["parameters"] == 22


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        ("no such *", ""),
        ("fc*", " (try '*fc*')"),
        ("model_state_dict.fc.wieght", " (did you mean model_state_dict.fc.weight?)"),
    ],
)
def test_filter_that_matches_nothing_says_which_would(run, guide: Path, glob: str, hint: str) -> None:
    status, out, err = run("inspect", "--filter", glob, guide)
    assert (status, err) == (1, f"ckpttool: {guide}: no tensor matches {glob!r}{hint}\n")
    assert out.startswith(f"{guide}: pytorch (zip)\n") and "weight  " not in out
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


def test_stats_stand_in_the_table(run, guide: Path) -> None:
    status, out, err = run("inspect", "--stats", guide)
    assert (status, err) == (0, "")
    (heading,) = [line for line in out.splitlines() if line.lstrip().startswith("tensor")]
    assert heading.split() == [
        "tensor", "type", "shape", "size", "min", "max", "mean", "std", "zeros", "NaN", "Inf",
    ]  # fmt: skip


def test_without_stats_no_value_is_read(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool import Tensor

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    monkeypatch.setattr(Tensor, "tobytes", refuse)
    before_statistics(monkeypatch, refuse)
    assert run("inspect", "--json", guide).status == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.epoch", "10"),
        ("format", "pytorch"),
        ("training.loss", "0.02"),
        ("training.step", "null"),
        ("complete", "true"),
        ("tensors.0.name", "model_state_dict.fc.weight"),
        ("tensors.0.shape", "[2, 10]"),
        ("values.epoch", "10"),
    ],
)
def test_field_prints_one_value(run, guide: Path, key: str, value: str) -> None:
    assert run("inspect", "--field", key, guide) == (0, f"{value}\n", "")


def test_field_of_several_paths_prints_a_line_each(run, files: Path) -> None:
    paths = [files / "series" / f"model_epoch_{epoch}.pth" for epoch in (3, 10)]
    assert run("inspect", "--field", "training.epoch", *paths) == (0, "3\n10\n", "")


@pytest.mark.parametrize("key", ["no.such", "training.epoch.more", "tensors.99.name", "", "tensors.-1"])
def test_field_that_is_not_there(run, guide: Path, key: str) -> None:
    status, out, err = run("inspect", "--field", key, guide)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ckpttool: error: no field {key!r}; ")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("epoch", "training.epoch"), ("parametres", "parameters"), ("training.los", "training.loss")],
)
def test_field_that_is_misspelled(run, guide: Path, key: str, meant: str) -> None:
    said = f"ckpttool: error: no field {key!r}; did you mean {meant}?\n"
    assert run("inspect", "--field", key, guide) == (2, "", said)


# Directories ----------------------------------------------------------------------------------------


def test_directory_of_several_shows_the_newest_and_says_so(run, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "series", tmp_path / "runs")
    status, out, err = run("inspect", "--json", tmp_path / "runs")
    newest = str(tmp_path / "runs" / "model_epoch_10.pth")
    assert (status, json.loads(out)["checkpoints"][0]["path"]) == (0, newest)
    assert inspect(tmp_path / "runs").checkpoint.path == newest
    assert err == f"ckpttool: {tmp_path}/runs: showing the newest of 10 checkpoints: {newest}\n"


def test_directory_of_runs_says_that_it_looked_below(run, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "series", tmp_path / "runs")
    status, out, err = run("inspect", "--field", "training.epoch", tmp_path)
    newest = tmp_path / "runs" / "model_epoch_10.pth"
    said = f"ckpttool: {tmp_path}: showing the newest of 10 checkpoints in subdirectories: {newest}\n"
    assert (status, out, err) == (0, "10\n", said)


def test_directory_of_one_shows_it_without_a_word(run, guide: Path, tmp_path: Path) -> None:
    shutil.copy(guide, tmp_path / "only.pth")
    status, out, err = run("inspect", "--field", "path", tmp_path)
    assert (status, out, err) == (0, f"{tmp_path / 'only.pth'}\n", "")


def test_directory_without_checkpoints(run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    status, out, err = run("inspect", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ckpttool: error: {tmp_path}: no checkpoint")


# What can't be done ---------------------------------------------------------------------------------


def test_no_such_file(run, tmp_path: Path) -> None:
    path = tmp_path / "missing.pth"
    assert run("inspect", path) == (2, "", f"ckpttool: error: {path}: no such file or directory\n")


def test_no_checkpoint(run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello, world")
    status, out, err = run("inspect", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.endswith(f"{path}: not a checkpoint: it looks like text that starts with 'hello, world'\n")


def test_one_bad_path_leaves_stdout_empty(run, guide: Path, tmp_path: Path) -> None:
    status, out, err = run("inspect", "--json", guide, tmp_path / "missing.pth")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_broken_symlink(run, tmp_path: Path) -> None:
    link = tmp_path / "latest.pth"
    link.symlink_to(tmp_path / "gone.pth")
    assert run("inspect", link) == (
        2,
        "",
        f"ckpttool: error: {link}: a link to {tmp_path}/gone.pth, which does not exist\n",
    )


def test_symlink_to_a_checkpoint(run, guide: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.pth"
    link.symlink_to(guide)
    assert run("inspect", "--field", "training.epoch", link) == (0, "10\n", "")


def test_loop_of_symlinks(run, tmp_path: Path) -> None:
    for name, target in (("a.pth", "b.pth"), ("b.pth", "a.pth")):
        (tmp_path / name).symlink_to(tmp_path / target)
    status, out, err = run("inspect", tmp_path / "a.pth")
    assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (PermissionError(13, "Permission denied"), "permission denied"),
        (FileNotFoundError(2, "No such file or directory"), "no such file or directory"),
        (OSError(24, "Too many open files"), "too many open files"),
        (IsADirectoryError(21, "Is a directory"), "is a directory"),
    ],
)
def test_file_that_cannot_be_opened(
    run, guide: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError, said: str
) -> None:
    def refuse(path, *_: object, **__: object) -> int:
        raise failure

    monkeypatch.setattr("ckpttool.io.source.os.open", refuse)
    answer = run("inspect", guide)
    monkeypatch.undo()
    assert answer == (2, "", f"ckpttool: error: {guide}: {said}\n")


def test_truncated_file(run, guide: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.pth"
    path.write_bytes(guide.read_bytes()[:2000])
    status, out, err = run("inspect", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ckpttool: error: {path}: ") and "2,000 bytes" in err


def test_git_lfs_pointer_is_named(run, files: Path) -> None:
    status, out, err = run("inspect", files / "lfs" / "model.safetensors")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "Git LFS" in err and "git lfs pull" in err


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


@pytest.mark.parametrize("name", ["names.pth", "names.safetensors"])
def test_names_from_files_are_escaped(run, files: Path, name: str) -> None:
    status, out, err = run("inspect", "--all", files / "hostile" / name)
    assert (status, err) == (0, "")
    assert "\x1b" not in out and "\\x1b" in out
    assert all(character.isprintable() or character == "\n" for character in out)


@pytest.mark.parametrize("name", ["names.pth", "names.safetensors"])
def test_json_spells_what_a_terminal_would_obey(run, files: Path, name: str) -> None:
    """JSON is read on terminals too; read by a program, the names are what they are in the file."""
    status, out, err = run("inspect", "--json", files / "hostile" / name)
    assert (status, err) == (0, "")
    names = [told["name"] for told in json.loads(out)["checkpoints"][0]["tensors"]]
    assert any("\x1b" in one for one in names)
    assert all(character.isprintable() or character == "\n" for character in out)


def test_field_shows_no_control_either(run, files: Path) -> None:
    for index in range(3):
        status, out, err = run(
            "inspect", "--field", f"tensors.{index}.name", files / "hostile" / "names.safetensors"
        )
        assert (status, err) == (0, "")
        assert all(character.isprintable() for character in out.removesuffix("\n"))


def test_path_with_controls_is_escaped(run, guide: Path, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mb\nc.pth"
    shutil.copy(guide, path)
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path}/a\\x1b[31mb\\nc.pth: pytorch (zip)\n")
    missing = tmp_path / "\x1b[31m\n.pth"
    assert run("inspect", missing) == (
        2,
        "",
        f"ckpttool: error: {tmp_path}/\\x1b[31m\\n.pth: no such file or directory\n",
    )


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
@pytest.mark.parametrize("option", [(), ("--json",), ("--field", "path")])
def test_path_that_is_no_utf8(guide: Path, tmp_path: Path, option: tuple[str, ...]) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.pth"
    shutil.copy(os.fsencode(guide), path)
    command = [sys.executable, "-m", "ckpttool", "inspect", *option, path]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, check=False, env=strict)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout

"""TensorFlow's state file: read, written, and kept right when what it lists goes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Policy, PruneRequest, prune
from ckpttool.formats.tensorflow.checkpoint_list import TensorFlowState
from ckpttool.formats.tensorflow.state import (
    CheckpointState,
    escape,
    expand_shards,
    parse_state,
    state_text,
    unescape,
)
from ckpttool.runs.pointers.kinds import pointers_in
from ckpttool.runs.pointers.search import names_in, raise_error
from ckpttool.storage.fs import Snapshot
from ckpttool.transaction.pointer_files import list_rewrites
from tests.support.state_files import read_state, write_state


@pytest.fixture
def managed(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a manager with ten checkpoints, below the working directory."""
    shutil.copytree(files / "tensorflow" / "manager", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def names(directory: Path) -> set[str]:
    return {path.stem for path in directory.glob("*.index")}


# The text -------------------------------------------------------------------------------------------


def test_what_the_framework_wrote_comes_back(managed: Path) -> None:
    text = (managed / "checkpoint").read_text()
    state = read_state(managed)
    assert (state.latest, len(state.paths), len(state.timestamps)) == ("ckpt-10", 10, 10)
    assert state_text(state) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_name_can_be_written(name: str) -> None:
    assert unescape(escape(name)) == name
    assert parse_state(state_text(CheckpointState(name, (name,)))) == CheckpointState(name, (name,))


def test_escapes_and_spellings() -> None:
    state = parse_state(
        "# a comment\nmodel_checkpoint_path : 'a\\'\\x41\\101\\n' \"b\";\n"
        'all_model_checkpoint_paths: "\\303\\251" all_model_checkpoint_paths: "\\u00e9",'
    )
    assert state == CheckpointState("a'AA\nb", ("é", "é"))


def test_timestamps_that_are_not_parallel_are_dropped() -> None:
    text = 'model_checkpoint_path: "a"\nall_model_checkpoint_paths: "a"\nall_model_checkpoint_paths: "b"\n'
    state = parse_state(text + "all_model_checkpoint_timestamps: 1.5\n")
    assert state == CheckpointState("a", ("a", "b"))


@pytest.mark.parametrize(
    "text", ['model_checkpoint_path: "a', "model_checkpoint_path 3", ": :", 'a: "\\q"', "a: b: c", "{"]
)
def test_what_is_no_state(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_state(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_state(text)
    except ValueError:
        return


def test_shards_of_the_first_version() -> None:
    assert expand_shards("a/b-?????-of-00002") == ("a/b-00000-of-00002", "a/b-00001-of-00002")
    assert expand_shards("a/b-12") == ("a/b-12",)


def test_the_shards_of_the_first_version_are_one_in_the_list(tmp_path: Path) -> None:
    for step in (1, 2):
        for shard in range(2):
            (tmp_path / f"m-{step}-{shard:05d}-of-00002").write_bytes(b"")
    paths = ("m-1-?????-of-00002", "m-2-?????-of-00002")
    write_state(tmp_path, CheckpointState(paths[1], paths))
    shards = {f"m-1-{shard:05d}-of-00002" for shard in range(2)}
    left = TensorFlowState().without((tmp_path / "checkpoint").read_text(), str(tmp_path), shards)
    assert parse_state(left) == CheckpointState(paths[1], paths[1:])


# Merged with what came since -------------------------------------------------------------------------


def state_file(latest: str, *paths: str, timed: bool = True) -> str:
    lines = [f'model_checkpoint_path: "{latest}"\n']
    lines += [f'all_model_checkpoint_paths: "{path}"\n' for path in paths]
    lines += [f"all_model_checkpoint_timestamps: {path[-1]}.0\n" for path in paths if timed]
    return "".join(lines)


@pytest.mark.parametrize(
    ("now", "wrote", "was", "restored", "expected"),
    [
        (("c4", "c3", "c4"), ("c3", "c3"), ("c3", "c1", "c2", "c3"), "c1 c2", ("c4", "c1", "c2", "c3", "c4")),
        (("c4", "c3", "c4"), ("c3", "c3"), ("c3", "c1", "c2", "c3"), "c2", ("c4", "c2", "c3", "c4")),
        (("c4", "c4"), ("c3", "c3"), ("c3", "c1", "c3"), "c1", ("c4", "c1", "c4")),
        (("s4", "s3", "s4"), ("s3", "s2", "s3"), ("c3", "c2", "c3"), "c2 c3", ("s4", "c3", "s4")),
        (("s3", "s2", "s3"), ("s3", "s2", "s3"), ("c3", "c2", "c3"), "c2", ("s3", "c2", "s3")),
        (("s3", "s2", "s3"), ("s3", "s2", "s3"), ("c3", "c2", "c3"), "c3", ("c3", "s2", "c3")),
    ],
)
def test_merging(now, wrote, was, restored, expected) -> None:
    ours, back = (state_file(*wrote), state_file(*was)), set(restored.split())
    merged = TensorFlowState().merged
    assert merged(state_file(*now), *ours, back) == state_file(*expected)
    assert merged(state_file(*now, timed=False), *ours, back) == state_file(*expected, timed=False)


# Commands -------------------------------------------------------------------------------------------


def test_list(run, managed: Path) -> None:
    status, out, err = run("list", managed, "--json")
    listed = json.loads(out)["checkpoints"]
    assert (status, err) == (0, "")
    assert [one["path"] for one in listed] == [f"run/ckpt-{step}" for step in range(1, 11)]
    assert [one["step"] for one in listed] == list(range(1, 11))
    assert {one["format"] for one in listed} == {"tensorflow"}
    assert {one["group"] for one in listed} == {"run/ckpt-*"}
    assert [one["protected"] for one in listed] == [[]] * 9 + [["latest"]]
    assert listed[0]["bytes"] == sum(file.stat().st_size for file in managed.glob("ckpt-1.*"))


def test_latest_is_a_prefix(run, managed: Path) -> None:
    assert run("latest", managed) == (0, "run/ckpt-10\n", "")
    (managed / "ckpt-10.data-00000-of-00001").unlink()
    status, out, err = run("latest", managed)
    assert (status, out) == (0, "run/ckpt-9\n")
    assert "run/ckpt-10: skipped: incomplete" in err


def test_a_directory_with_one_checkpoint_is_still_a_directory(run, managed: Path) -> None:
    for path in managed.glob("ckpt-[2-9].*"):
        path.unlink()
    for path in managed.glob("ckpt-10.*"):
        path.unlink()
    assert run("latest", managed) == (0, "run/ckpt-1\n", "")
    assert run("inspect", managed, "--field", "training.step").out == "1\n"


def test_prune_rewrites_the_state_file(run, managed: Path) -> None:
    os.chmod(managed / "checkpoint", 0o640)
    before = read_state(managed)
    status, _, _ = run("prune", managed, "--keep", "3")
    assert status == 0
    assert names(managed) == {"ckpt-8", "ckpt-9", "ckpt-10"}
    assert sorted(os.listdir(managed))[0] == "checkpoint"
    after = read_state(managed)
    assert after == CheckpointState("ckpt-10", before.paths[-3:], before.timestamps[-3:], before.preserved)
    assert stat.S_IMODE((managed / "checkpoint").stat().st_mode) == 0o640


def test_the_latest_that_the_file_names_stays(run, managed: Path) -> None:
    state = read_state(managed)
    write_state(managed, CheckpointState("ckpt-2", state.paths, state.timestamps))
    assert run("prune", managed, "--keep", "2").status == 0
    assert names(managed) == {"ckpt-2", "ckpt-9", "ckpt-10"}
    assert read_state(managed).paths == ("ckpt-2", "ckpt-9", "ckpt-10")
    assert read_state(managed).latest == "ckpt-2"


def test_a_dry_run_changes_nothing(run, managed: Path) -> None:
    text = (managed / "checkpoint").read_text()
    assert run("prune", managed, "--keep", "3", "--dry-run").status == 0
    assert (managed / "checkpoint").read_text() == text
    assert len(names(managed)) == 10


def test_stale_absolute_paths_of_a_run_that_was_moved(run, managed: Path) -> None:
    state = read_state(managed)
    stale = tuple(f"/gone/run/{path}" for path in state.paths)
    write_state(managed, CheckpointState(stale[-1], stale, state.timestamps))
    assert run("prune", managed, "--keep", "3").status == 0
    assert read_state(managed) == CheckpointState(
        "ckpt-10", ("ckpt-8", "ckpt-9", "ckpt-10"), state.timestamps[-3:]
    )


def test_dangling_entries_are_dropped(run, managed: Path) -> None:
    state = read_state(managed)
    paths = ("ckpt-77", *state.paths, "/elsewhere/other-3", "../outside")
    write_state(managed, CheckpointState("ckpt-10", paths))
    assert run("prune", managed, "--keep", "9").status == 0
    assert read_state(managed) == CheckpointState("ckpt-10", state.paths[1:])


def test_checkpoints_elsewhere_stay_in_the_list(run, managed: Path, tmp_path: Path) -> None:
    """A copy of a run may still speak of the original, which is there."""
    shutil.copytree(managed, tmp_path / "original")
    state = read_state(managed)
    real = tuple(str(tmp_path / "original" / path) for path in state.paths)
    write_state(managed, CheckpointState(real[-1], (*real, *state.paths)))
    assert run("prune", managed, "--keep", "3").status == 0
    assert read_state(managed).paths == (*real, "ckpt-8", "ckpt-9", "ckpt-10")
    assert len(names(tmp_path / "original")) == 10


def test_a_latest_that_is_nowhere_leaves_the_series_alone(run, managed: Path) -> None:
    (managed / "checkpoint").write_text('model_checkpoint_path: "ckpt-99"\n')
    status, _, err = run("prune", managed, "--keep", "3")
    assert status == 1
    assert "ckpt-99" in err
    assert len(names(managed)) == 10


@pytest.mark.parametrize(
    "content", [b'model_checkpoint_path: "ckpt-10\n', b"", b"model_ch", b"\x00\xff\x17 garbage", b"\n"]
)
def test_a_state_file_that_cannot_be_read_leaves_the_series_alone(run, managed: Path, content: bytes) -> None:
    (managed / "checkpoint").write_bytes(content)
    status, _, err = run("prune", managed, "--keep", "3")
    assert (status, len(names(managed))) == (1, 10)
    assert err.endswith("checkpoint: latest can't be read\n")


def test_a_file_called_checkpoint_says_nothing_of_other_formats(run, series: Path) -> None:
    (series / "checkpoint").write_bytes(b"")
    assert run("prune", series, "--keep", "3").status == 0
    assert len(list(series.glob("*.pth"))) == 3


def test_a_file_of_that_name_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\x80\x02 model_checkpoint_path \0")
    found = pointers_in(str(tmp_path), names_in(str(tmp_path), Snapshot()), Snapshot(), raise_error)
    assert [(one.target, one.kind.formats) for one in found] == [(None, {"tensorflow"})]
    assert list_rewrites(str(tmp_path), {"ckpt-1"}) == ()


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_kill_between_the_steps_leaves_a_state_that_works(run, managed: Path, fault, step: int) -> None:
    """Whatever call is the last: the latest is there, and what is listed is there or goes next."""
    assert run("prune", managed, "--keep", "5").status == 0
    original = managed.rename("original")
    for number in range(1, 100, step):
        shutil.rmtree(managed, ignore_errors=True)
        shutil.copytree(original, managed, copy_function=os.link)
        fault.at(number, KeyboardInterrupt())
        status = run("prune", managed, "--keep", "3").status
        fault.none()
        assert "ckpt-10.index" in os.listdir(managed)
        assert read_state(managed).latest == "ckpt-10"
        assert run("prune", managed, "--keep", "3").status == 0
        assert names(managed) == {"ckpt-8", "ckpt-9", "ckpt-10"}
        assert set(read_state(managed).paths) == {"ckpt-8", "ckpt-9", "ckpt-10"}
        if status == 0:
            assert number > 15
            return
    pytest.fail("no end")


def test_namesake_in_another_directory_stays_listed(managed: Path) -> None:
    elsewhere = managed.parent / "elsewhere"
    shutil.copytree(managed, elsewhere)
    state = CheckpointState("../elsewhere/ckpt-10", ("../elsewhere/ckpt-9", "ckpt-9", "../elsewhere/ckpt-10"))
    write_state(managed, state)
    left = TensorFlowState().without((managed / "checkpoint").read_text(), str(managed), {"ckpt-9"})
    assert parse_state(left) == CheckpointState(
        "../elsewhere/ckpt-10", ("../elsewhere/ckpt-9", "../elsewhere/ckpt-10")
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system")
def test_a_kill_while_the_state_is_rewritten_leaves_no_temporary_file(managed: Path) -> None:
    request = PruneRequest(directory=str(managed), policy=Policy(keep_last=3))
    child = os.fork()
    if not child:
        try:
            replace = os.replace
            os.replace = lambda old, new, **at: _die() if new == "checkpoint" else replace(old, new, **at)
            prune(request)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert any(name.startswith(".ckpttool") for name in os.listdir(managed))
    assert not prune(request).problems
    assert [name for name in os.listdir(managed) if name.startswith(".ckpttool")] == []


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

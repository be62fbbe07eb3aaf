"""Prune, undo, pins and the trash in a store: as on the disk, and whatever a kill or the store does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from ckpttool import CheckpointError, UsageError, prune, undo
from ckpttool.storage import remote
from ckpttool.storage.stores import ObjectReplaced
from ckpttool.transaction.store_directory import journals_in
from ckpttool.transaction.store_operations import StoreOperations
from tests.support.commands import Run
from tests.support.limits import lower_limits
from tests.support.memory import Killed, MemoryBucket
from tests.support.runs import KINDS
from tests.support.thorough import sampled, spread

NUMBERS = range(1, 7)
KEEP = ("--keep", "2", "--series", "*")
OWN = ".ckpttool-"


def make(kind: str, place: Path, numbers: Sequence[int] = NUMBERS) -> Path:
    """Make a run of a kind; a store has no symlinks."""
    run = place / "team" / "runs"
    run.mkdir(parents=True)
    KINDS[kind][0](run, numbers)
    for link in [path for path in run.rglob("*") if path.is_symlink()]:
        link.unlink()
    return run


def objects(bucket: MemoryBucket, *, own: bool = False) -> dict[str, bytes]:
    """Return what lies in a bucket; what is ours only with ``own``."""
    return {key: bucket.get(key) for key in bucket.keys("") if own or OWN not in key}


def files(place: Path) -> dict[str, bytes]:
    """Return what lies in a directory, by the names that it has in a bucket, without what is ours."""
    found = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if OWN not in name}


@pytest.fixture
def in_store(bucket: MemoryBucket, series: Path) -> MemoryBucket:
    """Return a bucket with ten epochs in ``runs``."""
    bucket.upload(series, "runs")
    return bucket


# As on the disk -------------------------------------------------------------------------------------


def documents(run: Run, bucket: MemoryBucket, tmp_path: Path, *options: str) -> tuple[object, object]:
    """Prune a run in a store and on the disk; return what is said of both, as if of the store."""
    here = run("prune", tmp_path / "team" / "runs", *KEEP, *options, "--json")
    there = run("prune", bucket.url("team/runs"), *KEEP, *options, "--json")
    assert there.out, there.err
    assert there.status == here.status
    return json.loads(there.out), json.loads(here.out.replace(str(tmp_path), bucket.url()))


PLAYED = ("PyTorch", "safetensors, sharded", "TensorFlow 1", "DCP", "Trainer")
"""A file, files behind an index, a state file, a directory, and a directory that names another."""


@pytest.mark.parametrize(
    "kind",
    [*PLAYED, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS if kind not in PLAYED)],
)
def test_it_does_in_a_store_what_it_does_on_the_disk(
    bucket: MemoryBucket, run: Run, tmp_path: Path, kind: str
) -> None:
    make(kind, tmp_path)
    bucket.upload(tmp_path, "")
    there, here = documents(run, bucket, tmp_path, "--yes")
    assert there == here
    assert objects(bucket) == files(tmp_path)
    assert journals_in(bucket.url("team/runs")) == []


@pytest.mark.parametrize("kind", sampled(KINDS, 2))
def test_it_plans_in_a_store_what_it_plans_on_the_disk(
    bucket: MemoryBucket, run: Run, tmp_path: Path, kind: str
) -> None:
    make(kind, tmp_path)
    bucket.upload(tmp_path, "")
    before = objects(bucket, own=True)
    there, here = documents(run, bucket, tmp_path, "--dry-run", "--trash")
    assert there == here
    assert objects(bucket, own=True) == before


@pytest.mark.parametrize(
    ("kind", "way"),
    sampled(
        product(
            ("PyTorch", "TensorFlow", "safetensors, sharded", "DCP", "Trainer"), ("trash", "versions", "both")
        ),
        5,
    ),
)
def test_undo_restores_all(bucket: MemoryBucket, run: Run, tmp_path: Path, kind: str, way: str) -> None:
    make(kind, tmp_path)
    if way != "trash":
        bucket.keep_versions()
    bucket.upload(tmp_path, "")
    before = objects(bucket, own=True)
    options = ["--trash"] if way != "versions" else []
    assert run("prune", bucket.url("team"), *KEEP, *options).status == 0
    assert objects(bucket) != before
    preview = run("undo", bucket.url("team"), "--dry-run", "--json")
    done = run("undo", bucket.url("team"), "--json")
    restored = json.loads(done.out)["restored"]
    assert restored == json.loads(preview.out)["restored"]
    assert len(restored) >= 3
    assert objects(bucket, own=True) == before
    assert run("undo", bucket.url("team")).err == f"{bucket.url('team')}: nothing to undo\n"


def test_undo_leaves_what_has_another_object_in_its_place(
    in_store: MemoryBucket, run: Run, series: Path
) -> None:
    url = in_store.url("runs")
    run("prune", url, "--keep", "8", "--trash", "--quiet")
    mine = b"m" * len((series / "model_epoch_1.pth").read_bytes())
    in_store.put("runs/model_epoch_1.pth", mine)
    done = run("undo", url)
    assert done.status == 1
    assert done.err == (
        f"ckpttool: error: {url}/model_epoch_1.pth: not restored: another object has its name now\n"
    )
    assert in_store.get("runs/model_epoch_1.pth") == mine
    in_store.remove("runs/model_epoch_1.pth")
    assert run("undo", url).status == 0
    assert not [key for key in in_store.keys("") if OWN in key]


def test_the_trash_is_emptied(in_store: MemoryBucket, run: Run) -> None:
    url = in_store.url("runs")
    run("prune", url, "--keep", "3", "--trash", "--quiet")
    assert len([key for key in in_store.keys("") if "/.ckpttool-trash/" in key]) == 8
    in_store.put("runs/.ckpttool-trash/note", "mine")
    assert (
        run("prune", url, "--empty-trash", "--older-than", "1h").out == "nothing to remove from the trash\n"
    )
    assert run("prune", url, "--empty-trash").out == "removed 7 checkpoints from the trash, 28 kB freed\n"
    assert [key for key in in_store.keys("") if OWN in key] == ["runs/.ckpttool-trash/note"]


def test_nothing_but_undo_looks_into_the_trash(in_store: MemoryBucket, run: Run) -> None:
    url = in_store.url("runs")
    run("prune", url, "--keep", "3", "--trash", "--quiet")
    listed = json.loads(run("list", url, "--json").out)["checkpoints"]
    assert [Path(one["path"]).name for one in listed] == [f"model_epoch_{n}.pth" for n in (8, 9, 10)]
    assert len(json.loads(run("verify", url, "--json").out)["checkpoints"]) == 3
    assert run("latest", url).out == f"{url}/model_epoch_10.pth\n"


def test_it_says_where_there_is_no_way_back(in_store: MemoryBucket, run: Run) -> None:
    url = in_store.url("runs")
    text = "ckpttool: warning: removals from this store can't be undone (--trash keeps copies)\n"
    assert run("prune", url, "--keep", "3", "--dry-run").err == text
    assert run("prune", url, "--keep", "3", "--dry-run", "--trash").err == ""
    in_store.keep_versions()
    for key in in_store.keys(""):
        in_store.put(key, in_store.get(key))
    assert run("prune", url, "--keep", "3", "--dry-run").err == ""


def test_rename_refuses(in_store: MemoryBucket, run: Run) -> None:
    url = in_store.url("runs")
    done = run("rename", url, "--template", "e{epoch}")
    problem = "can't rename in a store (rename checkpoints before you copy them there)"
    assert (done.status, done.out, done.err) == (2, "", f"ckpttool: error: {url}: {problem}\n")


def test_a_web_server_is_not_changed(run: Run, tmp_path: Path) -> None:
    from ckpttool.core.errors import AccessDenied
    from ckpttool.transaction.lock import lock_directory

    with (
        pytest.raises(AccessDenied, match="can't change files in this kind of store"),
        lock_directory("https://a/b"),
    ):
        pass


# Pins and pointers ----------------------------------------------------------------------------------


def test_pins_are_an_object_beside(in_store: MemoryBucket, run: Run) -> None:
    path = in_store.url("runs/model_epoch_1.pth")
    assert run("pin", path).out == f"pinned {path}\n"
    assert b'"model_epoch_1.pth"' in in_store.get("runs/.ckpttool-pins.toml")
    assert run("pin", path).out == f"{path} is already pinned\n"
    assert run("pin", "--list", in_store.url()).out == f"{path}\n"
    run("prune", in_store.url("runs"), "--keep", "2", "--quiet")
    assert in_store.keys("runs/model_epoch_1.pth") == ["runs/model_epoch_1.pth"]
    assert run("unpin", path).out == f"unpinned {path}\n"
    assert not [key for key in in_store.keys("") if OWN in key]


def test_a_pin_replaces_no_list_that_somebody_else_writes(in_store: MemoryBucket, run: Run) -> None:
    file, path = "runs/.ckpttool-pins.toml", in_store.url("runs/model_epoch_1.pth")
    theirs = 'pinned = ["model_epoch_2.pth"]\n'
    in_store.before = lambda call: call == f"write {file}" and in_store.put(file, theirs)
    done = run("pin", path)
    assert done.status == 2
    assert done.err == (
        f"ckpttool: error: {in_store.url(file)}: it was changed by another process; no pin was changed\n"
    )
    assert in_store.get(file) == theirs.encode()


def test_pointers_to_elsewhere_ask_nobody(in_store: MemoryBucket, run: Run, series: Path) -> None:
    """Neither files of this machine nor another store say what a pointer in a store means."""
    in_store.put("runs/best.txt", str(series / "model_epoch_1.pth"))
    in_store.put("runs/latest", "s3://elsewhere/runs/model_epoch_2.pth")
    done = run("prune", in_store.url("runs"), "--keep", "2", "--yes")
    kept = [int(key.split("_")[-1][:-4]) for key in in_store.keys("runs/model")]
    assert (done.status, sorted(kept)) == (0, [1, 2, 9, 10])


def test_min_age_goes_by_the_clock_of_the_store(
    in_store: MemoryBucket, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = in_store.url("runs")
    day = timedelta(days=1).total_seconds()
    later = time.time() + day
    in_store.clock = lambda: later - day
    monkeypatch.setattr(time, "time", lambda: later)
    done = run("prune", url, "--keep", "2", "--min-age", "1h", "--dry-run")
    assert "nothing to remove (10 checkpoints, all kept)" in done.out


# What changes meanwhile -----------------------------------------------------------------------------


def test_what_has_changed_since_the_plan_stays(in_store: MemoryBucket) -> None:
    url = in_store.url("runs")

    def confirm(planned: object) -> bool:
        in_store.put("runs/model_epoch_1.pth", "new")
        return True

    done = prune(url, keep_last=3, confirm=confirm)
    assert dict(done.failed) == {f"{url}/model_epoch_1.pth": "it has changed since the plan was made"}
    assert in_store.get("runs/model_epoch_1.pth") == b"new"
    assert len(in_store.keys("runs/model")) == 4


def test_what_changes_after_the_commit_stays_in_the_state_file(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("TensorFlow", tmp_path)
    bucket.upload(tmp_path, "")
    real = StoreOperations.finish
    (first, *_) = sorted(key for key in bucket.keys("team") if key.endswith(".index"))

    def finish(operations: StoreOperations, numbers: Sequence[int]) -> object:
        bucket.put(first, "saved again")
        return real(operations, numbers)

    monkeypatch.setattr(StoreOperations, "finish", finish)
    done = prune(bucket.url("team/runs"), keep_last=2, series=("*",), depth="quick")
    name = first.removesuffix(".index").rpartition("/")[2]
    assert [path.rpartition("/")[2] for path in done.failed] == [name]
    assert f'"{name}"' in bucket.get("team/runs/checkpoint").decode()
    assert journals_in(bucket.url("team/runs")) == []


def test_nothing_goes_if_a_survivor_has_changed(in_store: MemoryBucket) -> None:
    url = in_store.url("runs")

    def confirm(planned: object) -> bool:
        in_store.put("runs/model_epoch_10.pth", "new")
        return True

    done = prune(url, keep_last=3, confirm=confirm)
    assert len(done.failed) == 7
    assert len(in_store.keys("runs/model")) == 10


FIRST = {
    "safetensors, sharded": ".index.json",
    "TensorFlow": ".index",
    "DCP": "/.metadata",
    "SavedModel": "/saved_model.pb",
    "Trainer": "/model.safetensors",
}


@pytest.mark.usefixtures("one_request_at_once")
def test_what_makes_a_checkpoint_whole_goes_first(bucket: MemoryBucket, tmp_path: Path) -> None:
    """Whoever else reads it meanwhile is not to take a half for the whole."""
    for number, (kind, first) in enumerate(FIRST.items()):
        make(kind, tmp_path / str(number), (1, 2, 3, 4))
        bucket.upload(tmp_path / str(number), str(number))
        bucket.calls.clear()
        prune(bucket.url(f"{number}/team/runs"), keep_last=1, series=("*",))
        removed = [call for call in bucket.calls if call.startswith("remove") and OWN not in call]
        assert removed[0].endswith(first), (kind, removed)
        assert len(removed) > 2, kind


# Kills ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the order of requests be the same each time."""
    lower_limits(monkeypatch, requests_at_once=1)


def listed(run: Run, url: str) -> set[tuple[str, int]]:
    """Return what is listed as sound, with how many files it has."""
    document = json.loads(run("list", url, "--json", "--series", "*").out)
    return {(one["path"], one["files"]) for one in document["checkpoints"] if one["fault"] is None}


COMMANDS: dict[str, Callable[[str], object]] = {
    "prune": lambda url: prune(url, keep_last=2, series=("*",)),
    "prune --trash": lambda url: prune(url, keep_last=2, series=("*",), trash=True),
    "undo": undo,
}


@pytest.mark.usefixtures("one_request_at_once")
@pytest.mark.parametrize(
    ("kind", "command", "new_tags"),
    [
        *product(("PyTorch, sharded", "TensorFlow"), COMMANDS, (False,)),
        *sampled(product(("TensorFlow", *KINDS), COMMANDS, (True, False)), 1),
    ],
)
def test_a_kill_at_any_call_loses_nothing(
    bucket: MemoryBucket, run: Run, tmp_path: Path, kind: str, command: str, new_tags: bool
) -> None:
    bucket.new_tags = new_tags
    make(kind, tmp_path, (1, 2, 3, 4))
    bucket.upload(tmp_path, "")
    url, act = bucket.url("team/runs"), COMMANDS[command]
    whole = listed(run, url)
    if command == "undo":
        COMMANDS["prune --trash"](url)
    begin = bucket.snapshot()
    changes = bucket.kill_at(0)
    act(url)
    bucket.obey()
    expected, count = objects(bucket), changes()
    assert count > 5
    kept = {key: data for key, data in expected.items() if not key.endswith("/checkpoint")}
    for number in spread(range(1, count + 1), 10):
        bucket.restore(begin)
        bucket.kill_at(number)
        with pytest.raises(Killed):
            act(url)
        bucket.obey()
        remote.forget()
        assert listed(run, url) <= whole, number
        if command != "undo":
            assert kept.items() <= objects(bucket).items()
        bucket.kill_at(1 + number % 5)  # the recovery, too
        with suppress(Killed):
            act(url)
        bucket.obey()
        remote.forget()
        act(url)
        assert objects(bucket) == expected, (number, count)
        assert journals_in(url) == []


def test_a_prune_that_was_taken_for_killed_removes_nothing(in_store: MemoryBucket) -> None:
    """Another command settles what seems to be left: copies go, and with them the right to remove."""
    url = in_store.url("runs")

    def another(call: str) -> None:
        if call.startswith("copy"):
            in_store.obey()
            prune(url, keep_last=100)

    in_store.after = another
    with pytest.raises(
        CheckpointError, match="took this prune for interrupted, and reverted it; nothing was removed"
    ):
        prune(url, keep_last=3, trash=True)
    assert sorted(in_store.keys("runs/")) == [f"runs/model_epoch_{n}.pth" for n in (1, 10, *range(2, 10))]


def test_what_is_left_of_a_directory_is_no_checkpoint(bucket: MemoryBucket, run: Run, tmp_path: Path) -> None:
    """Each of its files could be taken for one, once those are gone that make it a directory of a kind."""
    make("Accelerate", tmp_path, (1, 2, 3))
    bucket.upload(tmp_path, "")
    url = bucket.url("team/runs")
    bucket.refuse("remove .*/random_states", 503)
    assert run("prune", url, *KEEP, "--yes").status == 1
    bucket.obey()
    assert bucket.keys("team/runs/checkpoint_1/") == ["team/runs/checkpoint_1/random_states_0.pkl"]
    assert listed(run, url) == {(f"{url}/checkpoint_{number}", 3) for number in (2, 3)}


# Journals ------------------------------------------------------------------------------------------

IDENTITY = "20260101T000000.000000Z-0123abcd"
JOURNAL = f"runs/.ckpttool-prune-{IDENTITY}.json"
COPIES = f"runs/.ckpttool-trash/{IDENTITY}"


def old_text(bucket: MemoryBucket, names: Sequence[str], way: str, *, copying: bool = False) -> bytes:
    """Return the journal, or the record, with which version 0.1 removed files from ``runs``."""
    objects = {name: bucket.found(f"runs/{name}")[1] for name in names}
    document = {
        "schema": "ckpttool.store-removal/1",
        "identity": IDENTITY,
        "way": way,
        "copying": copying,
        "checkpoints": [{"name": name, "objects": [[name, *status]]} for name, status in objects.items()],
        "state": None,
    }
    return json.dumps(document).encode()


@pytest.mark.parametrize(("copying", "left"), [(True, range(1, 11)), (False, range(2, 11))])
def test_a_journal_of_an_earlier_version(
    in_store: MemoryBucket, run: Run, copying: bool, left: Sequence[int]
) -> None:
    """It copied first, and then each checkpoint went of which the first object had gone."""
    names = ["model_epoch_1.pth", "model_epoch_2.pth"]
    text = old_text(in_store, names, "copies", copying=copying)
    for name in names:
        in_store.put(f"{COPIES}/0/{name}", in_store.get(f"runs/{name}"))
    if not copying:
        in_store.remove("runs/model_epoch_1.pth")
    before = objects(in_store)
    in_store.put(JOURNAL, text)
    url = in_store.url("runs")
    assert run("prune", url, "--keep", "100", "--yes").status == 0
    assert {f"runs/model_epoch_{number}.pth" for number in left} <= before.keys() == objects(in_store).keys()
    assert journals_in(url) == []
    assert bool(in_store.keys(COPIES)) is not copying
    assert run("undo", url).status == 0
    assert len(in_store.keys("runs/model")) == 10
    assert not [key for key in in_store.keys("") if OWN in key]


@pytest.mark.parametrize("way", ["copies", "versions"])
def test_a_record_of_an_earlier_version(in_store: MemoryBucket, run: Run, way: str) -> None:
    if way == "versions":
        in_store.keep_versions()
    before = objects(in_store)
    names = ["model_epoch_1.pth", "model_epoch_2.pth"]
    in_store.put(f"{COPIES}/record.json", old_text(in_store, names, way))
    for name in names:
        if way == "copies":
            in_store.put(f"{COPIES}/0/{name}", in_store.get(f"runs/{name}"))
        in_store.remove(f"runs/{name}")
    assert run("undo", in_store.url("runs")).status == 0
    assert objects(in_store, own=True) == before


@pytest.mark.parametrize(
    ("member", "operations"),
    [
        ("x", [["move", 0, "directory/../x", "stage/0/x"]]),
        ("x", [["move", 0, "directory/x", "trash/../x"]]),
        ("x", [["move", 0, "directory/x", "stage/0/x"], ["write", "train.py", "old", "new", None]]),
        ("x", [["put", 0, "x", None, ["directory/y", 1, 1, 1, 1]]]),
        ("y", [["move", 0, "directory/x", "stage/0/x"]]),
        ("x", [["move", 0, "directory/x", "directory/y"]]),
    ],
)
def test_a_journal_leads_nowhere_else(
    in_store: MemoryBucket, run: Run, member: str, operations: object
) -> None:
    group = {"path": "x", "directories": [], "files": [[member, 1, 1, 1, 1]], "survivors": []}
    document = {"schema": "ckpttool.operations/1", "kind": "remove", "identity": None, "leader": None}
    document |= {"groups": [{**group, "new_name": None}], "operations": operations, "done": [0], "id": "1"}
    in_store.put(JOURNAL, json.dumps(document))
    before = objects(in_store, own=True)
    done = run("prune", in_store.url("runs"), "--keep", "1", "--yes")
    assert done.status == 2
    assert "not a journal of ckpttool" in done.err
    assert objects(in_store, own=True) == before


@pytest.mark.usefixtures("one_request_at_once")
@pytest.mark.parametrize("versions", [False, True])
def test_two_undos_at_once_lose_nothing(in_store: MemoryBucket, versions: bool) -> None:
    if versions:
        in_store.keep_versions()
    before, url = objects(in_store, own=True), in_store.url("runs")
    prune(url, keep_last=8, trash=not versions)
    begin = in_store.snapshot()
    in_store.calls.clear()
    undo(url)
    for number in spread(range(1, len(in_store.calls) + 1), 12):
        in_store.restore(begin)
        in_store.calls.clear()

        def another(call: str, number: int = number) -> None:
            if len(in_store.calls) == number:
                in_store.obey()
                undo(url)

        in_store.before = another
        with suppress(CheckpointError):
            undo(url)
        in_store.obey()
        undo(url)
        assert objects(in_store, own=True) == before, number


def test_an_answer_that_is_lost_is_no_other_command(in_store: MemoryBucket) -> None:
    """The request to commit took effect, and was repeated."""
    before, url = objects(in_store), in_store.url("runs")

    def lose(call: str) -> None:
        if call.startswith("write runs/.ckpttool-prune-") and in_store.keys("runs/.ckpttool-trash/"):
            in_store.obey()
            raise ObjectReplaced(call)

    in_store.after = lose
    assert len(prune(url, keep_last=8, trash=True).plan.removals) == 2
    assert objects(in_store).keys() < before.keys()
    undo(url)
    assert objects(in_store) == before


def test_a_copy_that_can_not_be_dropped_is_told(bucket: MemoryBucket, run: Run, tmp_path: Path) -> None:
    make("safetensors, sharded", tmp_path, (1, 2, 3))
    bucket.upload(tmp_path, "")
    before, url = objects(bucket, own=True), bucket.url("team/runs")
    assert run("prune", url, *KEEP, "--trash").status == 0
    bucket.refuse("remove .*/0/set-1-00002", 403)
    done = run("undo", url)
    assert done.status == 2
    assert done.err.endswith(
        "the store answered 403 Forbidden (AccessDenied); the next command recovers it\n"
    )
    bucket.obey()
    run("undo", url)
    assert objects(bucket, own=True) == before


def test_undo_reads_no_checkpoint(in_store: MemoryBucket) -> None:
    """A copy has another ETag in some stores; its size was seen when it was made."""
    in_store.new_tags = True
    url = in_store.url("runs")
    prune(url, keep_last=8, trash=True)
    in_store.calls.clear()
    undo(url)
    assert not [call for call in in_store.calls if call.startswith("read") and ".pth" in call]
    assert len([call for call in in_store.calls if call == "status runs/model_epoch_1.pth"]) <= 4


def test_what_can_not_be_removed_from_the_trash_stays_restorable(in_store: MemoryBucket, run: Run) -> None:
    url = in_store.url("runs")
    prune(url, keep_last=8, trash=True)
    in_store.refuse("remove .*/0/model_epoch_1", 403)
    done = run("prune", url, "--empty-trash", "--yes")
    assert done.status == 1
    assert f"{url}/model_epoch_1.pth: left in " in done.err
    in_store.obey()
    assert [one.path for one in undo(url).restored] == [f"{url}/model_epoch_1.pth"]
    assert len(in_store.keys("runs/model")) == 9


def test_what_a_second_delete_marker_hides_is_restored(in_store: MemoryBucket) -> None:
    in_store.keep_versions()
    before, url = objects(in_store), in_store.url("runs")
    prune(url, keep_last=8)
    in_store.remove("runs/model_epoch_1.pth")  # as S3 does with what is gone already
    assert len(undo(url).restored) == 2
    assert objects(in_store) == before


def test_prunes_of_one_identity_are_undone_together(in_store: MemoryBucket) -> None:
    before, url = objects(in_store), in_store.url("runs")
    for keep in (8, 5):
        prune(url, keep_last=keep, trash=IDENTITY)
    assert len(undo(url).restored) == 5
    assert objects(in_store) == before


def test_the_age_of_what_is_in_the_trash_goes_by_the_clock_of_the_store(
    in_store: MemoryBucket, run: Run
) -> None:
    url = in_store.url("runs")
    prune(url, keep_last=8, trash=IDENTITY)  # of a machine whose clock is wrong
    done = run("prune", url, "--empty-trash", "--older-than", "1h")
    assert done.out == "nothing to remove from the trash\n"


# What the store refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "call", "expected", "why"),
    [
        (403, "read runs/latest", 1, "the store answered"),
        (503, "read runs/latest", 1, "the store answered"),
        (403, r"read runs/best\.json", 1, "the store answered"),
        (403, "listing runs$", 2, "the store answered"),
        (503, "listing runs$", 2, "the store answered"),
        (503, "listing runs/sub", 1, "the store answered"),
        (403, r"read runs/\.ckpttool-pins", 1, "pinned can't be read"),
        (503, "read runs/model_epoch_10", 1, "the store answered"),
    ],
)
def test_nothing_goes_where_a_store_does_not_answer(
    in_store: MemoryBucket, run: Run, status: int, call: str, expected: int, why: str
) -> None:
    """Whether something points there, is pinned, or what the newest says of the best is not known then."""
    in_store.put("runs/latest", "model_epoch_1.pth")
    in_store.put("runs/best.json", '{"best": "model_epoch_2.pth"}')
    in_store.put("runs/sub/best.txt", "../model_epoch_3.pth")
    in_store.put("runs/.ckpttool-pins.toml", 'pinned = ["model_epoch_1.pth"]')
    in_store.refuse(call, status)
    done = run("prune", in_store.url("runs"), "--keep", "3", "--yes")
    assert (done.status, why in done.err) == (expected, True), done
    assert len(in_store.keys("runs/model")) == 10


@pytest.mark.parametrize("status", [403, 503])
def test_what_may_not_be_removed_is_named(in_store: MemoryBucket, run: Run, status: int) -> None:
    in_store.refuse(r"remove .*/model_epoch_[12]\.pth", status)
    url = in_store.url("runs")
    done = run("prune", url, "--keep", "3", "--yes")
    assert done.status == 1
    assert f"{url}/model_epoch_1.pth: not removed: " in done.err
    assert f"answered {status}" in done.err
    assert len(in_store.keys("runs/model")) == 5
    in_store.obey()
    assert run("prune", url, "--keep", "3", "--yes").status == 0
    assert len(in_store.keys("runs/model")) == 3
    assert journals_in(url) == []


def test_a_part_that_could_not_be_removed_goes_with_the_next_prune(
    bucket: MemoryBucket, run: Run, tmp_path: Path
) -> None:
    make("safetensors, sharded", tmp_path)
    bucket.upload(tmp_path, "")
    bucket.refuse("remove .*/set-1-00001", 503)
    url = bucket.url("team/runs")
    done = run("prune", url, *KEEP, "--yes")
    assert done.status == 1
    assert "only partly removed: the store answered 503" in done.err
    assert not any("set-1" in path for path, _ in listed(run, url))
    bucket.obey()
    assert run("prune", url, *KEEP, "--yes").status == 0
    assert not [key for key in bucket.keys("") if "set-1" in key or OWN in key.replace("pins", "")]


def test_who_may_write_no_journal_removes_nothing(in_store: MemoryBucket, run: Run) -> None:
    in_store.refuse("write|copy", 403)
    url = in_store.url("runs")
    done = run("prune", url, "--keep", "3", "--yes")
    assert done.status == 2
    assert done.err.startswith(f"ckpttool: error: {url}: the store answered 403")
    assert done.err.endswith("; nothing was removed\n")
    assert len(in_store.keys("runs/model")) == 10


def test_prune_of_a_checkpoint_is_a_usage_error(in_store: MemoryBucket) -> None:
    with pytest.raises(UsageError, match="is a file"):
        prune(in_store.url("runs/model_epoch_1.pth"), keep_last=1)


# Keys that no URL can have --------------------------------------------------------------------------


def test_odd_keys_fail_nothing_beside_them(in_store: MemoryBucket, run: Run) -> None:
    odd = ("logs?/x.log", "train#1.log", "a//b.log", "tab\tname.log", "#", "x?y=z/m#.txt", "c\x7f/d.log")
    for key in odd:
        in_store.put(f"runs/{key}", "step 1")
    url = in_store.url("runs")
    assert run("latest", url)[:2] == (0, f"{url}/model_epoch_10.pth\n")
    listed = run("list", url)
    assert (listed.status, listed.out.count("readable")) == (0, 10)
    assert run("prune", url, "--keep", "2", "--dry-run").status == 0
    assert run("prune", url, "--keep", "2", "--yes").status == 0
    left = ["runs/model_epoch_10.pth", "runs/model_epoch_9.pth", *(f"runs/{key}" for key in odd)]
    assert in_store.keys("runs/") == sorted(left)


def test_a_checkpoint_of_an_odd_key_is_one_like_others(
    in_store: MemoryBucket, run: Run, tmp_path: Path
) -> None:
    content = in_store.get("runs/model_epoch_10.pth")
    in_store.put("runs/try#2/why?/model_epoch_10.pth", content)
    url = f"{in_store.url('runs')}/?try%232/?why%3F/model_epoch_10.pth"
    assert f"{url}\t" in run("list", in_store.url("runs")).out
    assert run("verify", url).status == 0
    assert run("copy", url, tmp_path / "copy").status == 0
    assert (tmp_path / "copy" / "model_epoch_10.pth").read_bytes() == content


def test_what_was_listed_long_ago_is_listed_again_and_not_asked_for_one_by_one(
    in_store: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = in_store.url("runs")
    names = [entry.name for entry in remote.entries(url)]
    for later in (100.0, 200.0):
        monkeypatch.setattr(time, "monotonic", lambda later=later: later + 1e9)
        in_store.calls.clear()
        for name in names:
            assert remote.cached_status(f"{url}/{name}").object is not None
        with pytest.raises(FileNotFoundError):
            remote.cached_status(f"{url}/none")
        assert in_store.calls == ["listing runs"]

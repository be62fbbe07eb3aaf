"""Prune, undo, pins and the trash in a store: as on the disk, and whatever a kill or the store does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpttool import UsageError, prune, undo
from ckpttool.io import answers, remote, stores
from ckpttool.io.s3_store import S3Store
from ckpttool.transaction.store_removal import journals_in
from tests.support.commands import Run
from tests.support.refusals import Refusals, refusing
from tests.support.runs import KINDS
from tests.support.stores import Bucket

NUMBERS = range(1, 9)
KEEP = ("--keep", "3", "--series", "*")
OWN = ".ckpttool-"


def make(kind: str, place: Path, numbers: Sequence[int] = NUMBERS) -> Path:
    """Make a run of a kind; a store has no symlinks."""
    run = place / "team" / "runs"
    run.mkdir(parents=True)
    KINDS[kind][0](run, numbers)
    for link in [path for path in run.rglob("*") if path.is_symlink()]:
        link.unlink()
    return run


def objects(bucket: Bucket, *, own: bool = False) -> dict[str, bytes]:
    """Return what lies in a bucket; what is ours only with ``own``."""
    return {key: bucket.get(key) for key in bucket.keys("") if own or OWN not in key}


def files(place: Path) -> dict[str, bytes]:
    """Return what lies in a directory, by the names that it has in a bucket, without what is ours."""
    found = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if OWN not in name}


@pytest.fixture
def series_in_store(s3: Bucket, series: Path) -> Bucket:
    """Return a bucket with ten epochs in ``runs``."""
    s3.upload(series, "runs")
    return s3


# As on the disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_in_a_store_what_it_does_on_the_disk(s3: Bucket, run: Run, tmp_path: Path, kind: str) -> None:
    local = make(kind, tmp_path)
    s3.upload(tmp_path, "")
    for options in (["--dry-run", "--trash"], ["--yes"]):
        here = run("prune", local, *KEEP, *options, "--json")
        there = run("prune", s3.url("team/runs"), *KEEP, *options, "--json")
        assert there.out, there.err
        assert json.loads(there.out) == json.loads(here.out.replace(str(tmp_path), s3.url()))
        assert there.status == here.status
    assert objects(s3) == files(tmp_path)
    assert journals_in(s3.url("team/runs")) == []


@pytest.mark.parametrize("way", ["trash", "versions"])
@pytest.mark.parametrize("kind", ["PyTorch", "TensorFlow", "safetensors, sharded", "DCP", "Trainer"])
def test_undo_restores_all(s3: Bucket, run: Run, tmp_path: Path, kind: str, way: str) -> None:
    make(kind, tmp_path)
    if way == "versions":
        s3.keep_versions()
    s3.upload(tmp_path, "")
    before = objects(s3, own=True)
    options = ["--trash"] if way == "trash" else []
    assert run("prune", s3.url("team"), *KEEP, *options).status == 0
    assert objects(s3) != before
    preview = run("undo", s3.url("team"), "--dry-run", "--json")
    done = run("undo", s3.url("team"), "--json")
    restored = json.loads(done.out)["restored"]
    assert restored == json.loads(preview.out)["restored"]
    assert len(restored) >= 4
    assert objects(s3, own=True) == before
    assert run("undo", s3.url("team")).err == f"{s3.url('team')}: nothing to undo\n"


def test_undo_leaves_what_has_another_object_in_its_place(series_in_store: Bucket, run: Run) -> None:
    url = series_in_store.url("runs")
    run("prune", url, "--keep", "8", "--trash", "--quiet")
    series_in_store.put("runs/model_epoch_1.pth", "mine")
    done = run("undo", url)
    assert done.status == 1
    assert done.err == (
        f"ckpttool: error: {url}/model_epoch_1.pth: not restored: another object has its name now\n"
    )
    assert series_in_store.get("runs/model_epoch_1.pth") == b"mine"
    series_in_store.client.delete_object(Bucket=series_in_store.name, Key="runs/model_epoch_1.pth")
    assert run("undo", url).status == 0
    assert not [key for key in series_in_store.keys("") if OWN in key]


def test_undo_from_versions_says_what_to_install(
    series_in_store: Bucket, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    series_in_store.keep_versions()
    series_in_store.upload(Path(__file__), "runs/notes.py")
    for key in series_in_store.keys("runs/model"):
        series_in_store.put(key, series_in_store.get(key))
    run("prune", series_in_store.url("runs"), "--keep", "3", "--quiet")
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    done = run("undo", series_in_store.url("runs"))
    assert (done.status, done.out) == (2, "")
    assert "older versions of objects are listed with boto3 (pip install boto3)" in done.err


def test_the_trash_is_emptied(series_in_store: Bucket, run: Run) -> None:
    url = series_in_store.url("runs")
    run("prune", url, "--keep", "3", "--trash", "--quiet")
    assert len([key for key in series_in_store.keys("") if "/.ckpttool-trash/" in key]) == 8
    series_in_store.put("runs/.ckpttool-trash/note", "mine")
    assert (
        run("prune", url, "--empty-trash", "--older-than", "1h").out == "nothing to remove from the trash\n"
    )
    assert run("prune", url, "--empty-trash").out == "removed 7 checkpoints from the trash, 28 kB freed\n"
    assert [key for key in series_in_store.keys("") if OWN in key] == ["runs/.ckpttool-trash/note"]


def test_nothing_but_undo_looks_into_the_trash(series_in_store: Bucket, run: Run) -> None:
    url = series_in_store.url("runs")
    run("prune", url, "--keep", "3", "--trash", "--quiet")
    listed = json.loads(run("list", url, "--json").out)["checkpoints"]
    assert [Path(one["path"]).name for one in listed] == [f"model_epoch_{n}.pth" for n in (8, 9, 10)]
    assert len(json.loads(run("verify", url, "--json").out)["checkpoints"]) == 3
    assert run("latest", url).out == f"{url}/model_epoch_10.pth\n"


def test_it_says_where_there_is_no_way_back(series_in_store: Bucket, run: Run) -> None:
    url = series_in_store.url("runs")
    text = "ckpttool: warning: undo can't restore what is removed from this store (--trash keeps copies)\n"
    assert run("prune", url, "--keep", "3", "--dry-run").err == text
    assert run("prune", url, "--keep", "3", "--dry-run", "--trash").err == ""
    series_in_store.keep_versions()
    for key in series_in_store.keys(""):
        series_in_store.put(key, series_in_store.get(key))
    assert run("prune", url, "--keep", "3", "--dry-run").err == ""


def test_rename_refuses(series_in_store: Bucket, run: Run) -> None:
    url = series_in_store.url("runs")
    done = run("rename", url, "--template", "e{epoch}")
    problem = "nothing can be renamed in a store (rename checkpoints before they are copied there)"
    assert (done.status, done.out, done.err) == (2, "", f"ckpttool: error: {url}: {problem}\n")


def test_a_web_server_is_not_changed(run: Run, tmp_path: Path) -> None:
    from ckpttool.core.errors import AccessDenied
    from ckpttool.transaction.lock import lock_directory

    with pytest.raises(AccessDenied, match="changes nothing in such a store"), lock_directory("https://a/b"):
        pass


# Pins and pointers ----------------------------------------------------------------------------------


def test_pins_are_an_object_beside(series_in_store: Bucket, run: Run) -> None:
    path = series_in_store.url("runs/model_epoch_1.pth")
    assert run("pin", path).out == f"pinned {path}\n"
    assert b'"model_epoch_1.pth"' in series_in_store.get("runs/.ckpttool-pins.toml")
    assert run("pin", path).out == f"{path} is already pinned\n"
    assert run("pin", "--list", series_in_store.url()).out == f"{path}\n"
    run("prune", series_in_store.url("runs"), "--keep", "2", "--quiet")
    assert series_in_store.keys("runs/model_epoch_1.pth") == ["runs/model_epoch_1.pth"]
    assert run("unpin", path).out == f"unpinned {path}\n"
    assert not [key for key in series_in_store.keys("") if OWN in key]


def test_a_pin_replaces_no_list_that_somebody_else_writes(
    series_in_store: Bucket, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, path = "runs/.ckpttool-pins.toml", series_in_store.url("runs/model_epoch_1.pth")
    theirs = 'pinned = ["model_epoch_2.pth"]\n'
    real = S3Store.write

    def late(self, *arguments):
        series_in_store.put(file, theirs)
        return real(self, *arguments)

    monkeypatch.setattr(S3Store, "write", late)
    done = run("pin", path)
    assert done.status == 2
    assert done.err == (
        f"ckpttool: error: {series_in_store.url(file)}: it was changed meanwhile; no pin was changed\n"
    )
    assert series_in_store.get(file) == theirs.encode()


def test_pointers_to_elsewhere_ask_nobody(series_in_store: Bucket, run: Run, series: Path) -> None:
    """Neither files of this machine nor another store say what a pointer in a store means."""
    series_in_store.put("runs/best.txt", str(series / "model_epoch_1.pth"))
    series_in_store.put("runs/latest", "s3://elsewhere/runs/model_epoch_2.pth")
    done = run("prune", series_in_store.url("runs"), "--keep", "2", "--yes")
    kept = [int(key.split("_")[-1][:-4]) for key in series_in_store.keys("runs/model")]
    assert (done.status, sorted(kept)) == (0, [1, 2, 9, 10])


def test_min_age_goes_by_the_clock_of_the_store(
    series_in_store: Bucket, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = series_in_store.url("runs")
    later = datetime.now(timezone.utc).timestamp() + timedelta(days=1).total_seconds()
    monkeypatch.setattr("ckpttool.runs.pruning.protections.time", SimpleNamespace(time=lambda: later))
    done = run("prune", url, "--keep", "2", "--min-age", "1h", "--dry-run")
    assert "nothing to remove (10 checkpoints, all kept)" in done.out


def test_unfinished_uploads_are_named(series_in_store: Bucket, run: Run) -> None:
    client, name = series_in_store.client, series_in_store.name
    begun = client.create_multipart_upload(Bucket=name, Key="runs/model_epoch_11.pth")
    part = {"Bucket": name, "Key": "runs/model_epoch_11.pth", "UploadId": begun["UploadId"]}
    client.upload_part(**part, PartNumber=1, Body=b"x" * 1000)
    text = f"{series_in_store.url('runs')}: 1 unfinished upload (1,000 bytes), which no listing shows"
    assert text in run("list", series_in_store.url("runs")).err
    assert text in run("prune", series_in_store.url("runs"), "--keep", "3", "--dry-run").err


# What changes meanwhile -----------------------------------------------------------------------------


def test_what_has_changed_since_the_plan_stays(series_in_store: Bucket) -> None:
    url = series_in_store.url("runs")

    def confirm(planned: object) -> bool:
        series_in_store.put("runs/model_epoch_1.pth", "new")
        return True

    done = prune(url, keep_last=3, confirm=confirm)
    assert dict(done.failed) == {f"{url}/model_epoch_1.pth": "it has changed since the plan was made"}
    assert series_in_store.get("runs/model_epoch_1.pth") == b"new"
    assert len(series_in_store.keys("runs/model")) == 4


def test_nothing_goes_if_a_survivor_has_changed(series_in_store: Bucket) -> None:
    url = series_in_store.url("runs")

    def confirm(planned: object) -> bool:
        series_in_store.put("runs/model_epoch_10.pth", "new")
        return True

    done = prune(url, keep_last=3, confirm=confirm)
    assert len(done.failed) == 7
    assert len(series_in_store.keys("runs/model")) == 10


@pytest.mark.parametrize("name", ["a.bin", "with space+ü/b=1.bin"])
def test_the_server_removes_only_the_version_that_was_seen(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    s3.put(name, "old")
    store, _ = remote.store_at(s3.url())
    old = store.status(name)
    s3.put(name, "new")
    with pytest.raises(stores.Replaced):
        store.remove(name, old)
    monkeypatch.setattr(S3Store, "status", lambda self, name: old)  # it changes between both requests
    with pytest.raises(stores.Replaced):
        store.remove(name, old)
    assert s3.get(name) == b"new"
    monkeypatch.undo()


# Kills ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill."""


class Kills:
    """Kills at a call that changes a store, before it or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.at, self.after = 0, -1, False
        for name in ("remove", "write", "copy"):
            self._patch(monkeypatch, name)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(S3Store, name)

        def call(store: S3Store, *arguments: object) -> object:
            self.calls += 1
            number = self.calls
            if 0 <= self.at < number or (number == self.at and not self.after):
                raise Killed
            result = real(store, *arguments)
            if number == self.at:
                raise Killed
            return result

        monkeypatch.setattr(S3Store, name, call)

    def none(self) -> None:
        """Let everything pass from now on."""
        self.at = -1


@pytest.fixture
def kills(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kills]:
    monkeypatch.setattr("ckpttool.transaction.store_removal.REQUESTS_AT_ONCE", 1)
    yield Kills(monkeypatch)
    monkeypatch.undo()


def listed(run: Run, url: str) -> set[tuple[str, int]]:
    """Return what is listed as sound, with how many files it has."""
    document = json.loads(run("list", url, "--json", "--series", "*").out)
    return {(one["path"], one["files"]) for one in document["checkpoints"] if one["fault"] is None}


COMMANDS: dict[str, Callable[[str], object]] = {
    "prune": lambda url: prune(url, keep_last=2, series=("*",)),
    "prune --trash": lambda url: prune(url, keep_last=2, series=("*",), trash=True),
    "undo": undo,
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["PyTorch, sharded", "TensorFlow"])
def test_a_kill_at_any_call_loses_nothing(
    s3: Bucket, run: Run, tmp_path: Path, kills: Kills, kind: str, command: str
) -> None:
    made = files(make(kind, tmp_path, (1, 2, 3, 4)).parent.parent)
    act = COMMANDS[command]

    def fresh(number: int) -> str:
        for name, data in made.items():
            s3.put(f"{number}/{name}", data)
        url = s3.url(f"{number}/team/runs")
        if command == "undo":
            COMMANDS["prune --trash"](url)
        return url

    def left(number: int) -> dict[str, bytes]:
        found = {key: s3.get(key) for key in s3.keys(f"{number}/") if OWN not in key}
        return {key.partition("/")[2]: data for key, data in found.items()}

    url = fresh(0)
    whole = listed(run, url)
    whole = {(path.removeprefix(s3.url("0/")), count) for path, count in whole}
    kills.calls = 0
    act(url)
    expected, count = left(0), kills.calls
    assert count > 5
    for number in range(1, count + 1, 1 if command == "prune" else 3):  # the other two make many calls
        url = fresh(number)
        kills.calls, kills.at, kills.after = 0, number, bool(number % 2)
        with pytest.raises(Killed):
            act(url)
        kills.none()
        remote.forget()
        sound = {(path.removeprefix(s3.url(f"{number}/")), files) for path, files in listed(run, url)}
        if command != "undo":
            assert sound <= whole, number
            kept = {key: data for key, data in expected.items() if not key.endswith("/checkpoint")}
            assert kept.items() <= left(number).items()
        act(url)
        assert left(number) == expected, (number, count)
        assert journals_in(url) == []


def test_a_prune_that_was_taken_for_killed_removes_nothing(
    series_in_store: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command settles what seems to be left: copies go, and with them the right to remove."""
    url = series_in_store.url("runs")
    real, called = S3Store.copy, []

    def late(self, name, to):
        real(self, name, to)
        if not called:
            called.append(name)
            prune(url, keep_last=100)

    monkeypatch.setattr(S3Store, "copy", late)
    from ckpttool import CheckpointError

    with pytest.raises(CheckpointError, match="took this prune for an interrupted one; nothing was removed"):
        prune(url, keep_last=3, trash=True)
    assert sorted(series_in_store.keys("runs/")) == [
        f"runs/model_epoch_{n}.pth" for n in (1, 10, *range(2, 10))
    ]


# What the store refuses -----------------------------------------------------------------------------


@pytest.fixture
def refusals(s3: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    """Return what decides which requests of ckpttool's are refused; those that are, are not asked again."""
    for module in (answers, stores):
        monkeypatch.setattr(module, "RETRIES", 0)
    with refusing(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (r"GET /bucket-\d+/runs/latest", 1),
        (r"GET /bucket-\d+/runs/best\.json", 1),
        (r"GET /bucket-\d+\?.*prefix=runs%2F(&|$)", 2),
        (r"GET /bucket-\d+\?.*prefix=runs%2Fsub%2F", 1),
    ],
)
def test_a_store_that_does_not_answer_has_not_said_that_nothing_points_there(
    series_in_store: Bucket, run: Run, refusals: Refusals, request_: str, expected: int, status: int
) -> None:
    series_in_store.put("runs/latest", "model_epoch_1.pth")
    series_in_store.put("runs/best.json", '{"best": "model_epoch_2.pth"}')
    series_in_store.put("runs/sub/best.txt", "../model_epoch_3.pth")
    refusals.refuse(request_, status)
    done = run("prune", series_in_store.url("runs"), "--keep", "3", "--yes")
    assert done.status == expected, done
    assert "the store" in done.err
    assert len(series_in_store.keys("runs/model")) == 10


@pytest.mark.parametrize("status", [403, 503])
def test_a_series_whose_pins_are_not_answered_stays(
    series_in_store: Bucket, run: Run, refusals: Refusals, status: int
) -> None:
    series_in_store.put("runs/.ckpttool-pins.toml", 'pinned = ["model_epoch_1.pth"]')
    refusals.refuse(r"GET /bucket-\d+/runs/\.ckpttool-pins", status)
    done = run("prune", series_in_store.url("runs"), "--keep", "3", "--yes")
    assert done.status in (1, 2)
    assert "pinned can't be read" in done.err
    assert len(series_in_store.keys("runs/model")) == 10


@pytest.mark.parametrize("status", [403, 503])
def test_what_may_not_be_removed_is_named(
    series_in_store: Bucket, run: Run, refusals: Refusals, status: int
) -> None:
    refusals.refuse(r"DELETE .*/model_epoch_[12]\.pth", status)
    url = series_in_store.url("runs")
    done = run("prune", url, "--keep", "3", "--yes")
    assert done.status == 1
    assert f"{url}/model_epoch_1.pth: not removed: " in done.err
    assert f"answered {status}" in done.err
    assert len(series_in_store.keys("runs/model")) == 5
    refusals.pattern = None
    assert run("prune", url, "--keep", "3", "--yes").status == 0
    assert len(series_in_store.keys("runs/model")) == 3
    assert journals_in(url) == []


def test_a_part_that_could_not_be_removed_goes_with_the_next_prune(
    s3: Bucket, run: Run, refusals: Refusals, tmp_path: Path
) -> None:
    make("safetensors, sharded", tmp_path)
    s3.upload(tmp_path, "")
    refusals.refuse(r"DELETE .*/set-1-00001", 503)
    url = s3.url("team/runs")
    done = run("prune", url, *KEEP, "--yes")
    assert done.status == 1
    assert "only a part of it was removed: the store answered 503" in done.err
    assert not any("set-1" in path for path, _ in listed(run, url))
    refusals.pattern = None
    assert run("prune", url, *KEEP, "--yes").status == 0
    assert not [key for key in s3.keys("") if "set-1" in key or OWN in key.replace("pins", "")]


def test_who_may_write_no_journal_removes_nothing(
    series_in_store: Bucket, run: Run, refusals: Refusals
) -> None:
    refusals.refuse("PUT", 403)
    url = series_in_store.url("runs")
    done = run("prune", url, "--keep", "3", "--yes")
    assert done.status == 2
    assert done.err.startswith(f"ckpttool: error: {url}: the store answered 403")
    assert done.err.endswith("; nothing was removed\n")
    assert len(series_in_store.keys("runs/model")) == 10


def test_servers_without_conditions_remove_what_was_seen_just_before(
    series_in_store: Bucket, run: Run, refusals: Refusals
) -> None:
    refusals.refuse("DELETE .* If-Match", 501)
    assert run("prune", series_in_store.url("runs"), "--keep", "3", "--yes").status == 0
    assert len(series_in_store.keys("runs/model")) == 3


@pytest.mark.parametrize("status", [403, 503])
def test_a_series_whose_newest_is_not_answered_stays(
    series_in_store: Bucket, run: Run, refusals: Refusals, status: int
) -> None:
    """What it says of the best is not known."""
    refusals.refuse(r"GET /bucket-\d+/runs/model_epoch_10", status)
    done = run("prune", series_in_store.url("runs"), "--keep", "3", "--yes")
    assert done.status in (1, 2), done
    assert len(series_in_store.keys("runs/model")) == 10


def test_no_answer_shows_a_signature(series_in_store: Bucket, run: Run, refusals: Refusals) -> None:
    refusals.refuse("DELETE", 403)
    done = run("prune", series_in_store.url("runs"), "--keep", "3", "--yes", "--json")
    assert "Signature" not in done.out + done.err
    assert any("X-Amz-Signature" in request for request in refusals.requests)


def test_prune_of_a_checkpoint_is_a_usage_error(series_in_store: Bucket) -> None:
    with pytest.raises(UsageError, match="is a file"):
        prune(series_in_store.url("runs/model_epoch_1.pth"), keep_last=1)


# Keys that no URL can have --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["logs?/x.log", "train#1.log", "a//b.log", "tab\tname.log", "#", "x?y=z/m#.txt", "c\x7f/d.log"]
)
def test_an_odd_key_fails_nothing_beside_it(series_in_store: Bucket, run: Run, key: str) -> None:
    series_in_store.put(f"runs/{key}", "step 1")
    url = series_in_store.url("runs")
    assert run("latest", url)[:2] == (0, f"{url}/model_epoch_10.pth\n")
    listed = run("list", url)
    assert (listed.status, listed.out.count("readable")) == (0, 10)
    assert run("prune", url, "--keep", "2", "--dry-run").status == 0
    assert run("prune", url, "--keep", "2", "--yes").status == 0
    assert sorted(series_in_store.keys("runs/")) == sorted(
        ["runs/model_epoch_10.pth", "runs/model_epoch_9.pth", f"runs/{key}"]
    )


def test_a_checkpoint_of_an_odd_key_is_one_like_others(
    series_in_store: Bucket, run: Run, tmp_path: Path
) -> None:
    content = series_in_store.get("runs/model_epoch_10.pth")
    series_in_store.put("runs/try#2/why?/model_epoch_10.pth", content)
    url = f"{series_in_store.url('runs')}/?try%232/?why%3F/model_epoch_10.pth"
    assert f"{url}\t" in run("list", series_in_store.url("runs")).out
    assert run("verify", url).status == 0
    assert run("copy", url, tmp_path / "copy").status == 0
    assert (tmp_path / "copy" / "model_epoch_10.pth").read_bytes() == content


def test_what_was_listed_long_ago_is_listed_again_and_not_asked_for_one_by_one(
    series_in_store: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = series_in_store.url("runs")
    asked: list[str] = []
    real = answers._asked
    monkeypatch.setattr(answers, "_asked", lambda method, *more: asked.append(method) or real(method, *more))
    names = [entry.name for entry in remote.entries(url)]
    for later in (100.0, 200.0):
        monkeypatch.setattr(remote.time, "monotonic", lambda later=later: later + 1e9)
        asked.clear()
        for name in names:
            assert remote.look_at(f"{url}/{name}").object is not None
        with pytest.raises(FileNotFoundError):
            remote.look_at(f"{url}/none")
        assert asked == ["GET"]

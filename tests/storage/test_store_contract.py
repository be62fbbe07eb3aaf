"""What every store promises: in memory, of a server as Amazon S3's, and of one as Google Cloud Storage's."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpttool import CheckpointError, MissingPackage, prune, undo
from ckpttool.storage import fs, http_requests, remote, s3_store, stores
from ckpttool.storage.remote import store_at
from ckpttool.storage.stores import ObjectReplaced, ObjectStatus, Store
from tests.support.commands import Run
from tests.support.google import GoogleBucket, GoogleServer, google_server
from tests.support.memory import MemoryBucket, memory_stores
from tests.support.refusals import Refusals, refusing
from tests.support.stores import Bucket, S3Bucket

PART = 5 << 20
"""The least that a part of an upload may have."""
SIZES = (0, 5, PART, 2 * PART + 5)
"""The last one doesn't go with one request."""
NAMES = ("plain", "with space+ü/b=1.bin", "a/b/c/d", "a.b/~x'y(z)", "%41/100%")


def blocks(size: int, fill: int = 1) -> Iterator[bytes]:
    """Yield so many bytes, in blocks that are no parts."""
    left = size
    while left:
        block = bytes([fill]) * min(left, 3 << 20)
        left -= len(block)
        yield block


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_LEAST_PART", PART)


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    with google_server() as server:
        yield server


@pytest.fixture(params=["memory", "Amazon", "Google"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return an empty bucket of each kind of store."""
    if request.param == "memory":
        with memory_stores():
            yield MemoryBucket()
    elif request.param == "Amazon":
        yield request.getfixturevalue("s3")
    else:
        server = request.getfixturevalue("google")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        remote.forget()
        yield GoogleBucket(server)


@pytest.fixture
def store(bucket: Bucket) -> Store:
    return store_at(bucket.url())[0]


# What is there ------------------------------------------------------------------------------------------


def test_status(store: Store, bucket: Bucket) -> None:
    for name in NAMES:
        bucket.put(name, b"12345")
        first = store.status(name)
        assert first.size == 5, name
        assert abs(first.modified_ns / 1e9 - time.time()) < 60, name
        assert first.matches(store.status(name)), name
        bucket.put(name, b"54321")
        assert not first.matches(store.status(name)), name


def test_nothing_is_there(store: Store, bucket: Bucket) -> None:
    bucket.put("a/b", b"1")
    for name in ("none", "a", "a/b/c", "a/none"):
        with pytest.raises(FileNotFoundError):
            store.status(name)
    assert store.listing("none") == ((), {}) or not any(store.listing("none"))


def test_listing(store: Store, bucket: Bucket) -> None:
    """The servers send few names at once."""
    names = [f"run/{number:02}" for number in range(12)]
    for name in (*names, "run/sub/one", "run/sub/two/three", "running", "other/one", "run.txt"):
        bucket.put(name, name)
    top, run = store.listing(""), store.listing("run")
    assert (top.directories, top.objects.keys()) == ({"run", "other"}, {"running", "run.txt"})
    assert (run.directories, [f"run/{name}" for name in sorted(run.objects)]) == ({"sub"}, names)
    assert store.listing("run/sub").directories == {"two"}
    for name, status in run.objects.items():
        assert status.size == len(f"run/{name}")
        assert status == store.status(f"run/{name}"), name


def test_an_object_that_stands_for_a_directory_is_not_listed(store: Store, bucket: Bucket) -> None:
    """Some consoles make one."""
    bucket.put("run/", b"")
    bucket.put("run/a", b"1")
    assert store.listing("run").objects.keys() == {"a"}
    assert store.listing("").directories == {"run"}


def test_names_are_listed_as_they_are(store: Store, bucket: Bucket) -> None:
    for name in NAMES:
        bucket.put(f"{name}/x", name)
        directory, _, own = name.rpartition("/")
        assert own in store.listing(directory).directories, name
        assert list(store.listing(name).objects) == ["x"], name


def test_what_is_looked_at(bucket: Bucket) -> None:
    bucket.put("run/a", b"123")
    assert fs.isfile(bucket.url("run/a")) and fs.getsize(bucket.url("run/a")) == 3
    assert fs.isdir(bucket.url("run")) and fs.isdir(bucket.url())
    assert not fs.lexists(bucket.url("run/none"))
    assert fs.listdir(bucket.url("run")) == ["a"]
    with pytest.raises(NotADirectoryError):
        fs.listdir(bucket.url("run/a"))
    with pytest.raises(FileNotFoundError):
        remote.cached_status(bucket.url("none"))


def test_an_object_and_a_directory_of_one_name(bucket: Bucket) -> None:
    bucket.put("run/x", b"1")
    bucket.put("run/x/y", b"2")
    with pytest.raises(OSError, match="x is both an object and a directory"):
        remote.entries(bucket.url("run"))


# Bytes --------------------------------------------------------------------------------------------------


def test_read(store: Store, bucket: Bucket) -> None:
    data = bytes(range(256)) * 10
    bucket.put("a", data)
    status = store.status("a")
    for begin, end in ((0, len(data)), (0, 1), (100, 900), (len(data) - 1, len(data))):
        assert store.read("a", begin, end, status) == data[begin:end]


def test_read_is_of_the_version_that_was_seen(store: Store, bucket: Bucket) -> None:
    bucket.put("a", b"12345")
    seen = store.status("a")
    bucket.put("a", b"54321")
    with pytest.raises(ObjectReplaced):
        store.read("a", 0, 5, seen)
    bucket.remove("a")
    with pytest.raises(FileNotFoundError):
        store.read("a", 0, 5, seen)


@pytest.mark.parametrize("size", SIZES)
def test_write(store: Store, bucket: Bucket, size: int) -> None:
    written = store.write("a/b", blocks(size), size, None)
    assert written == store.status("a/b") and written.size == size
    assert bucket.get("a/b") == b"\1" * size


def test_write_of_any_name(store: Store, bucket: Bucket) -> None:
    for name in NAMES:
        store.write(name, [b"1", b"23"], 3, None)
        assert bucket.get(name) == b"123", name
        store.remove(name, store.status(name))
        assert bucket.keys() == [], name


@pytest.mark.parametrize("size", SIZES[1::2])
def test_write_replaces_nothing_unseen(store: Store, bucket: Bucket, size: int) -> None:
    bucket.put("a", "old")
    with pytest.raises(FileExistsError):
        store.write("a", blocks(size), size, None)
    assert bucket.get("a") == b"old"


@pytest.mark.parametrize("size", SIZES[1::2])
def test_write_replaces_what_was_seen_and_nothing_else(store: Store, bucket: Bucket, size: int) -> None:
    bucket.put("a", "old")
    seen = store.status("a")
    store.write("a", blocks(size), size, seen)
    assert bucket.get("a") == b"\1" * size
    with pytest.raises(ObjectReplaced):
        store.write("a", blocks(size, 2), size, seen)
    assert bucket.get("a") == b"\1" * size


@pytest.mark.parametrize("size", SIZES[1::2])
def test_write_does_not_replace_what_has_gone(store: Store, bucket: Bucket, size: int) -> None:
    bucket.put("a", "old")
    seen = store.status("a")
    bucket.remove("a")
    with pytest.raises((ObjectReplaced, FileNotFoundError)):
        store.write("a", blocks(size), size, seen)
    assert bucket.keys() == []


@pytest.mark.parametrize("size", SIZES[1::2])
def test_write_of_blocks_that_fail_leaves_nothing(store: Store, bucket: Bucket, size: int) -> None:
    def failing() -> Iterator[bytes]:
        yield from blocks(size)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write("a", failing(), size, None)
    assert bucket.keys() == []
    if isinstance(bucket, S3Bucket):
        assert "Uploads" not in bucket.client.list_multipart_uploads(Bucket=bucket.name)


def test_one_of_many_writers_wins(store: Store, bucket: Bucket) -> None:
    def write(number: int) -> int | None:
        try:
            store.write("a", [b"%d" % number], 1, None)
        except (FileExistsError, ObjectReplaced):
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        (winner,) = (one for one in threads.map(write, range(8)) if one is not None)
    assert bucket.get("a") == b"%d" % winner


def test_what_was_written_is_asked_for_again(bucket: Bucket, store: Store) -> None:
    url = bucket.url("d/a")
    assert not fs.lexists(url)
    with pytest.raises(FileNotFoundError):
        remote.entries(os.path.dirname(url))
    store.write("d/a", blocks(5), 5, None)
    remote.forget_at(url)
    assert remote.cached_status(url).object is not None
    assert [one.name for one in remote.entries(os.path.dirname(url))] == ["a"]


# Removals and copies ------------------------------------------------------------------------------------


def test_remove(store: Store, bucket: Bucket) -> None:
    for name in NAMES:
        bucket.put(name, "old")
    seen = {name: store.status(name) for name in NAMES}
    for name in NAMES[1:]:
        store.remove(name, seen[name])
    assert bucket.keys() == [NAMES[0]]
    with pytest.raises(FileNotFoundError):
        store.remove(NAMES[1], seen[NAMES[1]])


def test_remove_leaves_what_was_replaced(store: Store, bucket: Bucket) -> None:
    for name in NAMES:
        bucket.put(name, "old")
        seen = store.status(name)
        bucket.put(name, "new")
        with pytest.raises(ObjectReplaced):
            store.remove(name, seen)
        assert bucket.get(name) == b"new"


def test_copy(store: Store, bucket: Bucket) -> None:
    bucket.put("over", "old")
    for name in NAMES:
        bucket.put(name, f"of {name}")
        for to in (f"copies of/{name}", "over"):
            store.copy(name, to)
            assert bucket.get(to) == f"of {name}".encode()
            assert store.status(to).version == store.status(name).version
    with pytest.raises(FileNotFoundError):
        store.copy("none", "over")


def test_what_it_can_do(store: Store, bucket: Bucket) -> None:
    assert store.is_changeable
    assert abs(store.clock() - time.time()) < 60
    bucket.put("a", "1")
    assert not store.keeps_version("a")
    assert store.takes_any_name is not isinstance(bucket, GoogleBucket)


def test_versions(store: Store, bucket: Bucket) -> None:
    if isinstance(bucket, GoogleBucket):
        with pytest.raises(OSError, match="this store can't list older versions"):
            store.older_versions()
        return
    bucket.keep_versions()
    for name in ("a/1", "a/2", "b"):
        bucket.put(name, "older")
        bucket.put(name, name)
    assert store.keeps_version("a/1")
    seen = store.status("a/1")
    store.remove("a/1", seen)
    older = store.older_versions()
    found = older.versions("a/")
    assert found.keys() == {"a/1", "a/2"}
    assert found["a/2"].marker is None
    hidden = found["a/1"]
    assert hidden.newest is not None and hidden.newest.matches(seen) and hidden.marker is not None
    older.uncover("a/1", hidden.marker)
    assert bucket.get("a/1") == b"a/1"
    assert store.status("a/1").matches(seen)


# Odd names ----------------------------------------------------------------------------------------------


def test_names_that_no_url_can_have(bucket: Bucket, store: Store) -> None:
    for name in ("a?b/x", "c#d", "ok"):
        bucket.put(f"run/{name}", "content")
    urls = {entry.name: entry.path for entry in remote.entries(bucket.url("run"))}
    assert urls.keys() == {"ok", "?a%3Fb", "?c%23d"}
    if store.takes_any_name:
        assert fs.listdir(urls["?a%3Fb"]) == ["x"]
        with fs.open_source(urls["?c%23d"]) as source:
            assert source.read(0, source.size) == b"content"
    else:
        with pytest.raises(OSError, match="its key 'c#d' can't be requested"):
            remote.store_at(urls["?c%23d"])


# Whole commands -----------------------------------------------------------------------------------------


def test_whole_commands(bucket: Bucket, run: Run, files: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for number in range(1, 5):
        (runs / f"model_epoch_{number}.pth").write_bytes(
            (files / "series" / f"model_epoch_{number}.pth").read_bytes()
        )
    url = bucket.url("team/runs")
    assert run("copy", runs, url).out.endswith("copied 4 of 4 checkpoints (16 kB)\n")
    assert run("latest", url).out == f"{url}/model_epoch_4.pth\n"
    assert run("verify", url).out.endswith("4 checkpoints: 4 valid\n")
    assert run("inspect", url, "--field", "training.epoch").out == "4\n"
    assert run("convert", f"{url}/model_epoch_4.pth", bucket.url("x/four.safetensors")).status == 0
    assert run("diff", bucket.url("x/four.safetensors"), runs / "model_epoch_4.pth").status == 0
    assert run("pin", f"{url}/model_epoch_1.pth").status == 0
    before = {key: bucket.get(key) for key in bucket.keys("")}
    assert run("prune", url, "--keep", "1", "--trash", "--yes").status == 0
    assert [line.split("\t")[0] for line in run("list", url).out.splitlines()] == [
        f"{url}/model_epoch_{number}.pth" for number in (1, 4)
    ]
    assert run("undo", url).status == 0
    assert {key: bucket.get(key) for key in bucket.keys("")} == before
    assert run("copy", url, tmp_path / "back").status == 0
    assert {one.name: one.read_bytes() for one in (tmp_path / "back").glob("*.pth")} == {
        one.name: one.read_bytes() for one in runs.iterdir()
    }


# Amazon S3 alone ----------------------------------------------------------------------------------------


@pytest.fixture
def refusals(s3: S3Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    """Return what decides which requests of ckpttool's are refused; those that are, are not asked again."""
    for module in (http_requests, stores):
        monkeypatch.setattr(module, "RETRIES", 0)
    with refusing(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def series(s3: S3Bucket, files: Path) -> str:
    """Upload three epochs."""
    for number in range(1, 4):
        s3.upload(files / "series" / f"model_epoch_{number}.pth", f"runs/model_epoch_{number}.pth")
    return s3.url("runs")


def test_s3_itself_removes_only_the_version_that_was_seen(
    s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(s3.url())[0]
    for name in NAMES:
        s3.put(name, "old")
        old = store.status(name)
        s3.put(name, "new")
        with monkeypatch.context() as between:  # it changes between both requests
            between.setattr(s3_store.S3Store, "status", lambda self, name, old=old: old)
            with pytest.raises(ObjectReplaced):
                store.remove(name, old)
        assert s3.get(name) == b"new"


def test_servers_without_conditions_remove_what_was_seen_just_before(
    s3: S3Bucket, refusals: Refusals, files: Path
) -> None:
    url = series(s3, files)
    refusals.refuse("DELETE .* If-Match", 501)
    assert not prune(url, keep_last=1).failed
    assert s3.keys() == ["runs/model_epoch_3.pth"]


@pytest.mark.parametrize(
    ("request_", "status", "call", "error"),
    [
        (r"HEAD .*/a", 403, lambda store, seen: store.status("a"), errno.EACCES),
        (r"GET .*/a", 503, lambda store, seen: store.read("a", 0, 1, seen), errno.EIO),
        (r"GET .*prefix=d%2F", 403, lambda store, seen: store.listing("d"), errno.EACCES),
        (r"PUT .*/b", 403, lambda store, seen: store.write("b", [b"1"], 1, None), errno.EACCES),
        (r"PUT .*/a", 503, lambda store, seen: store.copy("a", "b"), errno.EIO),
        (r"DELETE .*/a", 503, lambda store, seen: store.remove("a", seen), errno.EIO),
    ],
)
def test_what_s3_refuses(
    s3: S3Bucket,
    refusals: Refusals,
    request_: str,
    status: int,
    call: Callable[[Store, ObjectStatus], object],
    error: int,
) -> None:
    s3.put("a", "1")
    store = store_at(s3.url())[0]
    seen = store.status("a")
    refusals.refuse(request_ if "PUT .*/a" not in request_ else "PUT .*/b", status)
    with pytest.raises(OSError, match=f"answered {status} ") as caught:
        call(store, seen)
    assert caught.value.errno == error
    assert "Signature" not in str(caught.value)
    assert s3.keys() == ["a"]


def test_no_answer_shows_a_signature(s3: S3Bucket, run: Run, refusals: Refusals, files: Path) -> None:
    url = series(s3, files)
    refusals.refuse("DELETE", 403)
    done = run("prune", url, "--keep", "1", "--yes", "--json")
    assert done.status == 1 and "Signature" not in done.out + done.err
    assert any("X-Amz-Signature" in request for request in refusals.requests)
    assert len(s3.keys("runs/model")) == 3


def test_undo_from_versions_says_what_to_install(
    s3: S3Bucket, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.keep_versions()
    url = series(s3, files)
    before = s3.keys()
    prune(url, keep_last=1)
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(MissingPackage, match=r"listing older versions of objects needs boto3 \(pip install"):
        undo(url)
    monkeypatch.undo()
    for name, value in {"AWS_ENDPOINT_URL": s3.client.meta.endpoint_url, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    assert len(undo(url).restored) == 2
    assert [key for key in s3.keys("") if ".ckpttool" not in key] == before


def test_unfinished_uploads_are_named(s3: S3Bucket, run: Run, files: Path) -> None:
    url = series(s3, files)
    begun = s3.client.create_multipart_upload(Bucket=s3.name, Key="runs/model_epoch_11.pth")
    part = {"Bucket": s3.name, "Key": "runs/model_epoch_11.pth", "UploadId": begun["UploadId"]}
    s3.client.upload_part(**part, PartNumber=1, Body=b"x" * 1000)
    text = f"{url}: 1 unfinished upload (1,000 bytes), hidden from listings"
    assert text in run("list", url).err
    assert text in run("prune", url, "--keep", "3", "--dry-run").err


def test_names_that_obstore_takes_not(s3: S3Bucket) -> None:
    store = store_at(s3.url())[0]
    for name in ("a//b", "tab\tname", "c\x7f/d"):
        with pytest.raises(OSError, match="can't be requested"):
            store.status(name)
    with pytest.raises(OSError, match="File name too long"):
        store.listing("x" * 1025)
    with pytest.raises(CheckpointError, match="answered 404"):
        prune("s3://no-such-bucket/x", keep_last=1)


# Others -------------------------------------------------------------------------------------------------


def test_parts_are_few_enough() -> None:
    assert stores.part_size(1 << 40) * 10_000 >= 1 << 40


@pytest.mark.parametrize("url", ["https://example.org/a", "hf://owner/name/a"])
def test_nothing_is_written_where_files_are_only_read(url: str) -> None:
    store, name = store_at(url)
    with pytest.raises(OSError, match="nothing can be written"):
        store.write(name, blocks(5), 5, None)


@pytest.fixture
def fsspec_memory() -> Iterator[Store]:
    import fsspec

    store, _ = store_at("memory://bucket")
    yield store
    fsspec.filesystem("memory").store.clear()


def test_other_file_systems_take_a_file_by_its_name_at_the_end(fsspec_memory: Store) -> None:
    store = fsspec_memory

    def watched() -> Iterator[bytes]:
        yield b"new"
        with pytest.raises(FileNotFoundError):
            store.status("d/a")

    written = store.write("d/a", watched(), 3, None)
    assert store.read("d/a", 0, 3, written) == b"new"
    assert sorted(store.listing("d").objects) == ["a"]
    with pytest.raises(FileExistsError):
        store.write("d/a", blocks(5), 5, None)
    store.write("d/a", blocks(5), 5, written)
    assert store.status("d/a").size == 5
    assert sorted(store.listing("d").objects) == ["a"]

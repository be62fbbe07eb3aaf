"""Objects that are written into stores: whole or not at all, and over nothing but what was seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from ckpttool.io import remote, stores
from ckpttool.io.remote import store_at
from ckpttool.io.stores import Replaced, Store
from tests.support.stores import Bucket

PART = stores.part_size(1)
LARGE = 2 * PART + 5
"""More bytes than go with one request."""


def blocks(size: int, fill: int = 1) -> Iterator[bytes]:
    """Yield so many bytes, in blocks that are no parts."""
    left = size
    while left:
        block = bytes([fill]) * min(left, 3 << 20)
        left -= len(block)
        yield block


@pytest.fixture
def store(s3: Bucket) -> Store:
    return store_at(s3.url())[0]


@pytest.mark.parametrize("size", [0, 5, PART, LARGE])
def test_object_is_written(store: Store, s3: Bucket, size: int) -> None:
    written = store.write("a/b", blocks(size), size, None)
    assert written == store.status("a/b") and written.size == size
    assert s3.get("a/b") == b"\1" * size


@pytest.mark.parametrize("size", [5, LARGE])
def test_nothing_that_is_there_is_replaced(store: Store, s3: Bucket, size: int) -> None:
    s3.put("a", "old")
    with pytest.raises(FileExistsError):
        store.write("a", blocks(size), size, None)
    assert s3.get("a") == b"old"


@pytest.mark.parametrize("size", [5, LARGE])
def test_what_was_seen_is_replaced_and_nothing_else(store: Store, s3: Bucket, size: int) -> None:
    s3.put("a", "old")
    seen = store.status("a")
    store.write("a", blocks(size), size, seen)
    assert s3.get("a") == b"\1" * size
    with pytest.raises(Replaced):
        store.write("a", blocks(size, 2), size, seen)
    assert s3.get("a") == b"\1" * size


def test_what_has_gone_is_not_replaced(store: Store, s3: Bucket) -> None:
    s3.put("a", "old")
    seen = store.status("a")
    s3.client.delete_object(Bucket=s3.name, Key="a")
    for size in (5, LARGE):
        with pytest.raises((Replaced, FileNotFoundError)):
            store.write("a", blocks(size), size, seen)
    assert s3.keys() == []


@pytest.mark.parametrize("size", [5, LARGE])
def test_blocks_that_fail_leave_nothing(store: Store, s3: Bucket, size: int) -> None:
    def failing() -> Iterator[bytes]:
        yield from blocks(size)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write("a", failing(), size, None)
    assert s3.keys() == []
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=s3.name)


def test_parts_are_few_enough() -> None:
    assert stores.part_size(1 << 40) * 10_000 >= 1 << 40


@pytest.mark.parametrize("url", ["https://example.org/a", "hf://owner/name/a"])
def test_nothing_is_written_where_files_are_only_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, name = store_at(url)
    with pytest.raises(OSError, match="nothing can be written"):
        store.write(name, blocks(5), 5, None)


@pytest.fixture
def memory() -> Iterator[Store]:
    import fsspec

    store, _ = store_at("memory://bucket")
    yield store
    fsspec.filesystem("memory").store.clear()


def test_other_file_systems_take_a_file_by_its_name_at_the_end(memory: Store) -> None:
    def watched() -> Iterator[bytes]:
        yield b"new"
        with pytest.raises(FileNotFoundError):
            memory.status("d/a")

    written = memory.write("d/a", watched(), 3, None)
    assert memory.read("d/a", 0, 3, written) == b"new"
    assert sorted(memory.listing("d").objects) == ["a"]
    with pytest.raises(FileExistsError):
        memory.write("d/a", blocks(5), 5, None)
    memory.write("d/a", blocks(5), 5, written)
    assert memory.status("d/a").size == 5
    assert sorted(memory.listing("d").objects) == ["a"]


def _asks(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def test_what_was_written_is_asked_for_again(s3: Bucket, store: Store) -> None:
    url = s3.url("d/a")
    assert not _asks(lambda: remote.look_at(url)) and not _asks(lambda: remote.entries(os.path.dirname(url)))
    store.write("d/a", blocks(5), 5, None)
    remote.forget_at(url)
    assert remote.look_at(url).object is not None
    assert [one.name for one in remote.entries(os.path.dirname(url))] == ["a"]

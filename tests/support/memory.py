"""A store in memory, behind ckpttool's own interface: with conditions, versions, refusals and kills."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import md5
from itertools import count
from threading import RLock
from typing import NamedTuple
from unittest.mock import patch

from ckpttool.storage import http_requests, remote
from ckpttool.storage.stores import (
    Listing,
    ObjectReplaced,
    ObjectStatus,
    ObjectVersions,
    OlderVersions,
    Store,
)
from tests.support.stores import Bucket

SCHEME = "mem"
_REASONS = {
    403: ("Forbidden", "AccessDenied"),
    501: ("Not Implemented", "NotImplemented"),
    503: ("Service Unavailable", "SlowDown"),
}
_buckets: dict[str, MemoryBucket] = {}


class Killed(BaseException):
    """Stands for a kill."""


class Stored(NamedTuple):
    """A version of an object; without data it is the marker of a removal."""

    data: bytes | None
    status: ObjectStatus
    identity: str


class MemoryBucket(Bucket):
    """What lies in a store of this process.

    Attributes:
        calls: What ckpttool has asked for so far: ``VERB KEY``, as in ``remove runs/a.pth``; verbs are
            status, listing, read, write, remove and copy.
        before: Called with each of them before it is done; what it raises is the answer.
        after: The same, afterwards.
        clock: Tells the seconds since 1970 to whoever asks the store.
        new_tags: Whether each object that is written has another ETag, as in Azure; else its content has one.
    """

    def __init__(self) -> None:
        super().__init__(SCHEME)
        self.calls: list[str] = []
        self.before: Callable[[str], object] = lambda call: None
        self.after: Callable[[str], object] = lambda call: None
        self.clock: Callable[[], float] = time.time
        self.new_tags = False
        self._lock = RLock()
        self._objects: dict[str, list[Stored]] = {}
        self._numbers = count(1)
        self._keeps_versions = False
        _buckets[self.url()] = self

    # Around ckpttool --------------------------------------------------------------------------------

    def put(self, key: str, data: bytes | str) -> None:
        self.store(key, data.encode() if isinstance(data, str) else data)

    def get(self, key: str) -> bytes:
        return self.found(key)[0]

    def remove(self, key: str) -> None:
        with self._lock:
            if self._keeps_versions:
                marker = Stored(None, ObjectStatus(0, 0, ""), self._identity())
                self._objects[key] = [*self._objects[key], marker]
            else:
                del self._objects[key]

    def keep_versions(self) -> None:
        self._keeps_versions = True

    def keys(self, prefix: str = "") -> list[str]:
        with self._lock:
            there = (key for key, versions in self._objects.items() if versions[-1].data is not None)
            return sorted(key for key in there if key.startswith(prefix))

    def snapshot(self) -> Mapping[str, list[Stored]]:
        """Return all that lies here, to be restored."""
        return dict(self._objects)

    def restore(self, snapshot: Mapping[str, list[Stored]]) -> None:
        """Let nothing lie here but what did."""
        self._objects = dict(snapshot)
        remote.forget()

    # Faults -----------------------------------------------------------------------------------------

    def refuse(self, pattern: str, status: int) -> None:
        """Answer calls that match with an HTTP status from now on."""
        reason, code = _REASONS[status]
        answer = http_requests.Response(status, reason, {}, f"<Code>{code}</Code>".encode())

        def refuse(call: str) -> None:
            if re.search(pattern, call):
                raise http_requests.refusal(answer, self.url(call.partition(" ")[2]))

        self.before = refuse

    def kill_at(self, number: int) -> Callable[[], int]:
        """Kill before the number-th change from now on, never at 0; return what counts them."""
        changes = 0

        def count_call(call: str) -> None:
            nonlocal changes
            if call.startswith(("write", "remove", "copy")):
                changes += 1
                if 0 < number <= changes:
                    raise Killed

        self.before = count_call
        return lambda: changes

    def obey(self) -> None:
        """Do all that is asked for again."""
        self.before = self.after = lambda call: None

    # For the store ----------------------------------------------------------------------------------

    @contextmanager
    def call(self, verb: str, key: str) -> Iterator[None]:
        """Do something that ckpttool asks for."""
        call = f"{verb} {key}"
        self.calls.append(call)
        self.before(call)
        yield
        self.after(call)

    def found(self, key: str) -> tuple[bytes, ObjectStatus]:
        """Return an object, or raise that there is none."""
        with self._lock:
            versions = self._objects.get(key)
            if versions is None or versions[-1].data is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key))
            return versions[-1].data, versions[-1].status

    def store(self, key: str, data: bytes, replaces: ObjectStatus | bool | None = True) -> ObjectStatus:
        """Write an object: over anything, over nothing (None), or over what it replaces."""
        with self._lock:
            now = self.found(key)[1] if key in self.keys(key) else None
            if replaces is None and now is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key))
            if isinstance(replaces, ObjectStatus) and (now is None or now.version != replaces.version):
                raise ObjectReplaced(self.url(key))
            tag = self._identity() if self.new_tags else md5(data).hexdigest()
            status = ObjectStatus(len(data), time.time_ns(), f'"{tag}"')
            before = self._objects.get(key, []) if self._keeps_versions else []
            self._objects[key] = [*before, Stored(data, status, self._identity())]
            return status

    def remove_version(self, key: str, of: ObjectStatus) -> None:
        """Remove an object as far as it is that one."""
        with self._lock:
            if self.found(key)[1].version != of.version:
                raise ObjectReplaced(self.url(key))
            self.remove(key)

    def keeps(self, key: str) -> bool:
        """Tell whether the object was written since versions are kept."""
        self.found(key)
        return self._keeps_versions

    def versions(self, prefix: str) -> Mapping[str, ObjectVersions]:
        """Return the newest version of each object, and the marker that hides it."""
        found = {}
        for key, versions in self._objects.items():
            if key.startswith(prefix):
                newest = next((one.status for one in reversed(versions) if one.data is not None), None)
                hidden = versions[-1].data is None
                found[key] = ObjectVersions(newest, versions[-1].identity if hidden else None)
        return found

    def uncover(self, name: str, marker: str) -> None:
        """Take a marker away."""
        with self._lock:
            self._objects[name] = [one for one in self._objects[name] if one.identity != marker]

    def _identity(self) -> str:
        return f"{next(self._numbers):032x}"


class MemoryStore(Store):
    """The store of a bucket's root."""

    takes_any_name = is_changeable = has_content_tags = True

    def __init__(self, root: str) -> None:
        self.root = root

    @property
    def _bucket(self) -> MemoryBucket:
        if self.root not in _buckets:
            raise OSError(errno.EIO, "the store answered 404 Not Found (NoSuchBucket)", self.root)
        return _buckets[self.root]

    def status(self, name: str) -> ObjectStatus:
        with self._bucket.call("status", name):
            return self._bucket.found(name)[1]

    def listing(self, prefix: str) -> Listing:
        above = f"{prefix}/" if prefix else ""
        directories, objects = set(), {}
        with self._bucket.call("listing", prefix):
            for key in self._bucket.keys(above):
                name, slash, _ = key[len(above) :].partition("/")
                if slash:
                    directories.add(name)
                elif name:
                    objects[name] = self._bucket.found(key)[1]
        return Listing(frozenset(directories), objects)

    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        with self._bucket.call("read", name):
            data, now = self._bucket.found(name)
            if not now.matches(of):
                raise ObjectReplaced(f"{self.root}/{name}")
            assert 0 <= begin < end <= len(data), "servers refuse an empty range"
            return data[begin:end]

    def write(
        self, name: str, blocks: Iterable[bytes], size: int, replaces: ObjectStatus | None
    ) -> ObjectStatus:
        with self._bucket.call("write", name):
            data = b"".join(blocks)
            assert len(data) == size
            return self._bucket.store(name, data, replaces)

    def remove(self, name: str, of: ObjectStatus) -> None:
        with self._bucket.call("remove", name):
            self._bucket.remove_version(name, of)

    def copy(self, name: str, to: str) -> None:
        with self._bucket.call("copy", name):
            self._bucket.store(to, self._bucket.found(name)[0])

    def keeps_version(self, name: str) -> bool:
        return self._bucket.keeps(name)

    def older_versions(self) -> OlderVersions:
        return self._bucket

    def clock(self) -> float:
        return self._bucket.clock()


@contextmanager
def memory_stores() -> Iterator[None]:
    """Have ckpttool find such stores behind ``mem://``."""
    with patch.object(remote, "STORES", {**remote.STORES, SCHEME: MemoryStore}):
        remote.forget()
        yield
        remote.forget()
        _buckets.clear()

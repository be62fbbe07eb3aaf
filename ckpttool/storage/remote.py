"""URLs of stores: the store of a URL, the status of an object, and the entries of a directory.

A store takes milliseconds for a request, where a disk takes microseconds. So answers are cached for a while:
statuses of objects, and listings, after which no name in the directory is requested again. Bytes are always
read of the version that the cached status is of.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import filterfalse
from typing import NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

from ckpttool.core.errors import CheckpointError, UsageError, from_os_error
from ckpttool.core.urls import ODD, plain_url, store_root
from ckpttool.storage.checksums import StoredChecksums
from ckpttool.storage.http_requests import CONTROL, is_askable
from ckpttool.storage.s3_store import S3Store
from ckpttool.storage.stores import BucketStore, ObjectStatus, Store, WebStore

REMEMBERED_SECONDS = 30.0
"""Lifetime of cached answers. Before an object is changed or removed, it is requested again, and reads are of
the version that was seen."""
MAX_REMEMBERED = 1_000_000
MAX_DIRECTORIES = 20_000
"""Maximum number of directories listed in one command, since a server may invent new ones without end."""
STORES: Mapping[str, Callable[[str], Store]] = {
    **dict.fromkeys(("s3", "s3a"), S3Store),
    **dict.fromkeys(("gs", "az", "azure", "abfs", "abfss", "adl"), BucketStore),
    **dict.fromkeys(("http", "https"), WebStore),
}
"""Store constructors by URL scheme; fsspec serves all other schemes."""
_NEVER = -REMEMBERED_SECONDS, None
_FILE, _DIRECTORY = stat.S_IFREG | 0o444, stat.S_IFDIR | 0o555


class UrlStatus(NamedTuple):
    """Status of a URL; ``object`` is None for a directory."""

    status: os.stat_result
    object: ObjectStatus | None


class RemoteEntry(NamedTuple):
    """Entry of a directory in a store, with the interface of ``os.DirEntry``."""

    name: str
    path: str
    known: UrlStatus

    def is_symlink(self) -> bool:
        return False

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.known.object is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.known.object is None

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.known.status


_known: dict[str, tuple[float, UrlStatus | None]] = {}
"""Cached statuses by URL, with the times of the requests; None if a URL has nothing."""
_listed: dict[str, tuple[float, list[RemoteEntry]]] = {}
"""Cached listings by URL, with the times of the requests."""
_failures: list[tuple[str, OSError]] = []
"""Failed requests by URL, in order."""
_lock = threading.Lock()


def forget() -> None:
    """Discard all cached answers, and the stores themselves, which have read the environment."""
    with _lock:
        _known.clear()
        _listed.clear()
    _store.cache_clear()
    _repository.cache_clear()


def forget_at(url: str) -> None:
    """Discard cached answers about a URL and its parent directories, after a change."""
    # The directories above change with an object: the first one in it makes a directory exist.
    url = _plain(url)
    with _lock:
        while url:
            _known.pop(url, None)
            _listed.pop(url, None)
            url = "" if url == store_root(url) else os.path.dirname(url)


def cached_status(url: str) -> UrlStatus:
    """Return the status of a URL.

    Raises:
        FileNotFoundError: The URL has no object and no directory.
        OSError: The store doesn't answer.
    """
    url = _plain(url)
    with _lock:
        asked, known = _known.get(url, _NEVER)
        was_listed = os.path.dirname(url) in _listed
    if not _is_recent(asked) and was_listed:
        # One listing has the statuses of a thousand names, each of which would take a request.
        entries(os.path.dirname(url))
        with _lock:
            asked, known = _known.get(url, _NEVER)
        if not _is_recent(asked):  # its directory has no such entry
            asked, known = time.monotonic(), None
    if not _is_recent(asked):
        known = _ask(url)
        _remember({url: known})
    if known is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    return known


def entries(url: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: It doesn't exist, or is an object.
        OSError: The store doesn't answer.
    """
    url = _plain(url)
    with _lock:
        asked, found = _listed.get(url, (-REMEMBERED_SECONDS, []))
    if not _is_recent(asked):
        if len(_listed) >= MAX_DIRECTORIES:
            reason = f"more than {MAX_DIRECTORIES:,} directories (name one of them, or use --max-depth)"
            raise OSError(errno.EFBIG, reason, url)
        found = _list(url)
        _remember({entry.path: entry.known for entry in found})
        # Set after the entries: from now on, ``cached_status`` takes a name that isn't cached for missing.
        with _lock:
            _listed[url] = time.monotonic(), found
    if not found and cached_status(url).object is not None:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), url)
    return cast("list[os.DirEntry[str]]", found)


@contextmanager
def recording_failures(url: str) -> Iterator[None]:
    """Record a failed request for a URL; see ``raising_failed_requests``."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        with _lock:
            _failures.append((url, error))
        raise


@contextmanager
def raising_failed_requests(directory: str) -> Iterator[None]:
    """Raise, at the end, the first failed request below a directory."""
    # Readers report much of what can't be read as damage of the checkpoint. A failure of the network isn't,
    # so it replaces their result, or their error.
    with _lock:
        count = len(_failures)
    try:
        yield
    except CheckpointError:
        _raise_failure(count, directory)
        raise
    _raise_failure(count, directory)


def _raise_failure(count: int, directory: str) -> None:
    """Raise the first failure below a directory after the first ``count`` ones."""
    with _lock:
        failed = next((one for one in _failures[count:] if one[0].startswith(directory)), None)
    if failed is not None:
        raise from_os_error(failed[1], failed[0]) from failed[1]


def checksums_of(url: str) -> StoredChecksums:
    """Return the checksums that a store keeps of an object.

    Raises:
        FileNotFoundError: The object doesn't exist.
        OSError: The store doesn't answer.
    """
    found = cached_status(url).object
    if found is None:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), url)
    store, name = store_at(url)
    return store.checksums(name, found)


def _plain(url: str) -> str:
    """Return a URL in its canonical spelling; raise FileNotFoundError if ``..`` leaves the store."""
    plain = plain_url(url) if "/." in url or "//" in url.partition("://")[2] else url.rstrip("/")
    if store_root(plain) != store_root(url):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    return plain


def _is_recent(asked: float) -> bool:
    return time.monotonic() - asked < REMEMBERED_SECONDS


def _remember(answers: Mapping[str, UrlStatus | None]) -> None:
    with _lock:
        if len(_known) + len(answers) > MAX_REMEMBERED:
            _known.clear()
            _listed.clear()
        now = time.monotonic()
        _known.update((url, (now, known)) for url, known in answers.items())


def _ask(url: str) -> UrlStatus | None:
    # A store has no directories. One exists if its listing isn't empty, which takes a second request.
    store, name = store_at(url)
    if not name:
        return _directory(url)
    with recording_failures(url):
        try:
            return _object(url, store.status(name))
        except FileNotFoundError:
            listing = store.listing(name)
            return _directory(url) if listing.directories or listing.objects else None


def _list(url: str) -> list[RemoteEntry]:
    store, name = store_at(url)
    with recording_failures(url):
        listing = store.listing(name)
    if both := sorted(listing.directories & listing.objects.keys()):
        raise OSError(errno.ENOTSUP, f"{both[0]} is both an object and a directory", url)
    # Names with ``?``, ``#`` or control characters can't be a part of a URL. They are shown percent-encoded
    # after ``ODD``, and ``store_at`` decodes them again.
    paths = {name: f"{url}/{name}" for name in (*listing.directories, *listing.objects)}
    for name in filterfalse(is_askable, tuple(paths)):
        paths[name] = f"{url}/{ODD}{quote(name, safe='')}"
    known = {paths[name]: _directory(paths[name]) for name in listing.directories}
    known |= {paths[name]: _object(paths[name], one) for name, one in listing.objects.items()}
    return [RemoteEntry(path.rpartition("/")[2], path, one) for path, one in known.items()]


def _object(url: str, found: ObjectStatus) -> UrlStatus:
    """Return an object with the status of a file."""
    # With hashes of version and store as inode and device, code that compares the identities of files notices
    # a replaced object, too.
    seconds = found.modified_ns / 1e9
    row = (_FILE, _number(f"{url} {found.version}"), _number(store_root(url)), 1, 0, 0, found.size)
    times = {"st_mtime": seconds, "st_mtime_ns": found.modified_ns, "st_ctime_ns": found.modified_ns}
    return UrlStatus(os.stat_result((*row, int(seconds), int(seconds), int(seconds)), times), found)


def _directory(url: str) -> UrlStatus:
    row = (_DIRECTORY, _number(url), _number(store_root(url)), 1, 0, 0, 0, 0, 0, 0)
    return UrlStatus(os.stat_result(row, {"st_mtime": 0.0, "st_mtime_ns": 0, "st_ctime_ns": 0}), None)


def _number(text: str) -> int:
    # Seven bytes fit the signed 64-bit integers that inodes are stored in.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def store_at(url: str) -> tuple[Store, str]:
    """Return the store of a URL, and the name of the object in it; empty for the store itself.

    Raises:
        UsageError: The URL can't be read.
        MissingPackage: The package for such stores isn't installed.
        OSError: The store can't be asked for an object of this name.
    """
    parts = url.split("/")
    odd = [unquote(part.removeprefix(ODD)) for part in parts if part.startswith(ODD)]
    require_plain("/".join(part for part in parts if not part.startswith(ODD)))
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "hf":
        from ckpttool.storage.hub import hub_place

        *repository, path = hub_place(rest)
        return _repository(*repository), path
    host, _, name = rest.partition("/")
    store = _store(f"{scheme.lower()}://{host}")
    if not odd:
        return store, name.strip("/")
    if not store.takes_any_name or not {os.curdir, os.pardir}.isdisjoint(odd):
        raise OSError(errno.EINVAL, f"its key {odd[-1]!r} can't be requested", url)
    names = name.split("/")
    return store, "/".join(unquote(one.removeprefix(ODD)) if one.startswith(ODD) else one for one in names)


def require_plain(url: str) -> None:
    """Raise UsageError if a URL has credentials, which would be shown, or a part that isn't sent."""
    try:
        parts = urlsplit(url)
        hostname, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"not a URL: {error}") from error
    del port
    if parts.username is not None or parts.password is not None:
        hint = "configure them as for the store's own tools"
        raise UsageError(f"{parts.scheme}://…@{hostname}: credentials in a URL would be shown ({hint})")
    if parts.query or parts.fragment:
        raise UsageError(f"{url.partition('?')[0].partition('#')[0]}: a URL with ? or # is not supported")
    if not parts.netloc:
        raise UsageError(f"{url}: no bucket or host")
    if CONTROL.search(url):
        raise UsageError(f"{url}: a URL with control characters is not supported")


@cache
def _repository(kind: str, name: str, revision: str) -> Store:
    from ckpttool.storage.hub import HubStore

    return HubStore(kind, name, revision)


@cache
def _store(root: str) -> Store:
    scheme = root.partition("://")[0]
    if scheme in STORES:
        return STORES[scheme](root)
    from ckpttool.storage.fsspec_store import FsspecStore

    return FsspecStore(root)

"""Object stores: what lies at a URL, what a directory there holds, and bytes of objects by ranges.

A store answers in milliseconds what a disk does in microseconds. So what it said is remembered for a while:
the status of each object, and that a directory was listed, after which nothing in it is asked for again.
Bytes are asked of the version of an object that its status was of.

All failures are the ``OSError`` that a file system would raise, with what the store answered.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

from ckpttool.core.errors import MissingPackage, UsageError, from_os_error
from ckpttool.io.fs import normpath, store_root

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ObstoreStore

REMEMBERED_SECONDS = 30.0
"""How long what a store said is believed; whatever is changed or removed is asked about again, and whatever
is read has the version that was seen."""
MAX_REMEMBERED = 1_000_000
_RETRIES = 5
_RETRY_SECONDS = 60
_TIMEOUT_SECONDS, _CONNECT_SECONDS = 60, 10
_LEAST_PART = 1 << 24
_MOST_PARTS = 10_000
"""As many parts may an object of S3 have."""
PARTS_AT_ONCE = 6
_OBSTORE_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
_FILE, _DIRECTORY = stat.S_IFREG | 0o444, stat.S_IFDIR | 0o555
_ANSWER = re.compile(r"status code: (\d{3} ?[A-Za-z -]*)(?::[^<]*(?:<.*?<Code>(\w+)</Code>)?)?", re.DOTALL)
_DEBUG = re.compile(r"\s*Debug source:.*", re.DOTALL)


class ObjectStatus(NamedTuple):
    """What a store says of an object: its size in bytes, when it was written, and its version."""

    size: int
    modified_ns: int
    version: str

    def matches(self, other: ObjectStatus) -> bool:
        """Tell whether both are of one version; listings and headers round times differently."""
        if self.version or other.version:
            return (self.size, self.version) == (other.size, other.version)
        return self.size == other.size and abs(self.modified_ns - other.modified_ns) < 1_000_000_000


class Listing(NamedTuple):
    """What lies directly below a prefix, by its last name."""

    directories: frozenset[str]
    objects: Mapping[str, ObjectStatus]


class Store(ABC):
    """Something that holds objects under names; all raise ``OSError``.

    Attributes:
        root: The URL that the names are below, without a slash at its end.
    """

    root: str

    @abstractmethod
    def status(self, name: str) -> ObjectStatus:
        """Return what is said of an object; ``FileNotFoundError`` if there is none."""

    @abstractmethod
    def listing(self, prefix: str) -> Listing:
        """Return what lies directly below a prefix, which has no slash at its end."""

    @abstractmethod
    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        """Return bytes of an object, as far as it still is what its status says.

        Raises:
            Replaced: It is another one now.
        """

    def write(
        self, name: str, blocks: Iterable[bytes], size: int, replaces: ObjectStatus | None
    ) -> ObjectStatus:
        """Make an object of so many bytes, all of it or nothing, and return what it is.

        Args:
            name: Its name.
            blocks: Its bytes; if that raises, nothing was written.
            size: How many they are.
            replaces: What it takes the place of; None if nothing may be there.

        Raises:
            FileExistsError: Something is there.
            Replaced: What it was to replace is another now, or gone.
        """
        raise OSError(errno.EROFS, "nothing can be written there", f"{self.root}/{name}")

    def require_replaceable(self, name: str, replaces: ObjectStatus | None) -> None:
        """Require that at a name there is what may be replaced, or nothing; see ``write``."""
        try:
            found = self.status(name)
        except FileNotFoundError:
            found = None
        if replaces is None and found is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.root}/{name}")
        if replaces is not None and (found is None or not found.matches(replaces)):
            raise Replaced(f"{self.root}/{name}")


class Replaced(OSError):
    """An object is another one than the one that was asked about."""

    def __init__(self, url: str) -> None:
        super().__init__(errno.ESTALE, "it was replaced while it was read", url)


# What is at a URL -----------------------------------------------------------------------------------


class Known(NamedTuple):
    """What is at a URL; ``object`` is None for a directory."""

    status: os.stat_result
    object: ObjectStatus | None


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """An entry of a directory in a store, as ``os.scandir`` has those of this machine."""

    name: str
    path: str
    known: Known

    def is_symlink(self) -> bool:
        return False

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.known.object is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.known.object is None

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.known.status


_known: dict[str, tuple[float, Known | None]] = {}
"""When a store was asked what is at a URL, and what it said; None for nothing."""
_listed: dict[str, tuple[float, list[RemoteEntry]]] = {}
"""When the directory at a URL was listed, and what lies in it."""
_failures: list[tuple[str, OSError]] = []
"""What the stores failed to answer, by URL."""
_lock = threading.Lock()


def forget() -> None:
    """Ask the stores again from now on, where the environment says that they are."""
    with _lock:
        _known.clear()
        _listed.clear()
        _failures.clear()
    _store.cache_clear()


def forget_at(url: str) -> None:
    """Ask again what is at a URL, and in the directories above it: it was written or removed."""
    url = _plain(url)
    with _lock:
        while url:
            _known.pop(url, None)
            _listed.pop(url, None)
            url = "" if url == store_root(url) else os.path.dirname(url)


def look_at(url: str) -> Known:
    """Return what is at a URL.

    Raises:
        FileNotFoundError: Nothing is.
        OSError: The store doesn't say.
    """
    url = _plain(url)
    with _lock:
        asked, known = _known.get(url, (-REMEMBERED_SECONDS, None))
        if not _is_recent(asked) and _is_recent(
            _listed.get(os.path.dirname(url), (-REMEMBERED_SECONDS, []))[0]
        ):
            asked = time.monotonic()  # its directory has no such entry
    if not _is_recent(asked):
        known = _ask(url)
        _remember({url: known})
    if known is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    return known


def entries(url: str) -> list[os.DirEntry[str]]:
    """Return what lies in a directory.

    Raises:
        FileNotFoundError, NotADirectoryError: There is none.
        OSError: The store doesn't say.
    """
    url = _plain(url)
    with _lock:
        asked, found = _listed.get(url, (-REMEMBERED_SECONDS, []))
    if not _is_recent(asked):
        asked = time.monotonic()
        found = _list(url)
        _remember({entry.path: entry.known for entry in found})
        with _lock:  # after the entries: what a listed directory hasn't is not there
            _listed[url] = asked, found
    if not found and look_at(url).object is not None:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), url)
    return cast("list[os.DirEntry[str]]", found)


@contextmanager
def noted_failures(url: str) -> Iterator[None]:
    """Note that a store failed to answer a question about a URL."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        with _lock:
            _failures.append((url, error))
        raise


@contextmanager
def answers_below(directory: str) -> Iterator[None]:
    """Raise at the end what a store failed to answer meanwhile of what is below a directory.

    Readers take much of what can't be read for damage. That somebody else is out of order is none.
    """
    with _lock:
        count = len(_failures)
    try:
        yield
    finally:
        with _lock:
            failed = next((one for one in _failures[count:] if one[0].startswith(directory)), None)
        if failed is not None:
            raise from_os_error(failed[1], failed[0]) from failed[1]


def _plain(url: str) -> str:
    """Return a URL in its one spelling."""
    plain = normpath(url) if "/." in url or "//" in url.partition("://")[2] else url.rstrip("/")
    if store_root(plain) != store_root(url):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    return plain


def _is_recent(asked: float) -> bool:
    return time.monotonic() - asked < REMEMBERED_SECONDS


def _remember(answers: Mapping[str, Known | None]) -> None:
    with _lock:
        if len(_known) + len(answers) > MAX_REMEMBERED:
            _known.clear()
            _listed.clear()
        now = time.monotonic()
        _known.update((url, (now, known)) for url, known in answers.items())


def _ask(url: str) -> Known | None:
    store, name = store_at(url)
    if not name:
        return _directory(url)
    with noted_failures(url):
        try:
            return _object(url, store.status(name))
        except FileNotFoundError:
            listing = store.listing(name)
            return _directory(url) if listing.directories or listing.objects else None


def _list(url: str) -> list[RemoteEntry]:
    store, name = store_at(url)
    with noted_failures(url):
        listing = store.listing(name)
    if both := sorted(listing.directories & listing.objects.keys()):
        raise OSError(errno.ENOTSUP, f"{both[0]} is both an object and a directory", url)
    paths = {name: f"{url}/{name}" for name in (*listing.directories, *listing.objects)}
    found = [RemoteEntry(name, paths[name], _directory(paths[name])) for name in listing.directories]
    objects = listing.objects.items()
    return [*found, *(RemoteEntry(name, paths[name], _object(paths[name], one)) for name, one in objects)]


def _object(url: str, found: ObjectStatus) -> Known:
    """Return an object with the status of a file, whose inode and device tell its version from others."""
    seconds = found.modified_ns / 1e9
    row = (_FILE, _number(f"{url} {found.version}"), _number(store_root(url)), 1, 0, 0, found.size)
    times = {"st_mtime": seconds, "st_mtime_ns": found.modified_ns, "st_ctime_ns": found.modified_ns}
    return Known(os.stat_result((*row, int(seconds), int(seconds), int(seconds)), times), found)


def _directory(url: str) -> Known:
    row = (_DIRECTORY, _number(url), _number(store_root(url)), 1, 0, 0, 0, 0, 0, 0)
    return Known(os.stat_result(row, {"st_mtime": 0.0, "st_mtime_ns": 0, "st_ctime_ns": 0}), None)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


# Stores ---------------------------------------------------------------------------------------------


def store_at(url: str) -> tuple[Store, str]:
    """Return the store of a URL, and the name there of what it leads to; it is empty for the store itself.

    Raises:
        UsageError: It isn't a URL that can be read.
        MissingPackage: What talks to such a store isn't installed.
    """
    require_plain(url)
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "hf":
        from ckpttool.io.hub import hub_store

        return hub_store(rest)
    host, _, name = rest.partition("/")
    return _store(f"{scheme.lower()}://{host}"), name.strip("/")


def require_plain(url: str) -> None:
    """Require that a URL has nothing secret in it, which would be shown, and nothing that isn't sent."""
    try:
        parts = urlsplit(url)
        hostname, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"not a URL: {error}") from error
    del port
    if parts.username is not None or parts.password is not None:
        hint = "set them as the store's own tools have them"
        raise UsageError(f"{parts.scheme}://…@{hostname}: a URL with credentials would show them ({hint})")
    if parts.query or parts.fragment:
        raise UsageError(f"{url.partition('?')[0].partition('#')[0]}: a URL with ? or # can't be read")
    if not parts.netloc:
        raise UsageError(f"{url}: names no bucket or host")


@cache
def _store(root: str) -> Store:
    scheme = root.partition("://")[0]
    if scheme in _OBSTORE_SCHEMES or scheme in ("http", "https"):
        return BucketStore(root) if scheme in _OBSTORE_SCHEMES else WebStore(root)
    from ckpttool.io.fsspec_store import FsspecStore

    return FsspecStore(root)


class BucketStore(Store):
    """A bucket of Amazon S3, Google Cloud Storage or Azure, or of what speaks as they do.

    Source: https://developmentseed.org/obstore
    """

    def __init__(self, root: str, headers: Mapping[str, str] | None = None) -> None:
        """Make ready to ask; credentials come from where the store's own tools have them."""
        self.root = root
        self._store: ObstoreStore = _obstore_store(root, headers or {})

    def status(self, name: str) -> ObjectStatus:
        with _as_os_errors(f"{self.root}/{name}"):
            return _object_status(self._store.head(name))

    def listing(self, prefix: str) -> Listing:
        with _as_os_errors(f"{self.root}/{prefix}"):
            found = self._store.list_with_delimiter(prefix or None)
        # An object whose name ends with a slash stands for a directory in some consoles.
        objects = {
            os.path.basename(one["path"]): _object_status(one)
            for one in found["objects"]
            if one["path"].strip("/") != prefix
        }
        return Listing(frozenset(os.path.basename(one) for one in found["common_prefixes"]), objects)

    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        found, data = self.read_range(name, begin, end, of.version)
        if not found.matches(of):
            raise Replaced(f"{self.root}/{name}")
        return data

    def write(
        self, name: str, blocks: Iterable[bytes], size: int, replaces: ObjectStatus | None
    ) -> ObjectStatus:
        import obstore

        url, part = f"{self.root}/{name}", part_size(size)
        with _as_os_errors(url):
            if size <= part:
                data = b"".join(blocks)
                mode: Any = "create" if replaces is None else self._update_of(name, replaces)
                answer = obstore.put(self._store, name, data, mode=mode, use_multipart=False)
            else:  # obstore has no condition for what comes in parts: so there is a look just before the end
                parts = _from_a_thread(self._guarded(blocks, name, replaces))
                options: Any = {"chunk_size": part, "max_concurrency": PARTS_AT_ONCE}
                answer = obstore.put(self._store, name, parts, use_multipart=True, **options)
        found = self.status(name)
        if found.size != size or (answer["e_tag"] and answer["e_tag"] != found.version):
            raise Replaced(url)
        return found

    def _update_of(self, name: str, replaces: ObjectStatus) -> Any:
        """Return the condition that an object is the one that is to be replaced."""
        found: Mapping[str, Any] = self._store.head(name)
        if not _object_status(found).matches(replaces):
            raise Replaced(f"{self.root}/{name}")
        return {key: found[key] for key in ("e_tag", "version") if found.get(key)}

    def _guarded(self, blocks: Iterable[bytes], name: str, replaces: ObjectStatus | None) -> Iterator[bytes]:
        yield from blocks
        self.require_replaceable(name, replaces)

    def read_range(self, name: str, begin: int, end: int, version: str = "") -> tuple[ObjectStatus, bytes]:
        """Return bytes of an object, and what it is now; ``Replaced`` if that isn't the version."""
        with _as_os_errors(f"{self.root}/{name}", f"bytes {begin}..{end}"):
            options: Any = {"range": (begin, end)}
            if version:
                options["if_match"] = version
            answer = self._store.get(name, options=options)
            return _object_status(answer.meta), bytes(answer.bytes())


def _from_a_thread(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks that are made in a thread: in the one from which obstore takes them, it can't be asked."""
    from concurrent.futures import ThreadPoolExecutor

    iterator = iter(blocks)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, None)
        while (block := coming.result()) is not None:
            coming = thread.submit(next, iterator, None)
            yield block


def part_size(size: int) -> int:
    """Return how many bytes each part has of an object that is written, the last one perhaps fewer."""
    return max(_LEAST_PART, -(-size // _MOST_PARTS))


class WebStore(BucketStore):
    """A web server: its files can be read, and not listed."""

    write = Store.write

    def listing(self, prefix: str) -> Listing:
        return Listing(frozenset(), {})


def _obstore_store(root: str, headers: Mapping[str, str]) -> ObstoreStore:
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise MissingPackage(
            root, "reading from stores needs obstore", expected="pip install obstore"
        ) from error
    options: Any = {
        "timeout": timedelta(seconds=_TIMEOUT_SECONDS),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        "user_agent": "ckpttool",
        "default_headers": dict(headers),
    }
    if root.startswith("http:") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        options["allow_http"] = True
    retries: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    with _as_os_errors(root):
        return from_url(root, client_options=options, retry_config=retries)


def _object_status(found: Mapping[str, Any]) -> ObjectStatus:
    modified: datetime = found["last_modified"]
    version = found.get("version") or found.get("e_tag") or ""
    return ObjectStatus(
        found["size"], int(modified.timestamp() * 1_000_000_000), found.get("e_tag") or version
    )


@contextmanager
def _as_os_errors(url: str, where: str = "") -> Iterator[None]:
    """Raise what obstore says as a file system would."""
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotFoundError,
        NotSupportedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    place = f"{where}: " if where else ""
    try:
        yield
    except (FileNotFoundError, NotFoundError) as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
    except (FileExistsError, AlreadyExistsError) as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url) from error
    except PreconditionError as error:
        raise Replaced(url) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        reason = f"{place}{_answer(error)}"
        raise OSError(errno.EACCES, reason, url) from error
    except NotSupportedError as error:
        reason = f"{place}the server doesn't send parts of it (download it first)"
        raise OSError(errno.ENOTSUP, reason, url) from error
    except (BaseError, ValueError) as error:
        raise OSError(errno.EIO, f"{place}{_answer(error)}", url) from error


def _answer(error: Exception) -> str:
    """Return what a store answered, in a line: obstore's own text has the request and a dump of the error."""
    text = _DEBUG.sub("", str(error))
    if answer := _ANSWER.search(text):
        code = f" ({answer[2]})" if answer[2] else ""
        return f"the store answered {answer[1].strip()}{code}"
    if "body error" in text:
        return "the answer broke off"
    return " ".join(text.split())[:300] or type(error).__name__

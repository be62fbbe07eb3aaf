"""Interface of object stores, and the buckets that obstore supports.

All failures are the ``OSError`` that a file system would raise, with the store's answer in the message.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckpttool.core.errors import MissingPackage, UsageError
from ckpttool.core.urls import without_signatures
from ckpttool.storage.checksums import Checksum, StoredChecksums
from ckpttool.storage.http_requests import (
    CONNECT_SECONDS,
    RETRIES,
    TIMEOUT_SECONDS,
    name_below,
    require_sendable,
    send_request,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ObstoreStore

_GOOGLE_ENDPOINT = "https://storage.googleapis.com"
MAX_SIZE = 1 << 60
"""Limit on the size of an object that a server may state, in bytes."""
_RETRY_SECONDS = 60
_LISTING_SECONDS = 120
"""Limit on a whole listing, of which obstore returns all pages at once."""
_AWS_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "token",
    "region": "region",
    "endpoint_url": "endpoint",
}
"""Keys of obstore's configuration by those in AWS's files."""
_LEAST_PART = 1 << 24
_MOST_PARTS = 10_000
"""Limit of S3 on the number of parts of an object."""
PARTS_AT_ONCE = 6
_ANSWER = re.compile(r"status code: (\d{3} ?[A-Za-z -]*)(?::[^<]*(?:<.*?<Code>(\w+)</Code>)?)?", re.DOTALL)
_DEBUG = re.compile(r"\s*Debug source:.*", re.DOTALL)
_METADATA = re.compile("/latest/api/token|/computeMetadata/|/metadata/identity/")
"""Addresses of a cloud machine's metadata service, which is asked if no credentials are configured."""


class ObjectStatus(NamedTuple):
    """Status of an object: its size in bytes, time of writing, and version."""

    size: int
    modified_ns: int
    version: str

    def matches(self, other: ObjectStatus) -> bool:
        """Return whether both are of one version."""
        # Without versions, times are compared, which listings and headers round differently.
        if self.version or other.version:
            return (self.size, self.version) == (other.size, other.version)
        return self.size == other.size and abs(self.modified_ns - other.modified_ns) < 1_000_000_000


class Listing(NamedTuple):
    """Prefixes and objects directly below a prefix, by their last names."""

    directories: frozenset[str]
    objects: Mapping[str, ObjectStatus]


class ObjectVersions(NamedTuple):
    """An object's newest version and its delete marker.

    Attributes:
        newest: Status of the newest version; None if the bucket keeps none.
        marker: Version of the delete marker; None if the object isn't deleted.
    """

    newest: ObjectStatus | None
    marker: str | None


class OlderVersions(Protocol):
    """Older versions of the objects in a bucket. All methods raise ``OSError``."""

    def versions(self, prefix: str) -> Mapping[str, ObjectVersions]:
        """Return the objects whose names begin with a prefix, deleted ones included."""

    def uncover(self, name: str, marker: str) -> None:
        """Remove a delete marker, which restores the object."""


class Store(ABC):
    """Objects by name; all methods raise ``OSError``.

    Attributes:
        root: URL that the names are relative to, without a trailing slash.
    """

    root: str

    @abstractmethod
    def status(self, name: str) -> ObjectStatus:
        """Return the status of an object; ``FileNotFoundError`` if there is none."""

    @abstractmethod
    def listing(self, prefix: str) -> Listing:
        """Return the listing of a prefix, given without a trailing slash."""

    @abstractmethod
    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        """Return bytes of an object.

        Raises:
            ObjectReplaced: It no longer has the given status.
        """

    def write(
        self, name: str, blocks: Iterable[bytes], size: int, replaces: ObjectStatus | None
    ) -> ObjectStatus:
        """Write an object of ``size`` bytes, all or nothing, and return its status.

        Args:
            name: Name of the object.
            blocks: Its bytes; if iterating them raises, nothing is written.
            size: Number of bytes.
            replaces: Status of the object that it replaces; None if the name has to be free.

        Raises:
            FileExistsError: The name isn't free.
            ObjectReplaced: The object to replace has changed, or is missing.
        """
        raise OSError(errno.EROFS, "nothing can be written there", f"{self.root}/{name}")

    def require_replaceable(self, name: str, replaces: ObjectStatus | None) -> None:
        """Require that a name has the object to be replaced, or none; see ``write``."""
        try:
            found = self.status(name)
        except FileNotFoundError:
            found = None
        if replaces is None and found is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.root}/{name}")
        if replaces is not None and (found is None or not found.matches(replaces)):
            raise ObjectReplaced(f"{self.root}/{name}")

    def remove(self, name: str, of: ObjectStatus) -> None:
        """Remove an object.

        Raises:
            ObjectReplaced: It no longer has the given status.
            FileNotFoundError: It is missing.
        """
        raise OSError(errno.EROFS, "nothing can be removed there", f"{self.root}/{name}")

    def checksums(self, name: str, of: ObjectStatus) -> StoredChecksums:
        """Return the checksums that the store keeps of an object, without reading it.

        Raises:
            ObjectReplaced: It no longer has the given status.
        """
        return StoredChecksums(reason="this store has no checksums")

    @property
    def takes_any_name(self) -> bool:
        """Whether objects can be requested whose names can't be a part of a URL, such as those with ``?``."""
        return False

    @property
    def can_list(self) -> bool:
        """Whether names can be listed."""
        return True

    @property
    def has_content_tags(self) -> bool:
        """Whether an ETag that has the form of an MD5 is computed of the bytes."""
        return False

    @property
    def is_changeable(self) -> bool:
        """Whether objects can be removed, copied, and written conditionally."""
        return False

    def copy(self, name: str, to: str) -> None:
        """Copy an object inside the store, replacing any object of the new name."""
        raise OSError(errno.EROFS, "nothing can be written there", f"{self.root}/{to}")

    def keeps_version(self, name: str) -> bool:
        """Return whether an object has a version that is kept when the object is removed."""
        return False

    def older_versions(self) -> OlderVersions:
        """Return access to older versions.

        Raises:
            MissingPackage: The package that lists versions isn't installed.
            OSError: The store can't list versions.
        """
        raise OSError(errno.ENOTSUP, "this store can't list older versions", self.root)

    def unfinished_uploads(self, prefix: str) -> tuple[int, int | None] | None:
        """Return the number of unfinished uploads below a prefix, and their bytes if known; None if 0."""
        return None

    def clock(self) -> float:
        """Return the store's time in seconds since 1970; this machine's if the store has none."""
        return time.time()


class ObjectReplaced(OSError):
    """An object isn't the version that was seen before."""

    def __init__(self, url: str) -> None:
        super().__init__(errno.ESTALE, "it was replaced while it was read", url)


class BucketStore(Store):
    """Bucket of Amazon S3, Google Cloud Storage or Azure, or of a compatible server.

    Source: https://developmentseed.org/obstore
    """

    def __init__(self, root: str, headers: Mapping[str, str] | None = None) -> None:
        """Configure a client; credentials are looked for as by the store's own tools."""
        self.root = root
        self._store: ObstoreStore = obstore_store(root, headers or {})

    def status(self, name: str) -> ObjectStatus:
        with as_os_errors(f"{self.root}/{name}"):
            return _object_status(self._store.head(name))

    def listing(self, prefix: str) -> Listing:
        url = f"{self.root}/{prefix}"
        with as_os_errors(url):
            found = _listed_in_time(self._store, prefix or None, url)
        # Some consoles make an object whose name ends with a slash for a directory.
        objects = {
            name_below(one["path"], prefix, url): _object_status({**one, "e_tag": _quoted(one["e_tag"])})
            for one in found["objects"]
            if one["path"].strip("/") != prefix
        }
        return Listing(frozenset(name_below(one, prefix, url) for one in found["common_prefixes"]), objects)

    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        found, data = self.read_range(name, begin, end, of.version)
        if not found.matches(of):
            raise ObjectReplaced(f"{self.root}/{name}")
        return data

    def write(
        self, name: str, blocks: Iterable[bytes], size: int, replaces: ObjectStatus | None
    ) -> ObjectStatus:
        import obstore

        # A single request has a condition that the server checks: "create", or the ETag of the object to
        # replace. obstore has none for an upload in parts. It completes the upload after the last block, so
        # ``_guarded`` looks at the name just before that.
        url, part = f"{self.root}/{name}", part_size(size)
        with as_os_errors(url):
            if size <= part:
                data = b"".join(blocks)
                mode: Any = "create" if replaces is None else self._update_of(name, replaces)
                answer = obstore.put(self._store, name, data, mode=mode, use_multipart=False)
            else:
                parts = _from_a_thread(self._guarded(blocks, name, replaces))
                options: Any = {"chunk_size": part, "max_concurrency": PARTS_AT_ONCE}
                answer = obstore.put(self._store, name, parts, use_multipart=True, **options)
        found = self.status(name)
        if found.size != size or (answer["e_tag"] and answer["e_tag"] != found.version):
            raise ObjectReplaced(url)
        return found

    def remove(self, name: str, of: ObjectStatus) -> None:
        url = f"{self.root}/{name}"
        if not self.status(name).matches(of):
            raise ObjectReplaced(url)
        with as_os_errors(url):  # obstore has no condition for it: a change since the status isn't noticed
            self._store.delete(name)

    def _update_of(self, name: str, replaces: ObjectStatus) -> Any:
        """Return the condition that an object is still the one to be replaced."""
        found: Mapping[str, Any] = self._store.head(name)
        if not _object_status(found).matches(replaces):
            raise ObjectReplaced(f"{self.root}/{name}")
        return {key: found[key] for key in ("e_tag", "version") if found.get(key)}

    def _guarded(self, blocks: Iterable[bytes], name: str, replaces: ObjectStatus | None) -> Iterator[bytes]:
        yield from blocks
        self.require_replaceable(name, replaces)

    def checksums(self, name: str, of: ObjectStatus) -> StoredChecksums:
        found = self._stored_checksums(name)
        if found is None:
            return super().checksums(name, of)
        if found.version.strip('"') not in ("", of.version.strip('"')):
            raise ObjectReplaced(f"{self.root}/{name}")
        return found

    def _stored_checksums(self, name: str) -> StoredChecksums | None:
        """Return the checksums that the store keeps of an object; None if it has no request for them."""
        scheme, _, bucket = self.root.partition("://")
        if scheme != "gs":
            return None
        return _checksums_in_google(self._store, bucket, name, f"{self.root}/{name}")

    def read_range(self, name: str, begin: int, end: int, version: str = "") -> tuple[ObjectStatus, bytes]:
        """Return an object's status and a range of its bytes; raise ``ObjectReplaced`` for other versions."""
        with as_os_errors(f"{self.root}/{name}", f"bytes {begin}..{end}"):
            options: Any = {"range": (begin, end)}
            if version:
                options["if_match"] = version
            answer = self._store.get(name, options=options)
            return _object_status(answer.meta), bytes(answer.bytes())

    @property
    def is_changeable(self) -> bool:
        return True

    def copy(self, name: str, to: str) -> None:
        with as_os_errors(f"{self.root}/{name}"):
            self._store.copy(name, to)


def _from_a_thread(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks that are made in a thread, one ahead."""
    # obstore can't be called in the thread in which it takes the blocks, but ``_guarded``
    # has to ask it for a status.
    from concurrent.futures import ThreadPoolExecutor

    iterator = iter(blocks)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, iterator, None)
        while (block := coming.result()) is not None:
            coming = thread.submit(next, iterator, None)
            yield block


def part_size(size: int) -> int:
    """Return the part size for an upload, in bytes; the last part may be smaller."""
    return max(_LEAST_PART, -(-size // _MOST_PARTS))


class WebStore(BucketStore):
    """Web server, whose files can be read, but neither listed nor changed."""

    write, remove, copy = Store.write, Store.remove, Store.copy

    @property
    def can_list(self) -> bool:
        return False

    @property
    def is_changeable(self) -> bool:
        return False

    def listing(self, prefix: str) -> Listing:
        return Listing(frozenset(), {})


def _listed_in_time(store: Any, prefix: str | None, url: str) -> Any:
    """Return obstore's listing of all pages; raise an OSError if it takes too long."""
    # Only the asynchronous call can be cancelled. It runs in a thread, since this one may
    # have an event loop already.
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def listed() -> Any:
        try:
            return await asyncio.wait_for(store.list_with_delimiter_async(prefix), _LISTING_SECONDS)
        except asyncio.TimeoutError as error:
            reason = f"the server's listing takes more than {_LISTING_SECONDS} s"
            raise OSError(errno.EIO, reason, url) from error

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, listed()).result()


def allows_http(root: str) -> bool:
    """Return whether requests to a store may be sent without TLS."""
    return root.startswith("http:") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


def obstore_store(
    root: str, headers: Mapping[str, str], config: Mapping[str, str] | None = None
) -> ObstoreStore:
    """Return obstore's store for a URL, with headers and configuration in addition to the environment's."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        from ckpttool.core.plugins import install_command

        raise MissingPackage(root, "stores need obstore", expected=install_command("cloud")) from error
    options: Any = {
        "timeout": timedelta(seconds=TIMEOUT_SECONDS),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "user_agent": "ckpttool",
        "default_headers": dict(headers),
    }
    if allows_http(root):
        options["allow_http"] = True
    retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    profile = _aws_profile() if root.startswith("s3") else {}
    whole: Any = {**profile, **(config or {})}
    require_sendable(whole.values())
    with as_os_errors(root):
        return from_url(root, config=whole, client_options=options, retry_config=retries)


def _aws_profile() -> dict[str, str]:
    """Return the keys and the region of the user's AWS profile, unless the environment has keys.

    Source: https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-files.html
    """
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    from configparser import Error, RawConfigParser

    profile = os.environ.get("AWS_PROFILE", "default")
    files = {
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"): f"profile {profile}",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"): profile,
    }
    found: dict[str, str] = {}
    for path, section in files.items():
        parser = RawConfigParser()
        try:
            parser.read(os.path.expanduser(path), encoding="utf-8")
        except (Error, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: invalid AWS configuration: {type(error).__name__}") from error
        # Only the section of the default profile has no "profile" before its name in the configuration.
        name = profile if section != profile and profile == "default" else section
        if parser.has_section(name):
            values = parser[name]
            found |= {key: values[name] for name, key in _AWS_KEYS.items() if name in values}
    return found


def _object_status(found: Mapping[str, Any]) -> ObjectStatus:
    # The ETag identifies the content, and conditional requests name it. Only stores without ETags are
    # compared by their own version.
    modified: datetime = found["last_modified"]
    seconds = int(modified.timestamp())  # listings have fractions of a second, HTTP headers don't
    version = found.get("version") or found.get("e_tag") or ""
    return ObjectStatus(found["size"], seconds * 1_000_000_000, found.get("e_tag") or version)


def _quoted(tag: str | None) -> str | None:
    """Return an ETag with quotation marks, as in headers; Azure's listings lack them."""
    return f'"{tag}"' if tag and not tag.endswith('"') else tag


@contextmanager
def as_os_errors(url: str, where: str = "") -> Iterator[None]:
    """Raise obstore's errors as ``OSError``."""
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
        raise ObjectReplaced(url) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        reason = f"{place}{_response_text(error)}"
        raise OSError(errno.EACCES, reason, url) from error
    except NotSupportedError as error:
        reason = f"{place}the server can't send a part of it (download it first)"
        raise OSError(errno.ENOTSUP, reason, url) from error
    except (BaseError, ValueError) as error:
        raise OSError(errno.EIO, f"{place}{_response_text(error)}", url) from error
    except BaseException as error:
        # A panic in obstore's Rust code, for which PyO3 has no class that could be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise OSError(errno.EIO, f"{place}obstore can't send requests with these settings", url) from error


def _response_text(error: Exception) -> str:
    """Return a store's answer in a line."""
    # obstore's text has the request, which may be signed, and a dump of the error.
    text = _DEBUG.sub("", str(error))
    if _METADATA.search(text):
        return "no credentials for this store were found"
    if answer := _ANSWER.search(text):
        code = f" ({answer[2]})" if answer[2] else ""
        return f"the store answered {answer[1].strip()}{code}"
    if "body error" in text:
        return "the response was cut off"
    return without_signatures(" ".join(text.split()))[:300] or type(error).__name__


# Checksums that Google Cloud Storage keeps --------------------------------------------------------------


def _checksums_in_google(store: ObstoreStore, bucket: str, key: str, url: str) -> StoredChecksums:
    """Return the checksums that Google Cloud Storage keeps of an object."""
    from obstore.exceptions import BaseError

    try:
        answer = send_request("HEAD", _google_url(store, bucket, key), url)
    except BaseError:  # its text may contain the address, which is signed
        return StoredChecksums(reason="these credentials can't sign a request for its checksum")
    except OSError:
        return StoredChecksums(reason="the request for its checksum failed")
    if answer.status != 200:
        return StoredChecksums(reason=f"the store answered {answer.status} when asked for its checksum")
    headers = answer.headers
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return StoredChecksums(reason="the store has a checksum of its compressed bytes")
    kept = []
    for one in headers.get("x-goog-hash", "").split(","):  # several headers of one name are joined
        name, _, value = one.strip().partition("=")
        if name in ("crc32c", "md5"):
            try:
                kept.append(Checksum(name, hexadecimal(value)))
            except (binascii.Error, ValueError):
                return StoredChecksums(reason="the store sent an invalid checksum")
    return StoredChecksums(
        tuple(kept), "" if kept else "the store has no checksum of it", headers.get("ETag", "")
    )


def _google_url(store: ObstoreStore, bucket: str, key: str) -> str:
    """Return the URL of an object, signed for a minute unless requests are anonymous."""
    if os.environ.get("GOOGLE_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        from urllib.parse import quote

        endpoint = os.environ.get("GOOGLE_BASE_URL", _GOOGLE_ENDPOINT).rstrip("/")
        return f"{endpoint}/{bucket}/{quote(key)}"
    import obstore

    signer: Any = store  # typed as any store, of which not all can sign
    return str(obstore.sign(signer, "HEAD", key, timedelta(minutes=1)))


def hexadecimal(encoded: str) -> str:
    """Return base64 as hexadecimal digits; raises ``ValueError``."""
    return base64.b64decode(encoded, validate=True).hex()

"""Amazon S3 buckets: objects, checksums, versions and unfinished uploads.

obstore finds credentials, signs and writes. Reads, listings and deletions use presigned URLs, because its own
requests send the session token along redirects, its listings are unbounded and fail as a whole for one
invalid key, and it panics on credentials that no header can carry. What it can't ask for (stored checksums,
versions of objects, unfinished uploads) is asked for with boto3 if that is installed.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html;
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import binascii
import errno
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote_plus

from ckpttool.core.errors import MissingPackage
from ckpttool.storage.checksums import TITLES, Checksum, StoredChecksums
from ckpttool.storage.http_requests import Response, name_below, paged, refusal, require_whole, send_request
from ckpttool.storage.stores import (
    MAX_SIZE,
    BucketStore,
    Listing,
    ObjectReplaced,
    ObjectStatus,
    ObjectVersions,
    OlderVersions,
    allows_http,
    as_os_errors,
    hexadecimal,
    obstore_store,
)

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_SIGNED_SECONDS = 300
_MAX_REFUSAL = 1 << 16
_NO_OBJECT = ".ckpttool-clock"
"""Key that no object has; the response to a request for it states the time nevertheless."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_FRACTION = re.compile(r"\.\d+")
"""Fraction of a second, which HTTP headers lack."""
_MAX_KEY = 1024
"""Maximum length of a key in bytes."""


class _Row(NamedTuple):
    """Row of a listing; ``object`` is None for a common prefix."""

    key: str
    object: ObjectStatus | None


class S3Store(BucketStore):
    """Bucket of Amazon S3 or a compatible server."""

    @property
    def has_content_tags(self) -> bool:
        return True

    @property
    def takes_any_name(self) -> bool:
        return True

    def status(self, name: str) -> ObjectStatus:
        response = self._request("HEAD", name)
        return _status_of(response, response.headers.get("Content-Length"), f"{self.root}/{name}")

    def listing(self, prefix: str) -> Listing:
        url = f"{self.root}/{prefix}"
        if len(prefix.encode()) > _MAX_KEY:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), url)
        directories: set[str] = set()
        objects: dict[str, ObjectStatus] = {}
        for row in paged(lambda token: self._page(prefix, token, url), "", url):
            if row.object is None:
                directories.add(name_below(row.key.removesuffix("/"), prefix, url))
            elif row.key != f"{prefix}/":  # some consoles make such an empty object for a directory
                objects[name_below(row.key, prefix, url)] = row.object
        return Listing(frozenset(directories), objects)

    def _page(self, prefix: str, token: str, url: str) -> tuple[list[_Row], str | None]:
        asked = {"list-type": "2", "encoding-type": "url", "prefix": f"{prefix}/" if prefix else ""}
        if token:
            asked["continuation-token"] = token
        response = send_request("GET", self._listing_address(asked), url)
        if response.status != 200:
            raise refusal(response, url)
        require_whole(response, url)
        return _rows(response.body, url)

    def read_range(self, name: str, begin: int, end: int, version: str = "") -> tuple[ObjectStatus, bytes]:
        # With If-Match, the server refuses (412) to send bytes of another version. A server may ignore the
        # range, and send the whole (200), or send another one: neither is accepted.
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if version:
            headers["If-Match"] = version
        url, where = f"{self.root}/{name}", f"bytes {begin}..{end}"
        response = self._request("GET", name, headers, max(end - begin, _MAX_REFUSAL), where)
        if response.status != 206:
            reason = f"{where}: the server can't send a part of it (download it first)"
            raise OSError(errno.ENOTSUP, reason, url)
        sent = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if sent is None or (int(sent[1]), int(sent[2])) != (begin, end - 1):
            raise OSError(errno.EIO, f"{where}: the server sent another part", url)
        if len(response.body) != end - begin:
            raise OSError(errno.EIO, f"{where}: the server sent {len(response.body):,} bytes or more", url)
        return _status_of(response, sent[3], url), response.body

    def _update_of(self, name: str, replaces: ObjectStatus) -> Any:
        found = self.status(name)
        if not found.matches(replaces):
            raise ObjectReplaced(f"{self.root}/{name}")
        return {"e_tag": found.version}

    def remove(self, name: str, of: ObjectStatus) -> None:
        """Delete an object if its ETag still matches."""
        # The status is requested before, since a server may ignore the condition of a deletion.
        # One that answers 501 doesn't support it, and is asked again without: then the moment
        # since the status isn't covered.
        if not self.status(name).matches(of):
            raise ObjectReplaced(f"{self.root}/{name}")
        try:
            self._request("DELETE", name, {"If-Match": of.version})
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            self._request("DELETE", name)

    def keeps_version(self, name: str) -> bool:
        # An object that was written while the bucket kept no versions has the version "null". That is lost
        # when the object is removed, unless the bucket keeps versions now, which the answer doesn't show.
        return self._request("HEAD", name).headers.get("x-amz-version-id") not in (None, "", "null")

    def _stored_checksums(self, name: str) -> StoredChecksums:
        return _checksums_in_s3(self.root.partition("://")[2], name)

    def older_versions(self) -> OlderVersions:
        return VersionedBucket(self.root)

    def unfinished_uploads(self, prefix: str) -> tuple[int, int | None] | None:
        return _unfinished_uploads(f"{self.root}/{prefix}")

    def clock(self) -> float:
        try:
            response = send_request("HEAD", self._address("HEAD", _NO_OBJECT), f"{self.root}/{_NO_OBJECT}")
            return parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, TypeError, ValueError):  # no valid header
            return time.time()

    def _request(
        self,
        method: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        limit: int = _MAX_REFUSAL,
        where: str = "",
    ) -> Response:
        url = f"{self.root}/{name}"
        response = send_request(method, self._address(method, name), url, headers, limit)
        if response.status == 404:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        if response.status == 412:
            raise ObjectReplaced(url)
        if not 200 <= response.status < 300:
            raise refusal(response, url, where=where)
        return response

    def _address(self, method: str, name: str) -> str:
        """Return a presigned URL for a request on an object."""
        # It is for one method and one key, and valid for ``_SIGNED_SECONDS``. ``ask``
        # follows no redirect with it.
        return self._sendable(_signed(self._signer, method, name, f"{self.root}/{name}"))

    def _listing_address(self, asked: Mapping[str, str]) -> str:
        """Return a presigned URL of a listing."""
        # obstore signs only paths of objects below an endpoint, not queries. So the query is made a part of
        # the endpoint. With an empty key, obstore appends a slash to that: it becomes the value of the last
        # parameter, ``delimiter=/``.
        endpoint = self._signer_base
        query = "&".join(f"{key}={quote(value, safe='')}" for key, value in asked.items())
        config = {"endpoint": f"{endpoint}?{query}&delimiter=", "virtual_hosted_style_request": "true"}
        return self._sendable(_signed(self._signer_at(config), "GET", "", self.root))

    @cached_property
    def _signer_base(self) -> str:
        """Return the URL of the bucket as configured for obstore."""
        return _signed(self._signer, "GET", "x", self.root).partition("?")[0].removesuffix("/x")

    @cached_property
    def _signer(self) -> Any:
        # The URLs of anonymous requests are signed with dummy keys; ``_sendable`` removes the signature.
        return self._signer_at({}) if self._is_public else self._store

    def _signer_at(self, config: Mapping[str, str]) -> Any:
        keys = {"access_key_id": "x", "secret_access_key": "x"} if self._is_public else {}
        return obstore_store(self.root, {}, {**keys, **config})

    @property
    def _is_public(self) -> bool:
        return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y")

    def _sendable(self, address: str) -> str:
        """Return a URL without its signature if requests are anonymous; require TLS unless it is waived."""
        if not address.startswith("https:") and not allows_http(self.root):
            reason = "the endpoint has no TLS (AWS_ALLOW_HTTP=true allows that)"
            raise OSError(errno.EACCES, reason, self.root)
        return re.sub(r"[?&]X-Amz-.*", "", address) if self._is_public else address


def _signed(store: Any, method: Any, name: str, url: str) -> str:
    from obstore import sign

    try:
        with as_os_errors(url):
            return str(sign(store, method, name, timedelta(seconds=_SIGNED_SECONDS)))
    except TypeError as error:  # for obstore, a key has no empty part and no control characters
        odd = name.rpartition("/")[2] or name
        raise OSError(errno.EINVAL, f"its key {odd!r} can't be requested", url) from error


def _status_of(response: Response, size: str | None, url: str) -> ObjectStatus:
    try:
        modified = parsedate_to_datetime(response.headers["Last-Modified"]).timestamp()
        return ObjectStatus(_size(size), int(modified * 1_000_000_000), response.headers.get("ETag", ""))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise OSError(errno.EIO, "the store sent no size or time", url) from error


def _size(text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > MAX_SIZE:
        raise ValueError("no size")
    return int(text)


def _rows(body: bytes, url: str) -> tuple[list[_Row], str | None]:
    """Return the rows of a page and the continuation token, None on the last page."""
    from xml.etree.ElementTree import ParseError, fromstring

    try:
        if b"<!" in body:  # a document type, which could define entities that expand without end
            raise ValueError("a document type")
        root = fromstring(body)
        if _tag(root) != "ListBucketResult":
            raise ValueError("another response")
        fields: dict[str, str] = {}
        for one in root:
            if _tag(one) not in ("Contents", "CommonPrefixes"):
                fields[_tag(one)] = one.text or ""
        is_quoted = fields.get("EncodingType") == "url"  # some servers ignore ``encoding-type``
        rows = [_row(one, unquote_plus if is_quoted else str) for one in root if _tag(one) not in fields]
        if fields.get("IsTruncated") != "true":
            return rows, None
        return rows, fields["NextContinuationToken"]
    except (ParseError, ValueError, KeyError, OverflowError) as error:
        raise OSError(errno.EIO, "the store's listing is invalid", url) from error


def _row(element: Element, spelled: Callable[[str], str]) -> _Row:
    fields = {_tag(one): one.text or "" for one in element}
    if _tag(element) == "CommonPrefixes":
        return _Row(spelled(fields["Prefix"]), None)
    # Listings have fractions of a second and, on some servers, no time zone or no quotes around the ETag. All
    # is made like the headers of a single object, with which it is compared.
    modified = datetime.fromisoformat(_FRACTION.sub("", fields["LastModified"]).replace("Z", "+00:00"))
    if modified.tzinfo is None:
        modified = modified.replace(tzinfo=timezone.utc)
    tag = fields.get("ETag", "")
    version = f'"{tag}"' if tag and not tag.endswith('"') else tag
    status = ObjectStatus(_size(fields["Size"]), int(modified.timestamp() * 1_000_000_000), version)
    return _Row(spelled(fields["Key"]), status)


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


_MOST_UPLOADS = 100
"""Limit on the number of unfinished uploads whose parts are listed."""


class VersionedBucket:
    """Bucket that keeps older versions of its objects."""

    def __init__(self, url: str) -> None:
        """Connect to the bucket of a URL.

        Raises:
            MissingPackage: boto3 isn't installed.
        """
        self._url = url
        self._bucket = url.partition("://")[2].partition("/")[0]
        self._client = _client(url)

    def versions(self, prefix: str) -> dict[str, ObjectVersions]:
        newest: dict[str, ObjectStatus] = {}
        markers: dict[str, str] = {}
        with _as_os_errors(self._url):
            pages = self._client.get_paginator("list_object_versions").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            for page in pages:
                for one in page.get("Versions", ()):  # the newest of a name comes first
                    modified = int(one["LastModified"].timestamp() * 1_000_000_000)
                    newest.setdefault(one["Key"], ObjectStatus(one["Size"], modified, one["ETag"]))
                markers |= {
                    one["Key"]: one["VersionId"] for one in page.get("DeleteMarkers", ()) if one["IsLatest"]
                }
        names = {*newest, *markers}
        return {name: ObjectVersions(newest.get(name), markers.get(name)) for name in names}

    def uncover(self, name: str, marker: str) -> None:
        with _as_os_errors(f"{self._url.partition('://')[0]}://{self._bucket}/{name}"):
            self._client.delete_object(Bucket=self._bucket, Key=name, VersionId=marker)


def _unfinished_uploads(url: str) -> tuple[int, int | None] | None:
    """Return the number of unfinished uploads below a URL and their bytes, if known; None without any."""
    if importlib.util.find_spec("boto3") is None:
        return None
    bucket, _, name = url.partition("://")[2].partition("/")
    try:
        with _as_os_errors(url):
            client = _client(url)
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=f"{name.strip('/')}/" if name.strip("/") else ""
            )
            uploads = [one for page in pages for one in page.get("Uploads", ())]
            if len(uploads) > _MOST_UPLOADS:
                return len(uploads), None
            parts = (
                part
                for one in uploads
                for page in client.get_paginator("list_parts").paginate(
                    Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"]
                )
                for part in page.get("Parts", ())
            )
            nbytes = sum(part["Size"] for part in parts)
    except OSError:  # it takes a separate permission, and isn't needed for the command
        return None
    return (len(uploads), nbytes) if uploads else None


def _client(url: str) -> Any:
    try:
        import boto3  # noqa: F401 - botocore may be there without it
    except ImportError as error:
        problem = "listing older versions of objects needs boto3"
        raise MissingPackage(url, problem, expected="pip install boto3") from error
    with _as_os_errors(url):
        return _s3_client()


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "an error")
        code = error.response.get("Error", {}).get("Code", "")
        refuses = "the store refuses: " if status in (401, 403) else ""
        reason = f"{refuses}the store answered {status} ({code})"
        raise OSError(errno.EACCES if refuses else errno.EIO, reason, url) from error
    except (BotoCoreError, ValueError) as error:
        raise OSError(errno.EIO, f"the request failed: {type(error).__name__}", url) from error


_S3_KEYS = {
    "ChecksumCRC64NVME": "crc64nvme",
    "ChecksumCRC32C": "crc32c",
    "ChecksumCRC32": "crc32",
    "ChecksumSHA256": "sha256",
    "ChecksumSHA1": "sha1",
}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ENDPOINT_URL")
_SETTINGS = (*_ENDPOINTS, "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_PROFILE")
_CONNECTIONS = 32
_TIMEOUT_SECONDS = 30
_MAX_PARTS_ASKED = 1000
"""Limit on the number of parts whose sizes are requested one by one."""
_PARTS_IN_ETAG = re.compile(r'"?[0-9a-f]{32}-(\d+)"?')
_lock = threading.Lock()


# Amazon S3 ------------------------------------------------------------------------------------------


def _checksums_in_s3(bucket: str, key: str) -> StoredChecksums:
    """Return the checksums that S3 keeps of an object."""
    try:
        import boto3  # noqa: F401 - botocore may be there without it
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return StoredChecksums(reason="boto3 is not installed")
    try:
        client = _s3_client()
        head = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        kept = [(name, head[field]) for field, name in _S3_KEYS.items() if head.get(field)]
        if not kept:
            found = StoredChecksums(reason="S3 has no checksum of it")
        elif _may_be_composite(head, kept[0][1]):
            found = _composite(client, bucket, key, head, *kept[0])
        else:
            found = StoredChecksums(tuple(Checksum(name, hexadecimal(value)) for name, value in kept))
        return found._replace(version=head["ETag"])
    except ClientError as error:
        response = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "an error")
        return StoredChecksums(reason=f"S3 answered {response} when asked for its checksum")
    except BotoCoreError as error:
        return StoredChecksums(reason=f"boto3 failed: {type(error).__name__}")
    except (binascii.Error, ValueError, KeyError):
        return StoredChecksums(reason="S3 sent an invalid checksum")


_clients: dict[tuple[str | None, ...], Any] = {}


def _s3_client() -> Any:
    """Return a client that finds endpoint and credentials where obstore does."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    # One client for each configuration in the environment, which may change while the process runs.
    settings = tuple(map(os.environ.get, _SETTINGS))
    with _lock:  # a session may be used by one thread at a time; a client by many
        if settings not in _clients:
            is_anonymous = (os.environ.get("AWS_SKIP_SIGNATURE") or "").lower() in ("1", "true")
            options: dict[str, Any] = {"signature_version": UNSIGNED} if is_anonymous else {}
            timeouts = {"connect_timeout": _TIMEOUT_SECONDS, "read_timeout": _TIMEOUT_SECONDS}
            _clients[settings] = boto3.session.Session().client(
                "s3",
                region_name=os.environ.get("AWS_REGION"),
                endpoint_url=next((url for name in _ENDPOINTS if (url := os.environ.get(name))), None),
                config=Config(**options, **timeouts, max_pool_connections=_CONNECTIONS),
            )
        return _clients[settings]


def _may_be_composite(head: Mapping[str, Any], value: str) -> bool:
    """Return whether a checksum may be one of the checksums of parts."""
    # Servers that don't state the type have ``-<parts>`` at its end, or only at the end of the ETag.
    if (kind := head.get("ChecksumType")) is not None:
        return bool(kind == "COMPOSITE")
    return "-" in value or _PARTS_IN_ETAG.fullmatch(head["ETag"]) is not None


def _composite(
    client: Any, bucket: str, key: str, head: Mapping[str, Any], algorithm: str, value: str
) -> StoredChecksums:
    # A checksum of checksums can be verified only if the sizes of all parts are known. GetObjectAttributes
    # lists them; if a server's list is incomplete, the size of each part is requested.
    asked: dict[str, Any] = {"Bucket": bucket, "Key": key, "ObjectAttributes": ["Checksum", "ObjectParts"]}
    first = client.get_object_attributes(**asked)
    if first.get("Checksum", {}).get("ChecksumType", "COMPOSITE") != "COMPOSITE":
        return StoredChecksums((Checksum(algorithm, hexadecimal(value)),))
    if algorithm not in ("crc32", "crc32c"):
        return StoredChecksums(reason=f"S3 has a {TITLES[algorithm]} of its parts, not of the whole")
    parts, response = [], first.get("ObjectParts", {})
    while response.get("Parts"):
        parts += [part["Size"] for part in response["Parts"]]
        if not response.get("IsTruncated"):
            break
        more = client.get_object_attributes(**asked, PartNumberMarker=response["NextPartNumberMarker"])
        response = more.get("ObjectParts", {})
    if sum(parts) != head["ContentLength"]:
        parts = list(_part_sizes(client, bucket, key, head))
    if sum(parts) != head["ContentLength"]:
        return StoredChecksums(reason="S3 has a checksum of its parts, but not their sizes")
    return StoredChecksums((Checksum(algorithm, hexadecimal(value.partition("-")[0]), tuple(parts)),))


def _part_sizes(client: Any, bucket: str, key: str, head: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of parts, which are requested one by one."""
    parts = _PARTS_IN_ETAG.fullmatch(head["ETag"])
    if parts is None or int(parts[1]) > _MAX_PARTS_ASKED:
        return
    for number in range(1, int(parts[1]) + 1):
        yield client.head_object(Bucket=bucket, Key=key, PartNumber=number)["ContentLength"]

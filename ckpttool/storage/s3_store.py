"""Amazon S3 buckets: reads, listings and deletions by presigned URLs, writes by obstore.

obstore finds credentials and signs. Its own requests send the session token along redirects, its listings are
unbounded and fail as a whole for one invalid key, and it panics on credentials that no header can carry.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote_plus

from ckpttool.storage.answers import Answer, ask, own_name, paged, refusal, require_whole
from ckpttool.storage.stores import (
    MAX_SIZE,
    BucketStore,
    Listing,
    ObjectStatus,
    OlderVersions,
    Replaced,
    allows_http,
    as_os_errors,
    obstore_store,
)

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_SIGNED_SECONDS = 300
_MAX_REFUSAL = 1 << 16
_NO_OBJECT = ".ckpttool-clock"
"""Key that no object has; the response states the time all the same."""
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
        answer = self._answer("HEAD", name)
        return _status_of(answer, answer.headers.get("Content-Length"), f"{self.root}/{name}")

    def listing(self, prefix: str) -> Listing:
        url = f"{self.root}/{prefix}"
        if len(prefix.encode()) > _MAX_KEY:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), url)
        directories: set[str] = set()
        objects: dict[str, ObjectStatus] = {}
        for row in paged(lambda token: self._page(prefix, token, url), "", url):
            if row.object is None:
                directories.add(own_name(row.key.removesuffix("/"), prefix, url))
            elif row.key != f"{prefix}/":  # some consoles make an object that stands for the directory
                objects[own_name(row.key, prefix, url)] = row.object
        return Listing(frozenset(directories), objects)

    def _page(self, prefix: str, token: str, url: str) -> tuple[list[_Row], str | None]:
        asked = {"list-type": "2", "encoding-type": "url", "prefix": f"{prefix}/" if prefix else ""}
        if token:
            asked["continuation-token"] = token
        answer = ask("GET", self._listing_address(asked), url)
        if answer.status != 200:
            raise refusal(answer, url)
        require_whole(answer, url)
        return _rows(answer.body, url)

    def read_range(self, name: str, begin: int, end: int, version: str = "") -> tuple[ObjectStatus, bytes]:
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if version:
            headers["If-Match"] = version
        url, where = f"{self.root}/{name}", f"bytes {begin}..{end}"
        answer = self._answer("GET", name, headers, max(end - begin, _MAX_REFUSAL), where)
        if answer.status != 206:
            reason = f"{where}: the server doesn't send parts of it (download it first)"
            raise OSError(errno.ENOTSUP, reason, url)
        sent = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if sent is None or (int(sent[1]), int(sent[2])) != (begin, end - 1):
            raise OSError(errno.EIO, f"{where}: the server sends another part", url)
        if len(answer.body) != end - begin:
            raise OSError(errno.EIO, f"{where}: the server sends {len(answer.body):,} bytes or more", url)
        return _status_of(answer, sent[3], url), answer.body

    def _update_of(self, name: str, replaces: ObjectStatus) -> Any:
        found = self.status(name)
        if not found.matches(replaces):
            raise Replaced(f"{self.root}/{name}")
        return {"e_tag": found.version}

    def remove(self, name: str, of: ObjectStatus) -> None:
        """Delete an object if its ETag still matches, where the server supports conditional deletes."""
        if not self.status(name).matches(of):
            raise Replaced(f"{self.root}/{name}")
        try:
            self._answer("DELETE", name, {"If-Match": of.version})
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            self._answer("DELETE", name)

    def keeps_version(self, name: str) -> bool:
        return self._answer("HEAD", name).headers.get("x-amz-version-id") not in (None, "", "null")

    def older_versions(self) -> OlderVersions:
        from ckpttool.storage.s3_versions import VersionedBucket

        return VersionedBucket(self.root)

    def unfinished_uploads(self, prefix: str) -> tuple[int, int | None] | None:
        from ckpttool.storage.s3_versions import unfinished_uploads

        return unfinished_uploads(f"{self.root}/{prefix}")

    def clock(self) -> float:
        try:
            answer = ask("HEAD", self._address("HEAD", _NO_OBJECT), f"{self.root}/{_NO_OBJECT}")
            return parsedate_to_datetime(answer.headers["Date"]).timestamp()
        except (KeyError, TypeError, ValueError):  # none, or none that is one
            return time.time()

    def _answer(
        self,
        method: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        limit: int = _MAX_REFUSAL,
        where: str = "",
    ) -> Answer:
        url = f"{self.root}/{name}"
        answer = ask(method, self._address(method, name), url, headers, limit)
        if answer.status == 404:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        if answer.status == 412:
            raise Replaced(url)
        if not 200 <= answer.status < 300:
            raise refusal(answer, url, where=where)
        return answer

    def _address(self, method: str, name: str) -> str:
        """Return a presigned URL for a request on an object."""
        return self._sendable(_signed(self._signer, method, name, f"{self.root}/{name}"))

    def _listing_address(self, asked: Mapping[str, str]) -> str:
        """Return a presigned URL of a listing.

        obstore signs paths below an endpoint only and appends a slash, which becomes the delimiter.
        """
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
    except TypeError as error:  # obstore takes no empty part in a key, and no control characters
        odd = name.rpartition("/")[2] or name
        raise OSError(errno.EINVAL, f"the store calls it {odd!r}, which can't be asked for", url) from error


def _status_of(answer: Answer, size: str | None, url: str) -> ObjectStatus:
    try:
        modified = parsedate_to_datetime(answer.headers["Last-Modified"]).timestamp()
        return ObjectStatus(_size(size), int(modified * 1_000_000_000), answer.headers.get("ETag", ""))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise OSError(errno.EIO, "the store states no size or time of it", url) from error


def _size(text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > MAX_SIZE:
        raise ValueError("no size")
    return int(text)


def _rows(body: bytes, url: str) -> tuple[list[_Row], str | None]:
    """Return the rows of a page and the continuation token, None on the last page."""
    from xml.etree.ElementTree import ParseError, fromstring

    try:
        if b"<!" in body:  # entities, which nobody needs here
            raise ValueError("a document type")
        root = fromstring(body)
        if _tag(root) != "ListBucketResult":
            raise ValueError("another answer")
        fields: dict[str, str] = {}
        for one in root:
            if _tag(one) not in ("Contents", "CommonPrefixes"):
                fields[_tag(one)] = one.text or ""
        is_quoted = fields.get("EncodingType") == "url"  # not every server does what it is asked
        rows = [_row(one, unquote_plus if is_quoted else str) for one in root if _tag(one) not in fields]
        if fields.get("IsTruncated") != "true":
            return rows, None
        return rows, fields["NextContinuationToken"]
    except (ParseError, ValueError, KeyError, OverflowError) as error:
        raise OSError(errno.EIO, "the store's listing can't be read", url) from error


def _row(element: Element, spelled: Callable[[str], str]) -> _Row:
    fields = {_tag(one): one.text or "" for one in element}
    if _tag(element) == "CommonPrefixes":
        return _Row(spelled(fields["Prefix"]), None)
    modified = datetime.fromisoformat(_FRACTION.sub("", fields["LastModified"]).replace("Z", "+00:00"))
    if modified.tzinfo is None:
        modified = modified.replace(tzinfo=timezone.utc)
    tag = fields.get("ETag", "")
    version = f'"{tag}"' if tag and not tag.endswith('"') else tag
    status = ObjectStatus(_size(fields["Size"]), int(modified.timestamp() * 1_000_000_000), version)
    return _Row(spelled(fields["Key"]), status)


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]

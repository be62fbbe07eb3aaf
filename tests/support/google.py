"""A server that answers as the XML API of Google Cloud Storage does, as far as ckpttool asks.

Source: https://cloud.google.com/storage/docs/xml-api/overview
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from hashlib import md5
from itertools import count
from threading import Lock
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.stores import Bucket, answering

_PAGE = 3
"""Rows of a listing that come at once."""
_ONLY_IF = "x-goog-if-generation-match"


@dataclass(frozen=True)
class _Object:
    data: bytes
    generation: int
    modified: float = field(default_factory=time.time)

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{md5(self.data).hexdigest()}"',
            "Last-Modified": formatdate(self.modified, usegmt=True),
            "x-goog-generation": str(self.generation),
        }


@dataclass
class GoogleServer:
    """What lies in a server of buckets."""

    url: str = ""
    objects: dict[str, _Object] = field(default_factory=dict)
    _uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _lock: Lock = field(default_factory=Lock)

    def environment(self) -> dict[str, str]:
        """Return what leads ckpttool here."""
        empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        key = {"gcs_base_url": self.url, "disable_oauth": True, **empty}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "AWS_ALLOW_HTTP": "true"}

    def store(self, path: str, data: bytes, only_if: str | None = None) -> _Object | None:
        """Write an object, by its bucket and key; None if there is another one than the request names."""
        with self._lock:
            now = self.objects.get(path)
            if only_if not in (None, str(now.generation if now else 0)):
                return None
            self.objects[path] = _Object(data, next(self._numbers))
            return self.objects[path]

    def answer(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of the answer to a request."""
        if "list-type" in query:
            return 200, {}, self._listing(path, query)
        if method == "POST":
            return self._upload(path, query, headers)
        if method == "PUT" and "uploadId" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": f'"{md5(body).hexdigest()}"'}, b""
        if method == "PUT" and "x-goog-copy-source" in headers:
            source = self.objects.get(unquote(headers["x-goog-copy-source"]).lstrip("/"))
            if source is None:
                return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
            body = source.data
        if method == "PUT":
            made = self.store(path, body, headers.get(_ONLY_IF))
            return (412, {}, b"") if made is None else (200, made.headers, b"")
        if method == "DELETE" and "uploadId" in query:
            del self._uploads[query["uploadId"]]
            return 204, {}, b""
        found = self.objects.get(path)
        if found is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        if method == "DELETE":
            del self.objects[path]
            return 204, {}, b""
        if headers.get("if-match") not in (None, found.headers["ETag"]):
            return 412, {}, b""
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", "")):
            begin, end = int(wanted[1]), int(wanted[2]) + 1
            place = f"bytes {begin}-{end - 1}/{len(found.data)}"
            return 206, {**found.headers, "Content-Range": place}, found.data[begin:end]
        return 200, found.headers, found.data

    def _upload(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        if "uploads" in query:
            identity = f"upload-{next(self._numbers)}"
            self._uploads[identity] = {}
            tag = "InitiateMultipartUploadResult"
            return 200, {}, f"<{tag}><UploadId>{identity}</UploadId></{tag}>".encode()
        parts = self._uploads.pop(query["uploadId"])
        made = self.store(path, b"".join(parts[number] for number in sorted(parts)))
        assert made is not None
        tag = "CompleteMultipartUploadResult"
        xml = f"<{tag}><ETag>{escape(made.headers['ETag'])}</ETag></{tag}>"
        return 200, made.headers, xml.encode()

    def _listing(self, bucket: str, query: Mapping[str, str]) -> bytes:
        above = f"{bucket}/{query.get('prefix', '')}"
        rows: dict[str, str] = {}
        for path, one in sorted(self.objects.items()):
            if not path.startswith(above):
                continue
            key, below = path.removeprefix(f"{bucket}/"), path.removeprefix(above)
            if "/" in below:
                prefix = key[: len(key) - len(below) + below.index("/") + 1]
                row = f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
                rows[prefix] = row
            else:
                modified = datetime.fromtimestamp(one.modified, timezone.utc).isoformat()
                rows[key] = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(one.data)}</Size>"
                    f"<ETag>{escape(one.headers['ETag'])}</ETag>"
                    f"<LastModified>{modified}</LastModified></Contents>"
                )
        names = [name for name in sorted(rows) if name > unquote(query.get("continuation-token", ""))]
        page, is_cut = names[:_PAGE], len(names) > _PAGE
        token = f"<NextContinuationToken>{quote(page[-1])}</NextContinuationToken>" if is_cut else ""
        content = "".join(rows[name] for name in page)
        return f"<ListBucketResult>{token}{content}</ListBucketResult>".encode()


@contextmanager
def google_server() -> Iterator[GoogleServer]:
    """Run such a server."""
    served = GoogleServer()

    def answer(
        method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        asked = "GET" if method == "HEAD" else method
        return served.answer(asked, unquote(parts.path).strip("/"), query, headers, body)

    with answering(answer) as served.url:
        yield served


class GoogleBucket(Bucket):
    """A bucket of such a server."""

    def __init__(self, server: GoogleServer) -> None:
        super().__init__("gs")
        self.server = server

    def put(self, key: str, data: bytes | str) -> None:
        self.server.store(f"{self.name}/{key}", data.encode() if isinstance(data, str) else data)

    def get(self, key: str) -> bytes:
        return self.server.objects[f"{self.name}/{key}"].data

    def remove(self, key: str) -> None:
        del self.server.objects[f"{self.name}/{key}"]

    def keep_versions(self) -> None:
        raise NotImplementedError("this server keeps none")

    def keys(self, prefix: str = "") -> list[str]:
        names = (
            path.removeprefix(f"{self.name}/")
            for path in self.server.objects
            if path.startswith(self.name + "/")
        )
        return sorted(name for name in names if name.startswith(prefix))

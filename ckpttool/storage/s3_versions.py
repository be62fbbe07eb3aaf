"""What obstore can't ask Amazon S3 about: versions of objects, and uploads that were never finished.

boto3 asks, if it is installed.
"""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.core.errors import MissingPackage
from ckpttool.storage.stored_checksums import s3_client
from ckpttool.storage.stores import ObjectStatus, ObjectVersions

_MOST_UPLOADS = 100
"""Unfinished uploads of which the parts are counted."""


class VersionedBucket:
    """A bucket that keeps older versions of its objects."""

    def __init__(self, url: str) -> None:
        """Make ready to ask about what lies below a URL.

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
                for one in page.get("Versions", ()):  # of each name the newest comes first
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


def unfinished_uploads(url: str) -> tuple[int, int | None] | None:
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
    except OSError:  # it takes a permission of its own, and is of no use to what was asked
        return None
    return (len(uploads), nbytes) if uploads else None


def _client(url: str) -> Any:
    try:
        import boto3  # noqa: F401 - botocore may be there without it
    except ImportError as error:
        problem = "older versions of objects are listed with boto3"
        raise MissingPackage(url, problem, expected="pip install boto3") from error
    with _as_os_errors(url):
        return s3_client()


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
        raise OSError(errno.EIO, f"the store can't be asked: {type(error).__name__}", url) from error

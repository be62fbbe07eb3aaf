"""The checksums that Amazon S3 and Google Cloud Storage keep of an object, asked for without reading it.

obstore doesn't tell them. Those of S3 are asked for with boto3 if it is installed, those of Google Cloud
Storage with a URL that obstore signs.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html;
https://cloud.google.com/storage/docs/xml-api/reference-headers#xgooghash
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ckpttool.storage.answers import ask
from ckpttool.storage.checksums import TITLES, Checksum, StoredChecksums

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ObstoreStore

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
_GOOGLE_ENDPOINT = "https://storage.googleapis.com"
_TIMEOUT_SECONDS = 30
_MAX_PARTS_ASKED = 1000
"""Of more parts the sizes are not asked for one by one: that takes a request each."""
_PARTS_IN_ETAG = re.compile(r'"?[0-9a-f]{32}-(\d+)"?')
_lock = threading.Lock()


# Amazon S3 ------------------------------------------------------------------------------------------


def checksums_in_s3(bucket: str, key: str) -> StoredChecksums:
    """Return what S3 keeps of an object."""
    try:
        import boto3  # noqa: F401 - botocore may be there without it
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return StoredChecksums(reason="boto3 is not installed")
    try:
        client = s3_client()
        head = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        kept = [(name, head[field]) for field, name in _S3_KEYS.items() if head.get(field)]
        if not kept:
            found = StoredChecksums(reason="S3 keeps no checksum of it")
        elif _may_be_composite(head, kept[0][1]):
            found = _composite(client, bucket, key, head, *kept[0])
        else:
            found = StoredChecksums(tuple(Checksum(name, _digits(value)) for name, value in kept))
        return found._replace(version=head["ETag"])
    except ClientError as error:
        answer = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "an error")
        return StoredChecksums(reason=f"S3 answered {answer} when it was asked for its checksum")
    except BotoCoreError as error:
        return StoredChecksums(reason=f"boto3 can't ask S3: {type(error).__name__}")
    except (binascii.Error, ValueError, KeyError):
        return StoredChecksums(reason="S3 states a checksum that can't be read")


_clients: dict[tuple[str | None, ...], Any] = {}


def s3_client() -> Any:
    """Return a client that finds endpoint and credentials where obstore does."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

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
    """Tell whether a checksum may be one of the checksums of parts; not every server says which it is."""
    if (kind := head.get("ChecksumType")) is not None:
        return bool(kind == "COMPOSITE")
    return "-" in value or _PARTS_IN_ETAG.fullmatch(head["ETag"]) is not None


def _composite(
    client: Any, bucket: str, key: str, head: Mapping[str, Any], algorithm: str, value: str
) -> StoredChecksums:
    asked: dict[str, Any] = {"Bucket": bucket, "Key": key, "ObjectAttributes": ["Checksum", "ObjectParts"]}
    first = client.get_object_attributes(**asked)
    if first.get("Checksum", {}).get("ChecksumType", "COMPOSITE") != "COMPOSITE":
        return StoredChecksums((Checksum(algorithm, _digits(value)),))
    if algorithm not in ("crc32", "crc32c"):
        return StoredChecksums(reason=f"S3 keeps a {TITLES[algorithm]} of its parts, not of the whole")
    parts, answer = [], first.get("ObjectParts", {})
    while answer.get("Parts"):
        parts += [part["Size"] for part in answer["Parts"]]
        if not answer.get("IsTruncated"):
            break
        more = client.get_object_attributes(**asked, PartNumberMarker=answer["NextPartNumberMarker"])
        answer = more.get("ObjectParts", {})
    if sum(parts) != head["ContentLength"]:
        parts = list(_part_sizes(client, bucket, key, head))
    if sum(parts) != head["ContentLength"]:
        return StoredChecksums(reason="S3 keeps a checksum of its parts, and doesn't tell their sizes")
    return StoredChecksums((Checksum(algorithm, _digits(value.partition("-")[0]), tuple(parts)),))


def _part_sizes(client: Any, bucket: str, key: str, head: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of parts, asked for one by one."""
    parts = _PARTS_IN_ETAG.fullmatch(head["ETag"])
    if parts is None or int(parts[1]) > _MAX_PARTS_ASKED:
        return
    for number in range(1, int(parts[1]) + 1):
        yield client.head_object(Bucket=bucket, Key=key, PartNumber=number)["ContentLength"]


def _digits(value: str) -> str:
    return base64.b64decode(value, validate=True).hex()


# Google Cloud Storage -------------------------------------------------------------------------------


def checksums_in_google(store: ObstoreStore, bucket: str, key: str, url: str) -> StoredChecksums:
    """Return what Google Cloud Storage keeps of an object."""
    from obstore.exceptions import BaseError

    try:
        answer = ask("HEAD", _google_url(store, bucket, key), url)
    except BaseError:  # its text may hold the address, which is signed
        return StoredChecksums(reason="these credentials can't sign a question for its checksum")
    except OSError:
        return StoredChecksums(reason="the store couldn't be asked for its checksum")
    if answer.status != 200:
        return StoredChecksums(
            reason=f"the store answered {answer.status} when it was asked for its checksum"
        )
    headers = answer.headers
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return StoredChecksums(reason="the store keeps a checksum of its compressed bytes")
    kept = []
    for one in headers.get("x-goog-hash", "").split(","):  # several headers of a name come as one
        name, _, value = one.strip().partition("=")
        if name in ("crc32c", "md5"):
            try:
                kept.append(Checksum(name, _digits(value)))
            except (binascii.Error, ValueError):
                return StoredChecksums(reason="the store states a checksum that can't be read")
    return StoredChecksums(
        tuple(kept), "" if kept else "the store keeps no checksum of it", headers.get("ETag", "")
    )


def _google_url(store: ObstoreStore, bucket: str, key: str) -> str:
    """Return the URL of an object; for what is not public, one that is signed for a minute."""
    if os.environ.get("GOOGLE_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        from urllib.parse import quote

        endpoint = os.environ.get("GOOGLE_BASE_URL", _GOOGLE_ENDPOINT).rstrip("/")
        return f"{endpoint}/{bucket}/{quote(key)}"
    import obstore

    signer: Any = store  # one of Google's; not every kind can sign
    return str(obstore.sign(signer, "HEAD", key, timedelta(minutes=1)))

"""The checksums that stores keep: S3's of every kind, Google's and the hub's, and why there are none."""

from __future__ import annotations

import base64
import builtins
import json
import zlib
from typing import Any

import google_crc32c
import pytest

from ckpttool.storage import remote, stores
from ckpttool.storage.checksums import Checksum, StoredChecksums
from tests.support.checksums import crc64nvme
from tests.support.stores import Answer, Asked, S3Bucket, WebServer, environment

DATA = b"123456789"
CRC32C = base64.b64encode(google_crc32c.value(DATA).to_bytes(4, "big")).decode()
CRC64 = base64.b64encode(crc64nvme(DATA).to_bytes(8, "big")).decode()
PARTS = """<GetObjectAttributesResponse><Checksum><ChecksumCRC32C>4waSgw==</ChecksumCRC32C>
<ChecksumType>COMPOSITE</ChecksumType></Checksum><ObjectParts><IsTruncated>{more}</IsTruncated>
<NextPartNumberMarker>{marker}</NextPartNumberMarker>{parts}</ObjectParts></GetObjectAttributesResponse>"""


@pytest.fixture
def kept(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the headers with which a server answers as S3 does: it has an object ``bucket/m``."""
    for name, value in environment(web.url).items():
        monkeypatch.setenv(name, value)
    web.files["/bucket/m"] = DATA
    headers: dict[str, str] = {}

    def add(number: int, asked: Asked, answer: Answer) -> None:
        if asked.headers.get("x-amz-checksum-mode") == "ENABLED":
            answer.headers.update(headers)

    web.misbehave = add
    return headers


def stored(url: str) -> StoredChecksums:
    remote.forget()
    return remote.checksums_of(url)


# Amazon S3 --------------------------------------------------------------------------------------------


def test_what_boto3_uploads_by_default(s3: S3Bucket) -> None:
    s3.put("m", DATA)
    assert stored(s3.url("m")).checksums == (Checksum("crc32", f"{zlib.crc32(DATA):08x}"),)
    s3.client.put_object(Bucket=s3.name, Key="m", Body=DATA, ChecksumAlgorithm="SHA256")
    assert stored(s3.url("m")).checksums == (
        Checksum("sha256", "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225"),
    )


def test_the_endpoint_has_the_names_that_obstore_reads(
    s3: S3Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("m", DATA)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, s3_endpoint)
        assert stored(s3.url("m")).checksums
        monkeypatch.delenv(name)


def test_an_upload_in_parts(s3: S3Bucket) -> None:
    first, second = bytes(5 << 20), b"the second part"
    asked = {"Bucket": s3.name, "Key": "m"}
    upload = s3.client.create_multipart_upload(**asked, ChecksumAlgorithm="CRC32")["UploadId"]
    parts = []
    for number, body in enumerate((first, second), 1):
        part = s3.client.upload_part(
            **asked, UploadId=upload, PartNumber=number, Body=body, ChecksumAlgorithm="CRC32"
        )
        parts.append({"PartNumber": number, "ETag": part["ETag"], "ChecksumCRC32": part["ChecksumCRC32"]})
    s3.client.complete_multipart_upload(**asked, UploadId=upload, MultipartUpload={"Parts": parts})
    crcs = b"".join(zlib.crc32(part).to_bytes(4, "big") for part in (first, second))
    expected = Checksum("crc32", f"{zlib.crc32(crcs):08x}", (len(first), len(second)))
    assert stored(s3.url("m")).checksums == (expected,)


def test_crc64_and_crc32c_of_the_whole(kept: dict[str, str]) -> None:
    kept.update({"x-amz-checksum-crc64nvme": CRC64, "x-amz-checksum-type": "FULL_OBJECT"})
    assert stored("s3://bucket/m").checksums == (Checksum("crc64nvme", "ae8b14860a799888"),)
    del kept["x-amz-checksum-crc64nvme"]
    kept["x-amz-checksum-crc32c"] = CRC32C
    assert stored("s3://bucket/m").checksums == (Checksum("crc32c", "e3069283"),)


def test_the_sizes_of_parts_are_listed_in_pages(kept: dict[str, str], web: WebServer) -> None:
    kept.update({"x-amz-checksum-crc32c": f"{CRC32C}-2", "x-amz-checksum-type": "COMPOSITE"})
    pages = {
        "": PARTS.format(more="true", marker="1", parts="<Part><Size>5</Size></Part>"),
        "1": PARTS.format(more="false", marker="2", parts="<Part><Size>4</Size></Part>"),
    }
    headers = web.misbehave

    def attributes(number: int, asked: Asked, answer: Answer) -> None:
        headers(number, asked, answer)
        if asked.path.endswith("?attributes"):
            answer.status, answer.body = (
                200,
                pages[asked.headers.get("x-amz-part-number-marker", "")].encode(),
            )

    web.misbehave = attributes
    assert stored("s3://bucket/m").checksums == (Checksum("crc32c", "e3069283", (5, 4)),)


def test_a_checksum_of_parts_of_unknown_sizes(kept: dict[str, str], web: WebServer) -> None:
    kept.update({"x-amz-checksum-crc32c": f"{CRC32C}-2", "x-amz-checksum-type": "COMPOSITE"})
    web.files["/bucket/m?attributes"] = PARTS.format(more="false", marker="0", parts="").encode()
    assert stored("s3://bucket/m")[:2] == (
        (),
        "S3 has a checksum of its parts, but not their sizes",
    )


def test_a_digest_of_parts_says_nothing_of_the_whole(kept: dict[str, str], web: WebServer) -> None:
    kept.update({"x-amz-checksum-sha256": f"{'A' * 43}=-2", "x-amz-checksum-type": "COMPOSITE"})
    web.files["/bucket/m?attributes"] = PARTS.format(more="false", marker="0", parts="").encode()
    assert stored("s3://bucket/m")[:2] == ((), "S3 has a SHA-256 of its parts, not of the whole")


def test_no_checksum(kept: dict[str, str]) -> None:
    assert stored("s3://bucket/m")[:2] == ((), "S3 has no checksum of it")
    kept["x-amz-checksum-crc32c"] = "not base64"
    assert stored("s3://bucket/m")[:2] == ((), "S3 sent an invalid checksum")


def test_without_permission(kept: dict[str, str], web: WebServer) -> None:
    headers = web.misbehave

    def refuse(number: int, asked: Asked, answer: Answer) -> None:
        headers(number, asked, answer)
        if "x-amz-checksum-mode" in asked.headers:
            answer.status = 403

    web.misbehave = refuse
    assert stored("s3://bucket/m")[:2] == ((), "S3 answered 403 when asked for its checksum")


def test_without_boto3(s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("m", DATA)
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name.startswith("boto"):
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert stored(s3.url("m")) == StoredChecksums((), "boto3 is not installed")


def test_an_object_that_was_replaced_meanwhile(s3: S3Bucket) -> None:
    s3.put("m", DATA)
    remote.forget()
    remote.cached_status(s3.url("m"))
    s3.put("m", DATA[::-1])
    with pytest.raises(stores.ObjectReplaced):
        remote.checksums_of(s3.url("m"))


# Google Cloud Storage ---------------------------------------------------------------------------------


@pytest.fixture
def google(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    """Return a server that answers for the object ``gs://bucket/m`` as Google's XML API does."""
    monkeypatch.setenv("GOOGLE_BASE_URL", web.url)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    web.files["/bucket/m"] = DATA
    return web


def test_google_keeps_crc32c(google: WebServer) -> None:
    def add(number: int, asked: Asked, answer: Answer) -> None:
        answer.headers["x-goog-hash"] = f"crc32c={CRC32C}, md5=JfnnlDI7RTiF9RgfG2JNCw=="

    google.misbehave = add
    assert stored("gs://bucket/m").checksums == (
        Checksum("crc32c", "e3069283"),
        Checksum("md5", "25f9e794323b453885f5181f1b624d0b"),
    )
    assert {asked.method for asked in google.requests} == {"HEAD"}


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "the store has no checksum of it"),
        ({"x-goog-hash": "crc32c=?"}, "the store sent an invalid checksum"),
        (
            {"x-goog-hash": f"crc32c={CRC32C}", "x-goog-stored-content-encoding": "gzip"},
            "the store has a checksum of its compressed bytes",
        ),
    ],
)
def test_google_keeps_none_that_helps(google: WebServer, headers: dict[str, str], reason: str) -> None:
    google.misbehave = lambda number, asked, answer: answer.headers.update(headers)
    assert stored("gs://bucket/m")[:2] == ((), reason)


def test_google_refuses_to_answer(google: WebServer) -> None:
    def refuse(number: int, asked: Asked, answer: Answer) -> None:
        if "accept-encoding" in asked.headers:  # obstore sends none
            answer.status = 403

    google.misbehave = refuse
    assert stored("gs://bucket/m")[:2] == ((), "the store answered 403 when asked for its checksum")


def test_a_question_to_google_is_signed(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"private_key": key.decode(), "private_key_id": "1", "client_email": "a@b.c"}
    account["gcs_base_url"] = web.url
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    store, name = remote.store_at("gs://bucket/a/m")
    found = store.checksums(name, stores.ObjectStatus(9, 0, ""))
    assert found[:2] == ((), "the store answered 404 when asked for its checksum")
    (asked,) = web.requests
    path, _, query = asked.path.partition("?")
    assert (asked.method, path) == ("HEAD", "/bucket/a/m")
    assert "X-Goog-Signature=" in query


# Others -----------------------------------------------------------------------------------------------


def test_the_hub_states_digests(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    rows = [
        {"type": "file", "path": "m", "size": 9, "oid": "1" * 40, "lfs": {"oid": "2" * 64, "size": 9}},
        {"type": "file", "path": "n", "size": 9, "oid": "3" * 40},
        {"type": "file", "path": "o", "size": 9, "oid": "3" * 40, "lfs": {"oid": "?"}},
    ]
    web.files["/api/models/me/sums/revision/main"] = json.dumps({"sha": "0" * 40}).encode()
    web.files[f"/api/models/me/sums/tree/{'0' * 40}"] = json.dumps(rows).encode()
    assert stored("hf://me/sums/m").checksums == (Checksum("sha256", "2" * 64),)
    assert stored("hf://me/sums/n").checksums == (Checksum("git-sha1", "3" * 40),)
    assert stored("hf://me/sums/o")[:2] == ((), "the hub has no checksum of it")


def test_web_servers_tell_none(web: WebServer) -> None:
    web.files["/m"] = DATA
    assert stored(f"{web.url}/m")[:2] == ((), "this store has no checksums")

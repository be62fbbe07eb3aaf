"""Manifests of what is in a store, and copies: compared by what stores keep, without reading."""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from ckpttool.storage import remote, s3_store
from tests.support.commands import Run
from tests.support.manifests import seal
from tests.support.stores import Answer, Asked, S3Bucket, WebServer
from tests.support.thorough import sampled

LARGE = "large.safetensors"
NBYTES = 17 << 20
MB = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return a checkpoint of three blocks."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [NBYTES], "data_offsets": [0, NBYTES]}}).encode()
    header = header.ljust(1032)
    path = tmp_path / "here" / LARGE
    path.parent.mkdir()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(256)) * (NBYTES >> 8))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what is added to by each read of an object: how many bytes were asked for."""
    counts: list[int] = []
    read_range = s3_store.S3Store.read_range

    def counted(self: Any, name: str, begin: int, end: int, version: str = "") -> Any:
        counts.append(end - begin)
        return read_range(self, name, begin, end, version)

    monkeypatch.setattr(s3_store.S3Store, "read_range", counted)
    return counts


@pytest.fixture
def without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name == "boto3":
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)


def upload_parts(s3: S3Bucket, key: str, data: bytes, part: int) -> None:
    """Upload as boto3 does: in parts, with a CRC-32 of each."""
    asked = {"Bucket": s3.name, "Key": key}
    upload = s3.client.create_multipart_upload(**asked, ChecksumAlgorithm="CRC32")["UploadId"]
    parts = []
    for number, at in enumerate(range(0, len(data), part), 1):
        body = data[at : at + part]
        done = s3.client.upload_part(
            **asked, UploadId=upload, PartNumber=number, Body=body, ChecksumAlgorithm="CRC32"
        )
        parts.append({"PartNumber": number, "ETag": done["ETag"], "ChecksumCRC32": done["ChecksumCRC32"]})
    s3.client.complete_multipart_upload(**asked, UploadId=upload, MultipartUpload={"Parts": parts})
    remote.forget()


def upload_sealed(s3: S3Bucket, path: Path, **options: str) -> str:
    """Write a manifest, upload it with the checkpoint, and return the URL of this one."""
    assert seal(path).is_written
    for name in (path.name, f"{path.name}.sha256", f"{path.name}.digests.json"):
        data = (path.parent / name).read_bytes()
        s3.client.put_object(Bucket=s3.name, Key=f"run/{name}", Body=data, **options)
    remote.forget()
    return s3.url(f"run/{path.name}")


def checks(run: Run, *arguments: object) -> dict[str, tuple[str, str]]:
    """Return how each check went, and its detail."""
    answer = run("verify", "--json", *arguments)
    (told,) = json.loads(answer.out)["checkpoints"]
    return {one["name"]: (one["status"], one["detail"]) for one in told["checks"]}


def findings(run: Run, *arguments: object) -> list[tuple[str, str]]:
    (told,) = json.loads(run("verify", "--json", *arguments).out)["checkpoints"]
    return [(one["code"], one["message"]) for one in told["findings"]]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


# Manifests in a store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sampled(["CRC32", "SHA256"], 1))
def test_a_manifest_is_compared_without_reading(
    s3: S3Bucket, large: Path, run: Run, read: list[int], kind: str
) -> None:
    url = upload_sealed(s3, large, ChecksumAlgorithm=kind)
    assert checks(run, url, "--only", "manifest")["manifest"] == (
        "passed",
        "1 file, by the store's checksums",
    )
    assert sum(read) < MB / 2
    assert run("verify", url, "--only", "manifest").status == 0
    s3.client.put_object(
        Bucket=s3.name, Key=f"run/{LARGE}", Body=flipped(large.read_bytes()), ChecksumAlgorithm=kind
    )
    remote.forget()
    read.clear()
    ((code, message),) = findings(run, url, "--only", "manifest")
    assert len(read) <= 6  # the structure, and the manifest
    assert code == "manifest-mismatch"
    if kind == "CRC32":
        is_, was = (f"{zlib.crc32(data):08x}" for data in (flipped(large.read_bytes()), large.read_bytes()))
        assert message == f"the store's CRC-32 is {is_} instead of {was}"
    else:
        is_, was = (
            hashlib.sha256(data).hexdigest()[:16] for data in (s3.get(f"run/{LARGE}"), large.read_bytes())
        )
        assert message == f"the store's SHA-256 is {is_}… instead of {was}…"
    assert sum(read) < MB / 2


def test_an_upload_in_parts_of_whole_blocks(s3: S3Bucket, large: Path, run: Run, read: list[int]) -> None:
    url = upload_sealed(s3, large)
    for part in (8 * MB, 16 * MB):
        upload_parts(s3, f"run/{LARGE}", large.read_bytes(), part)
        assert checks(run, url, "--only", "manifest")["manifest"][0] == "passed"
    upload_parts(s3, f"run/{LARGE}", flipped(large.read_bytes()), 8 * MB)
    assert [code for code, _ in findings(run, url, "--only", "manifest")] == ["manifest-mismatch"]
    assert sum(read) < MB


def test_an_upload_in_other_parts_is_skipped_or_read(
    s3: S3Bucket, large: Path, run: Run, read: list[int]
) -> None:
    url = upload_sealed(s3, large)
    upload_parts(s3, f"run/{LARGE}", large.read_bytes(), 5 * MB)
    reason = f"{LARGE} could not be compared: the manifest has none of the checksums that the store keeps"
    status, out, _ = run("verify", url, "--only", "manifest")
    assert (status, out.splitlines()[0].split()[:3]) == (1, ["✗", "NOT", "RUN"])
    assert f"(manifest was skipped: {reason})" in out
    assert sum(read) < MB / 2
    assert checks(run, url)["manifest"] == ("passed", "1 file")  # read, as its values are


def test_a_store_without_checksums(
    s3: S3Bucket, large: Path, run: Run, read: list[int], without_boto3: None
) -> None:
    url = upload_sealed(s3, large)
    skipped = checks(run, url, "--only", "structure,manifest")["manifest"]
    assert skipped == ("skipped", f"{LARGE} could not be compared: boto3 is not installed")
    assert sum(read) < MB / 2
    assert checks(run, url)["manifest"] == ("passed", "1 file")


def test_digests_alone_do(s3: S3Bucket, large: Path, run: Run, read: list[int]) -> None:
    url = upload_sealed(s3, large)
    s3.client.delete_object(Bucket=s3.name, Key=f"run/{LARGE}.sha256")
    remote.forget()
    assert checks(run, url, "--only", "manifest")["manifest"] == (
        "passed",
        "1 file, by the store's checksums",
    )
    s3.put(f"run/{LARGE}", flipped(large.read_bytes()))
    remote.forget()
    assert [code for code, _ in findings(run, url, "--only", "manifest")] == ["manifest-mismatch"]
    assert sum(read) < MB / 2


@pytest.mark.thorough
def test_digests_alone_where_the_store_keeps_none(
    s3: S3Bucket, large: Path, run: Run, without_boto3: None
) -> None:
    url = upload_sealed(s3, large)
    s3.client.delete_object(Bucket=s3.name, Key=f"run/{LARGE}.sha256")
    remote.forget()
    assert checks(run, url, "--only", "manifest")["manifest"][0] == "skipped"
    assert checks(run, url)["manifest"] == ("passed", "1 file")
    s3.put(f"run/{LARGE}", flipped(large.read_bytes()))
    remote.forget()
    is_, was = (f"{google_crc32c.value(data):08x}" for data in (s3.get(f"run/{LARGE}"), large.read_bytes()))
    expected = ("manifest-mismatch", f"CRC-32C is {is_} instead of {was}")
    assert findings(run, url)[0] == expected


@pytest.mark.thorough
def test_a_manifest_of_an_earlier_ckpttool(s3: S3Bucket, large: Path, run: Run) -> None:
    url = upload_sealed(s3, large)
    s3.put(f"run/{LARGE}.digests.json", without_crcs(Path(f"{large}.digests.json")))
    remote.forget()
    assert checks(run, url, "--only", "manifest")["manifest"][0] == "skipped"
    assert checks(run, url)["manifest"] == ("passed", "1 file")
    s3.client.put_object(
        Bucket=s3.name, Key=f"run/{LARGE}", Body=large.read_bytes(), ChecksumAlgorithm="SHA256"
    )
    remote.forget()
    assert checks(run, url, "--only", "manifest")["manifest"][0] == "passed"


def without_crcs(path: Path) -> bytes:
    """Return digests as they were before they had CRCs."""
    document = json.loads(path.read_text())
    document["files"] = {name: {"bytes": one["bytes"]} for name, one in document["files"].items()}
    return json.dumps(document).encode()


def test_an_object_of_another_size(s3: S3Bucket, large: Path, run: Run) -> None:
    url = upload_sealed(s3, large)
    s3.put(f"run/{LARGE}", large.read_bytes() + b"\0")
    remote.forget()
    expected = f"it has {NBYTES + 1041:,} bytes instead of {NBYTES + 1040:,}"
    assert expected in run("verify", url, "--only", "manifest").out or "trailing" in run("verify", url).out


def test_a_manifest_in_google_cloud_storage(
    web: WebServer, large: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers as Google's XML API: a listing, and the CRC-32C at HEAD."""
    assert seal(large).is_written
    for name in (LARGE, f"{LARGE}.sha256", f"{LARGE}.digests.json"):
        web.files[f"/bucket/run/{name}"] = large.parent / name
        web.files[f"/bucket/run%2F{name.replace('.', '%2E')}"] = large.parent / name  # as obstore spells it
    crc = base64.b64encode(google_crc32c.value(large.read_bytes()).to_bytes(4, "big")).decode()

    def as_google(number: int, asked: Asked, answer: Answer) -> None:
        if "list-type" in asked.path:
            answer.status, answer.body = 200, b"<ListBucketResult></ListBucketResult>"
        elif asked.path == f"/bucket/run/{LARGE}" and asked.method == "HEAD":
            answer.headers["x-goog-hash"] = f"crc32c={crc}"

    web.misbehave = as_google
    for name, value in {
        "GOOGLE_BASE_URL": web.url,
        "GOOGLE_SKIP_SIGNATURE": "1",
        "AWS_ALLOW_HTTP": "1",
    }.items():
        monkeypatch.setenv(name, value)
    passed = ("passed", "1 file, by the store's checksums")
    assert checks(run, f"gs://bucket/run/{LARGE}", "--only", "manifest")["manifest"] == passed
    assert web.nbytes < MB
    crc = base64.b64encode(b"1234").decode()
    assert [code for code, _ in findings(run, f"gs://bucket/run/{LARGE}", "--only", "manifest")] == [
        "manifest-mismatch"
    ]


# Writing ----------------------------------------------------------------------------------------------


def test_an_earlier_manifest_gets_its_crcs(large: Path) -> None:
    seal(large)
    document = Path(f"{large}.digests.json")
    whole = document.read_bytes()
    document.write_bytes(without_crcs(document))
    assert seal(large).is_written
    assert document.read_bytes() == whole
    assert not seal(large).is_written


def test_a_manifest_that_says_more_stays(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal(large)
    before = Path(f"{large}.digests.json").read_bytes()
    monkeypatch.setattr("ckpttool.ops.manifest_seal.CRCS", ("crc32c",))
    sealed = seal(large)
    assert (sealed.refused, sealed.is_written) == (None, False)
    assert Path(f"{large}.digests.json").read_bytes() == before


def test_other_crcs_are_another_manifest(large: Path) -> None:
    seal(large)
    document = Path(f"{large}.digests.json")
    told = json.loads(document.read_text())
    told["files"][LARGE]["crc32c"][0] = "00000000"
    document.write_text(json.dumps(told))
    expected = f"{LARGE}.digests.json already exists and differs; --force replaces it"
    assert seal(large).refused == expected
    assert seal(large, "--force").is_written


# Copies -----------------------------------------------------------------------------------------------


def copy_check(run: Run, *arguments: object) -> tuple[str, str]:
    return checks(run, *arguments)["copy"]


def test_a_copy_on_this_machine(large: Path, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "there" / LARGE
    copy.parent.mkdir()
    shutil.copy(large, copy)
    both = copy_check(run, large, "--against", copy)
    assert both == ("passed", "1 file by SHA-256 (read, read)")
    assert copy_check(run, large, "--quick", "--against", copy.parent) == both
    seal(large)
    assert copy_check(run, large, "--against", copy) == ("passed", "1 file by SHA-256 (manifest, read)")
    assert run("verify", large, "--against", copy) == (
        0,
        f"✓ valid    {large}  safetensors  18 MB  1 tensor, no checksums, manifest ok, copy ok\n",
        "",
    )
    seal(copy)
    os.unlink(f"{large}.sha256")
    os.unlink(f"{large}.digests.json")
    assert copy_check(run, large, "--against", copy) == both  # that a copy has a manifest proves nothing
    seal(large)
    copy.write_bytes(flipped(large.read_bytes()))
    status, out, err = run("verify", large, "--against", copy)
    is_, was = (hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in (copy, large))
    assert (status, err) == (1, "")
    assert out.splitlines()[:2] == [
        f"✗ DIFFERS  {large}  safetensors  18 MB  copy",
        f"    error copy-mismatch [{copy}]: the manifest's SHA-256 is {was}… instead of {is_}…",
    ]


def test_a_copy_in_a_store(s3: S3Bucket, large: Path, run: Run, read: list[int]) -> None:
    s3.put(f"run/{LARGE}", large.read_bytes())
    url = s3.url(f"run/{LARGE}")
    assert copy_check(run, large, "--against", url) == ("passed", "1 file by CRC-32 (read, store)")
    assert copy_check(run, large, "--against", s3.url("run/")) == ("passed", "1 file by CRC-32 (read, store)")
    seal(large)
    assert copy_check(run, large, "--against", url) == ("passed", "1 file by CRC-32 (manifest, store)")
    assert read == []
    assert copy_check(run, url, "--quick", "--against", large) == (
        "passed",
        "1 file by CRC-32 (store, manifest)",
    )
    os.unlink(f"{large}.sha256")
    os.unlink(f"{large}.digests.json")
    assert copy_check(run, url, "--quick", "--against", large) == ("passed", "1 file by CRC-32 (store, read)")
    s3.put(f"run/{LARGE}", flipped(large.read_bytes()))
    remote.forget()
    is_, was = (f"{zlib.crc32(data):08x}" for data in (s3.get(f"run/{LARGE}"), large.read_bytes()))
    expected = ("copy-mismatch", f"the store's CRC-32 is {is_} instead of {was}")
    assert findings(run, large, "--quick", "--against", url) == [expected]
    assert sum(read) < MB / 2


def test_a_manifest_that_is_older_is_not_believed(s3: S3Bucket, large: Path, run: Run) -> None:
    s3.put(f"run/{LARGE}", large.read_bytes())
    url = s3.url(f"run/{LARGE}")
    seal(large)
    assert copy_check(run, large, "--against", url)[1] == "1 file by CRC-32 (manifest, store)"
    large.write_bytes(flipped(large.read_bytes()))
    moment = os.stat(f"{large}.sha256").st_mtime + 60
    os.utime(large, (moment, moment))
    assert copy_check(run, large, "--quick", "--against", url)[0] == "failed"


def test_a_manifest_in_a_store_proves_nothing_by_itself(
    s3: S3Bucket, large: Path, run: Run, read: list[int], without_boto3: None
) -> None:
    url = upload_sealed(s3, large)
    s3.put(f"run/{LARGE}", flipped(large.read_bytes()))
    remote.forget()
    assert copy_check(run, large, "--quick", "--against", url)[0] == "skipped"
    assert copy_check(run, url, "--quick", "--against", large)[0] == "skipped"
    assert copy_check(run, large, "--against", url)[0] == "failed"


def test_a_manifest_leads_from_one_store_to_the_other(
    s3: S3Bucket, large: Path, run: Run, read: list[int]
) -> None:
    first, second = upload_sealed(s3, large), s3.url(f"other/{LARGE}")
    for data, expected in ((large.read_bytes(), "passed"), (flipped(large.read_bytes()), "failed")):
        upload_parts(s3, f"other/{LARGE}", data, 8 * MB)
        assert copy_check(run, first, "--quick", "--against", second)[0] == expected
        assert copy_check(run, second, "--quick", "--against", first)[0] == expected
    assert sum(read) < MB


def test_two_stores(s3: S3Bucket, large: Path, run: Run, read: list[int]) -> None:
    for key in ("a", "b"):
        s3.put(f"{key}/{LARGE}", large.read_bytes())
    urls = s3.url(f"a/{LARGE}"), s3.url(f"b/{LARGE}")
    told = copy_check(run, urls[0], "--quick", "--against", urls[1])
    assert told == ("passed", "1 file by CRC-32 (store, store)")
    upload_parts(s3, f"b/{LARGE}", large.read_bytes(), 8 * MB)
    told = copy_check(run, urls[0], "--quick", "--against", urls[1])
    assert told == ("skipped", f"{urls[1]} could not be compared: no common checksum is known")
    assert run("verify", urls[0], "--quick", "--against", urls[1]).status == 1
    assert sum(read) < MB / 2
    assert copy_check(run, urls[0], "--against", urls[1])[0] == "passed"


def test_parts_that_are_no_blocks_are_computed_of_the_file(s3: S3Bucket, large: Path, run: Run) -> None:
    upload_parts(s3, f"run/{LARGE}", large.read_bytes(), 5 * MB)
    url = s3.url(f"run/{LARGE}")
    assert copy_check(run, large, "--against", url) == ("passed", "1 file by CRC-32 (read, store)")
    upload_parts(s3, f"run/{LARGE}", flipped(large.read_bytes()), 5 * MB)
    assert copy_check(run, large, "--against", url)[0] == "failed"


def test_a_store_that_tells_nothing(
    s3: S3Bucket, large: Path, run: Run, read: list[int], without_boto3: None
) -> None:
    url = s3.url(f"run/{LARGE}")
    s3.put(f"run/{LARGE}", large.read_bytes())
    proven = "passed", "1 file by MD5 (read, store)"  # nor has it to: its ETag is the MD5
    for arguments in ([], ["--quick"]):
        assert copy_check(run, large, *arguments, "--against", url) == proven
    assert read == []
    s3.put(f"run/{LARGE}", flipped(large.read_bytes()))
    assert copy_check(run, large, "--against", url)[0] == "failed"
    read.clear()
    upload_parts(s3, f"run/{LARGE}", large.read_bytes(), 7 * MB)  # whose ETag nobody can compute
    reason = f"{url} could not be compared: boto3 is not installed"
    assert copy_check(run, large, "--quick", "--against", url) == ("skipped", reason)
    status, out, _ = run("verify", large, "--quick", "--against", url)
    assert (status, out.splitlines()[:2]) == (
        1,
        [
            f"✗ NOT RUN  {large}  safetensors  18 MB  not fully checked",
            f"    error copy-unproven: {reason}",
        ],
    )
    assert read == []
    assert copy_check(run, large, "--against", url) == ("passed", "1 file by SHA-256 (read, read)")


def test_a_directory_of_checkpoints(s3: S3Bucket, files: Path, run: Run, tmp_path: Path) -> None:
    runs = Path(shutil.copytree(files / "series", tmp_path / "runs"))
    s3.upload(runs, "copy")
    remote.forget()
    status, out, err = run("verify", runs, "--quick", "--against", s3.url("copy"))
    assert (status, err) == (0, "")
    assert "10 checkpoints: 10 valid" in out
    s3.client.delete_object(Bucket=s3.name, Key="copy/model_epoch_3.pth")
    s3.put("copy/model_epoch_4.pth", flipped((runs / "model_epoch_4.pth").read_bytes()))
    s3.put("copy/model_epoch_5.pth", b"short")
    remote.forget()
    status, out, _ = run("verify", runs, "--quick", "--against", s3.url("copy"))
    assert (status, out.splitlines()[-1]) == (1, "10 checkpoints: 7 valid, 3 unlike its copy")
    assert f"copy-missing-file [{s3.url('copy/model_epoch_3.pth')}]: no such file" in out
    size = (runs / "model_epoch_5.pth").stat().st_size
    assert f"[{s3.url('copy/model_epoch_5.pth')}]: it has 5 bytes instead of {size:,}" in out


def test_shards_and_a_step_directory(s3: S3Bucket, files: Path, run: Run, tmp_path: Path) -> None:
    for name in ("sharded", "trainer/checkpoint-4"):
        path = Path(shutil.copytree(files / "safetensors" / name, tmp_path / name))
        s3.upload(path, name)
        remote.forget()
        told = copy_check(run, path, "--against", s3.url(name))
        count = int(told[1].split()[0])
        assert told == ("passed", f"{count} files by CRC-32 (read, store)")
        assert count > 3
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    assert copy_check(run, index, "--against", s3.url(f"sharded/{index.name}"))[0] == "passed"
    seal(path)
    assert "(manifest, store)" in copy_check(run, path, "--against", s3.url(name))[1]


def test_a_copy_on_the_hub(
    web: WebServer, files: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    path = Path(shutil.copytree(files / "safetensors" / "sharded", tmp_path / "m"))
    rows = []
    for file in path.iterdir():
        data = file.read_bytes()
        row: dict[str, Any] = {"type": "file", "path": file.name, "size": len(data)}
        row["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if file.suffix == ".safetensors":
            row |= {"oid": "1" * 40, "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}}
        rows.append(row)
    web.files["/api/models/me/copied/revision/main"] = json.dumps({"sha": "0" * 40}).encode()
    web.files[f"/api/models/me/copied/tree/{'0' * 40}"] = json.dumps(rows).encode()
    status, told = copy_check(run, path, "--quick", "--against", "hf://me/copied")
    assert status == "passed"
    assert sorted(told.split("; ")) == [
        "1 file by git's SHA-1 (read, store)",
        "4 files by SHA-256 (read, store)",
    ]
    assert {asked.path.split("/")[1] for asked in web.requests} == {"api"}  # no file of it was read


def test_usage(large: Path, run: Run) -> None:
    expected = "ckpttool: error: --against takes one PATH, and can't be combined with --write-manifest\n"
    for arguments in ([large, large], [large, "--write-manifest"]):
        assert run("verify", *arguments, "--against", large) == (2, "", expected)
    for path in (large, large.parent):
        refused = run("verify", path, "--against", "s3://")
        assert refused == (2, "", "ckpttool: error: s3://: no bucket or host\n")


def test_a_signed_url_is_refused_and_not_shown(large: Path, run: Run, s3: S3Bucket) -> None:
    """Even where the directory was listed, and so nothing else has to be asked for."""
    s3.upload(large, "run/large.safetensors")
    url = s3.url("run/large.safetensors")
    for copy in (f"{url}?X-Amz-Signature=secret", f"{url}#secret", f"{url}\n"):
        status, out, err = run("verify", url, "--against", copy)
        assert (status, out) == (2, "")
        assert err.startswith(f"ckpttool: error: {url}") and "secret" not in err


def test_a_damaged_checkpoint_is_not_compared(large: Path, run: Run) -> None:
    large.write_bytes(large.read_bytes()[:100])
    assert copy_check(run, large, "--against", large) == ("skipped", "it is truncated")

"""Checkpoints in stores: answers as from the disk, few requests, and no verdict without an answer."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import (
    CheckpointError,
    NotFound,
    UsageError,
    inspect,
    latest,
    list_checkpoints,
    open_checkpoint,
    salvage,
    verify,
)
from ckpttool.storage import http_requests, remote, stores
from ckpttool.testing import described
from tests.support.commands import Run
from tests.support.memory import MemoryBucket
from tests.support.stores import Answer, Asked, S3Bucket, WebServer

FILES = Path(__file__).parents[2] / "fixtures" / "files"
MB = 1_000_000


# Answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keras/adam.weights.h5", "keras/adam.keras", "series/model_epoch_10.pth"])
def test_what_is_cut_is_salvaged(bucket: MemoryBucket, name: str, tmp_path: Path) -> None:
    cut = tmp_path / Path(name).name
    whole = (FILES / name).read_bytes()
    cut.write_bytes(whole[: len(whole) * 5 // 6])
    bucket.upload(cut, cut.name)
    here = salvage(cut, tmp_path / "here.safetensors")
    there = salvage(bucket.url(cut.name), tmp_path / "there.safetensors")
    assert (there.amount, [one.name for one in there.lost]) == (here.amount, [one.name for one in here.lost])
    contents = [(tmp_path / f"{place}.safetensors").read_bytes() for place in ("here", "there")]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_state_dict(bucket: MemoryBucket, framework: str) -> None:
    pytest.importorskip(framework)
    path = FILES / "series" / "model_epoch_10.pth"
    bucket.upload(path, path.name)
    with open_checkpoint(bucket.url(path.name)) as checkpoint, open_checkpoint(path) as local:
        found, expected = checkpoint.state_dict(framework), local.state_dict(framework)
    assert list(found) == list(expected) != []
    assert all((found[name] == expected[name]).all() for name in expected)


def test_commands_take_urls(bucket: MemoryBucket, run: Run, tmp_path: Path) -> None:
    bucket.upload(FILES / "series", "run")
    run_url = bucket.url("run")
    assert run("latest", run_url) == (0, f"{run_url}/model_epoch_10.pth\n", "")
    assert run("verify", run_url).out.splitlines()[-1] == "10 checkpoints: 10 valid"
    assert run("inspect", run_url, "--field", "training.epoch").out == "10\n"
    assert [line.split("\t")[0] for line in run("list", run_url).out.splitlines()] == [
        f"{run_url}/model_epoch_{number}.pth" for number in range(1, 11)
    ]
    assert run("list", bucket.url(), "-q").status == 0
    local = tmp_path / "ten.safetensors"
    assert run("convert", f"{run_url}/model_epoch_10.pth", local).status == 0
    assert run("diff", f"{run_url}/model_epoch_10.pth", FILES / "series" / "model_epoch_10.pth").status == 0
    assert run("diff", run_url, "--json").status == 1


def test_latest_asks_again_what_is_there(bucket: MemoryBucket) -> None:
    """What a store said a moment ago is no answer for a job that waits for a save."""
    first, second = (FILES / "series" / f"model_epoch_{number}.pth" for number in (1, 2))
    bucket.upload(first, f"run/{first.name}")
    assert latest(bucket.url("run")).path == bucket.url(f"run/{first.name}")
    bucket.upload(second, f"run/{second.name}")
    assert latest(bucket.url("run")).path == bucket.url(f"run/{second.name}")


def test_a_conversion_into_a_store(bucket: MemoryBucket, run: Run) -> None:
    source, target = FILES / "series" / "model_epoch_10.pth", bucket.url("x/ten.safetensors")
    assert run("convert", source, target, "--dry-run").status == 0
    assert bucket.keys() == []
    assert run("convert", source, target).out.startswith(f"{source} → {target}: 8 tensors")
    assert bucket.keys() == ["x/ten.safetensors"]
    assert run("diff", source, target).status == 0
    other = FILES / "series" / "model_epoch_9.pth"
    answer = run("convert", other, target)
    assert (answer.status, "not written" in answer.err) == (2, True)
    assert run("diff", source, target).status == 0
    assert run("convert", other, target, "--force").status == 0
    assert run("diff", other, target).status == 0


def test_nothing_there(bucket: MemoryBucket, run: Run) -> None:
    bucket.put("a/b.txt", b"text")
    for url in (bucket.url("none"), bucket.url("a/none.pth"), "mem://no-such-bucket/x"):
        assert run("inspect", url).status == 2
        with pytest.raises(CheckpointError):
            open_checkpoint(url)
    assert run("latest", bucket.url("none")).status == 2
    assert run("latest", bucket.url("none"), "--missing-ok") == (
        0,
        "",
        f"ckpttool: {bucket.url('none')}: no checkpoint yet\n",
    )


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(CheckpointError, match="s3://x/y: no credentials for this store were found"):
        open_checkpoint("s3://x/y")


# Requests ---------------------------------------------------------------------------------------------


def large_safetensors(path: Path, header_bytes: int = 0x408, values: bytes = b"") -> None:
    """Write a sparse file; the first byte of its header's length may be an opcode of pickles."""
    entry = {"dtype": "F32", "shape": [1 << 26], "data_offsets": [0, 1 << 28]}
    header: dict[str, Any] = {"w0": entry}
    for number in range(1, 4):
        header[f"w{number}"] = {**entry, "data_offsets": [number << 28, (number + 1) << 28]}
    text = json.dumps(header).encode()
    text = text.ljust(header_bytes)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + values)
        file.truncate(8 + len(text) + (1 << 30))


def like_a_pickle(path: Path) -> None:
    """Begin as a pickle of a text does, which ends with its line: somewhere in the values."""
    large_safetensors(path, 0x2000 + ord("V"), random.Random(0).randbytes(1 << 12))


def large_npz(path: Path, elements: int = 1 << 20) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4):
            with archive.open(f"w{number}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.zeros(elements, np.float32))


def large_torch(path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({f"w{number}": torch.zeros(1 << 20) for number in range(4)}, path)


def test_a_look_at_a_zip_asks_for_none_of_its_many_headers(web: WebServer, tmp_path: Path, run: Run) -> None:
    torch = pytest.importorskip("torch")
    torch.save({f"w{number}": torch.zeros(1 << 14) for number in range(60)}, tmp_path / "m.pth")
    web.files["/m.pth"] = tmp_path / "m.pth"
    url = f"{web.url}/m.pth"
    there = run("inspect", "--json", "--all", url).out.replace(url, "PATH")
    assert len(web.requests) < 10
    assert web.nbytes < MB
    assert there == run("inspect", "--json", "--all", tmp_path / "m.pth").out.replace(
        f"{tmp_path}/m.pth", "PATH"
    )
    with open_checkpoint(url):  # whoever reads values compares the headers
        assert len(web.requests) > 30


@pytest.mark.parametrize(
    "write, name",
    [
        (large_safetensors, "m.safetensors"),
        (like_a_pickle, "m.safetensors"),
        (large_npz, "m.npz"),
        (large_torch, "m.pth"),
    ],
    ids=["safetensors", "like a pickle", "npz", "pytorch"],
)
def test_structure_takes_few_requests(
    web: WebServer, tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    write(tmp_path / name)
    web.files[f"/{name}"] = tmp_path / name
    assert len(inspect(f"{web.url}/{name}").checkpoint.tensors) == 4
    assert len(web.requests) < 10
    assert web.nbytes < MB


def test_a_directory_is_listed_once(bucket: MemoryBucket) -> None:
    bucket.upload(FILES / "series", "run")
    assert len(list_checkpoints(bucket.url("run") + "/").checkpoints) == 10
    assert bucket.calls.count("listing run") <= 2  # whether it is a directory, and what lies in it
    assert {call for call in bucket.calls if call.startswith("status")} <= {"status run"}


# Azure, as far as a server of files can play it ------------------------------------------------------


def test_a_listing_has_versions_as_headers_have_them(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's listings lack the quotation marks around them."""
    path = "/account/box/run/model_epoch_1.pth"
    web.files[path] = FILES / "series" / "model_epoch_1.pth"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{web.url}/account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    whole = web.answer(Asked("HEAD", path, {}))

    def as_azure_does(number: int, asked: Asked, answer: Answer) -> None:
        if "comp=list" in asked.path:
            tag, size = whole.headers["ETag"].strip('"'), whole.headers["Content-Length"]
            blobs = AZURE_BLOB.format(tag=tag, size=size) if "prefix=run" in asked.path else ""
            answer.status, answer.body = 200, AZURE_LISTING.format(blobs=blobs).encode()

    web.misbehave = as_azure_does
    (listed,) = list_checkpoints("az://box/run").checkpoints
    assert listed.entry.unit.path == "az://box/run/model_epoch_1.pth"
    assert verify(listed.entry.unit.path)


AZURE_LISTING = """<?xml version="1.0" encoding="utf-8"?>
<EnumerationResults ServiceEndpoint="http://x/" ContainerName="box">
<Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>
"""
AZURE_BLOB = """<Blob><Name>run/model_epoch_1.pth</Name><Properties>
<Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified><Etag>{tag}</Etag>
<Content-Length>{size}</Content-Length><Content-Type>application/octet-stream</Content-Type>
<BlobType>BlockBlob</BlobType></Properties></Blob>
"""


# Servers that misbehave -------------------------------------------------------------------------------


def ignore_ranges(number: int, asked: Asked, answer: Answer) -> None:
    if answer.status == 206:
        answer.status = 200
        answer.headers.pop("Content-Range")


def lie_about_length(number: int, asked: Asked, answer: Answer) -> None:
    if answer.status == 206:
        answer.headers["Content-Range"] += "0"


def break_off(number: int, asked: Asked, answer: Answer) -> None:
    if asked.method == "GET":
        answer.sent = answer.body[: len(answer.body) // 2]


def change(number: int, asked: Asked, answer: Answer) -> None:
    if asked.method == "GET" and number > 2:
        answer.headers["ETag"] = '"another"'


def refuse(status: int, first: int) -> Callable[[int, Asked, Answer], None]:
    def misbehave(number: int, asked: Asked, answer: Answer) -> None:
        if asked.method == "GET" and number >= first:
            answer.status, answer.body, answer.headers = status, b"", {}

    return misbehave


@pytest.mark.parametrize(
    "misbehave, message",
    [
        (ignore_ranges, r"bytes 0\.\.\d+: the server can't send a part of it"),
        (lie_about_length, "it was replaced while it was read"),
        (break_off, r"bytes 0\.\.\d+: the response was cut off"),
        (change, "it was replaced while it was read"),
        (refuse(403, 1), r"bytes 0\.\.\d+: the store answered 403 Forbidden"),
        (refuse(404, 1), "no such file or directory"),
        (refuse(416, 1), "the store answered 416"),
        (refuse(500, 1), "the store answered 500"),
        (refuse(503, 1), "the store answered 503 Service Unavailable"),
        (refuse(403, 3), r"bytes \d+\.\.\d+: the store answered 403 Forbidden"),
        (refuse(503, 3), r"bytes \d+\.\.\d+: the store answered 503 Service Unavailable"),
    ],
)
def test_no_verdict_without_an_answer(
    web: WebServer,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    misbehave: Callable[[int, Asked, Answer], None],
    message: str,
) -> None:
    """What is read first tells what it is; whatever fails later is an error, too, and no damage."""
    for module in (http_requests, stores):
        monkeypatch.setattr(module, "RETRIES", 1)
    large_npz(tmp_path / "m.npz", 1 << 17)
    web.files["/m.npz"] = (tmp_path / "m.npz").read_bytes()
    web.misbehave = misbehave
    url = f"{web.url}/m.npz"
    with pytest.raises(CheckpointError, match=f"(?i){message}") as caught:
        verify(url)
    assert str(caught.value).startswith(url)
    remote.forget()
    web.requests.clear()
    status, out, err = run("verify", url)
    assert (status, "INVALID" in out) == (2, False)
    assert url in err
    assert len(web.requests) < 200


def test_what_is_below_a_directory_that_does_not_answer(bucket: MemoryBucket, run: Run) -> None:
    bucket.upload(FILES / "series", "run")
    bucket.refuse("read .*_3.pth", 503)
    status, out, err = run("verify", bucket.url("run"))
    assert (status, "INVALID" in out) == (2, False)
    assert f"{bucket.url('run/model_epoch_3.pth')}: the store answered 503" in err


# Addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@example.invalid/m.pth",
        "s3://secret@bucket/m.pth",
        "https://example.invalid/m.pth?token=secret",
        "https://example.invalid/m.pth#secret",
    ],
)
def test_secrets_in_an_address_are_refused_and_not_shown(run: Run, url: str) -> None:
    status, out, err = run("inspect", url)
    assert (status, out) == (2, "")
    assert "secret" not in err
    with pytest.raises(UsageError):
        open_checkpoint(url)


def test_a_token_goes_to_no_other_host(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub redirects to where its files are; with the user's token only as long as it is the hub."""
    from tests.support.stores import web_server

    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    data = (FILES / "safetensors" / "dtypes.safetensors").read_bytes()
    commit = "a" * 40
    answers = {
        "/api/models/me/m/revision/main": {"sha": commit},
        f"/api/models/me/m/tree/{commit}": [
            {"type": "file", "path": "m.safetensors", "size": len(data), "oid": "1" * 40}
        ],
    }
    for path, answer in answers.items():
        web.files[path] = json.dumps(answer).encode()
    stored = f"/me/m/resolve/{commit}/m.safetensors"
    with web_server() as other:
        other.files["/blob"] = data
        web.files[stored] = data

        def redirect(number: int, asked: Asked, answer: Answer) -> None:
            if asked.path == stored:
                answer.status, answer.body = 302, b""
                answer.headers = {"Location": f"{other.url.replace('127.0.0.1', 'localhost')}/blob"}

        web.misbehave = redirect
        with (
            open_checkpoint("hf://me/m/m.safetensors") as checkpoint,
            open_checkpoint(str(FILES / "safetensors" / "dtypes.safetensors")) as local,
        ):
            assert described(checkpoint) == described(local)
        assert latest("hf://me/m").path == "hf://me/m/m.safetensors"
        assert other.requests
        assert all("authorization" not in asked.headers for asked in other.requests)
    assert all(asked.headers["authorization"] == "Bearer secret" for asked in web.requests)


def test_keys_of_a_profile(s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.upload(FILES / "series" / "model_epoch_1.pth", "m.pth")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "config").write_text("[profile mine]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert verify(s3.url("m.pth")).is_valid
    (tmp_path / "config").write_text("no section")
    remote.forget()
    with pytest.raises(UsageError, match="config: invalid AWS configuration"):
        verify(s3.url("m.pth"))


def test_other_protocols_by_fsspec(run: Run) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for path in (FILES / "series").iterdir():
        files.pipe_file(f"/run/{path.name}", path.read_bytes())
    try:
        assert run("latest", "memory://run") == (0, "memory://run/model_epoch_10.pth\n", "")
        assert verify("memory://run/model_epoch_1.pth").is_valid
        with pytest.raises(NotFound):
            open_checkpoint("memory://run/none.pth")
    finally:
        files.rm("/run", recursive=True)


def test_an_unknown_protocol(run: Run) -> None:
    status, _, err = run("inspect", "nonsense://x/y.pth")
    assert status == 2
    assert err.startswith("ckpttool: error: nonsense://x")

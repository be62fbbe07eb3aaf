"""Servers that lie: a clear error of the server, in bounded time, and never one of ours."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.storage import http_requests, remote, stores
from tests.support.commands import Run
from tests.support.stores import Answer, Asked, WebServer, environment, web_server

FILES = Path(__file__).parents[2] / "fixtures" / "files"
DATA = (FILES / "safetensors" / "dtypes.safetensors").read_bytes()
COMMIT = "a" * 40
MOST_SECONDS = 20

Lie = Callable[[int, Asked, Answer], None]


@pytest.fixture
def liar(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    """Return a server that is S3, the Hub and a web server, with one checkpoint each."""
    for name, value in environment(web.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token-of-the-user")
    monkeypatch.setattr(http_requests, "_FIRST_PAUSE", 0)
    for module in (http_requests, stores):
        monkeypatch.setattr(module, "RETRIES", 1)
    monkeypatch.setattr(http_requests, "TIMEOUT_SECONDS", 2)
    monkeypatch.setattr(http_requests, "MAX_PAGES", 50)
    monkeypatch.setattr(http_requests, "MAX_NAMES", 2_000)
    monkeypatch.setattr(remote, "MAX_DIRECTORIES", 60)
    http_requests._pool.cache_clear()
    web.files["/bucket/run/m.safetensors"] = web.files["/m.safetensors"] = DATA
    web.files[f"/me/m/resolve/{COMMIT}/m.safetensors"] = DATA
    web.files["/api/models/me/m/revision/main"] = json.dumps({"sha": COMMIT}).encode()
    web.files[f"/api/models/me/m/tree/{COMMIT}"] = json.dumps([hub_row()]).encode()
    remote.forget()
    return web


def hub_row(**changes: Any) -> dict[str, Any]:
    return {"type": "file", "path": "m.safetensors", "size": len(DATA), "oid": "1" * 40} | changes


def s3_page(
    *keys: str,
    prefixes: tuple[str, ...] = (),
    token: str | None = None,
    size: object = len(DATA),
    extra: str = "",
) -> bytes:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>&quot;x&quot;</ETag>"
        "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
        for key in keys
    )
    below = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in prefixes)
    more = "false" if token is None else "true"
    following = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        '<?xml version="1.0"?><ListBucketResult><EncodingType>url</EncodingType>'
        f"<IsTruncated>{more}</IsTruncated>{following}{extra}{contents}{below}</ListBucketResult>"
    ).encode()


def lists(page: bytes | Callable[[int, Asked], bytes], status: int = 200, **headers: str) -> Lie:
    """Return what answers to a listing of S3."""

    def lie(number: int, asked: Asked, answer: Answer) -> None:
        if "list-type=2" in asked.path:
            answer.status, answer.headers = status, headers
            answer.body = page if isinstance(page, bytes) else page(number, asked)

    return lie


def objects(
    status: int | None = None, *, method: str = "GET", body: bytes | None = None, **headers: str | None
) -> Lie:
    """Return what answers to a question about the object: in part as an honest server does."""

    def lie(number: int, asked: Asked, answer: Answer) -> None:
        if asked.path.endswith(".safetensors") and asked.method == method:
            answer.status = status or answer.status
            answer.body = answer.body if body is None else body
            for name, value in headers.items():
                answer.headers.pop(name.replace("_", "-"), None)
                if value is not None:
                    answer.headers[name.replace("_", "-")] = value

    return lie


def hub(
    page: bytes | Callable[[int, Asked], bytes], status: int = 200, where: str = "/tree/", **headers: str
) -> Lie:
    """Return what answers to a question to the Hub."""

    def lie(number: int, asked: Asked, answer: Answer) -> None:
        if where in asked.path and asked.path.startswith("/api/"):
            answer.status, answer.headers = status, dict(headers)
            answer.body = page if isinstance(page, bytes) else page(number, asked)

    return lie


def hub_goes_on(address: str) -> Lie:
    """Return what names a next page, ``{n}`` being the number of the request and ``{url}`` the server."""

    def lie(number: int, asked: Asked, answer: Answer) -> None:
        if "/tree/" in asked.path:
            base = f"http://{asked.headers['host']}/api/models/me/m/tree/{COMMIT}"
            answer.status, answer.body = 200, json.dumps([hub_row(path=f"f{number}.txt")]).encode()
            answer.headers = {"Link": f'<{address.format(n=number, tree=base)}>; rel="next"'}

    return lie


def hub_breaks_off(number: int, asked: Asked, answer: Answer) -> None:
    """Know nothing of the second page."""
    if "?cursor=" in asked.path:
        answer.status, answer.headers, answer.body = 404, {}, b""
    else:
        hub_goes_on("{tree}?cursor=2")(number, asked, answer)


def breaks_off(number: int, asked: Asked, answer: Answer) -> None:
    if asked.method == "GET":
        answer.sent = answer.body[: len(answer.body) // 2]


def dawdles(number: int, asked: Asked, answer: Answer) -> None:
    time.sleep(3)


def deep(opening: str, closing: str) -> bytes:
    return (opening * 200_000 + closing * 200_000).encode()


def ever_new(number: int, asked: Asked) -> bytes:
    return s3_page(f"run/{number}.txt", token=f"t{number}")


def prefixes_of_prefixes(number: int, asked: Asked) -> bytes:
    prefix = asked.path.partition("prefix=")[2].partition("&")[0].replace("%2F", "/")
    return s3_page(prefixes=(f"{prefix}a/", f"{prefix}b/"))


S3, S3_FILE, HUB, WEB = "s3://bucket/run", "s3://bucket/run/m.safetensors", "hf://me/m", "{web}/m.safetensors"
ENTITIES = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
UNREADABLE = "the store's listing is invalid"
ELSEWHERE = "is not in this directory"

LIES: dict[str, tuple[str, Lie, str]] = {
    # S3: listings
    "ever new pages": (S3, lists(ever_new), "more than 50 pages"),
    "empty pages with ever new tokens": (
        S3,
        lists(lambda n, _: s3_page(token=f"t{n}")),
        "more than 50 pages",
    ),
    "a token twice": (S3, lists(s3_page("run/a.txt", token="t")), "repeats a page"),
    "an empty token": (S3, lists(s3_page("run/a.txt", token="")), UNREADABLE),
    "more names than anybody has": (
        S3,
        lists(lambda n, _: s3_page(*(f"run/{n}-{i}.txt" for i in range(500)), token=f"t{n}")),
        "more than 2,000 names",
    ),
    "prefixes of prefixes": (S3, lists(prefixes_of_prefixes), "more than 60 directories"),
    "a key outside the prefix": (S3, lists(s3_page("other/m.safetensors")), ELSEWHERE),
    "a key that begins as the prefix": (S3, lists(s3_page("running/m.safetensors")), ELSEWHERE),
    "a key far below": (S3, lists(s3_page("run/sub/m.safetensors")), ELSEWHERE),
    "an empty key": (S3, lists(s3_page("")), ELSEWHERE),
    "a prefix outside the prefix": (S3, lists(s3_page(prefixes=("other/",))), ELSEWHERE),
    "no such listing": (S3, lists(b"", 404), "answered 404"),
    "an answer that is no XML": (S3, lists(b"hello"), UNREADABLE),
    "an empty answer": (S3, lists(b""), UNREADABLE),
    "JSON": (S3, lists(b'["x"]'), UNREADABLE),
    "HTML": (S3, lists(b"<html><body/></html>"), UNREADABLE),
    "XML that is cut": (S3, lists(s3_page("run/m.safetensors")[:-30]), UNREADABLE),
    "200,000 elements in each other": (S3, lists(deep("<a>", "</a>")), UNREADABLE),
    "200,000 elements in a listing": (
        S3,
        lists(s3_page("run/m.safetensors", extra=deep("<a>", "</a>").decode(), size="x")),
        UNREADABLE,
    ),
    "entities": (S3, lists(ENTITIES.encode() + s3_page("run/&b;")), UNREADABLE),
    "bytes that are no UTF-8": (S3, lists(b"<ListBucketResult>\xff</ListBucketResult>"), UNREADABLE),
    "an object without a size": (
        S3,
        lists(s3_page("run/m.safetensors").replace(b"Size", b"Sise")),
        UNREADABLE,
    ),
    "an object without a name": (S3, lists(s3_page("run/m.safetensors").replace(b"Key", b"Kee")), UNREADABLE),
    "a negative size": (S3, lists(s3_page("run/m.safetensors", size=-1)), UNREADABLE),
    "a size of 10^30": (S3, lists(s3_page("run/m.safetensors", size=10**30)), UNREADABLE),
    "a size that is no number": (S3, lists(s3_page("run/m.safetensors", size="x")), UNREADABLE),
    "a size of other digits": (S3, lists(s3_page("run/m.safetensors", size="٣")), UNREADABLE),
    "a time that is none": (S3, lists(s3_page("run/m.safetensors").replace(b"2015-", b"20x5-")), UNREADABLE),
    "a prefix without a name": (
        S3,
        lists(s3_page(prefixes=("run/a/",)).replace(b"Prefix>", b"P>")),
        UNREADABLE,
    ),
    "a listing of 9 MB": (S3, lists(b" " * 9_000_000), "more than 8,388,608 bytes"),
    "a redirect of a listing": (
        S3,
        lists(b"", 307, Location="http://127.0.0.1:1/"),
        "answered 307 Temporary Redirect; redirects are not followed",
    ),
    "a redirect without a place": (S3, lists(b"", 301), "answered 301 Moved Permanently"),
    "an error page of 1 MB": (S3, lists(b"x" * 1_000_000, 400), "answered 400 Bad Request"),
    "an error for a listing": (S3, lists(b"<Code>SlowDown</Code>", 503), r"answered 503 .*\(SlowDown\)"),
    "a refusal of a listing": (
        S3,
        lists(b"<Code>AccessDenied</Code>", 403),
        r"answered 403 .*\(AccessDenied\)",
    ),
    "nothing where a listing was": (S3, lists(b"", 204), "answered 204"),
    # S3: objects
    "a whole file for a part": (S3_FILE, objects(200, Content_Range=None), "can't send a part"),
    "no range": (S3_FILE, objects(Content_Range=None), "sent another part"),
    "another range": (S3_FILE, objects(Content_Range="bytes 5-9/100"), "sent another part"),
    "a range that is none": (S3_FILE, objects(Content_Range="bytes x-y/z"), "sent another part"),
    "a part of another size": (
        S3_FILE,
        objects(Content_Range=f"bytes 0-{len(DATA) - 1}/1"),
        "it was replaced",
    ),
    "too short a part": (S3_FILE, objects(body=DATA[:10]), "sent 10 bytes"),
    "too long a part": (S3_FILE, objects(body=DATA + b"x"), "bytes or more"),
    "another version": (S3_FILE, objects(ETag='"another"'), "it was replaced"),
    "no version": (S3_FILE, objects(ETag=None), "it was replaced"),
    "no time": (S3_FILE, objects(method="HEAD", Last_Modified=None), "sent no size or time"),
    "a time of nonsense": (
        S3_FILE,
        objects(method="HEAD", Last_Modified="yesterday"),
        "sent no size or time",
    ),
    "no size of an object": (
        S3_FILE,
        objects(method="HEAD", Content_Length="x"),
        "broke off|no size or time",
    ),
    "a redirect of an object": (
        S3_FILE,
        objects(307, Location="http://127.0.0.1:1/"),
        "answered 307 Temporary Redirect; redirects are not followed",
    ),
    "a redirect of a status": (S3_FILE, objects(302, method="HEAD", Location="/x"), "answered 302 Found"),
    "an answer that breaks off": (S3_FILE, breaks_off, "the response was cut off"),
    "an answer that takes too long": (S3_FILE, dawdles, "no response in time"),
    "a code that is none": (S3_FILE, objects(799), "answered 799"),
    # The Hub
    "a next page, always": (HUB, hub_goes_on("{tree}?cursor={n}"), "more than 50 pages"),
    "the same page, always": (HUB, hub_goes_on("{tree}"), "repeats a page"),
    "a next page that is not there": (HUB, hub_breaks_off, "the hub's listing is cut off"),
    "a next page elsewhere": (HUB, hub_goes_on("http://127.0.0.1:1/"), "continues at another address"),
    "a next page of a file": (HUB, hub_goes_on("file:///etc/passwd"), "continues at another address"),
    "rows that are texts": (HUB, hub(b'["x"]'), "'x', which is not a file"),
    "rows that are lists": (HUB, hub(b"[[]]"), "which is not a file"),
    "rows that are null": (HUB, hub(b"[null]"), "which is not a file"),
    "an object for rows": (HUB, hub(b"{}"), "the hub's response is not a list"),
    "a number for rows": (HUB, hub(b"5"), "the hub's response is not a list"),
    "200,000 brackets": (HUB, hub(deep("[", "]")), "the hub's response is not JSON"),
    "200,000 objects": (HUB, hub(deep('{"a":', "}")), "the hub's response is not JSON"),
    "no JSON": (HUB, hub(b"hello"), "the hub's response is not JSON"),
    "no UTF-8": (HUB, hub(b'["\xff"]'), "the hub's response is not JSON"),
    "9 MB of JSON": (HUB, hub(b"[" + b" " * 9_000_000 + b"]"), "more than 8,388,608 bytes"),
    "a size of text": (HUB, hub(json.dumps([hub_row(size="5")]).encode()), "which is not a file"),
    "a size below zero": (HUB, hub(json.dumps([hub_row(size=-5)]).encode()), "which is not a file"),
    "a size without end": (HUB, hub(json.dumps([hub_row(size=10**30)]).encode()), "which is not a file"),
    "a path of a number": (HUB, hub(json.dumps([hub_row(path=5)]).encode()), "which is not a file"),
    "a path elsewhere": (HUB, hub(json.dumps([hub_row(path="../x")]).encode()), ELSEWHERE),
    "a path from the root": (HUB, hub(json.dumps([hub_row(path="/etc/x")]).encode()), ELSEWHERE),
    "a commit that is none": (HUB, hub(b'{"sha": "../.."}', where="/revision/"), "sent no commit"),
    "a list for a commit": (HUB, hub(b"[]", where="/revision/"), "sent no commit"),
    "brackets for a commit": (HUB, hub(deep("[", "]"), where="/revision/"), "the hub's response is not JSON"),
    "a redirect of the hub": (HUB, hub(b"", 302, Location="http://127.0.0.1:1/"), "answered 302 Found"),
    "a broken hub": (HUB, hub(b"", 500), "the hub answered 500"),
    "a hub that refuses": (HUB, hub(b"", 401), "the hub answered 401"),
    # Web servers
    "a web server without parts": (WEB, objects(200, Content_Range=None), "can't send a part"),
    "a web server that breaks off": (WEB, breaks_off, "the response was cut off"),
    "a web server that turns round": (WEB, objects(302, method="GET", Location="/m.safetensors"), "error"),
}


@pytest.mark.parametrize(("url", "lie", "message"), LIES.values(), ids=list(LIES))
def test_a_lie_is_an_error_of_the_server(liar: WebServer, run: Run, url: str, lie: Lie, message: str) -> None:
    liar.misbehave = lie
    begun = time.monotonic()
    status, out, err = run("verify", url.format(web=liar.url))
    assert time.monotonic() - begun < MOST_SECONDS
    assert (status, "internal error" in err, "Traceback" in err) == (2, False, False), err
    assert "valid" not in out
    assert re.search(message, err), err
    assert len(liar.requests) < 300
    for secret in ("hf_0123456789", "session-token", "X-Amz-"):
        assert secret not in out + err


@pytest.mark.parametrize("url", [S3, S3_FILE, HUB, WEB])
def test_an_honest_server(liar: WebServer, run: Run, url: str) -> None:
    liar.misbehave = honest_listing(liar)
    assert run("verify", url.format(web=liar.url)).status == 0


def honest_listing(liar: WebServer, *keys: str, prefixes: tuple[str, ...] = ()) -> Lie:
    """Return what lists the checkpoint with the version that it has, and other keys."""
    tag = liar.answer(Asked("HEAD", "/bucket/run/m.safetensors", {})).headers["ETag"].strip('"')
    page = s3_page("run/m.safetensors", *keys, prefixes=prefixes).replace(
        b"&quot;x&quot;", f'"{tag}"'.encode()
    )
    return lists(lambda _, asked: page if "prefix=run%2F&" in asked.path else s3_page())


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("run/a%0Ab.safetensors", r"'a\nb.safetensors'"),
        ("run/a%00b.safetensors", r"'a\x00b.safetensors'"),
        ("run/%1B%5B31m.safetensors", r"'\x1b[31m.safetensors'"),
    ],
)
def test_an_odd_key_is_named_and_the_others_are_verified(
    liar: WebServer, run: Run, key: str, name: str
) -> None:
    liar.misbehave = honest_listing(liar, key)
    status, out, err = run("verify", S3)
    assert (status, "m.safetensors" in out) == (2, True), (out, err)
    assert f"its key {name} can't be requested" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("prefix", "name"), [("run/../", "'..'"), ("run/./", "'.'")])
def test_an_odd_prefix_is_named_and_not_entered(liar: WebServer, run: Run, prefix: str, name: str) -> None:
    liar.misbehave = honest_listing(liar, prefixes=(prefix,))
    status, out, err = run("verify", S3)
    assert (status, "m.safetensors" in out) == (2, True), (out, err)
    assert f"its key {name} can't be requested" in err


@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN"]
)
def test_a_line_break_in_a_key_is_refused(
    liar: WebServer, run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "first-half\nsecond-half")
    remote.forget()
    status, out, err = run("verify", HUB if name == "HF_TOKEN" else S3_FILE)
    assert (status, out) == (2, "")
    assert err == f"ckpttool: error: {name}: contains a line break or another control character\n"


def test_a_line_break_in_a_url_is_refused(liar: WebServer, run: Run) -> None:
    status, _, err = run("verify", "s3://bucket/a\nb.pt")
    assert (status, err) == (
        2,
        "ckpttool: error: s3://bucket/a\\nb.pt: a URL with control characters is not supported\n",
    )


@pytest.mark.parametrize("url", [S3, S3_FILE, HUB])
def test_what_identifies_a_user_follows_no_redirect(liar: WebServer, run: Run, url: str) -> None:
    """Neither to another port nor to another name of the same machine."""
    with web_server() as other:
        for host in (other.url, other.url.replace("127.0.0.1", "localhost")):

            def redirect(number: int, asked: Asked, answer: Answer, host: str = host) -> None:
                if asked.path.startswith(("/bucket", "/me/")):
                    answer.status, answer.headers = 307, {"Location": f"{host}{asked.path}"}

            liar.misbehave = redirect
            remote.forget()
            run("verify", url)
        for asked in other.requests:  # the hub's files may lie elsewhere, for anybody to read
            assert url == HUB
            assert not {"authorization", "x-amz-security-token"} & asked.headers.keys()
            assert "session-token" not in str(asked)


def test_public_buckets_are_asked_without_a_signature(
    liar: WebServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    liar.misbehave = honest_listing(liar)
    paths: list[str] = []
    real = http_requests._send_once
    monkeypatch.setattr(
        http_requests,
        "_send_once",
        lambda method, address, *rest: paths.append(address) or real(method, address, *rest),
    )
    assert run("verify", S3).status == 0
    assert paths
    assert not any("X-Amz" in path for path in paths)


def test_an_endpoint_without_tls_has_to_be_allowed(
    liar: WebServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    status, _, err = run("verify", S3_FILE)
    assert status == 2
    assert "no TLS (AWS_ALLOW_HTTP=true allows that)" in err
    assert liar.requests == []


def test_nobody_listens(liar: WebServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    answer = run("verify", "s3://bucket/run")
    assert answer.status == 2 and "it can't be reached" in answer.err

"""Servers of this machine: one that answers as Amazon S3 does, and one of files, which can misbehave."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

_NUMBERS = count(1)
_SIGNATURE = re.compile(r"[?&]X-Amz-.*")
_ROOT = Path(__file__).parents[2]
_SERVE = """
import sys
from tests.support.stores import serve

with serve() as url:
    print(url, flush=True)
    sys.stdin.read()  # until whoever started it ends
"""


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment in which a process talks to a server instead of Amazon."""
    return {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


class Bucket(ABC):
    """A bucket, with what talks to it around ckpttool."""

    def __init__(self, scheme: str) -> None:
        self.name = f"bucket-{next(_NUMBERS)}"
        self._scheme = scheme

    def url(self, key: str = "") -> str:
        """Return the URL of an object, or of the bucket."""
        return f"{self._scheme}://{self.name}/{key}" if key else f"{self._scheme}://{self.name}"

    @abstractmethod
    def put(self, key: str, data: bytes | str) -> None:
        """Write an object."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return an object's bytes."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove an object."""

    @abstractmethod
    def keep_versions(self) -> None:
        """Let the bucket keep older versions of its objects from now on."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """Return the names of all objects, in order."""

    def upload(self, local_path: Path | str, key: str) -> None:
        """Write a file, or all files below a directory; where a link leads, the bytes there."""
        path = Path(local_path)
        if path.is_dir():
            for file in sorted(one for one in path.rglob("*") if one.is_file()):
                below = file.relative_to(path).as_posix()
                self.put(f"{key}/{below}" if key else below, file.read_bytes())
        else:
            self.put(key, path.read_bytes())


class S3Bucket(Bucket):
    """A bucket of a server that answers as Amazon S3 does."""

    def __init__(self, client: Any) -> None:
        super().__init__("s3")
        self.client = client
        client.create_bucket(Bucket=self.name)

    def put(self, key: str, data: bytes | str) -> None:
        content = data.encode() if isinstance(data, str) else data
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def keep_versions(self) -> None:
        enabled = {"Status": "Enabled"}
        self.client.put_bucket_versioning(Bucket=self.name, VersioningConfiguration=enabled)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", ())]


class QuietServer(ThreadingHTTPServer):
    """A server that doesn't mind that whoever asked has hung up."""

    def handle_error(self, request: object, address: object) -> None:
        pass


@contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """Have a thread serve, and yield the URL."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


AnswerRequest = Callable[[str, str, Mapping[str, str], bytes], tuple[int, Mapping[str, str], bytes]]
"""Makes status, headers and body of a method, a path, headers by their lower names and a body."""


@contextmanager
def answering(answer: AnswerRequest) -> Iterator[str]:
    """Run a server of one function, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            status, answered, content = answer(self.command, self.path, headers, body)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **answered}.items():
                if status != 204 or name != "Content-Length":
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = reply  # noqa: N815 - http.server's names

        def log_message(self, format: str, *values: object) -> None:
            """Keep silent."""

    with running(QuietServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@contextmanager
def serve() -> Iterator[str]:
    """Run a server that answers as Amazon S3 does, and yield its URL."""
    from moto.server import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_backend_app("s3")
    with running(make_server("127.0.0.1", 0, app, True, request_handler=MotoRequestHandler)) as url:
        yield url


@contextmanager
def serve_apart() -> Iterator[str]:
    """Run that server in a process of its own, and yield its URL: its threads and files are none of ours."""
    pipe, few_at_once = subprocess.PIPE, {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "5"}
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVE], cwd=_ROOT, stdin=pipe, stdout=pipe, text=True, env=few_at_once
    )
    with child:
        assert child.stdin is not None and child.stdout is not None  # both are pipes
        yield child.stdout.readline().strip()
        child.stdin.close()


def client_of(endpoint: str) -> Any:
    """Return what talks to a server around ckpttool."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )


class Asked(NamedTuple):
    """A request that a server got; its path is without a signature."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class Answer:
    """What a server is about to answer; ``sent`` is what really goes out of ``body``."""

    status: int
    headers: dict[str, str]
    body: bytes
    sent: bytes | None = None


@dataclass
class WebServer:
    """A server of files by ranges.

    Attributes:
        files: What it has, by path: bytes, or a file to read from.
        misbehave: Changes an answer before it goes out; told which request it is, from 1.
        requests: All that it was asked.
        nbytes: How many bytes it has sent.
    """

    url: str = ""
    files: dict[str, bytes | Path] = field(default_factory=dict)
    misbehave: Callable[[int, Asked, Answer], None] = lambda number, asked, answer: None
    requests: list[Asked] = field(default_factory=list)
    nbytes: int = 0

    def answer(self, asked: Asked) -> Answer:
        """Return what is answered to a request."""
        content = self.files.get(asked.path)
        if content is None:
            return Answer(404, {}, b"")
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        begin, end, status = 0, size, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", "")):
            begin, end, status = int(wanted[1]), min(int(wanted[2]) + 1, size), 206
        head = content[:64] if isinstance(content, bytes) else str(content).encode()
        headers = {"ETag": f'"{sha256(head).hexdigest()[:16]}-{size}"'}
        headers["Last-Modified"] = "Wed, 21 Oct 2015 07:28:00 GMT"
        if asked.headers.get("if-match", headers["ETag"]) != headers["ETag"]:
            return Answer(412, {}, b"")
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        if asked.method == "HEAD":
            return Answer(status, {**headers, "Content-Length": str(end - begin)}, b"")
        if isinstance(content, bytes):
            return Answer(status, headers, content[begin:end])
        with content.open("rb") as file:
            file.seek(begin)
            return Answer(status, headers, file.read(end - begin))


@contextmanager
def web_server() -> Iterator[WebServer]:
    """Run a server of files."""
    served = WebServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = _SIGNATURE.sub("", self.path)
            asked = Asked(self.command, path, {k.lower(): v for k, v in self.headers.items()})
            served.requests.append(asked)
            answer = served.answer(asked)
            served.misbehave(len(served.requests), asked, answer)
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            body = answer.body if answer.sent is None else answer.sent
            served.nbytes += len(body)
            self.close_connection = answer.sent is not None
            try:
                self.wfile.write(body)
            except OSError:  # whoever asked has seen enough
                self.close_connection = True

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *values: object) -> None:
            """Keep silent."""

    with running(QuietServer(("127.0.0.1", 0), Handler)) as served.url:
        yield served

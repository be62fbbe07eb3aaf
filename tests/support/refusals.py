"""A server in front of another that answers some requests itself: with a refusal, as stores do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

_CODES = {403: "AccessDenied", 500: "InternalError", 501: "NotImplemented", 503: "SlowDown"}


@dataclass
class Refusals:
    """What is refused: requests like ``DELETE /bucket/key If-Match`` that match; and those that came.

    Attributes:
        url: The server's.
        pattern: None lets everything through.
        status: What a refusal is.
        requests: All requests so far, the refused ones included.
    """

    url: str
    pattern: str | None = None
    status: int = 503
    requests: list[str] = field(default_factory=list)

    def refuse(self, pattern: str, status: int) -> None:
        """Refuse such requests from now on."""
        self.pattern, self.status = pattern, status

    def matches(self, request: str) -> bool:
        """Tell whether a request is refused."""
        return self.pattern is not None and re.search(self.pattern, request) is not None


@contextmanager
def refusing(endpoint: str) -> Iterator[Refusals]:
    """Run a server that hands on to another what it doesn't refuse."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else None
            condition = " If-Match" if "If-Match" in self.headers else ""
            request = f"{self.command} {self.path}{condition}"
            refusals.requests.append(request)
            if refusals.matches(request):
                code = _CODES[refusals.status]
                return self.reply(refusals.status, {}, f"<Error><Code>{code}</Code></Error>".encode())
            headers = {"Content-type": "application/octet-stream"}  # else urllib says that it is a form
            headers |= {name: value for name, value in self.headers.items() if name.lower() != "host"}
            onward = Request(endpoint + self.path, body, headers, method=self.command)
            try:
                with urlopen(onward) as answer:
                    return self.reply(answer.status, answer.headers, answer.read())
            except HTTPError as error:
                with error:
                    return self.reply(error.code, error.headers, error.read())

        def reply(self, status: int, headers, body: bytes) -> None:
            self.send_response_only(status)
            own = ("content-length", "connection", "transfer-encoding")
            for name, value in headers.items():
                if name.lower() not in own:
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            if status != 204:
                self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    refusals = Refusals(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield refusals
    server.shutdown()
    server.server_close()
    thread.join()

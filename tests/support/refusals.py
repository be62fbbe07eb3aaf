"""A server in front of another that answers some requests itself: with a refusal, as stores do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.stores import answering

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

    url: str = ""
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
    refusals = Refusals()

    def answer(
        method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        request = f"{method} {path}{' If-Match' if 'if-match' in headers else ''}"
        refusals.requests.append(request)
        if refusals.matches(request):
            code = _CODES[refusals.status]
            return refusals.status, {}, f"<Error><Code>{code}</Code></Error>".encode()
        sent = {"content-type": "application/octet-stream"}  # else urllib says that it is a form
        sent |= {name: value for name, value in headers.items() if name != "host"}
        try:
            with urlopen(Request(endpoint + path, body or None, sent, method=method)) as found:
                return found.status, _handed_on(method, found.headers), found.read()
        except HTTPError as error:
            with error:
                return error.code, _handed_on(method, error.headers), error.read()

    with answering(answer) as refusals.url:
        yield refusals


def _handed_on(method: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an answer but those of its connection; a HEAD states the length of a GET."""
    own = {"connection", "transfer-encoding", *(() if method == "HEAD" else ("content-length",))}
    return {name: value for name, value in headers.items() if name.lower() not in own}

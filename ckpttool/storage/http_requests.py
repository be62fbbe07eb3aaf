"""HTTP requests with limits, and paged listings.

Redirects are not followed, so that credentials reach no other host. Responses are limited in bytes and
seconds, listings in pages, names and seconds. Errors are ``OSError`` and never contain the requested URL,
which may be signed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from ckpttool.core.errors import MissingPackage, UsageError
from ckpttool.core.urls import VARIABLES

MAX_RESPONSE = 1 << 23
"""Limit on a response that isn't a part of a file, in bytes; a page of 1,000 names from S3 is far smaller."""
MAX_PAGES, MAX_NAMES, LISTING_SECONDS = 2_000, 1_000_000, 600
TIMEOUT_SECONDS, CONNECT_SECONDS = 60, 10
RETRIES = 5
_FIRST_PAUSE = 0.1
# Statuses below 502 that are worth a retry: timeout, conflict, too many requests, internal
# error. From 502 on, all are.
_TRANSIENT = frozenset({408, 409, 429, 500})
_CONNECTIONS = 32
_BLOCK = 1 << 18
_CODE = re.compile(rb"<Code>(\w+)</Code>")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Row = TypeVar("Row")
Token = TypeVar("Token", bound=Hashable)


class Response(NamedTuple):
    """An HTTP response.

    Attributes:
        headers: Case-insensitive.
        body: At most one byte more than the limit.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


def send_request(
    method: str, address: str, url: str, headers: Mapping[str, str] | None = None, limit: int = MAX_RESPONSE
) -> Response:
    """Send a request and return the response, whatever its status.

    Transient failures are retried.

    Args:
        method: HTTP method.
        address: URL to request, possibly signed.
        url: URL as the user knows it, for errors.
        headers: Additional request headers.
        limit: Maximum size of the body in bytes.

    Raises:
        OSError: The server sent no HTTP response.
    """
    try:
        from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, TimeoutError
    except ImportError as error:
        from ckpttool.core.plugins import install_command

        raise MissingPackage(url, "stores need urllib3", expected=install_command("cloud")) from error
    # The pauses double from 0.2 to 3.2 seconds.
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(_FIRST_PAUSE * 2**attempt)
        try:
            response = _send_once(method, address, url, {"User-Agent": "ckpttool", **(headers or {})}, limit)
            if response.status < 502 and response.status not in _TRANSIENT:
                return response
            failure = None
        except NewConnectionError:  # before TimeoutError, of which it is a subclass
            failure = "it can't be reached"
        except TimeoutError:
            failure = "no response in time"
        except ProtocolError:
            failure = "the response was cut off"
        # Such as a header that can't be sent. The error's text may contain that, so only its type is
        # reported.
        except (HTTPError, ValueError) as error:
            failure = f"the request can't be sent ({type(error).__name__})"
    if failure is None:
        return response
    raise OSError(errno.EIO, failure, url)


def _send_once(method: str, address: str, url: str, headers: Mapping[str, str], limit: int) -> Response:
    # urllib3's timeout is for each read, and a server that sends a byte now and then never exceeds
    # it. So the whole response has a limit, too. Nothing is decompressed: limits and ranges count
    # the bytes that are sent.
    until = time.monotonic() + TIMEOUT_SECONDS
    response = _pool(_proxy_of(address)).request(
        method, address, headers=headers, redirect=False, preload_content=False, decode_content=False
    )
    # One byte more than the limit is read, which shows the caller that the body is too long. A connection
    # with an unread rest can't be used again, and is closed.
    try:
        body = bytearray()
        while len(body) <= limit and (block := response.read1(min(_BLOCK, limit + 1 - len(body)))):
            body += block
            if time.monotonic() > until:
                raise OSError(errno.EIO, f"the response takes more than {TIMEOUT_SECONDS} s", url)
        if len(body) <= limit:
            response.release_conn()
        return Response(response.status, response.reason or "", response.headers, bytes(body))
    finally:
        response.close()


@cache
def _pool(proxy: str | None) -> Any:
    """Return the connection pool of this process for a proxy, or for direct connections."""
    from urllib3 import PoolManager, ProxyManager, Timeout, make_headers

    timeout = Timeout(connect=CONNECT_SECONDS, read=TIMEOUT_SECONDS)
    options: Any = {"maxsize": _CONNECTIONS, "timeout": timeout, "retries": False}
    if proxy is None:
        return PoolManager(**options)
    parts = urlsplit(proxy)
    headers = None  # urllib3 doesn't send the credentials in a proxy's URL
    if parts.username is not None:
        headers = make_headers(proxy_basic_auth=unquote(f"{parts.username}:{parts.password or ''}"))
    return ProxyManager(
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", proxy_headers=headers, **options
    )


def _proxy_of(address: str) -> str | None:
    """Return the proxy configured in the environment for a URL."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(address)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def refusal(response: Response, url: str, who: str = "the store", where: str = "") -> OSError:
    """Return an HTTP status as an ``OSError``; 404 is left to the caller."""
    # The reason and the body are the server's: only printable characters and an error code are quoted. The
    # errno ENOTSUP for 501 (not implemented) lets callers repeat a request without its condition.
    code = _CODE.search(response.body)
    reason = "".join(one for one in response.reason[:60] if one.isprintable())
    text = f"{who} answered {response.status} {reason}".rstrip()
    if code is not None:
        text += f" ({code[1].decode()})"
    if 300 <= response.status < 400:
        text += "; redirects are not followed"
    codes = {401: errno.EACCES, 403: errno.EACCES, 501: errno.ENOTSUP}
    return OSError(codes.get(response.status, errno.EIO), f"{f'{where}: ' if where else ''}{text}", url)


def require_whole(response: Response, url: str, limit: int = MAX_RESPONSE) -> None:
    """Require that a response body is within the limit."""
    if len(response.body) > limit:
        raise OSError(errno.EFBIG, f"the server's response has more than {limit:,} bytes", url)


def json_of(response: Response, url: str, who: str) -> Any:
    """Parse a response body as JSON."""
    require_whole(response, url)
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise OSError(errno.EIO, f"{who}'s response is not JSON", url) from error


def paged(
    read_page: Callable[[Token], tuple[Iterable[Row], Token | None]], first: Token, url: str
) -> Iterator[Row]:
    """Yield the rows of all pages of a listing.

    Args:
        read_page: Returns the rows of a page and the token of the next one, None after the last.
        first: Token of the first page.
        url: URL of the listing, for errors.

    Raises:
        OSError: A token repeats, or a limit on pages, rows or time is exceeded.
    """
    # A faulty or hostile server may list without end: by giving out a token twice, or ever new ones.
    until = time.monotonic() + LISTING_SECONDS
    known: set[Token] = set()
    token: Token | None = first
    count = 0
    while token is not None:
        known.add(token)
        rows, token = read_page(token)
        for row in rows:
            count += 1
            if count > MAX_NAMES:
                raise OSError(errno.EFBIG, f"the listing has more than {MAX_NAMES:,} names", url)
            yield row
        if token in known:
            raise OSError(errno.EIO, "the server's listing repeats a page", url)
        if len(known) >= MAX_PAGES and token is not None:
            raise OSError(errno.EFBIG, f"the server's listing has more than {MAX_PAGES:,} pages", url)
        if time.monotonic() > until:
            raise OSError(errno.EIO, f"the server's listing takes more than {LISTING_SECONDS} s", url)


def name_below(key: str, prefix: str, url: str) -> str:
    """Return the last component of a listed key.

    Raises:
        OSError: The key is not directly below the prefix.
    """
    # A listed name becomes a part of paths, so a hostile server must not lead out of the directory.
    above = f"{prefix}/" if prefix else ""
    if not key.startswith(above) or "/" in key[len(above) :]:
        raise OSError(errno.EIO, f"the server lists {key[:200]!r}, which is not in this directory", url)
    return key[len(above) :]


def require_sendable(values: Iterable[str]) -> None:
    """Require that credentials contain no control characters, which HTTP headers can't carry."""
    for name in VARIABLES:
        if CONTROL.search(os.environ.get(name, "")):
            raise UsageError(f"{name}: contains a line break or another control character")
    if any(map(CONTROL.search, values)):
        raise UsageError("the credentials contain a line break or another control character")


def is_askable(name: str) -> bool:
    """Return whether a listed name can be a component of a requested URL."""
    # The categories are control characters, surrogates, and line and paragraph separators.
    return (
        name not in ("", ".", "..")
        and not any(mark in name for mark in "?#/")
        and not any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in name)
    )

"""Repositories of the Hugging Face Hub: ``hf://OWNER/NAME[@REVISION]/PATH``, and ``hf://datasets/…``.

Source: https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import errno
import json
import os
import re
from functools import cache, cached_property
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ckpttool.core.errors import UsageError
from ckpttool.io.stores import BucketStore, Listing, ObjectStatus, Replaced, Store
from ckpttool.io.urls import HUB_KINDS

_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_ANSWER = 1 << 26
_TIMEOUT_SECONDS = 30


def hub_store(rest: str) -> tuple[Store, str]:
    """Return the repository of what follows ``hf://``, and the path in it."""
    parts = rest.strip("/").split("/")
    kind = parts.pop(0) if parts[0] in HUB_KINDS else "models"
    if len(parts) < 2:
        raise UsageError(f"hf://{rest}: expected hf://OWNER/NAME/PATH")
    owner, name, *path = parts
    name, _, revision = name.partition("@")
    return _repository(kind, f"{owner}/{name}", revision or "main"), "/".join(path)


@cache
def _repository(kind: str, name: str, revision: str) -> HubStore:
    return HubStore(kind, name, revision)


class HubStore(Store):
    """One revision of a repository."""

    def __init__(self, kind: str, name: str, revision: str) -> None:
        endpoint = os.environ.get("HF_ENDPOINT", _ENDPOINT).rstrip("/")
        above = "" if kind == "models" else f"{kind}/"
        shown_revision = "" if revision == "main" else f"@{revision}"
        self.root = f"hf://{above}{name}{shown_revision}"
        self._api = f"{endpoint}/api/{kind}/{name}"
        self._web = f"{endpoint}/{above}{name}"
        self._revision = revision
        self._headers = _headers()

    def status(self, name: str) -> ObjectStatus:
        directory, _, own = name.rpartition("/")
        known = self.listing(directory).objects.get(own)
        if known is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.root}/{name}")
        return known

    def listing(self, prefix: str) -> Listing:
        """Return what the tree of the revision has there; a version is the digest that it states."""
        directories: set[str] = set()
        objects: dict[str, ObjectStatus] = {}
        tree = f"{self._api}/tree/{self._commit}"
        url = f"{tree}/{quote(prefix)}" if prefix else tree
        while url.startswith(tree):
            rows, url = self._answer(url)
            for row in rows if isinstance(rows, list) else ():
                own = os.path.basename(str(row.get("path", "")))
                if row.get("type") == "directory":
                    directories.add(own)
                elif row.get("type") == "file" and isinstance(row.get("size"), int):
                    objects[own] = ObjectStatus(row["size"], 0, str(row.get("oid", "")))
        return Listing(frozenset(directories), objects)

    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        found, data = self._files.read_range(name, begin, end)  # of a commit, which never changes
        if found.size != of.size:
            raise Replaced(f"{self.root}/{name}")
        return data

    @cached_property
    def _commit(self) -> str:
        """Return the commit that the revision was when it was first asked for; all is read of that one."""
        answer, _ = self._answer(f"{self._api}/revision/{quote(self._revision, safe='')}")
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise OSError(errno.EIO, f"the hub names no commit for {self._revision}", self.root)
        return commit

    @cached_property
    def _files(self) -> BucketStore:
        return BucketStore(f"{self._web}/resolve/{self._commit}", self._headers)

    def _answer(self, url: str) -> tuple[Any, str]:
        """Return what the hub answers, and where it goes on; nothing if it knows no such thing."""
        try:
            with _opener().open(Request(url, headers=self._headers), timeout=_TIMEOUT_SECONDS) as answer:
                content = answer.read(_MAX_ANSWER + 1)
                more = answer.headers.get("Link", "")
            if len(content) > _MAX_ANSWER:
                raise OSError(errno.EFBIG, "the hub's answer is too long", self.root)
            return json.loads(content), more.partition(">")[0].lstrip("<") if 'rel="next"' in more else ""
        except HTTPError as error:
            if error.code == 404:
                return [], ""
            number = errno.EACCES if error.code in (401, 403) else errno.EIO
            raise OSError(number, f"the hub answered {error.code} {error.reason}", self.root) from error
        except URLError as error:
            raise OSError(errno.EIO, f"the hub can't be reached: {error.reason}", self.root) from error
        except ValueError as error:
            raise OSError(errno.EIO, "the hub's answer is not JSON", self.root) from error


class _NoRedirects(HTTPRedirectHandler):
    """The token of a user goes to no other host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@cache
def _opener() -> Any:
    return build_opener(_NoRedirects())


def _headers() -> dict[str, str]:
    """Return the user's token, where the hub's own tools find it."""
    token = os.environ.get("HF_TOKEN", "")
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    path = os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))
    if not token and os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            token = file.read(1024).strip()
    return {"Authorization": f"Bearer {token}"} if token else {}

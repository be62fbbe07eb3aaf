"""Repositories of the Hugging Face Hub: ``hf://OWNER/NAME[@REVISION]/PATH``, and ``hf://datasets/…``.

Source: https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request

from ckpttool.core.errors import UsageError
from ckpttool.core.urls import HUB_KINDS
from ckpttool.io.checksums import Checksum, StoredChecksums
from ckpttool.io.stored_checksums import opener
from ckpttool.io.stores import BucketStore, Listing, ObjectStatus, Replaced, Store

_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
        self._checksums: dict[str, Checksum] = {}

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
                    self._note_checksum(row)
        return Listing(frozenset(directories), objects)

    def _note_checksum(self, row: Mapping[str, Any]) -> None:
        """Remember what the tree says of a file: the SHA-256 of one in LFS, git's own digest of another."""
        lfs = row.get("lfs")
        digits = str((lfs.get("oid") if isinstance(lfs, dict) else row.get("oid")) or "")
        if isinstance(lfs, dict) and _SHA256.fullmatch(digits):
            self._checksums[row["path"]] = Checksum("sha256", digits)
        elif lfs is None and _COMMIT.fullmatch(digits):
            self._checksums[row["path"]] = Checksum("git-sha1", digits)

    def checksums(self, name: str, of: ObjectStatus) -> StoredChecksums:
        if name not in self._checksums:
            self.status(name)  # the listing says both
        if name not in self._checksums:
            return StoredChecksums(reason="the hub states no checksum of it")
        return StoredChecksums((self._checksums[name],))

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
            with opener().open(Request(url, headers=self._headers), timeout=_TIMEOUT_SECONDS) as answer:
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


def _headers() -> dict[str, str]:
    """Return the user's token, where the hub's own tools find it."""
    token = os.environ.get("HF_TOKEN", "")
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    path = os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))
    if not token and os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            token = file.read(1024).strip()
    return {"Authorization": f"Bearer {token}"} if token else {}

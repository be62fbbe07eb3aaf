"""Repositories of the Hugging Face Hub: ``hf://OWNER/NAME[@REVISION]/PATH``, and ``hf://datasets/…``.

Source: https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from urllib.parse import quote

from ckpttool.core.errors import UsageError
from ckpttool.core.urls import HUB_KINDS
from ckpttool.storage.checksums import Checksum, StoredChecksums
from ckpttool.storage.http_requests import (
    Response,
    json_of,
    name_below,
    paged,
    refusal,
    require_sendable,
    send_request,
)
from ckpttool.storage.stores import MAX_SIZE, BucketStore, Listing, ObjectReplaced, ObjectStatus, Store

_ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hub_place(rest: str) -> tuple[str, str, str, str]:
    """Parse a URL without ``hf://``: kind, name and revision of the repository, and the path in it."""
    parts = rest.strip("/").split("/")
    kind = parts.pop(0) if parts[0] in HUB_KINDS else "models"
    if len(parts) < 2:
        raise UsageError(f"hf://{rest}: expected hf://OWNER/NAME/PATH")
    owner, name, *path = parts
    name, _, revision = name.partition("@")
    return kind, f"{owner}/{name}", revision or "main", "/".join(path)


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
        """Return the listing of a directory in the revision's tree; versions are digests of the files."""
        directories: set[str] = set()
        objects: dict[str, ObjectStatus] = {}
        tree, url = f"{self._api}/tree/{self._commit}", f"{self.root}/{prefix}"
        for row in paged(
            lambda address: self._page(tree, address, url), f"{tree}/{quote(prefix)}" if prefix else tree, url
        ):
            match row:
                case {"type": "directory", "path": str(path)}:
                    directories.add(name_below(path, prefix, url))
                case {"type": "file", "path": str(path), "size": int(size)} if 0 <= size < MAX_SIZE:
                    objects[name_below(path, prefix, url)] = ObjectStatus(size, 0, str(row.get("oid", "")))
                    self._note_checksum(row)
                case {"type": str(kind)} if kind not in ("directory", "file"):  # such as a submodule
                    continue
                case _:
                    raise OSError(errno.EIO, f"the hub lists {row!r:.100}, which is not a file", url)
        return Listing(frozenset(directories), objects)

    def _page(self, tree: str, address: str, url: str) -> tuple[list[Any], str | None]:
        response = self._request(address, url)
        if response is None:
            if "?" in address:  # a later page: what was listed so far isn't all
                raise OSError(errno.EIO, "the hub's listing is cut off", url)
            return [], None
        rows = json_of(response, url, "the hub")
        if not isinstance(rows, list):
            raise OSError(errno.EIO, "the hub's response is not a list", url)
        link = response.headers.get("Link", "")
        if 'rel="next"' not in link:
            return rows, None
        # The token is sent to this address as well, so it has to be of the same tree.
        address = link.partition(">")[0].lstrip("<")
        if not address.startswith(tree):
            raise OSError(errno.EIO, "the hub's listing continues at another address", url)
        return rows, address

    def _note_checksum(self, row: Mapping[str, Any]) -> None:
        """Remember the checksum of a listed file: SHA-256 of one in LFS, git's SHA-1 of any other."""
        # For a file in LFS, git's own digest is that of the pointer file, not of the content.
        lfs = row.get("lfs")
        digits = str((lfs.get("oid") if isinstance(lfs, dict) else row.get("oid")) or "")
        if isinstance(lfs, dict) and _SHA256.fullmatch(digits):
            self._checksums[row["path"]] = Checksum("sha256", digits)
        elif lfs is None and _COMMIT.fullmatch(digits):
            self._checksums[row["path"]] = Checksum("git-sha1", digits)

    def checksums(self, name: str, of: ObjectStatus) -> StoredChecksums:
        if name not in self._checksums:
            self.status(name)  # the listing has both
        if name not in self._checksums:
            return StoredChecksums(reason="the hub has no checksum of it")
        return StoredChecksums((self._checksums[name],))

    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        # The bytes are those of a commit, which never changes, so no version is required.
        found, data = self._files.read_range(name, begin, end)
        if found.size != of.size:
            raise ObjectReplaced(f"{self.root}/{name}")
        return data

    @cached_property
    def _commit(self) -> str:
        """Commit of the revision at the first request."""
        # A branch may move while a checkpoint is read. All requests name this commit, so
        # that its files fit together.
        response = self._request(f"{self._api}/revision/{quote(self._revision, safe='')}", self.root)
        found = None if response is None else json_of(response, self.root, "the hub")
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise OSError(errno.EIO, f"the hub sent no commit for {self._revision}", self.root)
        return commit

    @cached_property
    def _files(self) -> BucketStore:
        return BucketStore(f"{self._web}/resolve/{self._commit}", self._headers)

    def _request(self, address: str, url: str) -> Response | None:
        """Send a request and return the response; None for 404."""
        response = send_request("GET", address, url, self._headers)
        if response.status == 404:
            return None
        if response.status != 200:
            raise refusal(response, url, "the hub")
        return response


def _headers() -> dict[str, str]:
    """Return the request headers with the user's token, which is looked for as by the Hub's own tools."""
    # ``huggingface_hub`` takes HF_TOKEN, or the file that ``hf auth login`` writes: HF_TOKEN_PATH, which is
    # ``token`` in HF_HOME by default.
    token = os.environ.get("HF_TOKEN", "")
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    path = os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))
    if not token and os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            token = file.read(1024).strip()
    require_sendable([token])
    return {"Authorization": f"Bearer {token}"} if token else {}

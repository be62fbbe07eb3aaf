"""Digests that lie on this machine beside what was downloaded, or are its name.

The Hugging Face Hub's cache names a file after its SHA-256 (Git LFS) or git's digest of it; so do the ETags
that are written down beside a download to a directory. Git LFS names its objects after their SHA-256.

Source: huggingface_hub ``file_download.py`` and ``_local_folder.py``; git-lfs ``docs/spec.md``.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ckpttool.storage import fs

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"(models|datasets|spaces|kernels)--.+")
_DOWNLOADS = os.path.join(".cache", "huggingface", "download")
_MAX_BYTES = 4096


class ContentAddress(NamedTuple):
    """What a file's bytes should be by its name in a cache, or by what was noted when it was downloaded."""

    algorithm: str
    digits: str
    origin: str


def content_address(path: str) -> ContentAddress | None:
    """Return the digest that a cache or a download states of a file; None if there is none."""
    if fs.place_of(path).keeps_checksums:  # and the store states its own
        return None
    *above, name = fs.realpath(path).split(os.sep)
    if above[-1:] == ["blobs"] and _REPOSITORY.fullmatch("".join(above[-2:-1])):
        return _address(name, "its name in the Hugging Face cache")
    if above[-4:] == ["lfs", "objects", name[:2], name[2:4]] and _SHA256.fullmatch(name):
        return ContentAddress("sha256", name, "its name in Git LFS")
    return _download_address(fs.abspath(path))


def _address(digits: str, origin: str) -> ContentAddress | None:
    if _SHA256.fullmatch(digits):
        return ContentAddress("sha256", digits, origin)
    return ContentAddress("git-sha1", digits, origin) if _GIT_SHA1.fullmatch(digits) else None


def _download_address(path: str) -> ContentAddress | None:
    """Return what the hub said of a file that was downloaded to a directory, unless it was changed since."""
    directory, name = os.path.split(path)
    while True:
        note = os.path.join(directory, _DOWNLOADS, f"{name}.metadata")
        if os.path.isfile(note):
            break
        if directory == os.path.dirname(directory):
            return None
        directory, last = os.path.split(directory)
        name = os.path.join(last, name)
    try:
        with open(note, encoding="utf-8") as file:
            _, etag, written = file.read(_MAX_BYTES).split()
        # huggingface_hub itself takes a file for changed that is over a second younger than the note.
        is_current = os.stat(path).st_mtime - 1 <= float(written)
    except (OSError, ValueError):
        return None
    return _address(etag, "what the Hugging Face Hub said when it was downloaded") if is_current else None

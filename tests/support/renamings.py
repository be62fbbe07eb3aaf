"""What the tests of renaming share: the command, and what lies in a tree."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ckpttool import RenameRequest, rename, verify
from tests.support.commands import run_redirected

TEMPLATE = "{run}-e{epoch:04d}"


def renamed(directory: Path, template: str = TEMPLATE, *, dry_run: bool = False, **options: Any):
    request = RenameRequest(directory=str(directory), template=template, **options)
    return rename(request, dry_run=dry_run)


def content(directory: Path) -> dict[str, str]:
    """Return all that lies in a tree, but for what is ours: links with their targets, files with digests."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if ".ckpttool-" in name or ".ckpttool.lock" in name or (path.is_dir() and not path.is_symlink()):
            continue
        found[name] = (
            os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
        )
    return found


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".ckpttool"))


def seal(path: Path) -> None:
    """Write manifests beside a checkpoint."""
    assert run_redirected("verify", path, "--write-manifest").status == 0


def is_valid(path: Path) -> bool:
    verdict = verify(path)
    return verdict.is_valid and not [one for one in verdict.findings if one.code.startswith("manifest")]

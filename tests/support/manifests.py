"""Manifests: written by the command that verifies, and by sha256sum itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.commands import run_redirected


class Sealed(NamedTuple):
    """What became of a manifest.

    Attributes:
        is_valid: Whether the checkpoint is valid.
        files: The manifest and the digests of the tensors, where they are there now.
        refused: Why nothing was written; None where both files are there.
        is_written: Whether this command wrote them.
    """

    is_valid: bool
    files: tuple[str, ...]
    refused: str | None
    is_written: bool


def seal(path: str | Path, *options: str) -> Sealed:
    """Verify a checkpoint and write its manifest, where the system lets it be written."""
    answer = run_redirected("verify", "--json", path, "--write-manifest", *options)
    (told,) = json.loads(answer.out)["checkpoints"]
    made = told["manifest"]
    return Sealed(told["verdict"] == "valid", tuple(made["files"]), made["refused"], made["written"])


def sha256sum_accepts(manifest: Path) -> bool:
    command = ["sha256sum", "--check", "--strict", "--status", manifest.name]
    return subprocess.run(command, cwd=manifest.parent, check=False).returncode == 0


def sums(directory: Path, *names: str, options: tuple[str, ...] = ()) -> bytes:
    """Return what sha256sum itself writes."""
    command = ["sha256sum", *options, *names]
    return subprocess.run(command, cwd=directory, capture_output=True, check=True).stdout

"""Compares ckpttool with itself as it was at an earlier commit, which is checked out for the time."""

from __future__ import annotations

import compileall
import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.claims import Claim, Group

_ROOT = Path(__file__).parents[2]


@contextmanager
def earlier_tree(revision: str) -> Iterator[Path]:
    """Unpack the package as it was, and compile it as the present one is."""
    git = ["git", "-C", str(_ROOT), "archive", revision, "ckpttool", "docs/reference", "pyproject.toml"]
    archive = subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout
    with TemporaryDirectory(prefix="ckpttool-earlier-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as unpacked:
            unpacked.extraction_filter = getattr(tarfile, "data_filter", None)
            unpacked.extractall(folder)
        compileall.compile_dir(folder, quiet=1)
        yield Path(folder)


def against(group: Group, tree: Path) -> Group:
    """Return a group that measures each command of ckpttool's beside that of an earlier tree.

    Bars are that none takes more: the tolerance is all that a command may get slower.
    """
    names = dict.fromkeys(claim.ours for claim in group.claims)
    ours = [command for command in group.commands if command.name in names]
    variables = {"PYTHONPATH": str(tree)}
    earlier = [replace(one, name=_earlier(one.name), variables=variables) for one in ours]
    pairs = [command for pair in zip(ours, earlier, strict=True) for command in pair]
    jobs = {claim.ours: claim.job for claim in reversed(group.claims)}
    claims = [Claim(jobs[one.name], one.name, _earlier(one.name), ratio=1) for one in ours]
    return Group(tuple(pairs), tuple(claims), group.skipped)


def _earlier(name: str) -> str:
    return f"{name}, earlier"

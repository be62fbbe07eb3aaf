"""Report files and pictures, and the check that they don't replace other files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ckpttool.cli.output import say
from ckpttool.core.errors import AccessDenied, UsageError, from_os_error
from ckpttool.core.options import REPORT_PANEL, option
from ckpttool.storage import fs
from ckpttool.storage.directories import write_atomically
from ckpttool.storage.held import open_file

if TYPE_CHECKING:
    from ckpttool.core.errors import CheckpointError
    from ckpttool.ops.verdict import Verification

_APPEND = (
    os.O_WRONLY
    | os.O_APPEND
    | os.O_CREAT
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NONBLOCK", 0)
)

_report = partial(option, panel=REPORT_PANEL)
_written = partial(_report, metavar="FILE", is_output=True)

STDOUT = "-"
"""File name that sends a report to stdout instead of the verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Where each report is written."""

    junit: str | None = _written("--junit", help="Write a JUnit report to this file, or - for stdout.")
    sarif: str | None = _written("--sarif", help="Write a SARIF 2.1.0 report to this file, or - for stdout.")
    github: bool | None = _report(
        "--github",
        negation="--no-github",
        help="Write GitHub annotations. [default: in GitHub Actions]",
    )
    summary: str | None = _written(
        "--summary", help="Append a Markdown summary to this file, or - for stdout."
    )

    @property
    def takes_stdout(self) -> bool:
        """Whether a report is written to stdout in place of the verdicts."""
        return STDOUT in (self.junit, self.sarif, self.summary)


def write_reports(
    wanted: Reports,
    verifications: Sequence[Verification],
    failures: Sequence[CheckpointError],
    seconds: Mapping[str, float],
    *,
    strict: bool,
) -> None:
    """Write the requested reports; annotations are written to stderr, which GitHub also reads."""
    root = os.environ.get("GITHUB_WORKSPACE")
    if wanted.junit is not None:
        from ckpttool.cli.render.junit import junit

        write_report("--junit", wanted.junit, junit(verifications, failures, seconds=seconds).encode())
    if wanted.sarif is not None:
        from ckpttool.cli.render.sarif import sarif

        write_report("--sarif", wanted.sarif, sarif(verifications, failures, root=root).encode())
    if wanted.summary is not None:
        from ckpttool.cli.render.github import summary

        write_report("--summary", wanted.summary, summary(verifications, failures).encode())
    runs_on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    if runs_on_github if wanted.github is None else wanted.github:
        from ckpttool.cli.render.github import workflow_commands

        say(workflow_commands(verifications, failures, root=root, strict=strict).rstrip("\n"))


def _is_stdout(option: str, path: str) -> bool:
    """Whether a dash means stdout for an option; for the others it is a file name."""
    return path == STDOUT and option in _TO_STDOUT


def write_report(option: str, path: str, content: bytes) -> None:
    """Write a report or a picture; a regular file is replaced atomically.

    A summary is appended.
    """
    if _is_stdout(option, path):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    if option == "--summary" or (fs.exists(path) and not fs.isfile(path)):  # such as /dev/stdout
        _append(path, content)
        return
    try:
        write_atomically(fs.realpath(path), content)  # a link is kept
    except OSError as error:
        raise from_os_error(error, path) from error


def _append(path: str, content: bytes) -> None:
    """Append a report to a file or pipe."""
    # Opening a named pipe without a reader would wait for one, maybe for ever and after hours of work. With
    # O_NONBLOCK it fails with ENXIO. Writing may block again: a pipe with a reader holds only some KiB.
    try:
        descriptor = open_file(path, _APPEND, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise AccessDenied(path, "no process reads from this pipe") from error
        raise from_os_error(error, path) from error
    try:
        with open(descriptor, "wb") as file:
            if hasattr(os, "set_blocking"):
                os.set_blocking(descriptor, True)
            file.write(content)
    except OSError as error:
        raise from_os_error(error, path) from error


# Replaceable files -----------------------------------------------------------------------------------


_HEAD = 4096
_TAIL = 1 << 16
_MARKS: Mapping[str, Mapping[bytes, bytes]] = {
    "--junit": {b"<?xml": b"<testsuite"},
    "--sarif": {b"{": b"sarif"},
    "--plot": dict.fromkeys((b"<?xml", b"\x89PNG", b"<!doctype html>"), b"ckpttool picture"),
    "--output": {b"<!doctype html>": b"ckpttool report"},
}
"""For each option, the start of an earlier report, and another text in its first 4 KiB."""
_TO_STDOUT = frozenset({"--junit", "--sarif", "--summary"})
_RECORDING = (b"PK", b"ckpttool.npy")
"""Start of a recording, a zip file, and the name of a member in its central directory, at the end."""


def check_targets(written: Mapping[str, str | None], read: Sequence[str], *, force: bool = False) -> None:
    """Raise an error if an output would replace an input, or a file that isn't an earlier report.

    Args:
        written: Path of each output, by its option.
        read: Files and directories that the command reads.
        force: Whether a recording may be replaced.
    """
    # Checked before hours of work. ``--junit model.pt`` by mistake must not destroy a checkpoint, so only
    # files that begin like such a report are replaced. Two outputs are compared by their real paths, and
    # with inputs by inode, since a hard link to an input has another path.
    places: dict[str, str] = {}
    for flag, path in written.items():
        if path is None:
            continue
        is_stdout = _is_stdout(flag, path)
        place = path if is_stdout else fs.realpath(path)
        if place in places:
            raise UsageError(f"{places[place]} and {flag} name the same file")
        places[place] = flag
        if is_stdout:
            continue
        if fs.exists(path) and any(fs.exists(one) and fs.samefile(one, path) for one in read):
            raise UsageError(f"{flag} {path}: this file is an input")
        _check_is_ours(flag, path, force)


def check_plot(path: str, read: Sequence[str]) -> None:
    """Raise an error unless a picture can be drawn, before long work begins.

    Args:
        path: Of the picture.
        read: Files and directories that are read.

    Raises:
        UsageError: It isn't a picture's name, or would replace another file.
        MissingPackage: matplotlib is not installed.
    """
    from ckpttool.integrations.matplotlib import check_can_draw, kind_of

    kind_of(path)
    check_targets({"--plot": path}, read)
    check_can_draw(path)


def _check_is_ours(option: str, path: str, force: bool) -> None:
    """Raise an error unless a path is free, an earlier report, a replaceable recording, or a special file."""
    if not fs.lexists(path):
        return
    if fs.isdir(path):
        raise UsageError(f"{option} {path}: is a directory")
    if option == "--record":
        if not fs.isfile(path):
            raise UsageError(f"--record {path}: not a regular file")
        if not force:
            raise UsageError(f"--record {path}: already exists (--force replaces a recording)")
        begin, mark = _RECORDING
        if not (_bytes(path, 0, _HEAD).startswith(begin) and mark in _bytes(path, -_TAIL, _TAIL)):
            raise UsageError(f"--record {path}: the existing file is not a recording and is not replaced")
    elif fs.isfile(path):
        head = _bytes(path, 0, _HEAD)
        begins = _MARKS.get(option, {}).items()
        is_report = any(head.startswith(begin) and mark in head for begin, mark in begins)
        if option == "--summary":  # it is appended to whatever text is there
            is_report = b"\0" not in head and _is_text(head)
        if head and not is_report:
            raise UsageError(f"{option} {path}: the existing file is not such a report and is not replaced")


def _is_text(head: bytes) -> bool:
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4  # a character that the end cuts in two
    return True


def _bytes(path: str, start: int, count: int) -> bytes:
    """Return bytes of a file; a negative ``start`` counts from its end."""
    try:
        with fs.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size + start) if start < 0 else start)
            return file.read(count)
    except OSError as error:
        raise from_os_error(error, path) from error


def files_read(paths: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """Return all files to read that the command line names: checkpoints, inputs, and models' sources."""
    named = (str(options[name]) for name in ("input", "expect", "labels") if options.get(name))
    sources = (str(options[name]).rpartition(":")[0] for name in ("model", "optimizer") if options.get(name))
    return [*chain(paths, named, sources)]

"""Manifests: lists of SHA-256 digests of files, as ``sha256sum`` writes and checks them.

The reader accepts text and binary lines of ``sha256sum``, BSD's ``SHA256 (name) = …``, and a digest alone, as
web pages offer it.

Source: GNU coreutils ``src/digest.c``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.storage import fs

MAX_BYTES = 1 << 23
"""Limit in bytes on a manifest; 50,000 files have fewer."""

MAX_NAME = 1 << 13
"""Limit in bytes on a name; no system in use has longer paths."""
_MAX_LINE = 2 * MAX_NAME + 128  # every character of a name may be escaped

_PLAIN = re.compile(rb"(?P<escaped>\\?)(?P<digest>[0-9A-Fa-f]{64}) [ *](?P<name>.+)", re.DOTALL)
_TAGGED = re.compile(rb"(?P<escaped>\\?)SHA256 ?\((?P<name>.+)\) ?= ?(?P<digest>[0-9A-Fa-f]{64})", re.DOTALL)
_BARE = re.compile(rb"[0-9A-Fa-f]{64}")
_ESCAPE = re.compile(rb"\\(.?)", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"n": b"\n", b"r": b"\r"}


class Line(NamedTuple):
    """Entry of one file.

    Attributes:
        name: Path as in the manifest, relative to the manifest's directory.
        digest: SHA-256 in hexadecimal digits, lower case.
    """

    name: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A manifest; ``malformed`` has an error if lines, or the whole file, can't be read."""

    path: str
    lines: tuple[Line, ...] = ()
    malformed: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """Return the file name of the manifest."""
        return os.path.basename(self.path)

    @cached_property
    def digests(self) -> Mapping[str, frozenset[str]]:
        """Return the digests of each file by absolute path; several if it is listed more than once."""
        digests: dict[str, frozenset[str]] = {}
        directory = os.path.dirname(fs.abspath(self.path))
        for line in self.lines:
            place = fs.normpath(os.path.join(directory, line.name))
            digests[place] = digests.get(place, frozenset()) | {line.digest}
        return digests

    def about(self, checkpoint: str, files: Collection[str]) -> Manifest:
        """Return the manifest with the lines of one checkpoint: of its files, and of all in its directory."""
        inside, directory = checkpoint + os.sep, os.path.dirname(fs.abspath(self.path))
        lines = []
        for line in self.lines:
            place = fs.normpath(os.path.join(directory, line.name))
            if place in files or place.startswith(inside):
                lines.append(line)
        return Manifest(self.path, tuple(lines), self.malformed)


def read_manifest(path: str, *, lone_digest_file: str | None = None) -> Manifest:
    """Read a manifest; errors are in its ``malformed``.

    Args:
        path: Path of the manifest.
        lone_digest_file: File of a digest that is the whole line, without a name; None refuses such lines.
    """
    name = os.path.basename(path)
    try:
        with fs.open_source(path) as source:
            if source.size > MAX_BYTES:
                message = f"{source.size:,} bytes (at most {MAX_BYTES:,})"
                return Manifest(path, malformed=(error("manifest-malformed", message, name),))
            data = source.read(0, source.size)
    except CheckpointError as failure:
        return Manifest(path, malformed=(error("manifest-malformed", failure.reason, name),))
    return parse_manifest(path, data, lone_digest_file=lone_digest_file)


def parse_manifest(path: str, data: bytes, *, lone_digest_file: str | None = None) -> Manifest:
    """Parse the text of a manifest; see ``read_manifest``."""
    lines: list[Line] = []
    faults: list[tuple[int, str]] = []
    for number, text in enumerate(data.split(b"\n"), 1):
        text = text.removesuffix(b"\r")
        if not text or text.startswith(b"#"):
            continue
        line = _parse_line(text, lone_digest_file)
        if isinstance(line, Line):
            lines.append(line)
        else:
            faults.append((number, line))
    if not lines and not faults:
        faults.append((1, "no files listed"))
    if not faults:
        return Manifest(path, tuple(lines))
    number, why = faults[0]
    more = f"; {counted(len(faults) - 1, 'more malformed line')}" if len(faults) > 1 else ""
    malformed = error("manifest-malformed", f"{why}{more}", f"{os.path.basename(path)}:{number}")
    return Manifest(path, tuple(lines), (malformed,))


def _parse_line(text: bytes, lone_digest_file: str | None) -> Line | str:
    """Return the entry in a line, or the reason why it can't be read."""
    if lone_digest_file is not None and _BARE.fullmatch(text):
        return Line(os.path.basename(lone_digest_file), text.decode().lower())
    if len(text) > _MAX_LINE:
        return "line too long"
    match = _PLAIN.fullmatch(text) or _TAGGED.fullmatch(text)
    if match is None:
        return "not a line of sha256sum"
    if len(match["name"]) > MAX_NAME:
        return "name too long"
    name = match["name"]
    if match["escaped"]:
        if any(escape not in _ESCAPED for escape in _ESCAPE.findall(name)):
            return "unknown escape in the name"
        name = _ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], name)
    path = os.fsdecode(name)
    # A manifest comes with the files that it describes, and may be hostile, too: a path that leads out of its
    # directory isn't opened.
    while path.startswith("./"):
        path = path[2:]
    if "\0" in path or any(part in ("", os.curdir, os.pardir) for part in path.split("/")):
        return "path outside the manifest's directory; not opened"
    return Line(path, match["digest"].decode().lower())


def dumps_manifest(lines: Iterable[Line]) -> bytes:
    """Return the text of a manifest for ``sha256sum -c``."""
    # A name with a backslash or a line break is escaped, and its line marked by a backslash at the start.
    text = bytearray()
    for line in lines:
        name = os.fsencode(line.name)
        escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
        mark = b"\\" if escaped != name else b""
        text += mark + line.digest.encode() + b"  " + escaped + b"\n"
    return bytes(text)

"""Opens checkpoints with their formats, and adds findings of other readings of their files.

``Opening`` collects the findings of a reader, ``OpenedParts`` also the files of a checkpoint of several.

While ``copy`` writes into a directory, a note in it lists the names that belong to the copy, from before the
first file until after the last one. They are refused: a part of a checkpoint may look like a whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.checkpoint import Checkpoint, CheckpointParts, FileEntry, judged_files
from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    Truncated,
    Unsupported,
    from_os_error,
    memory_checked,
)
from ckpttool.core.report import Finding, Sentence, error, not_scanned
from ckpttool.core.tensor import Span
from ckpttool.formats.architecture import hub_config
from ckpttool.formats.interface import Format, Probe, SetFormat, Unit
from ckpttool.formats.readings import (
    add_bystanders,
    add_part_name,
    add_readings,
    bystander_findings,
    further_readings,
)
from ckpttool.storage import fs
from ckpttool.storage.fs import open_source

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


@dataclass(kw_only=True, eq=False)
class Opening:
    """The findings of a checkpoint so far; a context manager that closes its files if opening fails.

    Attributes:
        findings: Faults of the checkpoint.
        safety: Findings for code that loading it could run.
        judged: Absolute paths of the files that ``safety`` covers.
        complete: Whether all its parts exist and could be read.
        opened: Closes its files.
    """

    findings: list[Finding] = field(default_factory=list)
    safety: list[Finding] = field(default_factory=list)
    judged: set[str] = field(default_factory=set)
    complete: bool = True
    opened: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.opened.close()

    def fault(self, code: str, message: str | Sentence, where: str | None = None) -> None:
        """Add an error, and mark the checkpoint as incomplete."""
        self.findings.append(error(code, message, where))
        self.complete = False

    def add_failure(self, failure: CheckpointError, where: str) -> None:
        """Add the error of a part that can't be read, and mark the checkpoint as incomplete."""
        self.fault(failure.code, failure.reason, where)

    def checkpoint(self, base: Checkpoint | None = None, **parts: Unpack[CheckpointParts]) -> Checkpoint:
        """Return a checkpoint of some parts, with the findings and the open files, which it closes.

        ``safety`` and ``judged`` among the parts are added to those of the files; other parts replace theirs.
        Parts that are not given are those of ``base``.
        """
        found: dict[str, Any] = {
            "findings": tuple(self.findings),
            "complete": self.complete,
            "close": self.opened.pop_all().close,
            **parts,
            "safety": tuple(dict.fromkeys((*self.safety, *parts.get("safety", ())))),
            "judged": self.judged.union(parts.get("judged", ())),
        }
        return Checkpoint(**found) if base is None else base.replace(**found)


def open_with(
    path: str | os.PathLike[str], choose: Callable[[Probe], Format], *, allows_losses: bool = False
) -> Checkpoint:
    """Return the checkpoint at a path, opened by the format that ``choose`` returns for it.

    The checkpoint closes the file; if opening fails, it is closed here.
    """
    return open_probe(Probe(path, allows_losses=allows_losses), choose)


def open_probe(probe: Probe, choose: Callable[[Probe], Format]) -> Checkpoint:
    """Return the checkpoint at the path of a probe; see ``open_with``."""
    with ExitStack() as until_opened:
        until_opened.enter_context(probe)
        with memory_checked(probe.path):
            checkpoint = _open_and_judge(choose(probe), probe)
        until_opened.pop_all()
    return _with_config(checkpoint)


def _open_and_judge(format: Format, probe: Probe) -> Checkpoint:
    """Return the checkpoint with the findings of all other readings of its file or directory.

    If it can't be opened, they are the ``safety`` of the error.
    """
    # A file by itself is read in the ways of other loaders. A set, or a directory, has files besides those
    # of its format: they are judged instead, and each file of the format was judged when it was opened.
    is_file = not probe.is_directory and not isinstance(format, SetFormat)
    if COPYING in probe.entries:
        raise interrupted_copy(probe.path)
    try:
        checkpoint = format.open(probe)
    except DamagedCheckpoint as failure:
        with suppress(CheckpointError):  # the file may be closed already
            if is_file:
                findings = further_readings(probe, format, damaged=True)
                failure.safety = tuple(dict.fromkeys((*failure.safety, *findings)))
            elif probe.is_directory:
                failure.safety += bystander_findings(probe.path)
        raise
    if is_file:
        add_readings(checkpoint, probe, format)
        return checkpoint
    root = probe.path if probe.is_directory else checkpoint.path
    if fs.isdir(root):
        add_bystanders(checkpoint, root)
    return checkpoint


def open_unit(format: Format, unit: Unit, *, allows_losses: bool = False) -> Checkpoint:
    """Return the checkpoint of a unit; see ``Format.open``."""
    with memory_checked(unit.path):
        checkpoint = format.open_unit(unit, allows_losses=allows_losses)
    if checkpoint is None:
        return open_with(unit.path, lambda probe: format, allows_losses=allows_losses)
    return _with_config(checkpoint)


def _with_config(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the configuration next to its files, which is read at its first use."""
    return checkpoint.replace(config=partial(hub_config, checkpoint.files))


COPYING = ".ckpttool-copying"
"""Name of the note of an unfinished copy."""
EVERYTHING = "*"
"""Entry of a note that means all names of the directory."""
_MAX_BYTES = 1 << 24

CopyNote = Mapping[str, Collection[str]]
"""Names in a directory that belong to each checkpoint that is being copied there, by its name."""


def read_note(path: str) -> dict[str, list[str]]:
    """Return the names in a note; if it can't be read, everything next to it counts as incomplete."""
    try:
        with open_source(path) as source:
            document = parse_json(path, source.read(0, min(source.size, _MAX_BYTES)), "note")
    except CheckpointError:
        document = None
    match document:
        case dict() if all(isinstance(names, list) for names in document.values()):
            return {str(name): [str(one) for one in names] for name, names in document.items()}
    return {os.path.basename(os.path.dirname(path)): [EVERYTHING]}


def dumps_note(note: CopyNote) -> bytes:
    """Return the text of a note."""
    return json.dumps({name: [*names] for name, names in note.items()}).encode() + b"\n"


def interrupted_copy(path: str) -> Truncated:
    """Return the error for a checkpoint whose copy is unfinished."""
    return Truncated(
        path, "its copy was interrupted or is still running", expected="resume with ckpttool copy"
    )


MAX_RANKS = 100_000
"""Maximum number of ranks of a job, and of experts of a layer; no job has had more."""
_MAX_NAMED = 10
"""Maximum number of missing files with a finding for each."""


class OpenedParts(Opening):
    """The files of a checkpoint of several, as far as they open, and their findings.

    Attributes:
        parts: The opened files by name.
    """

    def __init__(self, kind: str, *, allows_losses: bool = False) -> None:
        """Begin without files.

        Args:
            kind: The first word of finding codes: ``shard``, ``part``.
            allows_losses: As in ``Probe``, for each of them.
        """
        super().__init__()
        self.parts: dict[str, Checkpoint] = {}
        self.allows_losses = allows_losses
        self._kind = kind

    def add_file(self, name: str, path: str) -> Checkpoint | None:
        """Open a file that is a checkpoint by itself; see ``add``."""
        return self.add(name, lambda: open_file(path, allows_losses=self.allows_losses))

    def add_unit(self, name: str, unit: Unit) -> Checkpoint | None:
        """Open a checkpoint of a directory; see ``add``."""
        format = unit.format
        if format is None:
            return self.add_file(name, unit.path)
        return self.add(name, lambda: open_unit(format, unit, allows_losses=self.allows_losses))

    def add(self, name: str, open: Callable[[], Checkpoint]) -> Checkpoint | None:
        """Open a file and return it; if it is damaged, add an error and return None."""
        # A damaged file counts as judged: the error has its safety findings, and a warning says that the rest
        # was not scanned. Safetensors can't hold code, damaged or not.
        try:
            part = self.opened.enter_context(open())
        except (DamagedCheckpoint, NotACheckpoint, Unsupported) as failure:
            self.judged.add(fs.abspath(failure.path))
            self.fault(f"{self._kind}-damaged", failure.placed_reason, name)
            self.safety += (add_part_name(finding, name) for finding in getattr(failure, "safety", ()))
            if not name.endswith(".safetensors"):
                self.safety.append(not_scanned(name))
            return None
        self.parts[name] = part
        self.judged |= judged_files(part)
        self.findings += (add_part_name(finding, name) for finding in part.findings)
        self.safety += (add_part_name(finding, name) for finding in part.safety)
        self.complete &= part.complete
        return part

    def is_in_place(self, name: str, path: str, bases: Collection[str]) -> bool:
        """Return whether a file exists in one of some directories; add an error if not.

        Args:
            name: Its name in the index.
            path: Its path.
            bases: Real paths of the directories; if empty, the file may be anywhere.
        """
        if not fs.exists(path):
            self.fault(f"{self._kind}-missing", "no such file", name)
            return False
        target = fs.realpath(path) if bases else path
        if bases and not any(target.startswith(base.rstrip(os.sep) + os.sep) for base in bases):
            message = "a link that points outside the checkpoint; not opened"
            self.fault(f"{self._kind}-path", message, name)
            return False
        return True

    def note_missing(self, names: Collection[str], what: str = "files") -> None:
        """Add an error for each file that is missing, and one for all of them beyond the first few."""
        for name in islice(names, _MAX_NAMED):
            self.fault("part-missing", "no such file", name)
        if len(names) > _MAX_NAMED:
            self.fault("part-missing", f"{len(names) - _MAX_NAMED:,} more {what} are missing", None)

    def spans(self) -> Iterator[Span]:
        """Yield the spans of all files; see ``Checkpoint.spans``."""
        for name, part in self.parts.items():
            for span in part.spans():
                yield span._replace(where=f"{name}: {span.where}")


def open_file(path: str, *, allows_losses: bool = False) -> Checkpoint:
    """Return the checkpoint in one regular file, by its content alone."""
    # An index as a part of a set is refused: one that names itself would be opened without end.
    if not fs.isfile(path):
        raise DamagedCheckpoint(path, "not a regular file")

    def choose(probe: Probe) -> Format:
        from ckpttool.formats import recognise

        format = recognise(probe)
        if isinstance(format, SetFormat):
            raise DamagedCheckpoint(probe.path, "an index", expected="a file with tensors")
        return format

    return open_with(path, choose, allows_losses=allows_losses)


def file_entry(path: str) -> FileEntry:
    """Return a file with its size in bytes."""
    try:
        return FileEntry(path, fs.stat(path).st_size)
    except OSError as failure:
        raise from_os_error(failure, path) from failure

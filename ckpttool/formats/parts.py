"""Checkpoints that lie in several files, each of which a format reads by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpttool.core.checkpoint import Checkpoint, FileEntry
from ckpttool.core.errors import DamagedCheckpoint, NotACheckpoint, Unsupported, from_os_error
from ckpttool.core.report import warning
from ckpttool.core.tensor import Span
from ckpttool.formats.bystanders import add_part_name
from ckpttool.formats.interface import Format, Probe, SetFormat
from ckpttool.formats.opening import Opening, open_with
from ckpttool.storage import fs


class OpenedParts(Opening):
    """The files of a checkpoint that lies in several, as far as they open, and what was found in them."""

    def __init__(self, kind: str) -> None:
        """Begin without files; ``kind`` is what one is called if it is damaged: ``shard``, ``part``."""
        super().__init__()
        self.parts: dict[str, Checkpoint] = {}
        self.judged: set[str] = set()
        self._kind = kind

    def add(self, name: str, open: Callable[[], Checkpoint]) -> Checkpoint | None:
        """Open a file; where it is damaged, note an error and return None."""
        try:
            part = self.opened.enter_context(open())
        except (DamagedCheckpoint, NotACheckpoint, Unsupported) as failure:
            self.judged.add(fs.abspath(failure.path))
            place = "" if failure.where is None else f"{failure.where}: "
            self.fault(f"{self._kind}-damaged", f"{place}{failure.reason}", name)
            self.safety += (add_part_name(finding, name) for finding in getattr(failure, "safety", ()))
            if not name.endswith(".safetensors"):
                message = "it could not be read, so what loading it would run is not known"
                self.safety.append(warning("not-scanned", message, name))
            return None
        self.parts[name] = part
        self.judged |= part.judged
        self.findings += (add_part_name(finding, name) for finding in part.findings)
        self.safety += (add_part_name(finding, name) for finding in part.safety)
        self.complete &= part.complete
        return part

    def spans(self) -> Iterator[Span]:
        """Iterate over every byte range worth scanning, file after file."""
        for name, part in self.parts.items():
            for span in part.spans():
                yield span._replace(where=f"{name}: {span.where}")


def open_file(path: str) -> Checkpoint:
    """Return the checkpoint that one regular file holds by itself, whatever its name says."""
    if not fs.isfile(path):
        raise DamagedCheckpoint(path, "not a regular file")

    def choose(probe: Probe) -> Format:
        from ckpttool.formats import recognise

        format = recognise(probe)
        if isinstance(format, SetFormat):
            raise DamagedCheckpoint(probe.path, "an index", expected="a file with tensors")
        return format

    return open_with(path, choose)


def file_entry(path: str) -> FileEntry:
    """Return a file with its size in bytes."""
    try:
        return FileEntry(path, fs.stat(path).st_size)
    except OSError as failure:
        raise from_os_error(failure, path) from failure

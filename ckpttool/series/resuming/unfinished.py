"""What a writer is still at: its temporary names tell."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpttool.formats import suffix_format
from ckpttool.formats.globs import Globs
from ckpttool.formats.tensorflow.prefix import DATA, INDEX
from ckpttool.naming import NameFields, parse_name
from ckpttool.series.files import Contents, contents
from ckpttool.series.members.entry import Entry
from ckpttool.series.paths import shown
from ckpttool.series.pointers.readers import names_in, temporary_for
from ckpttool.series.surveying.survey import Survey

GONE_SECONDS = 600
"""A writer that is alive changes something within ten minutes; later nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A writer's temporary file or directory: where it is, and what its name says of what it will be."""

    path: str
    fields: NameFields
    contents: Contents
    modified_ns: int


def unfinished(entry: Entry, now: float) -> str | None:
    """Return what tells that a writer is still at a directory that can be read already, or None.

    Args:
        entry: The checkpoint.
        now: The time, in seconds since 1970.
    """
    for file in entry.contents.files:
        name = os.path.basename(file.path)
        is_inside = os.sep in file.path and temporary_for(name) is not None
        if is_inside and now - file.mtime_ns / 1e9 < GONE_SECONDS:
            return f"being written: {name} lies in it"
    return None


def markers(found: Survey, exclude: Sequence[str]) -> Iterator[Marker]:
    """Yield what writers have begun in the directories that were looked at, under names of their own."""
    if any(entry.unit.path == found.root and not entry.holds_others for entry in found.entries):
        return
    blanks = {entry.fields.blank for entry in found.entries}
    globs = Globs(exclude, found.root)
    for directory in sorted({found.root, *(entry.directory for entry in found.entries)}):
        for name, file in names_in(directory).items():
            final = temporary_for(name)
            if final is None or any(globs.of(os.path.join(directory, one)) for one in (name, final)):
                continue
            fields = parse_name(final)
            is_directory = file.is_dir(follow_symlinks=False)
            if is_directory or fields.blank in blanks or _is_checkpoint_name(final):
                path = os.path.join(directory, name)
                try:
                    inside, own = contents(directory, [name]), os.lstat(path).st_mtime_ns
                except OSError:  # it has just gone
                    continue
                yield Marker(shown(path), fields, inside, max(own, inside.modified_ns))


def _is_checkpoint_name(name: str) -> bool:
    return suffix_format(name) is not None or name.endswith(INDEX) or DATA.fullmatch(name) is not None

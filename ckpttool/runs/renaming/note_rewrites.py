"""What people's notes say once checkpoints have other names, and which notes can't be made to say it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ckpttool.formats.pointer_kind import Renamer
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.notes import Mentions, decode_note, is_note, read_note
from ckpttool.runs.pointers.protection import directories_below
from ckpttool.runs.pointers.readers import Names, pass_over
from ckpttool.runs.pointers.targets import CheckpointIndex
from ckpttool.runs.renaming.scene import Note, PathRenames, Scene
from ckpttool.storage import fs

_DATA = frozenset({"", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".txt", ".list", ".lst"})
"""Endings of notes in which a value is a name; all others are prose or programs, which nobody rewrites."""

_NOT_DATA = frozenset(
    {"readme", "makefile", "gnumakefile", "dockerfile", "containerfile", "snakefile", "justfile", "rakefile"}
)
_QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")
_LINE = re.compile(r"(?P<mark>\s*(?:[-*]\s+)?)(?P<value>.*?)(?P<end>,?(?:\s+#.*)?\s*)")
_KEYED = re.compile(r"[^:=]*[:=]\s*")
_QUOTES = "\"'`"
_MARK = "\ufeff"


def note_directories(root: str, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the directories below one in which a note means one of its checkpoints."""
    index = CheckpointIndex(entries)
    mentions = Mentions(index)

    def has_notes(directory: str, names: Names) -> bool:
        for name, file in names.items():
            text = read_note(file, pass_over) if is_note(name) else None
            if text is not None and next(mentions.of(text, directory, name), None) is not None:
                return True
        return False

    return tuple(
        directory
        for directory, names in directories_below(root, index, pass_over)
        if has_notes(directory, names)
    )


class NoteRewriter:
    """The notes around checkpoints that get other names: what each means before, and afterwards."""

    def __init__(self, scene: Scene, moved: PathRenames) -> None:
        """Take the checkpoints under the names that notes have, and the new names."""
        self._scene = scene
        self._moved = moved

    @cached_property
    def _renamed_mentions(self) -> Mentions:
        """Return what finds the checkpoints that a text names by their new names."""
        entries: list[Entry] = []
        for entry in self._scene.entries:
            new = self._moved.in_directory(entry.directory)
            path = os.path.join(os.path.dirname(entry.unit.path), new.get(entry.name, entry.name))
            members = tuple(new.get(name, name) for name in entry.unit.members)
            entries.append(replace(entry, unit=entry.unit._replace(path=path, members=members)))
        return Mentions(CheckpointIndex(entries))

    def rewrite(self, text: str, directory: str, note: str) -> str:
        """Return a note with the new names in it, as far as values in it are names."""
        stem, ending = os.path.splitext(note.lower())
        if ending not in _DATA or stem in _NOT_DATA or text.startswith("#!"):
            return text
        mark = _MARK if text.startswith(_MARK) else ""
        new = self._renamer(directory, note)
        return mark + rewrite_data(text.removeprefix(_MARK), new, is_json=ending == ".json")

    def _renamer(self, directory: str, note: str) -> Renamer:
        """Return the function from a word that means a checkpoint, wherever that lies, to its new form."""

        def new(word: str) -> str | None:
            if "://" in word:  # what lies elsewhere has kept its name
                return None
            known, meant = self._scene.mentions.look_up(word, directory, note)
            new_names = {self._new_name(known, entry) for entry in meant}
            if len(new_names) != 1 or (name := new_names.pop()) == known:
                return None
            *_, last = re.finditer(rf"(?<![^/\\]){re.escape(known)}(?![^/\\])", word)
            front = word[: last.start()].replace("\\", "/")
            if not all(_leads_to(front, directory, entry.directory) for entry in meant):
                return None
            return word[: last.start()] + name + word[last.end() :]

        return new

    def _new_name(self, known: str, entry: Entry) -> str:
        """Return the new form of a checkpoint's name, of a member's, or of its name without its suffix."""
        new = self._moved.in_directory(entry.directory)
        if known in new or known in (entry.name, *entry.unit.members):
            return new.get(known, known)
        suffix = entry.name.removeprefix(known)
        name = new.get(entry.name, entry.name)
        return name.removesuffix(suffix) if name.endswith(suffix) else known

    def lost(self, note: Note) -> Iterator[str]:
        """Yield the names of the checkpoints that a note means, and won't mean once they have new names."""
        meant = {entry.path: entry for entry in self._entries_in(self._scene.mentions, note.before, note)}
        if not meant:
            return
        still = {entry.path for entry in self._entries_in(self._renamed_mentions, note.after, note)}
        yield from (entry.name for path, entry in meant.items() if path not in still)

    @staticmethod
    def _entries_in(mentions: Mentions, text: str, note: Note) -> Iterator[Entry]:
        plain = decode_note(text.encode("utf-8", "surrogateescape"))
        return iter(()) if plain is None else mentions.of(plain, note.directory, note.name)


def _leads_to(front: str, directory: str, target: str) -> bool:
    """Tell whether what stands before a name in a text leads to its directory: others may have it, too."""
    real, base = fs.realpath(target), fs.realpath(directory)
    if real == base or os.path.basename(front.rstrip("/")) == os.path.basename(real):
        return True
    while fs.realpath(os.path.join(base, front)) != real:
        base, below = os.path.dirname(base), base
        if base == below:
            return False
    return True


def rewrite_data(text: str, new: Renamer, *, is_json: bool) -> str:
    """Return a text of data in which values are names: strings, lines, and what stands behind a key.

    Of JSON, only strings are meant. A ValueError is raised if what came of it isn't what it is to say.
    """
    rewritten = "\n".join(_rewrite_line(line, new, is_json=is_json) for line in text.split("\n"))
    if rewritten == text or not is_json:
        return rewritten
    try:
        old = json.loads(text)
    except (ValueError, RecursionError):  # JSON with comments, perhaps
        return rewritten
    try:
        is_right = json.loads(rewritten) == _map_strings(old, new)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    if not is_right:
        raise ValueError("it isn't written as plain JSON")
    return rewritten


def _rewrite_line(line: str, new: Renamer, *, is_json: bool) -> str:
    """Return a line in which all values that are names have their new forms."""
    spans = [(*match.span(), _rewrite_quoted(match[0], new)) for match in _QUOTED.finditer(line)]
    match = None if is_json else _LINE.fullmatch(line)
    if match is not None and not any(quote in match["value"] for quote in _QUOTES):
        # Without quotes a name stands in the line alone, or behind a key.
        start, end = match.span("value")
        key = _KEYED.match(line, start, end)
        for begin in (start, *([key.end()] if key else ())):
            if begin < end and (name := new(line[begin:end])) is not None:
                spans.append((begin, end, name))
                break
    for start, end, name in sorted(spans, reverse=True):
        if name is not None:
            line = line[:start] + name + line[end:]
    return line


def _rewrite_quoted(quoted: str, new: Renamer) -> str | None:
    """Return a quoted string under its new name, quoted alike; None if it stays."""
    if quoted.startswith("'"):
        name = new(quoted[1:-1])
        return None if name is None or "'" in name else f"'{name}'"
    try:
        word = json.loads(quoted, strict=False)
    except ValueError:
        return None
    name = new(word)
    return None if name is None else json.dumps(name, ensure_ascii=quoted.isascii())


def _map_strings(tree: Any, new: Renamer) -> Any:
    """Return a JSON document in which strings have their new forms."""
    if isinstance(tree, str):
        return new(tree) or tree
    if isinstance(tree, list):
        return [_map_strings(item, new) for item in tree]
    if isinstance(tree, dict):
        return {new(key) or key: _map_strings(value, new) for key, value in tree.items()}
    return tree

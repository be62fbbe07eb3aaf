"""What people's notes say once checkpoints have other names, and which notes can't be made to say it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.notes import Mentions, decode_note, is_note, read_note
from ckpttool.series.pointers.protection import directories_below
from ckpttool.series.pointers.readers import names_in
from ckpttool.series.pointers.targets import CheckpointIndex
from ckpttool.series.renaming.scene import Note, PathRenames, Scene
from ckpttool.series.renaming.text_rewrites import Renamer

_DATA = frozenset({"", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".txt", ".list", ".lst"})
"""Endings of notes in which a value is a name; all others are prose or programs, which nobody rewrites."""

_NOT_DATA = frozenset(
    {"readme", "makefile", "gnumakefile", "dockerfile", "containerfile", "snakefile", "justfile", "rakefile"}
)
_QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")
_LINE = re.compile(r"(?P<mark>\s*(?:[-*]\s+)?)(?P<told>.*?)(?P<end>,?(?:\s+#.*)?\s*)")
_KEYED = re.compile(r"[^:=]*[:=]\s*")
_QUOTES = "\"'`"
_MARK = "\ufeff"


class Notes:
    """The notes around checkpoints that get other names: what each means before, and afterwards."""

    def __init__(self, scene: Scene, moved: PathRenames) -> None:
        """Take the checkpoints under the names that notes have, and the new names."""
        self._scene = scene
        self._moved = moved

    @cached_property
    def _after(self) -> Mentions:
        return Mentions(CheckpointIndex([self._with_new_name(one) for one in self._scene.entries]))

    def _with_new_name(self, entry: Entry) -> Entry:
        new = self._moved.at(entry.directory)
        path = os.path.join(os.path.dirname(entry.unit.path), new.get(entry.name, entry.name))
        members = tuple(new.get(name, name) for name in entry.unit.members)
        return replace(entry, unit=replace(entry.unit, path=path, members=members))

    def rewrite(self, text: str, directory: str, own: str) -> str:
        """Return a note with the new names in it, as far as values in it are names."""
        stem, ending = os.path.splitext(own.lower())
        if ending not in _DATA or stem in _NOT_DATA or text.startswith("#!"):
            return text
        mark = _MARK if text.startswith(_MARK) else ""
        return mark + rewrite_data(
            text.removeprefix(_MARK), self._renamer(directory, own), is_json=ending == ".json"
        )

    def _renamer(self, directory: str, own: str) -> Renamer:
        """Return what tells the new form of a word that means a checkpoint, wherever that lies."""

        def new(word: str) -> str | None:
            if "://" in word:  # what lies elsewhere has kept its name
                return None
            known, meant = self._scene.mentions.look_up(word, directory, own)
            told = {self._new_name(known, entry) for entry in meant}
            if len(told) != 1 or (name := told.pop()) == known:
                return None
            *_, last = re.finditer(rf"(?<![^/\\]){re.escape(known)}(?![^/\\])", word)
            front = word[: last.start()].replace("\\", "/")
            if not all(_leads_to(front, directory, entry.directory) for entry in meant):
                return None
            return word[: last.start()] + name + word[last.end() :]

        return new

    def _new_name(self, known: str, entry: Entry) -> str:
        """Return the new form of a checkpoint's name, of a member's, or of its name without its suffix."""
        new = self._moved.at(entry.directory)
        if known in new or known in (entry.name, *entry.unit.members):
            return new.get(known, known)
        suffix = entry.name.removeprefix(known)
        name = new.get(entry.name, entry.name)
        return name.removesuffix(suffix) if name.endswith(suffix) else known

    def lost(self, note: Note) -> Iterator[str]:
        """Yield the names of the checkpoints that a note means, and won't mean once they have new names."""
        meant = {one.path: one for one in self._mentioned(self._scene.mentions, note.before, note)}
        if not meant:
            return
        still = {one.path for one in self._mentioned(self._after, note.after, note)}
        for path, one in meant.items():
            if path not in still:
                yield one.name

    @staticmethod
    def _mentioned(meaning: Mentions, text: str, note: Note) -> Iterator[Entry]:
        plain = decode_note(text.encode("utf-8", "surrogateescape"))
        return iter(()) if plain is None else meaning.of(plain, note.directory, note.name)


def _leads_to(front: str, directory: str, place: str) -> bool:
    """Tell whether what stands before a name in a text leads to its directory: others may have it, too."""
    real, base = os.path.realpath(place), os.path.realpath(directory)
    if real == base or os.path.basename(front.rstrip("/")) == os.path.basename(real):
        return True
    while os.path.realpath(os.path.join(base, front)) != real:
        base, below = os.path.dirname(base), base
        if base == below:
            return False
    return True


def note_directories(root: str, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the directories below one in which a note means one of its checkpoints."""
    index = CheckpointIndex(entries)
    meaning = Mentions(index)
    return tuple(place for place in directories_below(root, index) if _has_notes(place, meaning))


def _has_notes(directory: str, meaning: Mentions) -> bool:
    for name, file in names_in(directory).items():
        text = read_note(file) if is_note(name) else None
        if text is not None and next(meaning.of(text, directory, name), None) is not None:
            return True
    return False


def rewrite_data(text: str, new: Renamer, *, is_json: bool) -> str:
    """Return a text of data in which values are names: strings, lines, and what stands behind a key.

    Args:
        text: JSON, YAML, TOML, a list of names, or the like.
        new: New names by old ones.
        is_json: Whether it is JSON, of which only strings are meant.

    Raises:
        ValueError: What came of it isn't what it is to say.
    """
    told = "\n".join(_rewrite_line(line, new, is_json=is_json) for line in text.split("\n"))
    if told == text or not is_json:
        return told
    try:
        was = json.loads(text)
    except (ValueError, RecursionError):  # JSON with comments, perhaps
        return told
    try:
        is_right = json.loads(told) == _map_strings(was, new)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    if not is_right:
        raise ValueError("it isn't written as plain JSON")
    return told


def _rewrite_line(line: str, new: Renamer, *, is_json: bool) -> str:
    """Return a line with all values in it that are names under their new ones."""
    spans = [(*match.span(), _rewrite_quoted(match[0], new)) for match in _QUOTED.finditer(line)]
    if not is_json:
        spans += _rewrite_unquoted(line, new)
    for start, end, told in sorted(spans, reverse=True):
        if told is not None:
            line = line[:start] + told + line[end:]
    return line


def _rewrite_unquoted(line: str, new: Renamer) -> Iterator[tuple[int, int, str | None]]:
    """Yield what stands in a line alone, or behind a key, without quotes, with its new form."""
    match = _LINE.fullmatch(line)
    if match is None or any(quote in match["told"] for quote in _QUOTES):
        return
    start, end = match.span("told")
    key = _KEYED.match(line, start, end)
    for at in (start, *([key.end()] if key else ())):
        told = new(line[at:end]) if at < end else None
        if told is not None:
            yield at, end, told
            return


def _rewrite_quoted(quoted: str, new: Renamer) -> str | None:
    """Return a quoted string under its new name, quoted alike; None where it stays."""
    if quoted.startswith("'"):
        told = new(quoted[1:-1])
        return None if told is None or "'" in told else f"'{told}'"
    try:
        word = json.loads(quoted, strict=False)
    except ValueError:
        return None
    told = new(word)
    return None if told is None else json.dumps(told, ensure_ascii=quoted.isascii())


def _map_strings(tree: Any, new: Callable[[str], str | None]) -> Any:
    """Return a JSON document in which strings have their new forms."""
    if isinstance(tree, str):
        return new(tree) or tree
    if isinstance(tree, list):
        return [_map_strings(one, new) for one in tree]
    if isinstance(tree, dict):
        return {new(key) or key: _map_strings(value, new) for key, value in tree.items()}
    return tree

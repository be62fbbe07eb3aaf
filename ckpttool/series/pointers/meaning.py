"""Which checkpoint a name or a path means that stands somewhere in a text."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.notes import lines, words

_SLASHES = re.compile(r"[/\\]+")
_MOST_PARTS = 64
"""Names in a path; a longer one is none."""


class Index:
    """Finds the checkpoint that a path belongs to: real paths, and base names for runs that were moved."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        real = {directory: os.path.realpath(directory) for directory in {one.directory for one in entries}}
        self.by_place: dict[str, Entry] = {}
        self.by_name: dict[tuple[str, str], Entry] = {}
        self.places: dict[str, list[str]] = defaultdict(list)
        for entry in entries:
            for name in {entry.name, *entry.unit.members}:
                place = os.path.join(real[entry.directory], name)
                self.by_place[place] = entry
                self.by_name[entry.directory, name] = entry
                self.places[name].append(place)

    def at(self, path: str) -> Entry | None:
        """Return the checkpoint at a path, or around it."""
        return self.around(os.path.realpath(path))

    def around(self, place: str) -> Entry | None:
        """Return the checkpoint at a place in a directory without symlinks, or around it."""
        while place not in self.by_place:
            above = os.path.dirname(place)
            if above == place:
                return None
            place = above
        return self.by_place[place]

    def holds_others(self, path: str) -> bool:
        """Tell whether other checkpoints lie inside one that is a directory."""
        return self.by_name[os.path.dirname(path), os.path.basename(path)].holds_others


class Meaning:
    """Finds the checkpoints that a text names: at the paths in it, or else of the same name.

    A path is tried relative to the text's directory and to those above it, and as it is. What lies there and
    is no checkpoint that was looked at is meant by it; only where nothing does, its last parts are tried.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._real: dict[str, str] = {}
        self._stems: dict[str, list[Entry]] = defaultdict(list)
        self._names: dict[str, list[Entry]] = defaultdict(list)
        for place, entry in index.by_place.items():
            directory, name = os.path.split(place)
            stem = _stem(name)
            self._names[name].append(entry)
            if stem is not None and name == entry.name:
                self._stems[os.path.join(directory, stem)].append(entry)
                self._names[stem].append(entry)

    def of(self, text: str, directory: str, own: str) -> Iterator[Entry]:
        """Yield the checkpoints that a text names.

        Args:
            text: The text.
            directory: Where it lies.
            own: The name of its file: one that is called like a checkpoint belongs to that, and tells of it.
        """
        alone = set(lines(text))
        for word in dict.fromkeys(words(text)):
            is_alone = word in alone and (_has_letter(word) or word == text.strip())
            yield from self.word(word, directory, own, is_alone=is_alone)[1]

    def word(
        self, word: str, directory: str, own: str, *, is_alone: bool = False
    ) -> tuple[str, Sequence[Entry]]:
        """Return the name in a word that is a checkpoint's, or its stem, and the checkpoints that it means.

        Args:
            word: The word, or a path.
            directory: Where the text lies.
            own: The name of its file; see ``of``.
            is_alone: Whether it stands alone, so that it is meant though it doesn't look like a name.
        """
        parts = [part for part in _SLASHES.split(word) if part not in ("", os.curdir)]
        known = next((part for part in reversed(parts) if part in self._names), None)
        if known is None or len(parts) > _MOST_PARTS or _belongs(own, known):
            return "", ()
        if len(parts) == 1 and not (is_alone or _is_telling(word)):
            return "", ()
        return known, self._meant(parts, known, directory, word.startswith(("/", "\\")))

    def _meant(self, parts: Sequence[str], known: str, directory: str, is_absolute: bool) -> Sequence[Entry]:
        bases = list(_upwards(os.path.abspath(directory)))
        for base in [os.sep] if is_absolute else bases:
            if found := self._at(base, parts):
                return found
            if exists(os.path.join(base, *parts)):
                entry = self._index.at(os.path.join(base, *parts))
                is_around = entry is None or os.path.join(self._dir(base), "").startswith(_inside(entry))
                return [] if entry is None or is_around else [entry]
        for start in range(len(parts)):
            for base in bases:
                if found := self._at(base, parts[start:]):
                    return found
        below = os.path.join(self._dir(directory), "")
        return [one for one in self._names[known] if _inside(one).startswith(below)]

    def _at(self, base: str, parts: Sequence[str]) -> list[Entry]:
        """Return the checkpoints at a path, with or without a suffix."""
        place = os.path.join(self._dir(os.path.join(base, *parts[:-1])), parts[-1])
        entry = self._index.by_place.get(place)
        return list(self._stems.get(place, ())) if entry is None else [entry]

    def _dir(self, path: str) -> str:
        if path not in self._real:
            try:
                self._real[path] = os.path.realpath(path)
            except ValueError:  # a NUL in it
                self._real[path] = path
        return self._real[path]


def _upwards(directory: str) -> Iterator[str]:
    while True:
        yield directory
        above = os.path.dirname(directory)
        if above == directory:
            return
        directory = above


def _inside(entry: Entry) -> str:
    """Return what the real paths of all in a checkpoint begin with."""
    return os.path.join(os.path.realpath(entry.directory), entry.name, "")


def _stem(name: str) -> str | None:
    """Return a name without its suffix, where a number in it says that it is one."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix and _has_digit(stem) else None


def _belongs(name: str, known: str) -> bool:
    """Tell whether a file is called like a checkpoint, as ``epoch_3.json`` that tells of ``epoch_3.pt``."""
    stem = _stem(known) or known
    return _has_digit(stem) and name.startswith(stem) and not name[len(stem) : len(stem) + 1].isalnum()


def _is_telling(word: str) -> bool:
    """Tell whether a word is a name wherever it stands: ``final`` and ``100`` are not."""
    return _has_letter(word) and ("." in word or _has_digit(word))


def _has_letter(text: str) -> bool:
    return any(char.isalpha() for char in text)


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)


def exists(path: str) -> bool:
    """Tell whether something lies at a path, or a TensorFlow checkpoint at a prefix."""
    try:
        return os.path.exists(path) or os.path.exists(f"{path}{INDEX}")
    except ValueError:  # a NUL in it
        return False

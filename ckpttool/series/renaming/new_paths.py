"""Paths as they stand in texts, once names in them are others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.series.renaming.rewording import NewName


class Moved:
    """New names by old ones, of all that gets another name, directory by directory."""

    def __init__(self, names: Mapping[str, Mapping[str, str]]) -> None:
        """Take new names by old ones, by the directory that they lie in."""
        self._real: dict[str, str] = {}
        self._names = {self._place(directory): dict(found) for directory, found in names.items()}

    def _place(self, directory: str) -> str:
        if directory not in self._real:
            self._real[directory] = os.path.realpath(directory)
        return self._real[directory]

    def at(self, directory: str) -> Mapping[str, str]:
        """Return new names by old ones in one directory."""
        return self._names.get(self._place(directory), {})

    def told(self, text: str, base: str) -> str | None:
        """Return a path in which a name is another; None where it leads past all that moves."""
        at = "/" if text.startswith("/") else base
        parts = text.split("/")
        try:
            for number, part in enumerate(parts):
                new = self.at(at).get(part) if part else None
                if new is not None:
                    return "/".join([*parts[:number], new, *parts[number + 1 :]])
                at = os.path.join(at, part)
        except ValueError:  # a NUL in it
            return None
        return None

    def follower(self, base: str, *others: str, near: Sequence[str] = ()) -> NewName:
        """Return what tells the new path of one that stands in a text.

        Args:
            base: The directory that relative paths belong to.
            others: Directories that they may belong to instead.
            near: Directories in which a run that was moved as a whole has what its stale paths name.
        """

        def new(text: str) -> str | None:
            for one in (base, *others):
                if (told := self.told(text, one)) is not None:
                    return told
            if any(exists(os.path.join(one, text)) for one in (base, *others)):
                return None
            above, name = os.path.split(text.rstrip("/"))
            renamed = next((self.at(one)[name] for one in near if name in self.at(one)), None)
            return None if renamed is None else os.path.join(above, renamed)

        return new


def exists(path: str) -> bool:
    """Tell whether something is at a path, or a checkpoint of TensorFlow's behind it."""
    try:
        return os.path.exists(path) or os.path.exists(path + INDEX)
    except ValueError:  # a NUL in it
        return False

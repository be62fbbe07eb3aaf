"""Globs of names, or of paths in a directory, as people give them: ``final/``, ``./*.tmp``, ``a/final``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase, translate
from typing import NamedTuple

from ckpttool.storage import fs

MATCHED_NOTHING = "matched nothing"
"""What the warning about a glob ends with; of several directories it is only true where it is of all."""

_WILD = re.compile(r"[*?\[]")


class _Form(NamedTuple):
    """One way to take a glob: of paths in a directory, and of names anywhere below it if it ``is_loose``."""

    pattern: re.Pattern[str]
    parts: tuple[str, ...]
    is_loose: bool

    def matches(self, relative: str, name: str) -> bool:
        return bool(self.pattern.match(relative) or (self.is_loose and self.pattern.match(name)))

    def is_of_something_in(self, relative: str) -> bool:
        """Tell whether it could match something in a directory."""
        count = relative.count("/") + 1
        return count < len(self.parts) and fnmatchcase(relative, "/".join(self.parts[:count]))


class Globs:
    """Globs, and which of them have matched something.

    A slash at the end and ``./`` at the beginning say nothing. What has a slash in it is relative to the
    directory; a path that leads into it from the root, or from the working directory, is taken as one in it,
    too.
    """

    def __init__(self, globs: Sequence[str], root: str) -> None:
        self._root = os.path.join(root, "")
        self._forms = {glob: tuple(_forms(glob, root)) for glob in globs}
        self._matched: set[str] = set()

    def of(self, path: str) -> list[str]:
        """Return the globs that match a path in the directory, as they were given."""
        if not self._forms:
            return []
        name = os.path.basename(path)
        is_below = path.startswith(self._root)
        relative = path[len(self._root) :] if is_below else os.path.relpath(path, self._root)
        matching = [
            glob for glob, forms in self._forms.items() if any(form.matches(relative, name) for form in forms)
        ]
        self._matched.update(matching)
        return matching

    def passes_over(self, path: str) -> bool:
        """Tell whether a glob matches a path; what others could match in it nobody sees then."""
        if not self.of(path):
            return False
        relative = path.removeprefix(self._root)
        for glob, forms in self._forms.items():
            if any(form.is_of_something_in(relative) for form in forms):
                self._matched.add(glob)
        return True

    def unmatched(self, option: str) -> list[str]:
        """Return a warning for each that has matched nothing."""
        return [f"{option} {glob!r} {MATCHED_NOTHING}" for glob in self._forms if glob not in self._matched]


def last_name(glob: str) -> str:
    """Return what a glob says of the name itself, without directories."""
    return os.path.basename(glob.rstrip("/"))


def _forms(glob: str, root: str) -> Iterator[_Form]:
    """Yield the ways to take a glob."""
    parts = [part for part in glob.split("/") if part not in ("", os.curdir)]
    if parts and not glob.startswith("/"):
        yield _form(parts, is_loose=True)
        if parts[0] == "**" and len(parts) > 1:
            yield _form(parts[1:], is_loose=True)
    if len(parts) < 2:
        return
    is_wild = glob.startswith("/")
    # A path from the root on, and the same without symlinks in the directories that it names.
    paths = [fs.abspath(glob)]
    if "\0" not in paths[0] and not _WILD.search(os.path.dirname(paths[0])):
        paths.append(os.path.join(fs.realpath(os.path.dirname(paths[0])), os.path.basename(paths[0])))
    roots = [fs.abspath(root)]
    if "\0" not in root:
        roots.append(fs.realpath(root))
    names_of_roots = {tuple(_split(path)) for path in roots}
    for path in dict.fromkeys(paths):
        names = _split(path)
        for root_names in names_of_roots:
            inner = names[len(root_names) :]
            if inner != parts and _leads_into(names, root_names, is_wild=is_wild):
                yield _form(inner, is_loose=False)


def _form(parts: Sequence[str], *, is_loose: bool) -> _Form:
    return _Form(re.compile(translate("/".join(parts))), tuple(parts), is_loose)


def _leads_into(names: Sequence[str], root: Sequence[str], *, is_wild: bool) -> bool:
    """Tell whether a path leads into the root: further than to it."""
    return len(names) > len(root) and all(
        name == root_name or (is_wild and fnmatchcase(root_name, name))
        for name, root_name in zip(names, root, strict=False)
    )


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part]

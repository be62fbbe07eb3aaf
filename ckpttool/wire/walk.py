"""Directories and all below them, without recursion: nesting may be as deep as paths can be long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator


def walk(
    top: str, on_error: Callable[[OSError], object] = lambda error: None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each directory with the names of the directories and of the other entries in it, from above.

    Links to directories are listed among these, and not followed. What is taken from the list of directories
    is not entered. It is what ``os.walk`` yields, which recurses before Python 3.12.
    """
    pending = [top]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                found = [(entry.name, _is_directory(entry), entry.is_symlink()) for entry in entries]
        except OSError as error:
            on_error(error)
            continue
        links = {name for name, _, is_link in found if is_link}
        below = [name for name, is_directory, _ in found if is_directory]
        yield directory, below, [name for name, is_directory, _ in found if not is_directory]
        pending += [os.path.join(directory, name) for name in reversed(below) if name not in links]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # as os.walk has it: what can't be told is none
        return False

"""The files that pins stand in: what is in one, and how one is changed, with all else in it kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ckpttool.errors import AccessDenied, DamagedCheckpoint, from_os_error
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.series.changing.home import home_of
from ckpttool.series.changing.owned import user_named
from ckpttool.series.paths import shown
from ckpttool.series.pointers.readers import MAX_STATE, PINS
from ckpttool.wire.atomic import write_atomically
from ckpttool.wire.source import NotRegular, open_regular
from ckpttool.wire.tomledit import changed_strings
from ckpttool.wire.tomltext import parse_toml

KEY = "pinned"


@dataclass(frozen=True, slots=True)
class Pin:
    """One line of a list of pins: the file, what stands there, and the path that it means."""

    file: str
    name: str
    path: str

    @property
    def is_there(self) -> bool:
        """Tell whether what it means is there."""
        return os.path.exists(self.path) or os.path.exists(f"{self.path}{INDEX}")


def pins_in(file: str, text: str) -> Iterator[Pin]:
    """Yield the pins in a file.

    Raises:
        DamagedCheckpoint: It isn't what it should be.
    """
    directory = os.path.dirname(file)
    try:
        names = names_in(text)
    except ValueError as error:
        raise _unreadable(file, error) from error
    for name in names:
        yield Pin(file, name, shown(os.path.normpath(os.path.join(directory, name))))


def _unreadable(file: str, error: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(shown(file), f"the pins can't be read: {error}", expected='pinned = ["name", …]')


def changed_text(
    file: str, text: str, *, renamed: Mapping[str, str | None] | None = None, added: Sequence[str] = ()
) -> str:
    """Return the text of a file with other pins in it.

    Raises:
        DamagedCheckpoint: It can't be changed in its place.
    """
    try:
        return changed_strings(text, KEY, renamed=renamed, added=added)
    except ValueError as error:
        raise _unreadable(file, error) from error


def read(file: str) -> str:
    """Return a list of pins as it stands on the disk, line endings included; nothing where there is none.

    Raises:
        CheckpointError: It can't be read.
    """
    try:
        with open_regular(file) as opened:
            content = opened.read(MAX_STATE + 1)
        if len(content) > MAX_STATE:
            raise DamagedCheckpoint(shown(file), "the pins can't be read: no list of names is so long")
        return content.decode()
    except FileNotFoundError as error:
        if os.path.islink(file):
            raise from_os_error(error, file) from error
        return ""
    except UnicodeDecodeError as error:
        raise _unreadable(file, error) from error
    except NotRegular as error:
        raise DamagedCheckpoint(shown(file), "the pins can't be read: it is no regular file") from error
    except OSError as error:
        raise from_os_error(error, file) from error


def write(file: str, text: str) -> None:
    """Write a list of pins; one that says nothing any more goes.

    Raises:
        AccessDenied: It can't be written, or is a link that somebody else made; it is as it was.
    """
    try:
        _require_trusted_link(file)
        target = os.path.realpath(file)
        if "".join(text.split()) == f"{KEY}=[]":
            os.unlink(target)
        else:
            write_atomically(target, text.encode())
    except OSError as error:
        raise AccessDenied(shown(file), f"{from_os_error(error, file).reason}; no pin was changed") from error


def _require_trusted_link(file: str) -> None:
    """Require of a link that this user made it, or whoever could write himself what it leads to.

    Raises:
        AccessDenied: Somebody else did.
        OSError: It can't be told.
    """
    if not os.path.islink(file) or not hasattr(os, "geteuid"):
        return
    maker = os.lstat(file).st_uid
    trusted = {os.geteuid(), *((os.stat(file).st_uid,) if os.path.exists(file) else ())}
    if maker not in trusted:
        reason = f"a symlink that another user made, {user_named(maker)}; no pin was changed"
        raise AccessDenied(shown(file), reason, expected="remove it, or name the pins where it leads")


def file_for(directory: str) -> str:
    """Return the file that what lies in a directory is pinned in."""
    home = home_of(directory)
    return os.path.join(home.path if home.suffix else directory, PINS)


def names_in(text: str) -> list[str]:
    """Return what is pinned, as it stands in a file.

    Raises:
        ValueError: It is no TOML, or no list of names; or such a list stands where nobody would look for it.
    """
    tables = parse_toml(text)
    if (place := _misplaced(tables)) is not None:
        raise ValueError(f"{place} means nothing; {KEY} is what pins, above all tables")
    names = tables.get(KEY, [])
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError(f"{KEY} is no list of names")
    return names


def _misplaced(tables: Mapping[str, object]) -> str | None:
    """Return a key that was meant to pin: misspelt, or below a table."""
    for key in tables:
        if key != KEY and (key.lower().startswith("pin") or get_close_matches(key.lower(), [KEY], 1, 0.8)):
            return key
    tasks = [(key, value) for key, value in tables.items() if isinstance(value, dict)]
    while tasks:
        path, table = tasks.pop()
        if KEY in table:
            return f"{path}.{KEY}"
        tasks += [(f"{path}.{key}", value) for key, value in table.items() if isinstance(value, dict)]
    return None

"""Spelling of paths: as users give them, and as messages show them."""

from __future__ import annotations

import os

from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.storage import fs


def shown(path: str) -> str:
    """Return a path for messages: without a leading ``./``, unless it would look like an option."""
    name = path.removeprefix(os.curdir + os.sep)
    return name if name and not name.startswith("-") else path


def without_trailing_slashes(path: str) -> str:
    """Return a path without trailing slashes, so that paths below it have one spelling."""
    return path.rstrip(os.sep) or path[:1]


def require_directory(path: str | os.PathLike[str]) -> str:
    """Return the path of an existing directory without trailing slashes."""
    try:
        fs.entries(os.fspath(path))
        return without_trailing_slashes(os.fspath(path))
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file (name the directory that it is in)") from error
    except OSError as error:
        raise from_os_error(error, path) from error
    except ValueError as error:
        raise UsageError(f"invalid path: {error}") from error


def is_within(path: str, directory: str) -> bool:
    """Return whether a path is a directory or below it; both are real paths."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)

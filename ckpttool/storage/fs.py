"""Files and directories, asked about as in ``os`` and ``os.path``, where a path may also be a store's URL.

What lies on this machine is answered by the system. What lies in a store is answered by ``stores``, which is
imported only then: there are no links there, and a directory is what names of objects begin with.
"""

from __future__ import annotations

import errno
import io
import os
import stat as stat_module
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO, cast

from ckpttool.core.errors import from_os_error
from ckpttool.core.urls import is_remote as is_remote
from ckpttool.core.urls import plain_url, store_root
from ckpttool.storage import held
from ckpttool.storage.directories import OpenDirectory
from ckpttool.storage.source import Source, regular_descriptor

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def is_absence(error: OSError) -> bool:
    """Tell whether an error says that there is nothing, rather than that nobody can tell."""
    return error.errno in _ABSENT


def stat(path: str) -> os.stat_result:
    """Return the status of a path; of an object, inode and device are made of its version and its store."""
    if is_remote(path):
        from ckpttool.storage import remote

        return remote.look_at(path).status
    return held.status(path)


def lstat(path: str) -> os.stat_result:
    return stat(path) if is_remote(path) else held.status(path, follows=False)


def lexists(path: str) -> bool:
    """Tell whether there is anything; where nobody can tell, this raises a ``CheckpointError``."""
    return _remote_kind(path) is not None if is_remote(path) else _is_there(path, follows=False)


def exists(path: str) -> bool:
    """Tell whether there is anything that is no broken link, as ``lexists`` does."""
    return _remote_kind(path) is not None if is_remote(path) else _is_there(path)


def isfile(path: str) -> bool:
    return _remote_kind(path) is False if is_remote(path) else stat_module.S_ISREG(_mode(path) or 0)


def isdir(path: str) -> bool:
    return _remote_kind(path) is True if is_remote(path) else stat_module.S_ISDIR(_mode(path) or 0)


def _remote_kind(path: str) -> bool | None:
    """Tell whether a URL is that of a directory; None if there is nothing."""
    from ckpttool.storage import remote

    try:
        return remote.look_at(path).object is None
    except FileNotFoundError:
        return None
    except OSError as error:  # "there is none" would be a verdict on a question that had no answer
        raise from_os_error(error, path) from error


def islink(path: str) -> bool:
    return not is_remote(path) and stat_module.S_ISLNK(_mode(path, follows=False) or 0)


def _mode(path: str, *, follows: bool = True) -> int | None:
    """Return the mode of a local path, None if there is nothing or it can't be read, as ``os.path`` has it.

    Raises:
        Exchanged: A directory on the way was replaced.
    """
    try:
        return held.status(path, follows=follows).st_mode
    except held.Exchanged:
        raise
    except (OSError, ValueError):
        return None


def _is_there(path: str, *, follows: bool = True) -> bool:
    try:
        held.status(path, follows=follows)
    except held.Exchanged:
        raise
    except ValueError:  # a NUL in it
        return False
    except OSError as error:
        if is_absence(error):
            return False
        raise from_os_error(error, path) from error
    return True


def readlink(path: str) -> str:
    """Return where a symlink leads."""
    return held.read_link(path)


def unlink(path: str) -> None:
    """Unlink a file of this machine."""
    above, name = os.path.split(path)
    with OpenDirectory(above) as directory:
        directory.unlink(name)


def set_modified(path: str, nanoseconds: int) -> None:
    """Set when a file of this machine was modified and read last, in nanoseconds since 1970."""
    above, name = os.path.split(path)
    with OpenDirectory(above) as directory:
        os.utime(directory.at(name), ns=(nanoseconds, nanoseconds), dir_fd=directory.descriptor)


def makedirs(path: str) -> None:
    """Make a directory of this machine, and those that it lies in, unless they are there."""
    above, name = os.path.split(path.rstrip(os.sep))
    if isdir(path or os.curdir) or not name:
        return
    makedirs(above)
    with OpenDirectory(above) as directory:
        if not directory.has(name):
            directory.make(name).close()


def getsize(path: str) -> int:
    return stat(path).st_size


def listdir(path: str) -> list[str]:
    return [entry.name for entry in entries(path)] if is_remote(path) else held.names(path)


def entries(path: str) -> list[os.DirEntry[str]]:
    """Return what lies in a directory, in no order."""
    if is_remote(path):
        from ckpttool.storage import remote

        return remote.entries(path)
    known = held.entries(path)
    if known is not None:
        return cast("list[os.DirEntry[str]]", known)
    with os.scandir(path) as found:
        return list(found)


def dirname(path: str) -> str:
    """Return the directory that a path lies in; that of a store itself, and of ``/``, is the same."""
    if not is_remote(path):
        return os.path.dirname(path)
    root = store_root(path)
    return root if len(path.rstrip("/")) <= len(root) else os.path.dirname(path)


def refresh(path: str) -> None:
    """Have the store that a URL is in asked again from now on; a disk is asked each time."""
    if is_remote(path):
        from ckpttool.storage import remote

        remote.forget()


def answers_below(directory: str) -> AbstractContextManager[None]:
    """Return a context that ends with an error if a store failed to answer of what is below a directory."""
    if is_remote(directory):
        from ckpttool.storage import remote

        return remote.answers_below(directory)
    return nullcontext()


def normpath(path: str) -> str:
    """Return a path without ``.``, ``..`` and doubled slashes."""
    return plain_url(path) if is_remote(path) else os.path.normpath(path)


def isabs(path: str) -> bool:
    return is_remote(path) or os.path.isabs(path)


def abspath(path: str) -> str:
    return normpath(path) if is_remote(path) else os.path.abspath(path)


def samefile(path: str, other: str) -> bool:
    if is_remote(path) or is_remote(other):
        return normpath(path) == normpath(other)
    return os.path.samestat(stat(path), stat(other))


def commonpath(paths: list[str]) -> str:
    """Return the directory that all paths lie in; nothing if some are in a store, and others elsewhere."""
    roots = {store_root(path) if is_remote(path) else "" for path in paths}
    if len(roots) > 1:
        return ""
    (root,) = roots
    if not root:
        return os.path.commonpath(paths)
    return root + os.path.commonpath([path.removeprefix(root) or "/" for path in paths]).rstrip("/")


def realpath(path: str) -> str:
    return normpath(path) if is_remote(path) else held.real_path(path)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a file, or an object if the path is the URL of one."""
    name = os.fspath(path)
    if is_remote(name):
        from ckpttool.storage.remote_source import RemoteSource

        return RemoteSource(name)
    return Source(name)


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Return a regular file, opened to be read as bytes; raises what ``regular_descriptor`` does."""
    name = os.fspath(path)
    if is_remote(name):
        from ckpttool.storage.remote_source import RemoteFile, RemoteSource

        return io.BufferedReader(RemoteFile(RemoteSource(name)))
    # Python's own opening would say of a directory that it is one.
    return open(regular_descriptor(name), "rb", buffering=buffering)


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
        subdirectories: list[str] = []
        others: list[str] = []
        links: set[str] = set()
        try:
            for entry in entries(directory):
                try:
                    is_directory = entry.is_dir()
                except OSError:  # as os.walk has it: what can't be told is none
                    is_directory = False
                (subdirectories if is_directory else others).append(entry.name)
                if entry.is_symlink():
                    links.add(entry.name)
        except OSError as error:
            on_error(error)
            continue
        yield directory, subdirectories, others
        pending += [os.path.join(directory, name) for name in reversed(subdirectories) if name not in links]

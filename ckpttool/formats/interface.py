"""The interface of formats, which recognise paths and open them, and the probe of a path."""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from ckpttool.containers.compressed import compression_of
from ckpttool.containers.zip_reader import EMPTY_MAGIC, LOCAL_MAGIC, Archive
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    from_os_error,
)
from ckpttool.storage import fs
from ckpttool.storage.source import Source

HEAD_BYTES = 4096
"""Number of first bytes that formats look at; a tar's magic and the second HDF5 signature are among them."""
_NOWHERE = frozenset({errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR})
"""Errors of links without a target, besides ``ENOENT``."""
MANIFEST_SUFFIXES = (".sha256", ".digests.json")
"""Suffixes of the files of ``verify --write-manifest``, which are moved and removed with the checkpoint."""

# A safetensors file begins with the length of its header in 8 bytes, then ``{``. A length may begin with the
# bytes of a zip's magic, and a zip may have a brace anywhere: it is JSON only with a brace in that place.
_JSON_HEADER = re.compile(rb".{8}\s*\{", re.DOTALL)
_HDF5 = b"\x89HDF\r\n\x1a\n"
_OTHER_MAGICS = (_HDF5, b"\x93NUMPY", b"\x80")
_ZIP_TAIL, _DIRECTORY_MAGIC = 1 << 16, b"PK\x01\x02"
_TENSORFLOW_SHARD = re.compile(r"\.data-\d{5}-of-\d{5}$")
_ALL_SHARDS = re.compile(r"-\?{5}-of-\d{5}$")
RANKED = re.compile(r"(?P<stem>.+?)[._-]rank[._-]?(?P<rank>\d{1,9})\.(pt|pth|bin|ckpt)", re.DOTALL)
"""Name of a file that one process of a job wrote: the part that all ranks share, and the rank."""
_DIGITS = re.compile(r"([0-9]+)")
_Key = TypeVar("_Key")


class Probe:
    """A path, looked at once for all formats: its first bytes, or the names in a directory.

    A context manager that closes the file; ``opening.open_with`` passes it to the checkpoint instead.

    Attributes:
        allows_losses: Whether readers return a partial checkpoint of a damaged one; only ``salvage`` asks for
            that. A lost tensor has an extent outside of its file.
        other_entries: Entries of further directories, by name, if a checkpoint is in several directories.
    """

    other_entries: Mapping[str, tuple[os.DirEntry[str], ...]] = {}

    def __init__(self, path: str | os.PathLike[str], *, allows_losses: bool = False) -> None:
        """Look at a path.

        Raises:
            NotFound, AccessDenied: It can't be looked at.
        """
        self.path = os.fspath(path)
        self.allows_losses = allows_losses
        self._file = _file_to_open(self.path)
        try:
            self.is_directory = stat.S_ISDIR(fs.stat(self._file).st_mode)
        except OSError as error:
            raise from_os_error(error, self.path) from error
        except ValueError as error:
            raise NotACheckpoint(self.path, f"no path: {error}") from error

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return os.path.basename(self.path.rstrip(os.sep))

    @cached_property
    def source(self) -> Source:
        """Return the open file.

        Raises:
            NotFound, AccessDenied: It can't be opened.
        """
        return fs.open_source(self._file)

    @cached_property
    def head(self) -> bytes:
        """Return the first bytes of the file; none of a directory."""
        return b"" if self.is_directory else self.source.read(0, min(HEAD_BYTES, self.source.size))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of content that the first bytes allow, as the table of formats names them."""
        if self.is_directory:
            return frozenset({"directory"})
        # A file may have several kinds: a pickle with a brace in its first bytes, a zip after a user block.
        # Content that only fits JSON, where any brace does, is ``other`` as well, for formats whose files
        # have no magic. A path that is no file itself (a prefix) may represent a file of any kind.
        head = self.head
        is_zip = self.is_zip
        signs = {
            "zip": is_zip,
            "tar": head[257:262] == b"ustar",
            "pickle": head[:1] == b"\x80",
            "compressed": compression_of(head) is not None,
            "json": b"{" in head
            and not head.startswith(_HDF5)
            and (not is_zip or _JSON_HEADER.match(head) is not None),
            # A record of a zip may be at such an offset by chance.
            "hdf5": any(head.startswith(_HDF5, at) for at in ((0,) if is_zip else (0, 512, 1024, 2048))),
            "numpy": head.startswith(b"\x93NUMPY"),
            # The index of a prefix is one, even if its first bytes are damaged.
            "table": self._file.endswith(".index") or _begins_table(head),
        }
        kinds = {kind for kind, is_so in signs.items() if is_so}
        if not kinds - {"json"}:
            kinds.add("other")
        if self._file != self.path and not kinds.isdisjoint(("zip", "pickle", "other")):
            kinds.add("prefix")
        return frozenset(kinds)

    @cached_property
    def entries(self) -> Mapping[str, os.DirEntry[str]]:
        """Return the entries of the directory, by name; none of a file."""
        return scan(self.path) if self.is_directory else {}

    @cached_property
    def _archive(self) -> Archive | CheckpointError | None:
        is_zip = self.head.startswith((LOCAL_MAGIC, EMPTY_MAGIC))
        if not is_zip and not (self.allows_losses and self._is_headless_zip):
            return None
        try:
            if not self.allows_losses:
                return Archive(self.source)
            from ckpttool.containers.zip_rescue import rescue_records

            return Archive(self.source, rescue_records)
        except CheckpointError as error:
            return error

    @property
    def _is_headless_zip(self) -> bool:
        """Return whether a file ends like a zip, and begins like no other format."""
        if self.is_directory or self.head.startswith(_OTHER_MAGICS) or _JSON_HEADER.match(self.head):
            return False
        length = min(_ZIP_TAIL, self.source.size)
        tail = self.source.read(self.source.size - length, length)
        return EMPTY_MAGIC in tail or _DIRECTORY_MAGIC in tail

    @property
    def is_zip(self) -> bool:
        """Return whether the file begins like a zip, damaged or not; for ``salvage``, or ends like one."""
        return self._archive is not None

    @property
    def is_rescued_zip(self) -> bool:
        """Return whether it is a damaged zip that is read by its whole records, for ``salvage``."""
        return isinstance(self._archive, Archive) and self._archive.rescue is not None

    @property
    def is_cut_zip(self) -> bool:
        """Return whether it is a zip without its end, which only ``salvage`` opens."""
        return isinstance(self._archive, Archive) and self._archive.is_cut

    @property
    def archive(self) -> Archive:
        """Return the file as a zip.

        Raises:
            CheckpointError: It is a damaged zip, or none.
        """
        if isinstance(self._archive, CheckpointError):
            raise self._archive
        if self._archive is None:
            raise DamagedCheckpoint(self.path, "not a zip", expected="PK at byte 0")
        return self._archive

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the records of the zip; none if it is no zip, or a damaged one."""
        return frozenset(self._archive.names) if isinstance(self._archive, Archive) else frozenset()

    @cached_property
    def members(self) -> frozenset[str]:
        """Return the names of the zip's records below its root directory, in lower case.

        Only the first record is known if the zip's directory is damaged.
        """
        if isinstance(self._archive, Archive):
            names = list(self._archive.names)
        elif self._archive is None:
            names = []
        else:
            names = [self.first_record]
        return frozenset(name.partition("/")[2].casefold() for name in names)

    def may_have_record(self, pattern: re.Pattern[str]) -> bool:
        """Return False if a zip has several records and none of a name, with or without its root directory.

        True for other files, and if the zip's directory is damaged.
        """
        return len(self.members) < 2 or any(map(pattern.fullmatch, self.members | self.names))

    @property
    def first_record(self) -> str:
        """Return the name of the first record of a zip, from its local header."""
        length = int.from_bytes(self.head[26:28], "little")
        return self.head[30 : 30 + length].decode("utf-8", "replace")

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "source" in self.__dict__:
            self.source.close()


def _begins_table(head: bytes) -> bool:
    """Return whether a TensorFlow index, a table that begins with an empty key, may begin like this."""
    # The first entry is three lengths (shared: 0, key: 0, value) and the value, so two zero bytes come first.
    # Compressed, at most 10 bytes of sizes and 5 of a literal's length come before them. A zip's second byte
    # is no literal.
    if b"\0\0" not in head[:17] or head[:3] == b"\0\0\0" or head.startswith(b"PK"):
        return False
    from ckpttool.containers.table import begins_with_empty_key

    return begins_with_empty_key(head)


def _file_to_open(path: str) -> str:
    """Return the file that a path represents: the index of a TensorFlow prefix or shard, or a first file."""
    # Users name checkpoints by a prefix (``model.ckpt-100``), which is no file. It represents the index of
    # TensorFlow's second version, the first shard of its first version, or the file of the first rank.
    shard = _TENSORFLOW_SHARD.search(path)
    index = f"{path[: shard.start()] if shard else path}.index"
    exists = fs.lexists(path)
    if (shard or not exists) and fs.isfile(index):
        return index
    if exists:
        return path
    return _first_old_shard(path) or next(iter(ranked_paths(path)), path)


def _first_old_shard(path: str) -> str | None:
    """Return the first shard of the prefix of a TensorFlow checkpoint of the first version."""
    directory, name = os.path.split(path)
    shard = re.compile(re.escape(_ALL_SHARDS.sub("", name)) + r"-\d{5}-of-\d{5}", re.DOTALL)
    try:
        first = min(filter(shard.fullmatch, fs.listdir(directory or os.curdir)), default=None)
    except (OSError, ValueError):
        return None
    return None if first is None else os.path.join(directory, first)


def ranked_paths(prefix: str) -> list[str]:
    """Return the files of all ranks of a prefix, in the order of their ranks."""
    directory, stem = os.path.split(prefix)
    try:
        names = fs.listdir(directory or os.curdir)
    except (OSError, ValueError):
        return []
    ranks = (name for name in names if (match := RANKED.fullmatch(name)) and match["stem"] == stem)
    return [os.path.join(directory, name) for name in sorted(ranks, key=natural)]


def scan(path: str) -> dict[str, os.DirEntry[str]]:
    """Return the entries of a directory by name, in natural order.

    The entry of a link that can't be followed raises ``CheckpointError`` if its target is needed.
    """
    try:
        known = [_checked(entry) for entry in fs.entries(path)]
    except OSError as error:
        raise from_os_error(error, path) from error
    return {entry.name: entry for entry in sorted(known, key=lambda entry: natural(entry.name))}


def _checked(entry: os.DirEntry[str]) -> os.DirEntry[str]:
    try:
        entry.is_file()
    except OSError as error:
        if not entry.is_symlink():
            raise from_os_error(error, entry.path) from error
        return cast("os.DirEntry[str]", _BlockedLink(entry.name, entry.path, error))
    return entry


@dataclass(frozen=True, slots=True)
class _BlockedLink:
    """Directory entry of a link that can't be followed; it raises if its target is needed."""

    # A link in a circle is treated as a dangling one. Another, such as one into a closed directory, may lead
    # to something dangerous, and must not be skipped as if it were none.

    name: str
    path: str
    failure: OSError

    def is_symlink(self) -> bool:
        return True

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        if follow_symlinks and self.failure.errno not in _NOWHERE:
            raise from_os_error(self.failure, self.path) from self.failure
        return False

    is_dir = is_file

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return fs.stat(self.path) if follow_symlinks else fs.lstat(self.path)


def group_names(
    directory: str, group: Callable[[Iterable[str]], dict[_Key, list[str]]]
) -> dict[_Key, list[str]]:
    """Return the names in a directory in groups, in natural order."""
    # Each of many sets in a directory is compared with all names next to it: listing it for each would take
    # quadratic time. It is listed again only if its status has changed.
    try:
        status = fs.stat(directory)
        state = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
        groups: dict[_Key, list[str]] = _grouped(directory, group, state)
    except OSError as failure:
        raise from_os_error(failure, directory) from failure
    return groups


@lru_cache(maxsize=4)
def _grouped(directory: str, group: Callable[[Iterable[str]], Any], state: tuple[int, ...]) -> Any:
    return group(sorted(fs.listdir(directory), key=natural))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sorting key in which numbers compare as numbers: epoch_9 comes before epoch_10."""
    parts = _DIGITS.split(name)
    return [(1, int(part), part) if index % 2 else (0, 0, part) for index, part in enumerate(parts)]


def natural_path(path: str) -> list[list[tuple[int, int, str]]]:
    """Return a sorting key of a path, directory by directory: ``a/b`` comes before ``a-1``."""
    return [natural(part) for part in path.split(os.sep)]


class Unit(NamedTuple):
    """A checkpoint in a directory, with all entries that are kept or removed together.

    Attributes:
        path: Path by which a user would name it: the file, the directory, or the index of a set.
        members: Names of its files and directories, in the directory of ``path``.
        format: The format that recognised it; None for a file with a checkpoint's suffix and other content.
        shared: Paths, relative to its directory, of files that it needs but that are in a subdirectory or
            belong to other checkpoints as well. They are never removed with it.
    """

    path: str
    members: tuple[str, ...]
    format: Format | None
    shared: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the members that hold the checkpoint, without the manifests next to it."""
        return tuple(name for name in self.members if not name.endswith(MANIFEST_SUFFIXES)) or self.members

    def files(self) -> Iterator[str]:
        """Yield the paths of all its files, also those in its directories; no link is followed."""
        directory = os.path.dirname(self.path.rstrip(os.sep))
        for name in self.members:
            path = os.path.join(directory, name)
            if fs.isdir(path) and not fs.islink(path):
                for parent, _, names in fs.walk(path):
                    yield from (os.path.join(parent, file) for file in sorted(names))
            else:
                yield path

    @property
    def nbytes(self) -> int:
        """Return the size of all its files in bytes; those that have vanished count 0."""
        return sum(fs.getsize(path) for path in self.files() if fs.exists(path))


class Format(ABC):
    """One kind of checkpoint.

    Attributes:
        name: Name in the documentation.
        suffixes: Usual endings of the file name, in lower case; hints for error messages only.
        specialises: Formats that recognise the same paths; this one wins.
        takes_in: Whether checkpoints in directories inside one of this format are parts of it.
        written: Names that its framework writes directly in a directory of this format, those of directories
            with a slash at the end; None if they can be any.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    specialises: ClassVar[tuple[type[Format], ...]] = ()
    takes_in: ClassVar[bool] = False
    written: ClassVar[re.Pattern[str] | None] = None

    @abstractmethod
    def matches(self, probe: Probe) -> bool:
        """Return whether the path has the content of this format, damaged or not."""

    @abstractmethod
    def open(self, probe: Probe) -> Checkpoint:
        """Return the checkpoint, with its whole structure checked and no value read.

        Its ``safety`` has the findings of this format's reading alone; ``opening`` adds those of what other
        loaders would read in the same file or directory.

        Raises:
            CheckpointError: It can't be read, or its structure is wrong.
        """

    def __reduce__(self) -> tuple[Callable[[type[Format]], Format], tuple[type[Format]]]:
        """Unpickle to this process's instance of the format instead of a copy."""
        return _known_instance, (type(self),)

    def state_files(self, names: Iterable[str], proven: Collection[str]) -> Iterable[str]:
        """Return the files of a directory that are needed only to continue the training; none by default.

        Args:
            names: Paths of all files, relative to the directory.
            proven: Those of them whose tensors are all of optimizers or random states.
        """
        return ()

    def open_unit(self, unit: Unit, *, allows_losses: bool = False) -> Checkpoint | None:
        """Return the checkpoint of a unit, if its path alone would open another one.

        Args:
            unit: The unit that discovery found.
            allows_losses: As in ``Probe``.

        Raises:
            CheckpointError: It can't be read, or its structure is wrong.
        """
        return None


@cache
def _known_instance(kind: type[Format]) -> Format:
    """Return the instance of a format that ``formats`` returns."""
    from ckpttool.formats import formats, third_party_formats

    known = next((format for format in formats() if type(format) is kind), None)
    return known or next((format for format in third_party_formats() if type(format) is kind), None) or kind()


class SetFormat(Format):
    """A format whose checkpoints consist of several entries of a directory, which may have others as well."""

    @abstractmethod
    def units(self, directory: str, entries: Mapping[str, os.DirEntry[str]]) -> Iterable[Unit]:
        """Return the checkpoints of this format among the entries of a directory."""

    def unit_of(self, probe: Probe) -> Unit | None:
        """Return the checkpoint at a path of this format; None for a directory that only contains it."""
        return Unit(probe.path, (probe.name,), self)

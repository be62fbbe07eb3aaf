"""Records in a copied directory, whose files have other inodes than recorded.

Where they have the sizes and times that were noted, they are taken for those files. Where they have lost
their times, nothing tells which file is which, and nothing is done.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.storage import fs
from ckpttool.transaction.files import Fingerprint, fingerprint
from ckpttool.transaction.journal import Exchange, Location, Operation, OperationList, StoredFile
from ckpttool.transaction.open_roots import OpenRoots, open_roots
from ckpttool.transaction.state_dir import StateDir

COPIED = "it was copied; the files here have the sizes and times that were noted, and other inodes"
LOST_TIMES = "it was copied without the times of its files, which alone tell one from another of its size"

_SECOND = 10**9
"""In nanoseconds."""


def operations_in_copy(
    directory: str, listed: OperationList, state_dir: StateDir
) -> tuple[OperationList, str | None]:
    """Return operations with the fingerprints of the copied files, and a note if it is a copy.

    A copy is meant where every file that is there has the size and the time that were noted, and none of them
    is the file that was noted. Elsewhere the operations are returned as they are; what is missing stays as
    noted.
    """
    if not fs.place_of(directory).can_rename:  # objects have versions, which no copy has
        return listed, None
    now: dict[Fingerprint, Fingerprint] = {}
    others: list[tuple[Fingerprint, Fingerprint]] = []
    try:
        with open_roots(directory, listed, state_dir) as roots:
            for number, group in enumerate(listed.groups):
                rewritten = listed.rewritten(number)
                for file in group.contents.files:
                    here = _file_at(roots, Location(listed.home(number), file.path))
                    if here is not None:
                        now[file] = here
                        if file.path not in rewritten:  # of those the text is compared
                            others.append((file, here))
            if all(_is_copied(noted, here) for noted, here in others):
                has_other_inodes = any(noted.inode != here.inode for noted, here in others)
                return (_as_found(listed, now, roots), COPIED) if has_other_inodes else (listed, None)
    except OSError:  # whoever does the operations is told the same
        return listed, None
    has_lost_times = all(noted.size == here.size and noted.inode != here.inode for noted, here in others)
    return listed, LOST_TIMES if has_lost_times else None


def _as_found(listed: OperationList, now: dict[Fingerprint, Fingerprint], roots: OpenRoots) -> OperationList:
    def found(stored: StoredFile | None, location: Location) -> StoredFile | None:
        here = None if stored is None else _file_at(roots, location)
        if stored is None or here is None or not _is_copied(stored.file, here):
            return stored
        return stored._replace(file=replace(here, path=stored.file.path))

    def operation(one: Operation) -> Operation:
        if not isinstance(one, Exchange):
            return one
        new = one.new if one.new is None else found(one.new, one.new.location)
        return one._replace(old=found(one.old, Location("directory", one.path)), new=new)

    groups = tuple(
        group._replace(
            contents=replace(
                group.contents, files=tuple(now.get(file, file) for file in group.contents.files)
            )
        )
        for group in listed.groups
    )
    return replace(listed, groups=groups, operations=tuple(map(operation, listed.operations)))


def _file_at(roots: OpenRoots, location: Location) -> Fingerprint | None:
    status = roots.status(location)
    return None if status is None else fingerprint(location.path, status)


def _is_copied(noted: Fingerprint, here: Fingerprint) -> bool:
    # An archive may hold whole seconds alone.
    has_time = here.mtime_ns in (noted.mtime_ns, noted.mtime_ns // _SECOND * _SECOND)
    is_itself = (noted.device, noted.inode) == (here.device, here.inode)
    return noted.size == here.size and has_time and not is_itself

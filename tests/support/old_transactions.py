"""Directories as ckpttool 0.1.0 left them when it was killed: unpacked, with journals that fit them here."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "fixtures" / "transactions"
NUMBERS = "CKPTTOOL.device-inode-ns"
OURS = ("journal.json", "record.json", "owner", "moving")
"""Files in which inodes are named."""
NOBODY = 1 << 40
"""What is added to an inode for a file that is not there, so that no other one has it by chance."""

Tree = dict[str, str]
Inodes = dict[int, int]


@cache
def cases() -> dict[str, Any]:
    """Return what ``fixtures/make_transactions.py`` says of its cases, by name."""
    document = json.loads((HERE / "cases.json").read_text())
    return {name: case | {"known": document["trees"]} for name, case in document["cases"].items()}


def unpack(place: Path, names: Collection[str], *, is_copy: bool = False) -> None:
    """Write cases of some names below a directory, as they lay on the disk on which they were made.

    Devices and inodes in journals and records become those of the files that are written here, unless it is
    to be a copy: then none of the files is the one that was noted, and none has a second name.
    """
    inodes: dict[str, Inodes] = {}
    times: list[tuple[Path, int]] = []
    with tarfile.open(HERE / "cases.tar.xz") as archive:
        for entry in archive:
            path, case = place / entry.name, entry.name.split("/")[0]
            if case not in names:
                continue
            _write(archive, entry, path, place, is_copy)
            _, inode, modified = map(int, entry.pax_headers[NUMBERS].split())
            times.append((path, modified))
            inodes.setdefault(case, {})[inode] = path.lstat().st_ino
    for path in sorted(place.rglob("*")):
        if path.name in OURS and ".ckpttool-" in str(path.parent.relative_to(place)):
            known = {} if is_copy else inodes[path.relative_to(place).parts[0]]
            _fit(path, known, is_copy)
    for path, modified in reversed(times):
        os.utime(path, ns=(modified, modified), follow_symlinks=False)


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path, place: Path, is_copy: bool) -> None:
    if entry.isdir():
        path.mkdir()
    elif entry.issym():
        path.symlink_to(entry.linkname)
    elif entry.islnk() and not is_copy:
        path.hardlink_to(place / entry.linkname)
    else:
        file = archive.extractfile(entry)
        assert file is not None
        path.write_bytes(file.read())
    if not entry.issym():
        path.chmod(entry.mode)


def _fit(path: Path, inodes: Inodes, is_copy: bool) -> None:
    """Have a file of ours name the inodes that its files have here; a copy's names those of nobody."""
    document = json.loads(path.read_text())
    device = path.stat().st_dev

    def here(inode: int) -> int:
        return inodes.get(inode, inode + NOBODY)

    def fitted(value: Any) -> Any:
        match value:
            case [str(name), int(), int(inode), int(size), int(modified)]:
                return [name, device, here(inode), size, modified]
            case list():
                return [fitted(one) for one in value]
            case dict():
                return {key: fitted(one) for key, one in value.items()}
        return value

    if path.name == "moving":
        new = {name: [here(inode), modified] for name, (inode, modified) in document["new"].items()}
        document = {"new": new, "old": {name: here(inode) for name, inode in document["old"].items()}}
    elif path.name == "owner":
        boot = Path("/proc/sys/kernel/random/boot_id")
        document |= {"inode": here(document["inode"]), "host": os.uname().nodename}
        document["boot"] = boot.read_text().strip() if boot.exists() else ""
    else:
        document = fitted(document)
        if document.get("root") is not None:
            document["root"] = here(document["root"])
    path.write_text(json.dumps(document))


def tree(place: Path) -> Tree:
    """Return what lies there as ``cases.json`` has it."""
    found: Tree = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if ".ckpttool-" in name or path.name in (".ckpttool.lock", "settled.safetensors"):
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found

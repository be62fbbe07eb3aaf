"""What may give way to a target: one checkpoint, and nothing that is not it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CheckpointError, UsageError, from_os_error
from ckpttool.formats import open_checkpoint
from ckpttool.formats.discovery import unit_at
from ckpttool.formats.interface import SIDECARS, scan
from ckpttool.formats.paddle.fluid_parts import MARKER
from ckpttool.formats.paddle.fluid_siblings import only_serial
from ckpttool.ops.manifest import SHARED, base_of

_MARKS = frozenset({MARKER, *SHARED})
"""Names of what lies in the directory of a checkpoint and tells of its files alone."""
_KNOWN = frozenset(
    {
        ("fluid", "checkpoint"),
        ("fluid", "variables"),
        ("keras-h5", "sharded"),
        ("pytorch", "sharded"),
        ("safetensors", "sharded"),
        ("savedmodel", "v1"),
        ("savedmodel", "v2"),
        ("torch-dcp", None),
        ("torch-dcp", "safetensors"),
    }
)
"""Directories of which it is known what belongs there, by format and variant; in others, anything may lie."""
_OF_SAVED_MODEL = re.compile(
    r"saved_model\.(pb|pbtxt|cpb)|fingerprint\.pb|keras_metadata\.pb|(assets|assets\.extra)/.*"
    r"|variables/variables\.(index|data-[0-9]{5}-of-[0-9]{5})",
    re.DOTALL,
)
"""What a SavedModel consists of; its reader tells of all that lies there."""


def check_replaceable(path: str) -> None:
    """Require that what stands at a path may be replaced: a file, a link, or a directory of one checkpoint.

    Raises:
        UsageError: It is something else, or something else lies in the directory.
        CheckpointError: It can't be looked at.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise from_os_error(error, path) from error
    if stat.S_ISDIR(mode):
        _check_own(path)
    elif not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise UsageError(f"{path} is neither a file nor a directory: it is not replaced")


def _check_own(directory: str) -> None:
    """Require that nothing lies in a directory but one checkpoint, and the manifests about it.

    Raises:
        UsageError: Something else does, or it can't be told.
        CheckpointError: It can't be looked at.
    """
    whole = directory if unit_at(directory) is not None else only_serial(directory)
    if whole is None:
        raise UsageError(f"{directory} is a directory, and no checkpoint: it is not replaced")
    try:
        with open_checkpoint(whole) as standing:
            is_own = _ownership(standing)
    except CheckpointError as error:
        raise UsageError(
            f"{directory}: which files belong to the checkpoint can't be told ({error.reason}): "
            "it is not replaced"
        ) from error
    for path in _files_in(directory):
        if not is_own(path):
            raise UsageError(f"{path} is no part of the checkpoint in {directory}, which is not replaced")


def _ownership(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Return what tells whether a file belongs to a checkpoint that is a directory.

    Raises:
        UsageError: It can't be told.
    """
    if (checkpoint.format, checkpoint.variant) not in _KNOWN:
        kind = f"{checkpoint.format} ({checkpoint.variant})" if checkpoint.variant else checkpoint.format
        raise UsageError(
            f"{checkpoint.path} is a directory of {kind}, where anything may lie: it is not replaced"
        )
    own = {os.path.realpath(entry.path) for entry in checkpoint.files}
    own.add(os.path.realpath(base_of(checkpoint)))

    def is_own(path: str) -> bool:
        about = next((path.removesuffix(ending) for ending in SIDECARS if path.endswith(ending)), path)
        if os.path.basename(path) in _MARKS:
            return True
        inside = os.path.relpath(about, checkpoint.path)
        is_strange = checkpoint.format == "savedmodel" and _OF_SAVED_MODEL.fullmatch(inside) is None
        return os.path.realpath(about) in own and not is_strange

    return is_own


def _files_in(directory: str) -> Iterator[str]:
    """Yield the paths of all files and links in a directory and those below.

    Raises:
        CheckpointError: One can't be looked at.
    """
    pending = [directory]
    while pending:
        for entry in scan(pending.pop()).values():
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            else:
                yield entry.path

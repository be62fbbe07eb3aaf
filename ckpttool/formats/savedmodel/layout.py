"""Names in a SavedModel's directory, and the check that files are inside of it.

Source: tensorflow/tensorflow ``cc/saved_model/constants.h``, ``python/saved_model/loader_impl.py``.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.formats.sidecar import ENTRY
from ckpttool.storage import fs

BINARY, TEXT, CHUNKED = "saved_model.pb", "saved_model.pbtxt", "saved_model.cpb"
VARIABLES, ASSETS = "variables", "assets"
SIDECAR = f"assets.extra/{ENTRY}"
"""Path of the sidecar, which holds what a SavedModel can't store, in the directory."""
_NEIGHBOURS = frozenset({"assets", "assets.extra", "debug", "fingerprint.pb", "keras_metadata.pb"})


def is_without_graph(directory: str, names: Collection[str]) -> bool:
    """Return whether a directory is a SavedModel without its ``saved_model.pb``."""
    # ``variables/variables.index`` alone isn't enough. It has to have at least one neighbour, and only those
    # that a SavedModel has.
    neighbours = set(names) - {VARIABLES}
    index = os.path.join(directory, VARIABLES, f"{VARIABLES}.index")
    return VARIABLES in names and bool(neighbours) and neighbours <= _NEIGHBOURS and fs.isfile(index)


def is_inside(path: str, directory: str) -> bool:
    """Return whether a file is in a SavedModel, with links resolved."""
    # In the cache of the Hugging Face Hub, all files are links from a snapshot to the folder ``blobs``. So a
    # file next to the target of ``saved_model.pb`` is inside as well.
    models = (os.path.join(directory, name) for name in (BINARY, TEXT))
    bases = [directory, *(os.path.dirname(fs.realpath(model)) for model in models)]
    roots = (fs.realpath(base).rstrip(os.sep) + os.sep for base in bases)
    return fs.realpath(path).startswith(tuple(roots))


def require_inside(path: str, directory: str) -> None:
    """Raise ``DamagedCheckpoint`` unless a file is in a SavedModel."""
    if not is_inside(path, directory):
        found = "a link that points outside the SavedModel; not opened"
        raise DamagedCheckpoint(path, found, code="path-outside")

"""What lies in a SavedModel's directory under which name, and what doesn't belong to it.

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
CONTENT = f"assets.extra/{ENTRY}"
"""Where the entry of what a SavedModel has no place for lies in its directory."""
_BESIDE = frozenset({"assets", "assets.extra", "debug", "fingerprint.pb", "keras_metadata.pb"})


def is_rest(directory: str, names: Collection[str]) -> bool:
    """Return whether what lies in a directory is a SavedModel of which the graph is gone.

    Assets and marks are all that lies beside the variables then, and there is one of them at least.
    """
    beside = set(names) - {VARIABLES}
    index = os.path.join(directory, VARIABLES, f"{VARIABLES}.index")
    return VARIABLES in names and bool(beside) and beside <= _BESIDE and fs.isfile(index)


def is_inside(path: str, directory: str) -> bool:
    """Return whether a file lies in a SavedModel, or beside what its model is a link to.

    The second is how the cache of the Hugging Face hub looks: links from a snapshot to its blobs.
    """
    models = (os.path.join(directory, name) for name in (BINARY, TEXT))
    bases = [directory, *(os.path.dirname(fs.realpath(model)) for model in models)]
    roots = (fs.realpath(base).rstrip(os.sep) + os.sep for base in bases)
    return fs.realpath(path).startswith(tuple(roots))


def require_inside(path: str, directory: str) -> None:
    """Require that a file lies in a SavedModel."""
    if not is_inside(path, directory):
        found = "a link that leads out of the SavedModel; it was not opened"
        raise DamagedCheckpoint(path, found, code="path-outside")

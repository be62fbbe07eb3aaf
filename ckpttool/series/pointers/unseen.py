"""Where what names a checkpoint may lie, and can't be looked for."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.errors import from_os_error
from ckpttool.series.paths import shown


def unseen_above(root: str) -> Iterator[str]:
    """Yield a warning where the directory above another can't be listed: texts and links there go unseen."""
    above = os.path.dirname(os.path.realpath(root))
    try:
        with os.scandir(above):
            return
    except OSError as error:
        reason = from_os_error(error, above).reason
        yield f"{shown(root)}: texts above it that name a checkpoint can't be looked for: {reason}: {above}"

"""``--plot FILE``: whether a picture can be drawn there, and writing it."""

from __future__ import annotations

import os
from collections.abc import Sequence


def check_plot(path: str, read: Sequence[str]) -> None:
    """Require that a picture can be drawn there, before anything long begins.

    Args:
        path: Where it is to lie.
        read: Files and directories that are looked at.

    Raises:
        UsageError: It is none, or would replace something else.
        MissingPackage: matplotlib is not installed.
    """
    from ckpttool.cli.targets import check_targets
    from ckpttool.render.plot import check_can_draw, kind_of

    kind_of(path)
    check_targets({"--plot": path}, read)
    check_can_draw(path)


def write_picture(path: str, picture: bytes) -> None:
    """Write a picture, whole or not at all.

    Raises:
        CheckpointError: It can't be written.
    """
    from ckpttool.errors import from_os_error
    from ckpttool.wire.atomic import write_atomically

    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe, or /dev/stdout
            with open(path, "wb") as file:
                file.write(picture)
        else:
            write_atomically(os.path.realpath(path), picture)  # a link stays one
    except OSError as error:
        raise from_os_error(error, path) from error

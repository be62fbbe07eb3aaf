"""``--plot FILE``: whether a picture can be drawn there."""

from __future__ import annotations

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

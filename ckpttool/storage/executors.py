"""Work on other machines: paths that all of them have, and answers of workers that may be lost.

A worker sees the same files under the same absolute paths, or it is an error: a file that only isn't there
for it has not vanished, and another file under the same path is no answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ckpttool.core.errors import CheckpointError, NotFound
from ckpttool.storage import fs

if TYPE_CHECKING:
    from concurrent.futures import Future

R = TypeVar("R")


def path_everywhere(path: str) -> str:
    """Return a path that means the same on all machines; a URL does, as it is."""
    return path if fs.isabs(path) else fs.abspath(path)


def answer_of(future: Future[R], path: str) -> R | CheckpointError:
    """Return a worker's answer; if the worker is lost or fails, an error of the path that it works on.

    Raises:
        CheckpointError: The task itself raised it.
    """
    try:
        return future.result()
    except CheckpointError:
        raise
    except Exception as failure:  # noqa: BLE001 - each engine has its own ways to say that a worker is lost
        lost = CheckpointError(path, f"the worker failed: {type(failure).__name__}: {failure}")
        lost.__cause__ = failure
        return lost


def not_visible(path: str, name: str) -> NotFound:
    """Return the error of a worker, as which this runs, that doesn't see a file of a checkpoint."""
    import platform

    here = f"{name} is not there on the worker {platform.node()}"
    return NotFound(path, here, expected="the same absolute path on all workers")


def not_the_same(path: str, where: str = "") -> CheckpointError:
    """Return the error of a checkpoint of which a worker saw other files, or which changes just now."""
    import platform

    found = f"files of other sizes on the worker {where or platform.node()}"
    return CheckpointError(path, found, expected="the same files on all workers, which nobody changes")

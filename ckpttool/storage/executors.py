"""Work on other machines: executors that an address names, and workers that are lost.

A worker sees the same files under the same absolute paths, or it is an error: a file that only isn't there
for it has not vanished, and another file under the same path is no answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.core.errors import CheckpointError, MissingPackage, NotFound, UsageError
from ckpttool.storage import fs

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

R = TypeVar("R")
SCHEME = "dask://"
_ANSWERS_WITHIN = "10s"
"""A scheduler that is there answers at once; one that is still being started has to be waited for outside."""


def path_everywhere(path: str) -> str:
    """Return a path that means the same on all machines; a URL does, as it is."""
    return path if fs.isabs(path) else fs.abspath(path)


def answer_of(future: Future[R], path: str) -> R | CheckpointError:
    """Return what a worker answers; that it is lost, or can't do its task, is an error of what it works on.

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


def require_address(text: str) -> str:
    """Require that an address names a scheduler: ``dask://HOST:PORT``."""
    host, colon, port = text.removeprefix(SCHEME).rpartition(":")
    if not text.startswith(SCHEME) or not (host and colon and port.isascii() and port.isdigit()):
        raise UsageError(f"no address of a scheduler: {text!r} (such as dask://10.0.0.1:8786)")
    return text


@contextmanager
def executor_at(address: str) -> Iterator[Executor]:
    """Yield the executor of a Dask cluster, which is left as it was.

    Raises:
        MissingPackage: Dask isn't installed.
        CheckpointError: No scheduler answers.
    """
    import logging

    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        from ckpttool.core.extras import install_command

        raise MissingPackage(
            address, "it needs dask[distributed]", expected=install_command("dask")
        ) from error
    # It tells of each answer that has to be computed again; whoever is lost for good is an error of ours.
    logging.getLogger("distributed.client").setLevel(logging.ERROR)
    try:
        client = distributed.Client(
            f"tcp://{address.removeprefix(SCHEME)}", timeout=_ANSWERS_WITHIN, set_as_default=False
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            address, "no Dask scheduler answers", expected="a running dask scheduler"
        ) from error
    with client:
        yield client.get_executor()

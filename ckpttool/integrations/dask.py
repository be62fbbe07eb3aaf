"""Dask: the executor of a cluster, by the address of its scheduler.

Executors of other engines need no integration: ``verify_all`` and ``list_checkpoints`` take any
``concurrent.futures.Executor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import CheckpointError, MissingPackage, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

SCHEME = "dask://"
_ANSWERS_WITHIN = "10s"
"""A running scheduler answers at once; the user waits for one that still starts."""


def require_address(text: str) -> str:
    """Require the address of a scheduler: ``dask://HOST:PORT``."""
    host, colon, port = text.removeprefix(SCHEME).rpartition(":")
    if not text.startswith(SCHEME) or not (host and colon and port.isascii() and port.isdigit()):
        raise UsageError(f"not a scheduler address: {text!r} (such as dask://10.0.0.1:8786)")
    return text


@contextmanager
def executor_at(address: str) -> Iterator[Executor]:
    """Yield the executor of a Dask cluster, which keeps running afterwards.

    Raises:
        MissingPackage: Dask isn't installed.
        CheckpointError: No scheduler answers.
    """
    import logging

    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        from ckpttool.core.plugins import install_command

        found = "it needs dask[distributed]"
        raise MissingPackage(address, found, expected=install_command("dask")) from error
    # The client logs each result that has to be computed again. A lost worker is reported as an error anyway.
    logging.getLogger("distributed.client").setLevel(logging.ERROR)
    # Not the default client, which is one for the whole process and may be the user's own.
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

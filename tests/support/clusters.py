"""A Dask cluster of one worker on this machine, and executors that lose a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEME = "dask://"


@contextmanager
def local_cluster() -> Iterator[str]:
    """Yield the address of a cluster, as ``--executor`` takes it, that gives up a lost worker's task."""
    from dask import config
    from distributed import LocalCluster

    # Each worker that a task kills is started anew, which takes seconds.
    with (
        config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            host="127.0.0.1",
            silence_logs=50,
        ) as cluster,
    ):
        yield SCHEME + cluster.scheduler_address.removeprefix("tcp://")


class Deadly(Executor):
    """Hands all tasks on; a worker that takes the one with a word in it ends at once."""

    def __init__(self, real: Executor, word: str) -> None:
        self._real = real
        self._word = word

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        is_deadly = self._word in repr(arguments)

        def run(*given: Any) -> Any:
            if is_deadly:
                os._exit(1)
            return function(*given)

        return self._real.submit(run, *arguments, **options)


class Elsewhere(Executor):
    """Does tasks in this process, while a file has another content, or is not there."""

    def __init__(self, path: Path, content: bytes | None) -> None:
        self._path = path
        self._content = content

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        hidden = self._path.rename(self._path.with_name("hidden"))
        if self._content is not None:
            self._path.write_bytes(self._content)
        try:
            future.set_result(function(*arguments, **options))
        finally:
            hidden.replace(self._path)
        return future

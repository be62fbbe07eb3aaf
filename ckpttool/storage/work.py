"""Work on several threads, and on workers on other machines, with progress.

A worker on another machine has to see the same files under the same absolute paths, or it fails. A file that
only the worker can't see hasn't vanished, and another file under the same path would give wrong results.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

from ckpttool.core.errors import CheckpointError, NotFound
from ckpttool.storage import fs

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

T = TypeVar("T")
R = TypeVar("R")

_BATCH_BYTES = 1 << 22
_BATCH_ITEMS = 256

Advance = Callable[[int], None]
"""Called with the bytes done, from any thread."""


Progress = Callable[[str, int | None], AbstractContextManager[Advance]]
"""``progress(label, total_bytes)`` returns a context with a callback that takes the bytes done.

None instead of a total: a directory is searched, and the callback takes numbers of entries."""


def no_advance(nbytes: int) -> None:
    """Ignore the bytes done."""


def no_progress(what: str, total: int | None) -> AbstractContextManager[Advance]:
    """Return a progress that isn't shown."""
    return nullcontext(no_advance)


def default_jobs() -> int:
    """Return the number of processors that this process may use."""
    # A batch system may confine a process to a few of the machine's processors.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Stopped(Exception):
    """The result is no longer needed; raised by ``Pool.check``."""


class TaskReturned(Exception):
    """A worker was lost, such as its child process; another worker is to do the task."""


Work = Callable[[T], object]
"""Does one task."""
Worker = Callable[[], AbstractContextManager[Work[T]]]
"""Context of one thread, with the resources for its tasks: buffers, or a child process."""


class Pool(Generic[T]):
    """Threads that share tasks, which may be added while others are done.

    The first exception in one of them, such as Ctrl-C, stops the others as soon as they take another task or
    call ``check``. It is raised by the calls that wait for the pool. At the end of its context, a pool has no
    running threads.

    Args:
        most_scarce: Number of scarce tasks that may be done at once; see ``add``.
    """

    def __init__(self, most_scarce: int = 0) -> None:
        self._workers: Iterator[Worker[T]] = iter(())
        self._tasks: deque[T] = deque()
        self._scarce: deque[T] = deque()
        self._scarce_room = most_scarce
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._is_complete = False
        self._error: BaseException | None = None
        self.is_stopped = False

    def __enter__(self) -> Pool[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, task: T, *, is_scarce: bool = False) -> None:
        """Add a task; tasks are begun in order, the scarce ones first."""
        # Threads are started one by one with the first tasks, so that a few tasks don't start many. A scarce
        # task that has to wait for room starts none.
        with self._changed:
            (self._scarce if is_scarce else self._tasks).append(task)
            self._changed.notify()
        can_begin = not is_scarce or len(self._scarce) <= self._scarce_room
        if can_begin and (worker := next(self._workers, None)) is not None:
            self.start(worker)

    def recruit(self, workers: Iterable[Worker[T]]) -> None:
        """Set the workers of threads that ``add`` starts, one with each task."""
        self._workers = iter(workers)

    def start(self, worker: Worker[T]) -> None:
        """Start a thread that takes tasks until all are done."""
        thread = threading.Thread(target=self._take_tasks, args=(worker,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def work(self, worker: Worker[T]) -> None:
        """Take tasks in this thread, too, until all are done; no more may be added."""
        # A worker that is lost returns its task, maybe after all other threads have ended. So this thread
        # looks for tasks once more.
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        self._take_tasks(worker)
        for thread in self._threads:
            thread.join()
        self._raise_error()
        self._take_tasks(worker)
        self._raise_error()

    def settle(self) -> None:
        """Wait until all tasks are done; after an error, only until those that were begun are."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._busy and (self._error or not (self._tasks or self._scarce))
            )
        self._raise_error()

    def check(self) -> None:
        """Require that the result is still needed."""
        if self.is_stopped:
            raise Stopped

    def stop(self) -> None:
        """Make all threads end as soon as they can, even if tasks remain."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads, and wait for them."""
        self.stop()
        for thread in self._threads:
            if thread.ident is not None:  # Ctrl-C may come before it is started
                thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_tasks(self, worker: Worker[T]) -> None:
        try:
            with worker() as work:
                while (taken := self._next_task()) is not None:
                    error: BaseException | None = None
                    try:
                        work(taken[0])
                    except BaseException as failure:  # noqa: BLE001 - raised again by the thread that waits
                        error = failure
                    self._note_end(*taken, error)
                    if error is not None:
                        return
        except TaskReturned:  # the worker couldn't begin
            return
        except BaseException as failure:  # noqa: BLE001 - raised again by the thread that waits
            self._fail(failure)

    def _note_end(self, task: T, is_scarce: bool, error: BaseException | None) -> None:
        with self._changed:
            self._busy -= 1
            self._scarce_room += is_scarce
            if isinstance(error, TaskReturned):
                (self._scarce if is_scarce else self._tasks).appendleft(task)
            elif error is not None and not isinstance(error, Stopped):
                self._fail(error)  # before the notification: ``settle`` must see the error
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self.is_stopped = True
            self._changed.notify_all()

    def _next_task(self) -> tuple[T, bool] | None:
        """Return a task, and whether it is a scarce one; None if no task can come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopped or self._has_task() or self._is_complete)
            if self.is_stopped or not self._has_task():
                return None
            self._busy += 1
            if self._scarce and self._scarce_room:
                self._scarce_room -= 1
                return self._scarce.popleft(), True
            return self._tasks.popleft(), False

    def _has_task(self) -> bool:
        return bool(self._tasks or (self._scarce and self._scarce_room))


def worker_of(work: Work[T]) -> Worker[T]:
    """Return a worker without resources."""
    return lambda: nullcontext(work)


Calls = Pool[Callable[[], object]]
"""A pool whose tasks are called."""


def pool_of_calls(jobs: int) -> Calls:
    """Return a pool that calls its tasks, in at most ``jobs`` threads."""
    pool: Calls = Pool()
    pool.recruit([worker_of(lambda task: task())] * max(1, jobs))
    return pool


def in_order(
    function: Callable[[T, Callable[[], None]], R],
    items: Iterable[T],
    jobs: int,
) -> list[R]:
    """Return a function's results for items, in order.

    Args:
        function: Takes an item, and a function to call from time to time; that raises to stop the work.
        items: Items; they may be generated while the first of them are worked on.
        jobs: Number of threads, including this one.
    """
    results: dict[int, R] = {}

    def work(task: tuple[int, T]) -> None:
        number, item = task
        results[number] = function(item, pool.check)

    pool: Pool[tuple[int, T]] = Pool()
    with pool:
        pool.recruit([worker_of(work)] * (jobs - 1))
        for task in enumerate(items):
            pool.add(task)
        pool.work(worker_of(work))
    return [results[number] for number in range(len(results))]


def submitted(
    function: Callable[[T], R], items: Iterable[T], executor: Executor
) -> Generator[Future[R], None, None]:
    """Submit a function for items to an executor; yield the futures in order, and cancel the rest at the end.

    If an executor takes no more tasks, such as a pool of processes that has lost one, futures have failed.
    """
    # All are submitted before the first is yielded: workers on other machines are kept
    # busy while results wait.
    futures: deque[Future[R]] = deque()
    try:
        for item in items:
            futures.append(_submit(executor, function, item))
        while futures:
            yield futures[0]
            futures.popleft()
    finally:
        for future in futures:
            future.cancel()


def _submit(executor: Executor, function: Callable[[T], R], item: T) -> Future[R]:
    try:
        return executor.submit(function, item)
    except RuntimeError as error:  # a broken or closed executor
        from concurrent.futures import Future

        failed: Future[R] = Future()
        failed.set_exception(error)
        return failed


def batches(items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in order, small ones in one list, since each task takes some microseconds."""
    batch: list[T] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += nbytes_of(item)
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def path_everywhere(path: str) -> str:
    """Return a path that is valid on all machines: an absolute path, or a URL as it is."""
    return path if fs.isabs(path) else fs.abspath(path)


def answer_of(future: Future[R], path: str) -> R | CheckpointError:
    """Return a worker's answer; if the worker was lost or failed, an error of the path that it works on.

    Raises:
        CheckpointError: The task itself raised it.
    """
    # A checkpoint's error was raised by the task itself, and is the result. Anything else is about the worker
    # or the engine, and must not end the whole command.
    try:
        return future.result()
    except CheckpointError:
        raise
    except Exception as failure:  # noqa: BLE001 - each engine has its own ways to say that a worker is lost
        lost = CheckpointError(path, f"the worker failed: {type(failure).__name__}: {failure}")
        lost.__cause__ = failure
        return lost


def not_visible(path: str, name: str) -> NotFound:
    """Return the error if this worker doesn't see a file of a checkpoint."""
    import platform

    here = f"{name} not found on the worker {platform.node()}"
    return NotFound(path, here, expected="the same absolute path on all workers")


def not_the_same(path: str, where: str = "") -> CheckpointError:
    """Return the error of a checkpoint that has other files on a worker, or is being changed."""
    import platform

    found = f"file sizes differ on the worker {where or platform.node()}"
    return CheckpointError(path, found, expected="the same, unchanging files on all workers")

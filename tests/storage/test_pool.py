"""Work that is shared by threads: order, exceptions, interrupts, workers that are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.storage.work import (
    Pool,
    Stopped,
    TaskReturned,
    batches,
    in_order,
    pool_of_calls,
    submitted,
    worker_of,
)
from tests.support.faults import ends_all_threads

Check = Callable[[], None]


def squared(number: int, check: Check) -> int:
    check()
    return number * number


@given(st.lists(st.integers(), max_size=40), st.integers(1, 4))
def test_results_are_in_the_order_of_the_items(numbers: list[int], jobs: int) -> None:
    before = set(threading.enumerate())
    assert in_order(squared, iter(numbers), jobs) == [number * number for number in numbers]
    assert not set(threading.enumerate()) - before


def test_an_executor_does_the_work_instead() -> None:
    handed: list[Any] = []

    class Elsewhere(Executor):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            handed.append(arguments[0])
            return here.submit(function, *arguments, **options)

    with ThreadPoolExecutor(1) as here:
        futures = submitted(partial(pow, 2), [1, 2, 3], Elsewhere())
        assert [future.result() for future in futures] == [2, 4, 8]
    assert handed == [1, 2, 3]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_first_exception_stops_all_and_comes_out(error: BaseException, jobs: int) -> None:
    before = set(threading.enumerate())

    def work(number: int, check: Check) -> None:
        if number == 3:
            raise error
        if number > 3 and jobs > 1:
            while True:  # until nobody waits any more
                check()

    with pytest.raises(type(error)):
        in_order(work, range(100), jobs)
    assert not set(threading.enumerate()) - before


def test_ctrl_c_between_two_tasks_ends_all() -> None:
    begun = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        assert begun.wait(60)
        raise KeyboardInterrupt

    with ends_all_threads():
        in_order(lambda number, check: begun.set(), items(), 2)


def test_what_an_executor_has_not_begun_is_cancelled() -> None:
    given: list[Future[Any]] = []

    class Busy(Executor):
        def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            given.append(Future())
            return given[-1]

    futures = submitted(partial(pow, 2), [1, 2, 3], Busy())
    assert next(futures) is given[0]
    futures.close()
    assert [future.cancelled() for future in given] == [True] * 3


def test_what_is_waited_for_has_ended_before_an_error_comes_out() -> None:
    writes, begun = [], threading.Event()

    def slow() -> None:
        begun.set()
        while not pool.is_stopped:
            pass
        writes.append("ended")

    def fail() -> None:
        begun.wait()
        raise OSError("full")

    with pool_of_calls(2) as pool:
        pool.add(slow)
        pool.add(fail)
        with pytest.raises(OSError, match="full"):
            pool.settle()
        assert writes == ["ended"]


def test_what_is_begun_is_waited_for() -> None:
    done = []

    def slow() -> None:
        done.append(sum(range(1 << 20)))

    with pool_of_calls(1) as pool:
        pool.add(slow)
        pool.settle()
        assert len(done) == 1


def test_work_returns_once_all_threads_have_ended() -> None:
    before = set(threading.enumerate())
    left = threading.Event()

    @contextmanager
    def own() -> Iterator[Callable[[int], None]]:
        yield lambda number: None
        left.set()

    def slow(number: int) -> None:
        left.wait(60)
        sum(range(1 << 20))

    with Pool[int]() as pool:
        pool.add(1)
        pool.start(worker_of(slow))
        while pool._tasks:  # until the thread has it
            pass
        pool.work(own)
        assert not set(threading.enumerate()) - before


def test_nothing_is_begun_once_it_is_stopped() -> None:
    done: list[int] = []
    with Pool[int]() as pool:
        pool.add(1)
        pool.stop()
        pool.start(worker_of(done.append))
    assert done == []


def test_the_first_error_is_the_one_that_is_told() -> None:
    begun = threading.Event()

    def fail_later() -> None:
        begun.set()
        while not pool.is_stopped:
            pass
        raise OSError("closed")

    def fail() -> None:
        begun.wait()
        raise OSError("full")

    with pool_of_calls(2) as pool:
        pool.add(fail_later)
        pool.add(fail)
        with pytest.raises(OSError, match="full"):
            pool.settle()


def test_a_lost_worker_gives_its_task_back() -> None:
    done: list[int] = []
    took = threading.Event()

    def lose(number: int) -> None:
        took.set()
        raise TaskReturned

    with Pool[int]() as pool:
        pool.start(worker_of(lose))
        pool.add(7)
        assert took.wait(60)
        pool.work(worker_of(done.append))
    assert done == [7]


def test_a_worker_that_cannot_begin_leaves_the_work_to_others() -> None:
    done: list[int] = []

    @contextmanager
    def broken() -> Iterator[Callable[[int], None]]:
        raise TaskReturned
        yield

    with Pool[int]() as pool:
        pool.recruit([broken, broken])
        for number in range(5):
            pool.add(number)
        pool.work(worker_of(done.append))
    assert done == list(range(5))


def test_few_scarce_tasks_are_under_way_at_once() -> None:
    lock, now, most = threading.Lock(), [0], [0]
    done: list[str] = []

    def work(task: str) -> None:
        with lock:
            now[0] += task == "scarce"
            most[0] = max(most[0], now[0])
        done.append(task)
        with lock:
            now[0] -= task == "scarce"

    with Pool[str](most_scarce=2) as pool:
        pool.recruit([worker_of(work)] * 3)
        for _ in range(50):
            pool.add("scarce", is_scarce=True)
            pool.add("plain")
        pool.work(worker_of(work))
    assert sorted(done) == ["plain"] * 50 + ["scarce"] * 50
    assert most[0] <= 2


def test_every_worker_is_ended() -> None:
    ended: list[int] = []

    @contextmanager
    def worker() -> Iterator[Callable[[int], None]]:
        try:
            yield lambda number: pool.check()
        finally:
            ended.append(1)

    pool: Pool[int] = Pool()
    pool.recruit([worker] * 3)
    for number in range(3):
        pool.add(number)
    pool.close()
    assert len(ended) == 3
    with pytest.raises(Stopped):
        pool.check()


@given(st.lists(st.integers(0, 1 << 23), max_size=600))
def test_batches_hold_all_in_order(sizes: list[int]) -> None:
    parts = list(batches(sizes, lambda nbytes: nbytes))
    assert [size for part in parts for size in part] == sizes
    assert all(part and sum(part[:-1]) < 1 << 22 for part in parts)


def test_an_interrupt_before_a_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with ends_all_threads(), Pool[int]() as pool:
        pool.start(lambda task: None)

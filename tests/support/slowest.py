"""A plugin of pytest that prints the files whose tests took the most processor time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

COUNT = 10
PROPERTY = "processor-seconds"
_BEGAN = pytest.StashKey[float]()

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test with its fixtures and with the children that it waited for."""
    item.stash[_BEGAN] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send along what a test took; with workers, the report alone reaches the one who prints."""
    report = yield
    if call.when == "teardown":
        seconds = sum(os.times()[:4]) - item.stash[_BEGAN]
        report.user_properties = [*report.user_properties, (PROPERTY, seconds)]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what the tests of a file took."""
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0]
        _seconds[file] += float(dict(report.user_properties).get(PROPERTY, 0))
        _tests[file] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest files, if there was more than one."""
    if len(_seconds) < 2:
        return
    terminalreporter.section(
        f"{COUNT} slowest files, {sum(_seconds.values()):,.0f} s of processor time in all"
    )
    for file, seconds in _seconds.most_common(COUNT):
        terminalreporter.write_line(f"{seconds:8.1f} s  {_tests[file]:6,} tests  {file}")

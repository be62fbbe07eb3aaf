"""What several test modules share."""

from __future__ import annotations

import builtins
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ckpttool.storage.work import Calls, pool_of_calls
from tests.support.commands import Answer, Run, run_here
from tests.support.faults import wait_for_no_disk
from tests.support.memory import MemoryBucket, memory_stores
from tests.support.schemas import require_valid
from tests.support.stores import S3Bucket, WebServer, client_of, environment, serve_apart, web_server

pytest_plugins = ["tests.support.golden", "tests.support.series", "tests.support.slowest"]
# How long an example takes says something of the machine, and nothing of the code.
_ALWAYS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", _ALWAYS, max_examples=40)
settings.register_profile("thorough", _ALWAYS, max_examples=1000)
settings.load_profile("quick")
wait_for_no_disk()


FIXTURES = Path(__file__).parents[1] / "fixtures" / "files"


def pytest_collection() -> None:
    """Collect no garbage while thousands of tests are made, none of which goes."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave out of all collections what stays until the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands remember of a user stays among the temporary files."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return an empty directory that lies alone: pytest leaves a link beside it for each test before, and
    ``list`` follows the links beside a directory.
    """
    alone = tmp_path / "t"
    alone.mkdir()
    return alone


@pytest.fixture(scope="session")
def files() -> Path:
    """Return the directory of the fixtures."""
    return FIXTURES


@pytest.fixture(scope="session")
def raw() -> ModuleType:
    """Return what writes tables and bundles byte by byte."""
    spec = importlib.util.spec_from_file_location("table_raw", FIXTURES.parent / "table_raw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a command in this process; its JSON documents must be as their schema says."""
    for name in ("CKPTTOOL_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def answer(*arguments: object) -> Answer:
        capsys.readouterr()
        status = run_here(*arguments)
        found = Answer(status, *capsys.readouterr())
        require_valid(found.out)
        return found

    return answer


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Return the URL of a server that answers as Amazon S3 does."""
    with serve_apart() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(nothing_received: None) -> Iterator[MemoryBucket]:
    """Return an empty bucket in memory."""
    with memory_stores():
        yield MemoryBucket()


@pytest.fixture
def nothing_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what stores said and sent in other tests: objects there may have the same names and versions."""
    from ckpttool.storage import object_stores, remote

    monkeypatch.setattr(object_stores, "_windows", object_stores._Windows())
    remote.forget()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, nothing_received: None) -> S3Bucket:
    """Return an empty bucket, which ckpttool is led to by the environment."""
    for name, value in environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return S3Bucket(client_of(s3_endpoint))


@pytest.fixture
def web(nothing_received: None) -> Iterator[WebServer]:
    """Return a server of files by ranges, of which nothing is remembered."""
    with web_server() as server:
        yield server


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matplotlib be not installed."""
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.fixture
def crew() -> Iterator[Calls]:
    """Return three threads that write."""
    made = pool_of_calls(3)
    yield made
    made.close()

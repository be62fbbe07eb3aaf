"""What happens meanwhile: at a moment of a command, something else is done, or something fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckpttool import MissingPackage
from ckpttool.cli import consent
from ckpttool.cli import inspect as inspect_command
from ckpttool.containers.hdf5_worker import Worker
from ckpttool.formats.interface import Probe
from ckpttool.ops import checks, verify
from ckpttool.ops import inspect as inspecting
from ckpttool.runs import look
from ckpttool.storage import scan
from tests.support.faults import path_at


def _do_before(patch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[..., object]) -> None:
    real = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        act(*arguments)
        return real(*arguments, **options)

    patch.setattr(place, name, call)


def before_verifying(patch: pytest.MonkeyPatch, act: Callable[[Any], object]) -> None:
    """Do something before each checkpoint that was found is verified; it is told which."""
    _do_before(patch, verify, "verify", act)


def before_scanning(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once a checkpoint is open, before its values are read."""
    _do_before(patch, checks, "scan", lambda *_: act())


def before_each_thread_scans(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something in each thread that reads values, before it does."""
    _do_before(patch, scan, "_scan_piece", lambda *_: act())


def before_statistics(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something before ``inspect --stats`` reads a tensor."""
    _do_before(patch, inspecting, "statistics_of", lambda *_: act())


def after_a_look(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something after it was looked at what is at a path, before it is opened as that."""
    look = Probe.__init__

    def looked(self: Probe, *arguments: Any, **options: Any) -> None:
        look(self, *arguments, **options)
        act()

    patch.setattr(Probe, "__init__", looked)


def names_read_in_full(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names are added of what ``latest`` reads in full."""
    names: list[str] = []
    _do_before(patch, look, "read_all", lambda entry, *_: names.append(entry.name))
    return names


def before_call(
    patch: pytest.MonkeyPatch,
    path: str | os.PathLike[str],
    act: Callable[[], object],
    calls: Sequence[str] = ("open", "scandir"),
) -> None:
    """Do something before each of some calls of ``os`` with a path, however that is given."""

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if arguments and path_at(arguments[0], options.get("dir_fd")) == os.fspath(path):
                act()
            return real(*arguments, **options)

        return call

    for name in calls:
        patch.setattr(os, name, watched(getattr(os, name)))


def fail_inspecting(patch: pytest.MonkeyPatch, failure: BaseException) -> None:
    """Let ``inspect`` fail at what nobody foresaw."""
    patch.setattr(inspect_command, "_newest_in", _raises(failure))


def fail_reading(patch: pytest.MonkeyPatch, failure: BaseException) -> None:
    """Let no file that is open be read any more."""
    patch.setattr(os, "preadv" if hasattr(os, "preadv") else "read", _raises(failure))


def refuse_opening(patch: pytest.MonkeyPatch, name: str | Path, failure: OSError) -> None:
    """Let the system not open files of a name, nor list directories of it; or what is at a path alone."""

    def refuse(path: Any, *_: Any) -> None:
        if isinstance(path, str) and name in (os.path.basename(path), Path(path)):
            raise failure

    for call in ("open", "scandir"):
        _do_before(patch, os, call, refuse)


def lack_h5py(patch: pytest.MonkeyPatch) -> None:
    """Let h5py be not installed."""

    def missing(worker: Worker, path: str) -> NoReturn:
        raise MissingPackage(path, "HDF5 needs h5py", expected="pip install h5py")

    patch.setattr(Worker, "_live_process", missing)


def wait_for_no_answer(patch: pytest.MonkeyPatch) -> None:
    """Let an answer that is not there at once be none."""
    patch.setattr(consent, "_PATIENCE", 0.0)


def _raises(failure: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **options: object) -> NoReturn:
        raise failure

    return fail

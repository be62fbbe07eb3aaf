"""Which code may run in the child: the user's own, and none that a checkpoint names without ``--trust``.

Loaders are asked for plain data wherever they can be (``weights_only``, ``safe_mode``, our own readers). Some
unpickle all the same when that fails, and the file may be another one by now than the one that was judged. So
the interpreter itself refuses: a pickle can call nothing that it can't look up, and code that was marshalled
is not made. Code that the user names, and all that it imports and reads, may do as it likes.

Only the child process imports this module.
"""

from __future__ import annotations

import importlib
import importlib._bootstrap_external as _importing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from ckpttool.core.report import error
from ckpttool.core.text import did_you_mean
from ckpttool.predict.interface import LoadFailed, error_message, place_in_user_code

_FIND, _UNMARSHAL = "pickle.find_class", "marshal.loads"
"""What CPython tells audit hooks before a pickle gets a name, and before ``marshal`` makes an object.

Source: https://docs.python.org/3/library/audit_events.html
"""
_IMPORTERS: Mapping[str, frozenset[str]] = {
    "keras.src.saving.serialization_lib": frozenset({"keras"}),
    "tf_keras.src.saving.serialization_lib": frozenset({"keras", "tf_keras"}),
    "torch.utils._pytree": frozenset({"builtins", "collections", "torch"}),
}
"""The modules that import what a file names, and the packages that each of them may: its own classes."""


class Refused(ImportError):
    """A checkpoint names code, and is not trusted."""


class _Guard:
    """What is forbidden now, and what was refused since it is, in the words of a finding."""

    def __init__(self) -> None:
        self.is_on = False
        self.refusals: list[str] = []
        self._is_hooked = False

    def install(self) -> None:
        """Put the hooks in place, which stay as long as this process; they ask ``is_on``."""
        if self._is_hooked:
            return
        self._is_hooked = True
        sys.addaudithook(self._audit)
        importlib.import_module = self._guarded(importlib.import_module)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == _FIND:
            self._refuse(f"it unpickles {args[0]}.{args[1]}")
        # A module's compiled code comes out of marshal, too.
        elif event == _UNMARSHAL and sys._getframe(1).f_globals is not vars(_importing):
            self._refuse("it loads bytecode")

    def _guarded(self, import_module: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
        """Return ``importlib.import_module`` as it is, but for those who import what a file names."""

        def guarded_import(name: str, package: str | None = None) -> ModuleType:
            importer = sys._getframe(1).f_globals.get("__name__", "")
            packages = _IMPORTERS.get(importer) if self.is_on else None
            if packages is not None and name.partition(".")[0] not in packages and name not in _of_user:
                self._refuse(f"it imports {name}")
            return import_module(name, package)

        return guarded_import

    def _refuse(self, what: str) -> None:
        self.refusals.append(f"{what}, whose code would run: --trust allows it")
        raise Refused(self.refusals[-1])


_guard = _Guard()
_of_user: set[str] = set()
"""The modules that the user named."""


@contextmanager
def plain_data_only(*, is_trusted: bool) -> Iterator[list[str]]:
    """Refuse all code that a file names while a block runs; the value is what was refused, in words."""
    _guard.install()
    before = _guard.is_on, _guard.refusals
    _guard.is_on, _guard.refusals = not is_trusted, []
    try:
        yield _guard.refusals
    finally:
        _guard.is_on, _guard.refusals = before


@contextmanager
def code_of_user() -> Iterator[None]:
    """Refuse nothing while the code runs that the user named: what it reads is his."""
    before, _guard.is_on = _guard.is_on, False
    try:
        yield
    finally:
        _guard.is_on = before


def admit(module: str) -> None:
    """Let a file name the classes of a module that the user named."""
    _of_user.add(module)


# The user's own classes and functions ---------------------------------------------------------------


def build_from(reference: str, *args: Any, **kwargs: Any) -> Any:
    """Return what the user's class or function makes."""
    make = resolve(reference)
    with _failures_of_user_code(f"{shown(reference)} can't be called"):
        return make(*args, **kwargs)


@contextmanager
def _failures_of_user_code(problem: str) -> Iterator[None]:
    """Turn what code of the user raises, which has no part of a checkpoint yet, into a finding about it."""
    try:
        with code_of_user():
            yield
    except (LoadFailed, MemoryError):
        raise
    except (Exception, SystemExit) as failure:  # other people's code may raise anything, and exit
        message = f"{problem}: {error_message(failure)}"
        raise LoadFailed(error("no-such-model", message, place_in_user_code(failure))) from failure


def shown(reference: str | None) -> str:
    """Return a reference or its module as messages name it: a file without its directory."""
    return os.path.basename(reference or "")


def resolve(reference: str) -> Callable[..., Any]:
    """Return what a reference names; its module is imported."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise LoadFailed(error("no-such-model", f"{reference!r} is no package.module:Name or file.py:Name"))
    value: Any = import_user_module(place)
    for part in name.split("."):
        if not hasattr(value, part):
            raise LoadFailed(
                error("no-such-model", f"{shown(place)} has no {name!r}{_names_in(value, part)}")
            )
        value = getattr(value, part)
    if not callable(value):
        raise LoadFailed(error("no-such-model", f"{name} is {type(value).__name__}, not a class or function"))
    return value  # type: ignore[no-any-return]  # anything callable


def _names_in(module: Any, name: str) -> str:
    """Return what a module defines instead, and which of that may have been meant."""
    names = (
        [
            one
            for one, value in vars(module).items()
            if callable(value)
            and not one.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        if isinstance(module, ModuleType)
        else []
    )
    if not names:
        return ""
    meant = f"; {question}" if (question := did_you_mean(name, names)) else ""
    return f" (it defines {', '.join(names[:10])}{', …' if len(names) > 10 else ''}{meant})"


@cache
def import_user_module(place: str) -> ModuleType:
    """Return a module, by its name or its file, which is run just once: its classes stay the same."""
    with _failures_of_user_code(f"{shown(place)} can't be imported"):
        module = _import_by_place(place)
    admit(module.__name__)
    return module


def _import_by_place(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return import_module(place)
        except ModuleNotFoundError as failure:
            if failure.name is None or not (place == failure.name or place.startswith(f"{failure.name}.")):
                raise  # the module is there; what it imports isn't
            raise LoadFailed(error("no-such-model", f"there is no module {failure.name!r}")) from failure
    if not os.path.isfile(place):
        raise LoadFailed(error("no-such-model", "there is no such file", place))
    name = os.path.basename(place)[: -len(".py")]
    if name in sys.modules:
        name = f"{name} (--model)"  # the other one, which may be anybody's, stays in its place
    # What lies beside it may be imported, but nothing there may stand in for what is installed.
    sys.path.append(os.path.dirname(os.path.abspath(place)))
    spec = spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

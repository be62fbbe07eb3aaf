"""Guard against code in checkpoints, and imports of the user's own code.

Loaders read plain data wherever they can (``weights_only``, ``safe_mode``, our own readers). Some unpickle
all the same when that fails, and the file may have been replaced since it was checked. So the interpreter
itself refuses, without ``--trust``: a pickle can look up no name, and no marshalled code is read. Code that
the user names, and all that it imports and reads, is not restricted.

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
"""Audit events of CPython before a pickle looks up a name, and before ``marshal`` creates an object.

Source: https://docs.python.org/3/library/audit_events.html
"""
_IMPORTERS: Mapping[str, frozenset[str]] = {
    "keras.src.saving.serialization_lib": frozenset({"keras"}),
    "tf_keras.src.saving.serialization_lib": frozenset({"keras", "tf_keras"}),
    "torch.utils._pytree": frozenset({"builtins", "collections", "torch"}),
}
"""Modules that import names from a file, and the packages that each of them may import from."""


class Refused(ImportError):
    """Code of a checkpoint that is not trusted was refused."""


class _Guard:
    """The hooks of this process, and the refusals since they were switched on, as messages."""

    def __init__(self) -> None:
        self.is_on = False
        self.refusals: list[str] = []
        self._is_hooked = False

    def install(self) -> None:
        """Install the hooks, which can't be removed; they do nothing unless ``is_on``."""
        if self._is_hooked:
            return
        self._is_hooked = True
        sys.addaudithook(self._audit)
        importlib.import_module = self._guarded(importlib.import_module)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        # PyTorch's ``weights_only`` reader is an unpickler of its own, which takes names from a list and
        # raises no such event. Python's own, which frameworks fall back to, raises one before each look-up.
        if not self.is_on:
            return
        if event == _FIND:
            self._refuse(f"it unpickles {args[0]}.{args[1]}")
        # An import unmarshals the compiled code of a module, too.
        elif event == _UNMARSHAL and sys._getframe(1).f_globals is not vars(_importing):
            self._refuse("it loads bytecode")

    def _guarded(self, import_module: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
        """Return ``importlib.import_module``, restricted for the callers in ``_IMPORTERS``."""

        # A Keras configuration and the tree of an exported program name classes by module. The module is
        # imported before the class is looked up, which runs its code. Other callers import parts of the
        # frameworks, on first use, and are not restricted.
        def guarded_import(name: str, package: str | None = None) -> ModuleType:
            importer = sys._getframe(1).f_globals.get("__name__", "")
            packages = _IMPORTERS.get(importer) if self.is_on else None
            if packages is not None and name.partition(".")[0] not in packages and name not in _user_modules:
                self._refuse(f"it imports {name}")
            return import_module(name, package)

        return guarded_import

    def _refuse(self, what: str) -> None:
        self.refusals.append(f"{what}, whose code would run: --trust allows it")
        raise Refused(self.refusals[-1])


_guard = _Guard()
_user_modules: set[str] = set()
"""Modules that the user named, whose classes a file may name."""


@contextmanager
def plain_data_only(*, is_trusted: bool) -> Iterator[list[str]]:
    """Refuse code that a file names while a block runs; the value is the list of refusals."""
    _guard.install()
    before = _guard.is_on, _guard.refusals
    _guard.is_on, _guard.refusals = not is_trusted, []
    try:
        yield _guard.refusals
    finally:
        _guard.is_on, _guard.refusals = before


@contextmanager
def code_of_user() -> Iterator[None]:
    """Lift the restrictions while the user's own code runs."""
    before, _guard.is_on = _guard.is_on, False
    try:
        yield
    finally:
        _guard.is_on = before


# The user's own classes and functions ---------------------------------------------------------------


def build_from(reference: str | None, *args: Any, **kwargs: Any) -> Any:
    """Return the result of the user's class or function."""
    make = resolve(reference or "")
    with _failures_of_user_code(f"{shown(reference)} can't be called"):
        return make(*args, **kwargs)


@contextmanager
def _failures_of_user_code(problem: str) -> Iterator[None]:
    """Turn an error of the user's code, which runs before the checkpoint is read, into a finding about it."""
    try:
        with code_of_user():
            yield
    except (LoadFailed, MemoryError):
        raise
    except (Exception, SystemExit) as failure:  # other people's code may raise anything, and exit
        message = f"{problem}: {error_message(failure)}"
        raise LoadFailed(error("no-such-model", message, place_in_user_code(failure))) from failure


def wrong_kind(reference: str | None, made: object, expected: str) -> LoadFailed:
    """Return the error for an object of the wrong kind from the user's class or function."""
    problem = f"{shown(reference)} returned a {type(made).__name__}, {expected}"
    return LoadFailed(error("no-such-model", problem))


def shown(reference: str | None) -> str:
    """Return a reference or its module for messages: a file without its directory."""
    return os.path.basename(reference or "")


def resolve(reference: str) -> Callable[..., Any]:
    """Import the module of a reference, and return the class or function that it names."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise LoadFailed(error("no-such-model", f"{reference!r} is not package.module:Name or file.py:Name"))
    value: Any = import_user_module(place)
    for part in name.split("."):
        if not hasattr(value, part):
            problem = f"{shown(place)} has no {name!r}{_names_in(value, part)}"
            raise LoadFailed(error("no-such-model", problem))
        value = getattr(value, part)
    if not callable(value):
        raise LoadFailed(error("no-such-model", f"{name} is {type(value).__name__}, not a class or function"))
    return value  # type: ignore[no-any-return]  # anything callable


def _names_in(module: Any, name: str) -> str:
    """Return the public classes and functions of a module in words, with the one that may have been meant."""
    if not isinstance(module, ModuleType):
        return ""
    names = [
        one
        for one, value in vars(module).items()
        if callable(value)
        and not one.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    if not names:
        return ""
    meant = f"; {question}" if (question := did_you_mean(name, names)) else ""
    return f" (it defines {', '.join(names[:10])}{', …' if len(names) > 10 else ''}{meant})"


@cache
def import_user_module(place: str) -> ModuleType:
    """Return a module by its name or its file."""
    # It runs only once, even if the model and the optimizer are in one file: a second run would create other
    # classes of the same names.
    with _failures_of_user_code(f"{shown(place)} can't be imported"):
        module = _import_by_place(place)
    _user_modules.add(module.__name__)
    return module


def _import_by_place(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return import_module(place)
        except ModuleNotFoundError as failure:
            if failure.name is None or not (place == failure.name or place.startswith(f"{failure.name}.")):
                raise  # the module exists; one that it imports doesn't
            raise LoadFailed(error("no-such-model", f"module {failure.name!r} not found")) from failure
    if not os.path.isfile(place):
        raise LoadFailed(error("no-such-model", "file not found", place))
    name = os.path.basename(place)[: -len(".py")]
    if name in sys.modules:
        name = f"{name} (--model)"  # an installed module with this name is not replaced
    # The user's file may import modules beside it, but these must not replace installed ones.
    sys.path.append(os.path.dirname(os.path.abspath(place)))
    spec = spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

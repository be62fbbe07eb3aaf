"""The user's own classes and functions: ``package.module:Name`` or ``path/to/file.py:Name``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from ckpttool.predict.guard import admit, code_of_user
from ckpttool.predict.interface import LoadFailed
from ckpttool.report import error


def made(reference: str, *args: Any, **kwargs: Any) -> Any:
    """Return what the user's class or function makes.

    Raises:
        LoadFailed: There is no such module, or no such name in it.
    """
    make = factory(reference)
    with code_of_user():
        return make(*args, **kwargs)


def factory(reference: str) -> Callable[..., Any]:
    """Return what a reference names; its module is imported.

    Raises:
        LoadFailed: There is no such module, or no such name in it.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise LoadFailed(error("no-such-model", f"{reference!r} is no package.module:Name or file.py:Name"))
    found: Any = imported(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise LoadFailed(error("no-such-model", f"{place} has no {name!r}", reference))
        found = getattr(found, part)
    if not callable(found):
        raise LoadFailed(error("no-such-model", f"{name} is {type(found).__name__}, not a class or function"))
    return found  # type: ignore[no-any-return]  # anything callable


@cache
def imported(place: str) -> ModuleType:
    """Return a module, by its name or its file, which is run just once: its classes stay the same."""
    with code_of_user():
        module = _imported(place)
    admit(module.__name__)
    return module


def _imported(place: str) -> ModuleType:
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

"""A record's attributes as keywords of a function: ``diff(a, b, rtol=1e-3)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from ckpttool.core.suggest import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")


def with_keywords(record: Record, keywords: Mapping[str, Any]) -> Record:
    """Return a record with other values of some attributes.

    Raises:
        TypeError: It has no attribute of that name.
    """
    require_known(keywords, type(record))
    return replace(record, **keywords)  # type: ignore[type-var]  # a dataclass


def require_known(keywords: Mapping[str, Any], *records: type) -> None:
    """Require that each keyword is an attribute of one of the records; raises TypeError if one isn't."""
    known = [name for record in records for name in attribute_names(record)]
    for name in keywords.keys() - set(known):
        hint = did_you_mean(name, known)
        raise TypeError(f"unexpected keyword argument {name!r}" + (f" ({hint})" if hint else ""))


def attribute_names(record: type) -> list[str]:
    """Return the names of a record's attributes."""
    return [one.name for one in fields(record)]


def shows_keywords(*records: type) -> Callable[[Function], Function]:
    """Let help and notebooks show the attributes of records in place of a function's ``**keywords``.

    Type checkers read theirs from a ``TypedDict``; ``Unpack`` isn't imported at run time.
    """

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, keywords = signature.parameters.values()
        names = {one.name for one in own}
        more = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(one), annotation=one.type
            )
            for record in records
            for one in fields(record)
            if one.name not in names
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]  # what inspect reads
        function.__annotations__ |= {keywords.name: Any}
        return function

    return show


def default_of(field: Any) -> Any:
    """Return the default of a dataclass's field, as signatures have it."""
    if field.default is not MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is MISSING else field.default_factory()

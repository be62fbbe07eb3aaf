"""``[retention]`` and ``[[retention.rule]]`` of a configuration.

``KEYS`` is the table: each key, which is an option's name, with the function that reads its value. Rules, and
what selects checkpoints, are read by what their attributes say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from ckpttool.cli.config import (
    ConfigDocument,
    Reach,
    Reader,
    WrongValue,
    described_by,
    glob_below,
    one_text,
    read_table,
    takes,
    texts,
    truth,
    whole_number,
)
from ckpttool.core.errors import UsageError
from ckpttool.core.options import Option, attributes_by_key, options_of, value_types
from ckpttool.runs.pruning.request import PruneRequest, delete_limit
from ckpttool.runs.retention.policies import PathRule, Policies
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.scope import Scope


def _one_of(*allowed: str) -> Reader:
    @takes(enum=[*allowed])
    def read(value: object, key: str) -> str:
        if value not in allowed:
            raise WrongValue(key, value, f"{', '.join(allowed[:-1])} or {allowed[-1]}")
        return str(value)

    return read


def _parsed(parse: Callable[[str], Any]) -> Reader:
    """Return what reads a text, or a whole number, that stands for something."""

    @takes(type=["string", "integer"], minLength=1, minimum=0)
    def read(value: object, key: str) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return parse(str(value))
        return parse(one_text(value, key))

    return read


def _delete_limit(text: str) -> str:
    try:
        delete_limit(text)
    except UsageError as failure:
        raise WrongValue("max-delete", text, "a number, or a share such as 20%") from failure
    return text


def _readers(record: type) -> dict[str, Reader]:
    """Return what reads the values of a record's options, by their keys."""
    types = value_types(record)
    readers = {one.key: _reader(one, types[name]) for name, one in options_of(record).items()}
    return described_by(record, readers)


def _reader(option: Option, type_: Any) -> Reader:
    if option.parse is not None:
        return _parsed(option.parse)
    if get_origin(type_) is Literal:
        return _one_of(*get_args(type_))
    if type_ is int:
        return whole_number(1 if option.minimum is None else option.minimum)
    readers: Mapping[Any, Reader] = {bool: truth, str: one_text}
    return readers.get(type_, texts)


RULES: Mapping[str, Reader] = {key: one.reaching(Reach.HARMLESS) for key, one in _readers(Policy).items()}
"""What says which checkpoints stay, in ``[retention]`` and in its rules."""

_REQUEST = _readers(PruneRequest)
_SCOPE_REACH = {
    "recursive": Reach.HARMLESS,
    "exclude": Reach.HARMLESS,
    "max-depth": Reach.HARMLESS,
    "series": Reach.HARMLESS,
    "metrics": Reach.BELOW,
    "group-by": Reach.HARMLESS,
}
KEYS: Mapping[str, Reader] = {
    **RULES,
    "failed": _REQUEST["failed"].reaching(Reach.HARMLESS),
    "paths": texts.described(
        "Directories to prune, relative to this file.", Reach.BELOW, default=[os.curdir]
    ),
    **{key: one.reaching(_SCOPE_REACH[key]) for key, one in _readers(Scope).items()},
    "min-age": _REQUEST["min-age"].reaching(Reach.HARMLESS),
    "max-delete": replace(_REQUEST["max-delete"], read=_parsed(_delete_limit).read, reach=Reach.HARMLESS),
    **described_by(PruneRequest, {"verify": _one_of("full", "quick").reaching(Reach.HARMLESS)}),
    "trash": truth.described(
        "Move checkpoints to the trash, from which undo restores them.", Reach.HARMLESS, default=False
    ),
    "yes": truth.described("Don't ask for confirmation.", Reach.YES, default=False),
    "jobs": whole_number(1).described(
        "Use N threads. [default: number of CPUs]", Reach.HARMLESS, examples=[4]
    ),
}
_ATTRIBUTES = attributes_by_key(Policy) | attributes_by_key(PruneRequest)
"""The attributes that keys stand for."""


@takes(type="string", minLength=1)
def _series_glob(value: object, key: str) -> str:
    """Return a glob of series; a directory's plain name means what lies in it and below."""
    glob: str = glob_below(value, key)
    last = glob.rpartition("/")[2]
    is_directory = str(value).endswith("/") or not any(mark in last for mark in "*?[")
    return f"{glob}/**" if is_directory and last != "**" else glob


RULE_KEYS: Mapping[str, Reader] = {
    "path": _series_glob.described(
        "Series that the rule is for, relative to this file.", Reach.HARMLESS, examples=["runs/final/**"]
    ),
    **RULES,
}
"""What a ``[[retention.rule]]`` may say."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What a configuration says of ``prune``.

    Attributes:
        path: Where it stands.
        values: Values by the names of attributes, but for those of policies.
        policies: Which policy each series has.
    """

    path: str
    values: Mapping[str, Any]
    policies: Policies | None


def read_retention(document: ConfigDocument, *, given: Collection[str] = ()) -> Retention | None:
    """Return what a configuration says of ``prune``; None if it says nothing.

    Args:
        given: Attributes that the command line gives, by their names.
    """
    table = document.table("retention")
    if not table:  # as `ckpttool init` writes it
        return None
    read = read_table(
        document,
        "retention",
        {key: value for key, value in table.items() if key != "rule"},
        KEYS,
        others=(f"[[{document.prefix}retention.rule]]",),
        overridden={key for key in KEYS if _ATTRIBUTES.get(key, key) in given},
    )
    values = {_ATTRIBUTES.get(key, key): value for key, value in read.items()}
    here = os.path.dirname(document.path)
    paths = values.get("paths", (os.curdir,))
    values["paths"] = tuple(os.path.normpath(os.path.join(here, one)) for one in paths)
    if "metrics" in values:
        values["metrics"] = tuple(_log_path(one, here) for one in values["metrics"])
    rules = {name: values.pop(name) for name in options_of(Policy).keys() & values.keys()}
    try:
        default = Policy(**rules) if rules else None
    except UsageError as failure:
        raise document.wrong("retention", str(failure)) from failure
    listed = tuple(_path_rules(document, table.get("rule", [])))
    policies = Policies(default, listed, here or os.curdir) if default or listed else None
    return Retention(document.path, values, policies)


def _log_path(path: str, here: str) -> str:
    """Return a log's path as seen from here; one that isn't there is looked for in each directory."""
    from ckpttool.runs.metrics.log_metrics import LogArgument

    tracker, _, directory = path.partition(":")
    if tracker == "wandb" and directory and not os.path.lexists(path):
        return f"{tracker}:{_log_path(directory, here)}"
    beside = os.path.normpath(os.path.join(here, path))
    return beside if os.path.lexists(LogArgument.parse(beside).name) else path


def _path_rules(document: ConfigDocument, tables: object) -> Iterator[PathRule]:
    if not isinstance(tables, list) or not all(isinstance(rule, Mapping) for rule in tables):
        raise document.wrong("retention.rule", "it is no list of tables (write [[retention.rule]])")
    for number, rule in enumerate(tables, 1):
        place = f"retention.rule {number}"
        values = read_table(document, place, rule, RULE_KEYS)
        if "path" not in values:
            raise document.wrong(place, "path is missing (a glob of series, such as runs/final/**)")
        glob = values.pop("path")
        origin = f"{document.path}[{document.prefix}{place}]"
        try:
            yield PathRule(glob, Policy(**{_ATTRIBUTES[key]: one for key, one in values.items()}), origin)
        except UsageError as failure:
            raise document.wrong(place, str(failure)) from failure

"""What ``prune`` is asked for, whoever says it: the command line, or ``[retention]`` of a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from ckpttool.amounts import nbytes, seconds, within
from ckpttool.errors import CheckpointError, UsageError
from ckpttool.series.pruning.planning import Request
from ckpttool.series.retention.policy import Policies, Policy, delete_limit, option

if TYPE_CHECKING:
    from ckpttool.cli.retention_config import Retention

_LOOKS = tuple(one.name for one in fields(Request) if one.name not in ("directory", "policy", "policies"))
_NOT_OF_TRASH = ("failed", "trash", "explain", "max_delete", "min_age", "metrics", "group_by", "series")
_READ: Mapping[str, Callable[[str], Any]] = {
    "keep_within": within,
    "max_size": nbytes,
    "max_total_size": nbytes,
    "min_age": seconds,
    "older_than": within,
    "max_delete": lambda text: delete_limit(text) and text,
}
"""What reads the options whose text is not the value yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is to be thinned out, and how.

    Attributes:
        paths: The directories, each of which is pruned for itself; none where nobody named one.
        policies: Which policy each series has; None where nobody said so.
        looks: Further attributes of a ``Request``, by their names.
        trash: Whether what goes is kept until the trash is emptied; what failed always is.
        yes: Whether nobody is asked.
        older_than: Of a trash: what has lain there for so many seconds is meant.
        is_narrowed: Whether the directory is one that stands in place of a configuration's.
        read: The configuration that was read.
        unread: A configuration that would be read, had nobody given a directory or a rule.
    """

    paths: tuple[str, ...] = ()
    policies: Policies | None = None
    looks: Mapping[str, Any] = field(default_factory=dict)
    trash: bool = False
    yes: bool = False
    older_than: int | None = None
    is_narrowed: bool = False
    read: str | None = None
    unread: str | None = None

    @property
    def recursive(self) -> bool:
        """Tell whether directories are descended into."""
        return bool(self.looks.get("recursive"))

    def requests(self) -> list[Request]:
        """Return what is to be done, directory by directory.

        Raises:
            UsageError: Nobody said what stays.
        """
        if self.policies is None and self.looks.get("failed") is None:
            told = "--keep N keeps the newest N"
            more = "" if self.paths else "; or write a ckpttool.toml with [retention]"
            if self.unread is not None:
                more = f"; {self.unread} is not read, since a directory was given: --config reads it"
            raise UsageError(f"no rule says what to keep ({told}{more})")
        return [Request(directory=path, policies=self.policies, **self.looks) for path in self.directories()]

    def directories(self) -> list[str]:
        """Return the directories, each once."""
        places: dict[str, str] = {}
        for path in self.paths or (os.curdir,):
            places.setdefault(os.path.realpath(path), path)
        return list(places.values())


def wishes(
    directory: str | None,
    parameters: Mapping[str, Any],
    config: str | None = None,
    *,
    tells_unread: bool = False,
) -> Wishes:
    """Return what is asked for.

    A configuration is looked for where neither a directory nor a rule is given; what else the command line
    says comes after what the configuration says.

    Args:
        directory: That of the command line.
        parameters: Its options, by the names of attributes; those that were not given are None or empty.
        config: The configuration that it names.
        tells_unread: Whether a configuration that is not read is looked for, to tell of it.

    Raises:
        UsageError: A value is none that its option or key can have, or two contradict each other.
        CheckpointError: The configuration can't be read.
    """
    given = {name: _read(name, value) for name, value in parameters.items() if _is_given(value)}
    older_than = given.pop("older_than", None) if "empty_trash" in given else None
    rules = {one.name: given[one.name] for one in fields(Policy) if one.name in given}
    _check_trash(given, [*rules, *(name for name in _NOT_OF_TRASH if name in given)])
    policies = Policies(Policy(**rules)) if rules else None
    told = _configured(config, is_alone=directory is None and not rules and "failed" not in given)
    if told is not None and policies is not None and told.policies is not None:
        raise UsageError(f"{told.path} has rules, and so has the command line (leave out one of them)")
    said = {} if told is None else dict(told.said)
    said.update(given, exclude=(*said.get("exclude", ()), *given.get("exclude", ())))
    paths = said.pop("paths", ())
    return Wishes(
        paths=paths if directory is None else (directory,),
        policies=policies if told is None or told.policies is None else told.policies,
        looks={name: said[name] for name in _LOOKS if name in said},
        trash=said.get("trash", False) or said.get("failed") == "remove",
        yes=said.get("yes", False),
        older_than=older_than,
        is_narrowed=told is not None and directory is not None,
        read=None if told is None else told.path,
        unread=_unread() if config is None and told is None and tells_unread else None,
    )


def _unread() -> str | None:
    """Return the configuration with rules that is not read, or None; one that can't be read has none."""
    from ckpttool.cli.config import find_config, read_document

    try:
        path = find_config()
        tables = {} if path is None else read_document(path).tables
    except (UsageError, CheckpointError):  # nobody asked for it
        return None
    return path if "retention" in tables else None


def _check_trash(given: Mapping[str, Any], others: Sequence[str]) -> None:
    """Require that what empties the trash stands beside nothing that looks at checkpoints.

    Raises:
        UsageError: It doesn't.
    """
    if "empty_trash" in given and others:
        raise UsageError(f"--empty-trash looks at no checkpoint (leave {option(others[0])} out)")


def _configured(named: str | None, *, is_alone: bool) -> Retention | None:
    """Return what a configuration says: one that is named, or one found where nothing else was said."""
    if named is None and not is_alone:
        return None
    from ckpttool.cli.config import find_config
    from ckpttool.cli.retention_config import read_retention

    path = named or find_config()
    told = None if path is None else read_retention(path, is_named=named is not None)
    if named is not None and told is None:
        raise UsageError(f"{named}: it has no [retention]")
    return told


def _read(name: str, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return tuple(value)
    if name not in _READ:
        return value
    try:
        return _READ[name](value)
    except UsageError as failure:
        flag = option(name)
        raise UsageError(f"{failure}" if flag in str(failure) else f"{flag}: {failure}") from failure


def _is_given(value: Any) -> bool:
    """Tell whether an option was given: a number that is 0 was, though it equals False."""
    return value is not None and value is not False and value not in ([], ())

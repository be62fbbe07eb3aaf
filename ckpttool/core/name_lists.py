"""Lists of names, in the folder ``lists/`` of the package that reads them, and operators judged by them.

An operator that no list knows is a library's own, or a later release's, with unknown effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import cached_property
from pathlib import Path

from ckpttool.core.report import Finding, Sentence, Severity, warning

_SHOWN = 8
_LONGEST = 200


def lines_of(file: Path) -> list[str]:
    """Return a list's entries, without comments and empty lines."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@dataclass(frozen=True)
class OperatorLists:
    """The operators of a framework, in ``NAME_ops.txt`` and ``NAME_unsafe_ops.txt`` of a directory.

    The first lists all operators that it registers, one per line; a test compares it with the framework. The
    second has a line for each operator with effects besides computing: severity, name (``*`` matches any
    end), and effect. A third, ``NAME_unchecked_ops.txt``, may list operators that crash, or access memory
    outside of their tensors, if sizes or indices are wrong.
    """

    directory: Path
    name: str

    def judge(
        self, names: Iterable[str], where: str | None, verb: str, files: Mapping[str, str] | None = None
    ) -> Iterator[Finding]:
        """Yield findings about operators with effects besides computing, and unknown or unchecked ones.

        ``verb`` begins each message; ``files`` has the file that an operator touches.
        """
        foreign: list[str] = []
        unchecked: list[str] = []
        for name in sorted(set(names)):
            danger = self.danger(name)
            if danger is not None:
                severity, does = danger
                file = f": {files[name][:_LONGEST]}" if files and name in files else ""
                message = f"{verb} {name[:_LONGEST]}, which {does}{file}"
                yield Finding("unsafe-op", severity, Sentence(message), where)
            elif name not in self.registered:
                foreign.append(name[:_LONGEST])
            elif name in self.unchecked:
                unchecked.append(name)
        if foreign:
            message = f"{verb} operators that only other code registers: {_shown(foreign)}"
            yield warning("custom-ops", message, where)
        if unchecked:
            message = f"{verb} operators that don't check their sizes and indices: {_shown(unchecked)}"
            yield warning("unchecked-ops", message, where)

    def danger(self, name: str) -> tuple[Severity, str] | None:
        """Return severity and effect of a call; None if it only computes, or is unknown."""
        # One pattern of all globs rejects most names at once; the first matching line has the effect.
        if not self._danger_pattern.match(name):
            return None
        matches = ((severity, does) for severity, glob, does in self.dangers if fnmatchcase(name, glob))
        return next(matches, None)

    @cached_property
    def registered(self) -> frozenset[str]:
        """Return the names of all operators that the framework registers."""
        return frozenset(lines_of(self.directory / f"{self.name}_ops.txt"))

    @cached_property
    def unchecked(self) -> frozenset[str]:
        """Return the names of operators that don't check their sizes and indices."""
        file = self.directory / f"{self.name}_unchecked_ops.txt"
        return frozenset(line.partition(" ")[0] for line in lines_of(file)) if file.exists() else frozenset()

    @cached_property
    def dangers(self) -> tuple[tuple[Severity, str, str], ...]:
        """Return severity, name pattern and effect of each line of the second list."""
        lines = lines_of(self.directory / f"{self.name}_unsafe_ops.txt")
        parts = (line.split(maxsplit=2) for line in lines)
        return tuple((Severity(severity), glob, does) for severity, glob, does in parts)

    @cached_property
    def _danger_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(translate(glob) for _, glob, _ in self.dangers))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

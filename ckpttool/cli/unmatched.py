"""Rules of a configuration that no series matches: most likely misspelled, so that nothing may go.

What such a rule was to keep would be thinned out by the rules for all others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.errors import CheckpointError

if TYPE_CHECKING:
    from ckpttool.cli.retaining import Wishes
    from ckpttool.series.members.order import Group
    from ckpttool.series.pruning.planning import Request
    from ckpttool.series.reasons import Problem
    from ckpttool.series.retention.policy import PathRule

_WILD = re.compile(r"[*?[]")


def unmatched_rules(wanted: Wishes, requests: Sequence[Request]) -> list[Problem]:
    """Return what is wrong with rules that no series in any of the directories matches.

    Where a directory stands in place of the configuration's, rules for what lies elsewhere have nothing to
    match; nor has a rule for what can't be looked at, which is an error of its own.
    """
    from ckpttool.series.reasons import Problem

    if wanted.policies is None or not wanted.policies.rules:
        return []
    groups, unseen = _groups(requests)
    base = os.path.realpath(wanted.policies.directory)
    found = []
    for rule in wanted.policies.unmatched(tuple(groups)):
        place = _place(rule, base)
        is_elsewhere = wanted.is_narrowed and not _is_within(place, os.path.realpath(requests[0].directory))
        is_unseen = any(_is_within(place, one) or _is_within(one, place) for one in unseen)
        if not (is_elsewhere or is_unseen):
            told = f"no series matches {rule.glob!r}; nothing was removed"
            found.append(Problem(rule.origin or "path", told))
    return found


def _groups(requests: Sequence[Request]) -> tuple[list[Group], list[str]]:
    """Return the series of all directories, and the directories that can't be looked at."""
    from ckpttool.series.surveying.survey import survey

    groups: list[Group] = []
    unseen = []
    for request in requests:
        try:
            found = survey(request.directory, replace(request, metrics=()))
        except CheckpointError:  # to thin it out will say so
            unseen.append(os.path.realpath(request.directory))
        else:
            groups += found.groups
    return groups, unseen


def _place(rule: PathRule, base: str) -> str:
    """Return the directory that all lies in which a rule can match."""
    return os.path.join(base, *_fixed(rule.glob.split("/")))


def _fixed(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if _WILD.search(name):
            return
        yield name


def _is_within(path: str, directory: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(directory, ""))

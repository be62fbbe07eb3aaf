"""Says of one checkpoint why ``prune`` would keep or remove it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.cli.output import has_colour, print_json, progress, say_error
from ckpttool.cli.pruning import Manner, say_unread
from ckpttool.cli.unmatched import unmatched_rules
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from ckpttool.cli.retaining import Wishes
    from ckpttool.series.pruning.planning import Request


def explained(wanted: Wishes, path: str, manner: Manner) -> int:
    """Say why one checkpoint stays or goes; nothing is changed.

    Raises:
        UsageError: It is none of those that are looked at.
    """
    from ckpttool.series.pruning.explanation import explain
    from ckpttool.series.pruning.planning import make_plan

    request = _around(wanted, path)
    say_unread(wanted, manner)
    wrong = unmatched_rules(wanted, wanted.requests())
    planned = make_plan(request, progress)
    told = explain(planned, path)
    if manner.json:
        from ckpttool.render.json_prune import explain_document

        print_json(explain_document(planned, told))
    elif not manner.quiet:
        from ckpttool.render.text_explain import explain_text

        print(explain_text(told, colour=has_colour(sys.stdout)))
    for problem in wrong:
        say_error(f"{problem.path}: {problem.message}")
    return int(bool(wrong))


def _is_part(directory: str, place: str) -> bool:
    """Tell whether a path is a checkpoint in a directory, or lies in one."""
    from ckpttool.formats.discovery import unit_at

    first, *_ = os.path.relpath(place, directory).split(os.sep)
    return unit_at(os.path.join(directory, first)) is not None


def _around(wanted: Wishes, path: str) -> Request:
    """Return the request that looks at a path: that of its directory, or of one around it."""
    around = os.path.dirname(path.rstrip(os.sep)) or os.curdir
    requests = wanted.requests()
    for request in requests:
        if os.path.realpath(request.directory) == os.path.realpath(around):
            return request
    place = os.path.realpath(path)
    for request in requests:
        inside = os.path.join(os.path.realpath(request.directory), "")
        if place.startswith(inside) and (request.recursive or _is_part(inside, place)):
            return request
    if not wanted.paths:
        return replace(requests[0], directory=around)
    raise UsageError(f"{path} lies in none of the directories that are looked at: {', '.join(wanted.paths)}")

"""What lies in a directory, and what a policy would do with it; nothing on disk is changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpttool.errors import UsageError
from ckpttool.series.members.reading import Progress, unseen
from ckpttool.series.paths import shown
from ckpttool.series.pointers.protection import Pointed, follow
from ckpttool.series.problem import Problem
from ckpttool.series.pruning.planning import Planned, Request, make_plan
from ckpttool.series.surveying.scope import Scope
from ckpttool.series.surveying.survey import Survey, survey


@dataclass(frozen=True, slots=True)
class Place:
    """A directory, what of it is looked at, and the policy, if there is one, that says what would stay."""

    directory: str
    scope: Scope
    retention: Request | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """What lies in a directory: who points at it, and what a policy would do with it."""

    found: Survey
    pointed: Pointed
    planned: Planned | None = None
    refused: tuple[Problem, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        """Return what could not be looked at, or would not be carried out."""
        return [*(Problem(shown(error.path), error.reason) for error in self.found.errors), *self.refused]

    @property
    def warnings(self) -> list[str]:
        """Return what is doubtful."""
        planned = () if self.planned is None else self.planned.warnings
        return list(dict.fromkeys([*self.found.warnings, *self.pointed.warnings, *planned]))


def looked_at(place: Place, progress: Progress = unseen) -> Looked:
    """Return what lies in a directory; nothing on disk is changed.

    Raises:
        UsageError: The policy can't be followed there.
        CheckpointError: The directory, or a file of metrics, can't be looked at.
    """
    found = survey(place.directory, place.scope, enters_root=place.retention is not None)
    pointed = follow(found.root, found.groups, recursive=place.scope.recursive)
    request = place.retention
    if request is None:
        return Looked(found, pointed)
    try:
        return Looked(found, pointed, make_plan(request, progress, found))
    except UsageError as error:
        if request.max_delete is None:
            raise
        planned = make_plan(replace(request, max_delete=None), progress, found)
        return Looked(found, pointed, planned, (Problem(place.directory, str(error)),))

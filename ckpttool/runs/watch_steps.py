"""Steps of ``watch`` after verification: rename, copy, prune, log."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from glob import escape
from itertools import islice

from ckpttool.core.report import Problem
from ckpttool.runs.copying import CopyRequest, CopyStatus, carry_out, plan_copy
from ckpttool.runs.entry import Entry
from ckpttool.runs.pruning.planning import PrunePlan
from ckpttool.runs.pruning.prune import prune
from ckpttool.runs.renaming.rename import RenameRequest, rename
from ckpttool.runs.retention.request import PruneRequest
from ckpttool.runs.tracking import facts_of, open_target
from ckpttool.runs.watching import Step, StepInput, StepResult, require_same_place
from ckpttool.storage import fs
from ckpttool.storage.held import holding
from ckpttool.transaction.files import Contents

_MOST_TRIES = 10
"""Limit on attempts to rename the rest without refused checkpoints."""


def rename_step(template: str, exclude: Sequence[str] = ()) -> Step:
    """Return the step that renames valid checkpoints by a template, without those that can't get a name."""

    def step(step_input: StepInput) -> StepResult:
        refused: dict[str, str] = {}
        globs = (*exclude, *step_input.excluded)
        for _ in range(_MOST_TRIES):
            renamed = rename(
                RenameRequest(directory=step_input.root, template=template, exclude=globs, keeps=refused)
            )
            # Checkpoints without a valid new name keep theirs, and the rest is planned again. An error of the
            # disk keeps all from being renamed: the copies of some would have pointers that are changed again
            # when the others are renamed.
            more = {one.path: str(one.message) for one in renamed.planned.plan.refused}
            if not more:
                break
            refused |= more
        for old, new in renamed.renames:
            step_input.emit("renamed", old, f"renamed to {os.path.basename(new)}", to=new)
        culprit = dict(islice(renamed.failed.items(), 1))
        problems = replace(renamed, failed=culprit).problems
        is_pending = bool(refused or renamed.failed or renamed.stale)
        is_done = not renamed.stale  # a half-renamed directory may have dangling pointers: no pruning
        return StepResult(
            is_done, problems, renamed.planned.warnings, dict(renamed.renames), is_pending=is_pending
        )

    return step


def copy_step(destination: str, exclude: Sequence[str] = (), jobs: int | None = None) -> Step:
    """Return the step that copies valid checkpoints to a directory or store, each once while unchanged."""
    copied: dict[str, Contents] = {}
    place = fs.realpath(destination)

    def step(step_input: StepInput) -> StepResult:
        with holding(destination):
            require_same_place(destination, place)
            return copy_entries(step_input)

    def copy_entries(step_input: StepInput) -> StepResult:
        entries = {
            fs.normpath(entry.unit.path): entry
            for entry in step_input.entries
            if copied.get(entry.path) != entry.contents and entry.is_unchanged
        }
        if not entries:
            return StepResult()
        request = CopyRequest(
            sources=(step_input.root,),
            destination=destination,
            exclude=(*exclude, *step_input.excluded),
            depth="quick",  # every byte has just been verified
            jobs=jobs,
        )
        plan = plan_copy(request)
        problems: list[Problem] = []
        protected: list[str] = []
        warnings: tuple[str, ...] = ()
        for planned in plan.copies:
            entry = entries.get(fs.normpath(planned.unit.path))
            if entry is None:
                continue
            outcome = carry_out(replace(plan, copies=(planned,), problems=()), progress=step_input.progress)
            (one,) = outcome.checkpoints
            warnings += outcome.warnings
            if one.is_there:
                copied[entry.path] = entry.contents
            else:
                problems.append(Problem(entry.path, f"not copied to {one.target}: {one.why}"))
                protected.append(entry.path)
            if one.status is CopyStatus.COPIED:
                words = f"copied to {one.target}"
                step_input.emit("copied", entry.path, words, to=one.target, nbytes=one.sent_bytes)
        return StepResult(
            True, tuple(problems), warnings, protected=tuple(protected), is_pending=bool(problems)
        )

    return step


def prune_step(
    request_for: Callable[[str], PruneRequest],
    obstacles: Callable[[PruneRequest], Sequence[Problem]],
    *,
    trash: bool = False,
) -> Step:
    """Return the step that prunes by a policy; every survivor was read in full before.

    Args:
        request_for: Makes the request for a directory.
        obstacles: Returns problems of its rules; then nothing is removed.
        trash: Whether removed checkpoints are moved to the trash.
    """

    def step(step_input: StepInput) -> StepResult:
        request = replace(request_for(step_input.root), depth="full")
        request = replace(request, exclude=(*request.exclude, *map(escape, step_input.protected)))
        if problems := obstacles(request):
            return StepResult(False, tuple(problems))
        # ``prune`` surveys the directory itself, and may see checkpoints that arrived since the verification.
        # A plan that would change one of these is declined; the next look verifies it first.
        known = {*step_input.bad, *(entry.path for entry in step_input.entries)}

        def confirm(planned: PrunePlan) -> bool | None:
            """Decline a plan that changes unverified checkpoints."""
            return None if all(one.path in known for one in planned.plan.changed) else False

        pruned = prune(
            request, trash=trash, confirm=confirm, progress=step_input.progress, reader=step_input.reader
        )
        if pruned.declined:
            return StepResult(is_done=False)
        for path, status, words, nbytes in pruned.events:
            step_input.emit(status, path, words, nbytes=nbytes)
        return StepResult(not pruned.failed, pruned.problems, pruned.warnings)

    return step


def log_step(to: str, jobs: int | None = None) -> Step:
    """Return the step that records valid checkpoints with a tracker, each once while unchanged."""
    recorded: dict[str, Contents] = {}

    def step(step_input: StepInput) -> StepResult:
        new = (one for one in step_input.entries if recorded.get(one.path) != one.contents)
        waiting = [one for one in new if one.is_unchanged]  # prune may have removed some
        if not waiting:
            return StepResult()
        done: list[tuple[Entry, bool]] = []
        with open_target(to, step_input.root) as record:
            for entry in waiting:
                one = facts_of(entry, step_input.root, is_valid=True, safety=entry.safety, jobs=jobs)
                if entry.is_unchanged:
                    done.append((entry, record(one)))
        # A tracker may write only when it is closed, so nothing counts as recorded before the block's end.
        for entry, is_new in done:
            recorded[entry.path] = entry.contents
            if is_new:
                step_input.emit("recorded", entry.path, f"recorded in {to}", to=to)
        return StepResult()

    return step

"""The texts of commands that change files: ``prune``, ``rename``, ``undo``, ``copy``, ``convert`` and others.

Each text begins or ends with a line for the total.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.cli.render.terminal import (
    NARROWEST_TEXT,
    Style,
    aligned_numbers,
    aligned_pairs,
    display_width,
    hanging_lines,
    pad,
    shorten_names,
    styled,
)
from ckpttool.cli.render.verdicts import finding_lines, survival_text
from ckpttool.core.text import ELLIPSIS, counted, file_size, printable
from ckpttool.formats.interface import natural_path
from ckpttool.runs.reasons import reason_text
from ckpttool.storage import fs
from ckpttool.transaction.paths import shown

if TYPE_CHECKING:
    from ckpttool.ops.conversion import Converted
    from ckpttool.ops.salvage import Salvaged
    from ckpttool.runs.copying import CheckpointCopy, Copied
    from ckpttool.runs.entry import Entry
    from ckpttool.runs.pruning.planning import Explanation
    from ckpttool.runs.pruning.prune import Pruned
    from ckpttool.runs.renaming.rename import PlannedNames, RenameResult
    from ckpttool.runs.retention.plan import GroupPlan, KeptEntry, RetentionPlan
    from ckpttool.runs.tracking import Logged
    from ckpttool.runs.undo import Undone
    from ckpttool.transaction.trash import EmptiedTrash

# prune: the plan ------------------------------------------------------------------------------------


_MOST, _ALIKE, _FIRST = 24, 12, 5
"""If more than 24 are kept or removed, of more than 12 with equal reasons only 5 and the last are shown."""
_MOST_FOREIGN_FILES = 4
_WIDEST_REASON = 40
"""Columns of reasons if names and reasons don't fit on one line."""
_INDENT = len("  remove  ")


class _PlanRow(NamedTuple):
    """A line of a plan: a checkpoint, or the number of hidden ones."""

    verb: str
    name: str
    why: str
    is_note: bool = False


def plan_text(
    groups: Sequence[GroupPlan], *, width: int | None = None, colour: bool = False, verbose: bool = False
) -> str:
    """Return the plan of each series.

    Series of one checkpoint that is kept are only counted, unless ``verbose``. Of many checkpoints with equal
    reasons, the first few and the last are shown.

    Args:
        groups: The series.
        width: Columns of the terminal; None leaves every line whole.
        colour: Whether to colour removals.
        verbose: Whether everything is shown.
    """
    shown = [one for one in groups if verbose or not (_is_single(one) or _is_without_rules(one))]
    titles = _titles([one.key for one in shown], width, colour)
    parts = [
        "\n".join([title, *_group_lines(one, width, colour, verbose)])
        for title, one in zip(titles, shown, strict=True)
    ]
    for note in _kept_notes(groups) if not verbose else ():
        lines = hanging_lines("", note, width, 0)
        parts.append("\n".join(styled(line, Style.DIM, colour) for line in lines))
    return "\n\n".join(parts)


def _titles(names: Iterable[str], width: int | None, colour: bool) -> list[str]:
    """Return the headings of series or directories, shortened so that they remain distinct."""
    titles = [printable(name) for name in names]
    return [
        styled(title, Style.BOLD, colour)
        for title in (titles if width is None else shorten_names(titles, width))
    ]


def _kept_notes(groups: Sequence[GroupPlan]) -> Iterator[str]:
    """Yield the numbers of kept series that are not shown."""
    unruled = sum(map(_is_without_rules, groups))
    if unruled and any(one.policy is not None for one in groups):
        yield f"{unruled:,} series kept, since no rule matches them (-v shows them)"
    singles = sum(_is_single(one) and not _is_without_rules(one) for one in groups)
    if singles == 1:
        yield "1 single checkpoint kept (-v shows it)"
    elif singles:
        hint = "-v shows them; --series GLOB makes some of them one series"
        yield f"{singles:,} single checkpoints kept ({hint})"


def _is_single(group: GroupPlan) -> bool:
    """Return whether a series is a single valid checkpoint that is kept."""
    if (
        len(group.keep) != 1
        or group.remove
        or group.slim
        or group.failed is not None
        or group.skipped is not None
    ):
        return False
    entry = group.keep[0].entry
    return entry.is_sound and entry.danger is None


def _is_without_rules(group: GroupPlan) -> bool:
    """Return whether a series has neither a request nor a result."""
    return group.policy is None and group.failed is None


def _group_lines(group: GroupPlan, width: int | None, colour: bool, verbose: bool) -> Iterator[str]:
    is_listed = group.policy is None and not group.remove  # a failed run, excepted from removal
    remarks = {
        "left alone": None if is_listed else group.skipped,
        "failed": group.failed,
        "run": group.rank.reason if group.rank is not None else None,
        "too large": None if group.excess is None else str(group.excess),
    }
    for word, why in remarks.items():
        if why is not None:
            yield from hanging_lines(f"  {word}: ", printable(why), width, _INDENT)
    if is_listed and not verbose:
        size = file_size(sum(kept.entry.contents.nbytes for kept in group.keep))
        yield f"  {counted(len(group.keep), 'checkpoint')}, {size}"
        return
    # Names get all that reasons leave, but reasons no more than _WIDEST_REASON: longer ones are wrapped below
    # themselves. A note on hidden checkpoints spans both columns.
    rows = _rows(group, verbose)
    names = [row.name for row in rows if not row.is_note]
    if width is not None:
        reasons = max((display_width(row.why) for row in rows), default=0)
        names = shorten_names(names, max(width - _INDENT - 2 - min(reasons, _WIDEST_REASON), NARROWEST_TEXT))
    widest, fitted = max(map(display_width, names), default=0), iter(names)
    for row in rows:
        head = f"  {row.verb:<6}  " + (row.name if row.is_note else f"{pad(next(fitted), widest)}  ")
        for line in hanging_lines(head, row.why, width, _INDENT):
            yield styled(line, Style.YELLOW, colour and row.verb != "keep")


def _rows(group: GroupPlan, verbose: bool) -> list[_PlanRow]:
    is_long = len(group.keep) > _MOST and not verbose
    rows: list[_PlanRow] = []
    entries = [*(one.entry for one in group.keep), *group.remove]
    is_spread = len({entry.directory for entry in entries}) > 1
    slim = {entry.path for entry in group.slim}

    def outcome(one: KeptEntry) -> tuple[bool, tuple[str, ...]]:
        why = group.whole.get(one.entry.path)
        notes = () if why is None else (f"whole: {why}",)
        return one.entry.path in slim, (*one.reasons, *notes, *_unsafe_note(one.entry))

    for (is_slim, reasons), kept_alike in groupby(group.keep, outcome):
        kept = [one.entry for one in kept_alike]
        words = ", ".join(map(reason_text, reasons))
        # What slimming frees is approximate if a file is rewritten, and exact if files are removed.
        notes = [
            f"frees {'' if one.state.files else 'about '}{file_size(group.slim_bytes(one))}; {words}"
            if is_slim
            else words
            for one in kept
        ]
        rows += _fold_alike("slim" if is_slim else "keep", kept, notes, is_long, is_spread)
    is_long = len(group.remove) > _MOST and not verbose
    for has_foreign_files, alike in groupby(group.remove, lambda entry: bool(entry.foreign_files)):
        removed = list(alike)
        facts = [(file_size(one.contents.nbytes), _foreign_words(one), *_unsafe_note(one)) for one in removed]
        notes = [", ".join(filter(None, one)) for one in facts]
        rows += _fold_alike("remove", removed, notes, is_long and not has_foreign_files, is_spread)
    return rows


def _foreign_words(entry: Entry) -> str:
    """Return the files that would be removed with a checkpoint though they aren't part of it."""
    names = entry.foreign_files
    if not names:
        return ""
    first = names[:_MOST_FOREIGN_FILES]
    more = f" and {len(names) - len(first):,} more" if len(names) > len(first) else ""
    return f"with {', '.join(first)}{more} in it"


def _unsafe_note(entry: Entry) -> tuple[str, ...]:
    """Return the note on a checkpoint that is unsafe to load, which doesn't affect the plan."""
    return () if entry.danger is None else ("unsafe",)


def _fold_alike(
    verb: str, entries: Sequence[Entry], notes: Sequence[str], is_long: bool, is_spread: bool
) -> Iterator[_PlanRow]:
    """Yield the lines of checkpoints with equal outcomes; of many, the first few and the last."""
    rows = [
        _PlanRow(verb, printable(entry.path if is_spread else entry.name), printable(note))
        for entry, note in zip(entries, notes, strict=True)
    ]
    if not is_long or len(rows) <= _ALIKE:
        yield from rows
        return
    hidden = entries[_FIRST:-1]
    size = file_size(sum(entry.contents.nbytes for entry in hidden))
    yield from rows[:_FIRST]
    yield _PlanRow(verb, f"{ELLIPSIS} {len(hidden):,} more, {size} (-v shows them)", "", is_note=True)
    yield rows[-1]


# prune: the total, one checkpoint explained, an emptied trash ---------------------------------------


def total_line(pruned: Pruned, *, colour: bool = False) -> str:
    """Return the result of a prune in one line; further lines have exceeded limits, and how to undo it."""
    excess = () if pruned.declined or pruned.failed else excess_lines(pruned.plan)
    hints = (styled(hint, Style.DIM, colour) for hint in _hints(pruned))
    return "\n".join([_total_words(pruned), *excess, *hints])


def excess_lines(plan: RetentionPlan) -> list[str]:
    """Return a line for each limit on all series together that is exceeded."""
    return [f"too large: {excess}" for excess in plan.excess]


def _total_words(pruned: Pruned) -> str:
    removed = sum(entry.path not in pruned.failed for entry in pruned.plan.removals)
    count = removed + sum(len(one.keep) for one in pruned.plan.groups)
    checkpoints = counted(count, "checkpoint")
    has_rules = pruned.plan.removes_failed or any(one.policy is not None for one in pruned.plan.groups)
    if pruned.failed:
        return _failure_words(pruned, removed)
    if not removed and not has_rules:  # failed runs were listed
        failed = sum(one.failed is not None for one in pruned.plan.groups)
        return f"{failed:,} of {len(pruned.plan.groups):,} series failed; nothing removed ({checkpoints})"
    slimmed = len(pruned.plan.slimmed)
    if slimmed:
        return _slimming_words(pruned, removed, slimmed, checkpoints)
    if not removed:
        kept = "all kept" if count > 1 else "kept"
        return f"{'nothing removed' if pruned.declined else 'nothing to remove'} ({checkpoints}, {kept})"
    if pruned.trash is not None:
        size = file_size(pruned.trashed_bytes)
        verb = "would move" if pruned.dry_run else "moved"
        return f"{verb} {removed:,} of {checkpoints} to the trash ({size})"
    if pruned.dry_run:
        return f"would remove {removed:,} of {checkpoints} and free {file_size(pruned.freed_bytes)}"
    return f"removed {removed:,} of {checkpoints}, {file_size(pruned.freed_bytes)} freed"


def _slimming_words(pruned: Pruned, removed: int, slimmed: int, checkpoints: str) -> str:
    """Return the result of a prune that slims: ``would remove 3 and slim 4 of 10 checkpoints, …``."""
    is_trash = pruned.trash is not None
    about = "about " if pruned.dry_run and pruned.plan.is_estimate else ""
    size = about + file_size(pruned.trashed_bytes if is_trash else pruned.freed_bytes)
    removing = ("move", "moved") if is_trash else ("remove", "removed")
    verbs = [verb[not pruned.dry_run] for verb in (removing, ("slim", "slimmed"))]
    trash = " to the trash" if is_trash else ""
    parts = [f"{verbs[0]} {removed:,}{trash}"] if removed else []
    text = f"{' and '.join([*parts, f'{verbs[1]} {slimmed:,}'])} of {checkpoints}"
    if is_trash:
        return f"{'would ' if pruned.dry_run else ''}{text}; emptying the trash frees {size}"
    return f"would {text} and free {size}" if pruned.dry_run else f"{text}, {size} freed"


def question(planned: RetentionPlan, *, trash: bool, for_good: bool = False) -> str:
    """Return the question before a plan is applied; ``for_good`` if removals can't be undone."""
    if planned.slimmed:
        removed = len(planned.removals)
        size = ("about " if planned.is_estimate else "") + file_size(planned.freed_bytes)
        removing = [f"{'move' if trash else 'remove'} {removed:,}"] if removed else []
        text = " and ".join([*removing, f"slim {counted(len(planned.slimmed), 'checkpoint')}"])
        return f"{text[0].upper()}{text[1:]} ({size}){', keeping them in the trash' if trash else ''}?"
    checkpoints = f"{counted(len(planned.removals), 'checkpoint')} ({file_size(planned.freed_bytes)})"
    return (
        f"Move {checkpoints} to the trash?"
        if trash
        else f"Remove {checkpoints}{' for good' if for_good else ''}?"
    )


def _hints(pruned: Pruned) -> Iterator[str]:
    """Yield the commands that restore the trash or delete it."""
    # Each directory has a trash of its own. If several were pruned, the commands are for their common parent,
    # with -r to reach all of them.
    places = {entry.directory for entry in pruned.plan.changed if entry.path not in pruned.failed}
    if pruned.dry_run or not pruned.trash or not places:
        return
    if len(places) == 1:
        (where,) = places
    else:
        where = fs.relpath(fs.commonpath([fs.abspath(place) for place in places]))
    arguments = " -r" if len(places) > 1 else ""
    arguments += "" if where == os.curdir else f" {printable(quote(shown(where)))}"
    yield f"to restore them: ckpttool undo{arguments}"
    yield f"to free the space: ckpttool prune --empty-trash{arguments}"


def _failure_words(pruned: Pruned, removed: int) -> str:
    """Return the result of a prune that could not do everything."""
    reasons = list(dict.fromkeys(pruned.failed.values()))
    why = reasons[0] + (", …" if len(reasons) > 1 else "")
    is_trash = pruned.trash is not None
    slimmed = len(pruned.plan.slimmed)
    verb = "moved to the trash" if is_trash else "removed"
    freed = "" if is_trash else f", {file_size(pruned.freed_bytes)} freed"
    whole = {path for group in pruned.plan.groups for path in group.whole}
    parts = [] if pruned.failed.keys() <= whole and not removed else [f"{verb} {removed:,}"]
    parts = [f"slimmed {slimmed:,}", *parts] if slimmed or not parts else parts
    line = f"{' and '.join(parts)} of {removed + slimmed + len(pruned.failed):,}{freed}"
    return f"{line}; {len(pruned.failed):,} failed: {printable(why)}"


def explain_text(explanation: Explanation, *, colour: bool = False) -> str:
    """Return the decision on a checkpoint, its position in its series, and the reasons for and against."""
    return "\n".join(_explain_lines(explanation, colour))


def _explain_lines(explanation: Explanation, colour: bool) -> Iterator[str]:
    if explanation.requested_path is not None:
        yield f"{printable(explanation.requested_path)} belongs to {printable(explanation.entry.path)}"
    verb = "would be kept" if explanation.is_kept else "would be removed"
    is_changed = not explanation.is_kept or explanation.slims
    end = " without its training state" if explanation.slims else ""
    yield styled(f"{printable(explanation.entry.path)} {verb}{end}", Style.YELLOW, colour and is_changed)
    place = "; ".join(explanation.place)
    yield f"  {printable(explanation.key)}{': ' if place else ''}{printable(place)}"
    for reason in explanation.reasons:
        yield f"  for      {printable(reason)}"
    if not explanation.reasons:
        yield "  for      nothing: no rule keeps it, nothing refers to it, it isn't pinned"
    for reason in explanation.against:
        yield f"  against  {printable(reason)}"


def empty_question(preview: Sequence[EmptiedTrash]) -> str:
    """Return the question before the trash is emptied."""
    count, size = sum(len(one.removed) for one in preview), sum(one.freed_bytes for one in preview)
    return f"Delete {counted(count, 'checkpoint')} ({file_size(size)}) from the trash for good?"


def empty_text(emptied: Sequence[EmptiedTrash]) -> str:
    """Return the result of emptying the trash of some directories, in one line."""
    count = sum(len(one.removed) for one in emptied)
    if not count:
        left = sum(one.left_bytes for one in emptied)
        return f"nothing to remove from the trash{f' ({file_size(left)} left in it)' if left else ''}"
    size = file_size(sum(one.freed_bytes for one in emptied))
    if any(one.dry_run for one in emptied):
        return f"would remove {counted(count, 'checkpoint')} from the trash and free {size}"
    return f"removed {counted(count, 'checkpoint')} from the trash, {size} freed"


# rename, undo ---------------------------------------------------------------------------------------


_BECOMES = "  ->  "
_COMMANDS = {"trash": "prune --trash", "prune": "prune", "rename": "rename", "restore": "undo"}


def rename_text(renamed: RenameResult, *, width: int | None = None, colour: bool = False) -> str:
    """Return old and new names, and the total."""
    pairs = rename_lines(renamed, width=width, colour=colour)
    return "\n\n".join(filter(None, (pairs, rename_total_line(renamed))))


def rename_lines(renamed: RenameResult, *, width: int | None = None, colour: bool = False) -> str:
    """Return old and new names, directory by directory; a new one below the old one if there is no room."""
    directories: dict[str, list[tuple[str, str]]] = defaultdict(list)
    refused = {one.path for one in renamed.planned.plan.refused}
    for old, new in renamed.renames:
        name = printable(os.path.basename(new)) + ("  can't be used" if old in refused else "")
        directories[os.path.dirname(old) or os.curdir].append((printable(os.path.basename(old)), name))
    parts = []
    for title, pairs in zip(_titles(directories, width, colour), directories.values(), strict=True):
        lines = aligned_pairs(pairs, between=_BECOMES)
        if width is not None and any(display_width(line) > width for line in lines):
            lines = [line for old, new in pairs for line in (f"  {old}", f"  {_BECOMES}{new}")]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


def rename_total_line(renamed: RenameResult) -> str:
    """Return the result of a rename in one line."""
    plan = renamed.planned.plan
    checkpoints = counted(plan.count, "checkpoint")
    count = len(renamed.renames)
    if renamed.failed:
        planned = counted(len(plan.renamings), "checkpoint")
        return f"renamed {count:,} of {planned}; {counted(len(renamed.failed), 'failure')}"
    if renamed.declined or renamed.is_refused:
        return f"nothing renamed ({checkpoints})"
    if plan.refused:
        return f"would rename nothing ({checkpoints}): {counted(len(plan.refused), 'name')} can't be used"
    if not plan.renamings:
        return f"nothing to rename ({checkpoints})"
    if count < plan.count:
        checkpoints = f"{count:,} of {checkpoints}"
    references = counted(renamed.planned.update_count, "reference") if renamed.planned.update_count else ""
    if renamed.dry_run:
        return f"would rename {checkpoints}{references and f' and update {references}'}"
    return f"renamed {checkpoints}{references and f' and updated {references}'}"


def rename_question(planned: PlannedNames) -> str:
    """Return the question before checkpoints are renamed."""
    references = f" and update {counted(planned.update_count, 'reference')}" if planned.update_count else ""
    return f"Rename {counted(len(planned.plan.renamings), 'checkpoint')}{references}?"


def undo_text(done: Undone, *, width: int | None = None, colour: bool = False) -> str:
    """Return a heading, a line for each checkpoint and each pointer, and the total."""
    from ckpttool.transaction.history import local_time_of

    command = _COMMANDS[done.kind or "trash"]
    sources = {"trash": "from the trash", "prune": "from an older version"}
    rows = [
        (one.path, sources.get(done.kind or "", f"was {os.path.basename(one.was)}"))
        for one in sorted(done.restored, key=lambda one: natural_path(one.path))
    ]
    rows += [(path, "rewritten") for path in done.pointers]
    paths, facts = [printable(path) for path, _ in rows], [printable(what) for _, what in rows]
    if width is not None:
        room = width - max(map(display_width, facts), default=0) - 2 * len("  ")
        paths = shorten_names(paths, max(room, NARROWEST_TEXT))
    title = styled(f"{command} of {local_time_of(done.identity or '')}", Style.BOLD, colour)
    return "\n".join([title, *aligned_pairs([*zip(paths, facts, strict=True)]), _undo_total(done)])


def _undo_total(done: Undone) -> str:
    verb = "would restore" if done.dry_run else "restored"
    if count := len(done.restored):
        return f"{verb} {counted(count, 'checkpoint')}"
    if done.pointers:
        return f"{verb} {counted(len(done.pointers), 'pointer')}; no checkpoint had moved"
    nothing = "would restore nothing" if done.dry_run else "nothing restored"
    if not done.problems:
        return f"{nothing}: everything is already as it was"
    others = f" (and {len(done.problems) - 1:,} more)" if len(done.problems) > 1 else ""
    problem = done.problems[0]
    return f"{nothing}: {printable(f'{os.path.basename(problem.path)}: {problem.why}')}{others}"


# copy -----------------------------------------------------------------------------------------------


_COPY_VERBS = {
    "copied": "copied",
    "present": "already there",
    "differs": "differs",
    "invalid": "not copied",
    "failed": "not copied",
}


def copy_text(copied: Copied, *, width: int | None = None, colour: bool = False) -> str:
    """Return a line for each checkpoint, and the total."""
    return "\n".join([*_copy_lines(copied, width, colour), _copy_total(copied)])


def _copy_lines(copied: Copied, width: int | None, colour: bool) -> Iterator[str]:
    words = {**_COPY_VERBS, "copied": "would copy"} if copied.dry_run else _COPY_VERBS
    rows = [(words[one.status.value], one, _copy_detail(one)) for one in copied.checkpoints]
    verbs = max((len(verb) for verb, _, _ in rows), default=0)
    names = [printable(one.path) for one in copied.checkpoints]
    if width is not None:
        widest = max((display_width(detail) for _, _, detail in rows), default=0)
        room = width - verbs - 2 * len("  ") - min(widest, _WIDEST_REASON)
        names = shorten_names(names, max(room, NARROWEST_TEXT))
    widest = max(map(display_width, names), default=0)
    for name, (verb, one, detail) in zip(names, rows, strict=True):
        head = f"{pad(verb, verbs)}  {pad(name, widest)}  "
        for line in hanging_lines(head, detail, width, verbs + 2):
            yield styled(line, Style.YELLOW, colour and not one.is_there)


def _copy_detail(one: CheckpointCopy) -> str:
    if one.why is None:
        return file_size(one.nbytes)
    return printable(f"invalid: {one.why}" if one.status.value == "invalid" else one.why)


def _copy_total(copied: Copied) -> str:
    sent = [one for one in copied.checkpoints if one.status.value == "copied"]
    present = sum(one.status.value == "present" for one in copied.checkpoints)
    checkpoints = counted(len(copied.checkpoints), "checkpoint")
    verb = "would copy" if copied.dry_run else "copied"
    parts = [f"{verb} {len(sent):,} of {checkpoints} ({file_size(sum(one.sent_bytes for one in sent))})"]
    if present:
        parts.append(f"{present:,} already there")
    if others := len(copied.checkpoints) - len(sent) - present:
        parts.append(f"{others:,} not copied")
    if copied.left_out:
        parts.append(f"{len(copied.left_out):,} not selected")
    return ", ".join(parts)


# convert, merge -------------------------------------------------------------------------------------


_MOST_DROPPED = 40


def salvage_text(done: Salvaged, *, colour: bool = False) -> str:
    """Return the result of a salvage, its evidence, the omitted parts, and the lost tensors."""
    size = file_size(done.nbytes)
    verb = "would salvage" if done.converted.dry_run else "salvaged"
    paths = f"{printable(done.source)} → {printable(done.converted.target)}"
    head = f"{verb} {done.amount} ({size}): {paths}{'' if done.converted.dry_run else ', verified'}"
    lines = [styled(head, Style.BOLD, colour)]
    if done.unproven:
        proven = f"{done.proven:,} match their checksums; " if done.proven else ""
        lines.append(f"  {proven}no checksum covers the values of {counted(done.unproven, 'tensor')}")
    lines += [f"  {printable(note)}" for note in done.converted.notes]
    if done.lost:
        lines.append(f"  {styled(survival_text(done.survival), Style.BOLD, colour)}")
    if done.lost or not done.names_all:
        amounts = [f"{len(done.lost):,}"] * bool(done.lost)
        amounts += ["possibly others with lost names"] * (not done.names_all)
        lines.append(f"  {styled('lost: ' + ', and '.join(amounts), Style.YELLOW, colour)}")
        lines += [f"    {printable(one.name)}: {printable(one.why)}" for one in done.lost[:_MOST_DROPPED]]
        if len(done.lost) > _MOST_DROPPED:
            lines.append(f"    … {len(done.lost) - _MOST_DROPPED:,} more (--json lists all)")
    lines += [f"  {line}" for line in finding_lines(done.damage, colour)]
    return "\n".join(lines)


_SAFETY = {"unsafe": "UNSAFE", "unknown": "safety unknown"}


def logged_text(logged: Logged, *, colour: bool = False) -> str:
    """Return a line for each checkpoint that was recorded, and the total."""
    paths = [printable(one.path) for one in logged.checkpoints if one.is_new]
    width = max(map(len, paths), default=0)
    lines = []
    for path, one in zip(paths, (one for one in logged.checkpoints if one.is_new), strict=True):
        verdict, safety = one.facts["verdict"], one.facts["safety"]
        words = verdict if verdict == "invalid" else f"{verdict}, {_SAFETY.get(safety, safety)}"
        lines.append(f"{path:{width}}  {styled(words, Style.GREEN if one.passes else Style.RED, colour)}")
    return "\n".join([*lines, printable(logged.summary)])


def convert_text(converted: Converted, *, colour: bool = False) -> str:
    """Return the result of a conversion in a line, with its notes and the dropped values below."""
    sources = converted.sources
    source = sources[0] if len(sources) == 1 else f"{len(sources):,} parts"
    if shares := converted.shares:
        source = f"average of {len(shares):,} checkpoints"
    size = f"{counted(converted.tensors, 'tensor')}, {file_size(converted.nbytes)}"
    # The format is named unless the target's suffix says it: model.safetensors, but "model.pth as pytorch".
    if converted.dry_run:
        result = f"would write {size} as {converted.format}"
    else:
        names_format = os.path.basename(converted.target).lower().endswith(f".{converted.format}")
        result = f"{size}{'' if names_format else f' as {converted.format}'}, verified"
    head = f"{printable(source)} → {printable(converted.target)}: {result}"
    lines = [styled(head, Style.BOLD, colour)]
    if len(set(shares)) > 1:
        parts = zip(
            aligned_numbers([f"{100 * share:.3g} %" for share in shares]),
            map(printable, sources),
            strict=True,
        )
        lines += aligned_pairs([*parts])
    lines += [f"  {printable(note)}" for note in converted.notes]
    if dropped := converted.dropped:
        count = f"not preserved: {counted(len(dropped), 'item')}"
        lines.append(f"  {styled(count, Style.YELLOW, colour)}")
        lines += [f"    {printable(one.path)}: {printable(one.why)}" for one in dropped[:_MOST_DROPPED]]
        if len(dropped) > _MOST_DROPPED:
            lines.append(f"    … {len(dropped) - _MOST_DROPPED:,} more")
    return "\n".join(lines)

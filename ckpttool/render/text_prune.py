"""What people read of ``prune``: what stays and why, and what goes."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.render.escape import printable
from ckpttool.render.text_findings import styled
from ckpttool.render.text_numbers import file_size
from ckpttool.report import counted
from ckpttool.series.pruning import Pruned
from ckpttool.series.retention import GroupPlan


def prune_text(pruned: Pruned, *, colour: bool = False, verbose: bool = False) -> str:
    """Return the plan, series by series, and what it comes to.

    What is a series of its own and stays is counted, unless ``verbose``: nobody asked for it.
    """
    shown = [one for one in pruned.plan.groups if verbose or not _is_single(one)]
    parts = ["\n".join(_group_lines(one, colour)) for one in shown]
    if folded := len(pruned.plan.groups) - len(shown):
        advice = "" if folded == 1 else "; --series GLOB makes some of them one series"
        parts.append(f"{counted(folded, 'single checkpoint')} kept (-v shows them{advice})")
    return "\n\n".join([*parts, total_line(pruned)])


def _is_single(group: GroupPlan) -> bool:
    is_alone = len(group.keep) == 1 and not group.remove
    return is_alone and group.skipped is None and group.keep[0].entry.is_sound


def _group_lines(group: GroupPlan, colour: bool) -> Iterator[str]:
    yield printable(group.key)
    if group.skipped is not None:
        yield f"  left alone: {printable(group.skipped)}"
    rows = [("keep", kept.entry, ", ".join(kept.reasons)) for kept in group.keep]
    rows += [("remove", entry, file_size(entry.contents.nbytes)) for entry in group.remove]
    width = max((len(printable(entry.name)) for _, entry, _ in rows), default=0)
    for verb, entry, told in rows:
        line = f"  {verb:<6}  {printable(entry.name):<{width}}  {printable(told)}".rstrip()
        yield styled(line, "yellow", colour and verb == "remove")


def total_line(pruned: Pruned) -> str:
    """Return what a prune came to, in one line."""
    removed = len(pruned.plan.removals)
    count = removed + sum(len(one.keep) for one in pruned.plan.groups)
    checkpoints = counted(count, "checkpoint")
    if pruned.failed:
        return _failures(pruned, removed)
    if not removed:
        return f"nothing to remove among {checkpoints}"
    if pruned.declined:
        return f"nothing removed of {checkpoints}"
    if pruned.dry_run:
        return f"would remove {removed:,} of {checkpoints} and free {file_size(pruned.freed_bytes)}"
    return f"removed {removed:,} of {checkpoints}, {file_size(pruned.freed_bytes)} freed"


def _failures(pruned: Pruned, removed: int) -> str:
    """Return what a prune came to that could not do all that it was to."""
    reasons = list(dict.fromkeys(pruned.failed.values()))
    told = reasons[0] + (", …" if len(reasons) > 1 else "")
    line = f"removed {removed:,} of {removed + len(pruned.failed):,}, {file_size(pruned.freed_bytes)} freed"
    return f"{line}; {len(pruned.failed):,} failed: {printable(told)}"

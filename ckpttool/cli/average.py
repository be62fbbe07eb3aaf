"""``ckpttool average``: one checkpoint whose weights are the average of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.cli.convert import plan_and_convert, target_argument
from ckpttool.cli.options import json_option, quiet_option
from ckpttool.core.errors import UsageError
from ckpttool.core.options import SELECTION_PANEL, Mode, argument, group, mode_option, option
from ckpttool.ops.conversion import ConvertOptions
from ckpttool.runs.scope import Scope

AVERAGE_PANEL = "Average"
_WRITING = (
    "to",
    "dtype",
    "layout",
    "mapping",
    "model",
    "by_order",
    "shard_size",
    "dry_run",
    "force",
    "strict",
    "jobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageCommand:
    """The options of ``average``."""

    sources: Sequence[str] = argument("SRC...", "Checkpoints, the oldest first; or a directory of a series.")
    target: str = target_argument()
    weights: str | None = option(
        "--weights", metavar="W,W,...", help="Set the weight of each SRC: 1,2,1.", panel=AVERAGE_PANEL
    )
    ema: float | None = option(
        "--ema",
        metavar="DECAY",
        help="Take an exponential moving average over SRC..., the oldest first.",
        panel=AVERAGE_PANEL,
    )
    last: int | None = option(
        "--last", metavar="N", help="Average the N newest intact checkpoints of SRC.", panel=SELECTION_PANEL
    )
    best: int | None = option(
        "--best", metavar="N", help="Average the N best by --metric of SRC.", panel=SELECTION_PANEL
    )
    metric: str | None = option(
        "--metric",
        metavar="NAME",
        complete="metric",
        help="Compare by this metric for --best.",
        panel=SELECTION_PANEL,
    )
    mode: Mode | None = mode_option(SELECTION_PANEL)
    scope: Scope = group(Scope, ("series", "metrics"), is_record=True)
    writing: ConvertOptions = group(ConvertOptions, _WRITING, is_record=True)
    json: bool = json_option()
    quiet: bool = quiet_option()


def average(command: AverageCommand) -> int:
    """Average the weights of several checkpoints into one and compare the result.

    Sums are computed in float64 and rounded once. Integers, such as counters, are taken from the last SRC.
    DST holds only weights, and is written completely or not at all.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.ops.average import open_average, plan_average, shares_of

    how = command.writing
    if command.last is not None or command.best is not None:
        paths = _of_series(command)
    elif command.metric is not None or command.mode is not None or command.scope != Scope():
        raise UsageError("--metric, --mode, --metrics and --series are only valid with --last N or --best N")
    else:
        paths = [*map(single_checkpoint, command.sources)]
    weights = None
    if command.weights is not None:
        try:
            weights = [float(one) for one in command.weights.split(",")]
        except ValueError as error:
            raise UsageError(f"--weights {command.weights}: expected numbers, such as 1,2,1") from error
    with open_average(paths, shares_of(len(paths), weights, command.ema)) as averaged:
        return plan_and_convert(
            lambda path, model: plan_average(averaged, path, how, model),
            command.target,
            how,
            json=command.json,
            quiet=command.quiet,
        )


def _of_series(command: AverageCommand) -> list[str]:
    """Return the checkpoints that ``--last`` or ``--best`` selects in a directory."""
    from ckpttool.cli.paths import say_inferred_mode
    from ckpttool.cli.progress import ProgressLines
    from ckpttool.runs.average_sources import best_checkpoints, newest_checkpoints

    scope, jobs, metric, mode = command.scope, command.writing.jobs, command.metric, command.mode
    if len(command.sources) != 1:
        raise UsageError("--last and --best take one directory")
    (directory,) = command.sources
    if (command.last is None) == (command.best is None):
        raise UsageError("--last and --best are mutually exclusive")
    if command.last is not None:
        if metric is not None or mode is not None:
            raise UsageError("--metric and --mode are only valid with --best N")
        return newest_checkpoints(directory, command.last, scope, jobs=jobs, progress=ProgressLines())
    if metric is None or command.best is None:
        raise UsageError("--best needs --metric NAME, such as val_loss")
    found = best_checkpoints(
        directory, command.best, metric, mode, scope, jobs=jobs, progress=ProgressLines()
    )
    say_inferred_mode(metric, mode)
    return found

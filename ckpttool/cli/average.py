"""``ckpttool average``: one checkpoint whose weights are the average of several."""

from __future__ import annotations

from typing import Annotated

from ckpttool.cli.convert import Target, plan_and_convert
from ckpttool.cli.options import (
    Given,
    Jobs,
    Json,
    Mode,
    OptionsOf,
    PathText,
    Quiet,
    path_argument,
    typer_option,
)
from ckpttool.core.errors import UsageError
from ckpttool.core.options import SELECTION_PANEL
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
)

Weights = Annotated[
    str | None,
    typer_option(
        "--weights", metavar="W,W,...", help="Let each SRC count so much: 1,2,1.", panel=AVERAGE_PANEL
    ),
]
Ema = Annotated[
    float | None,
    typer_option(
        "--ema",
        metavar="DECAY",
        help="Take an exponential moving average over SRC..., the oldest first.",
        panel=AVERAGE_PANEL,
    ),
]
Last = Annotated[
    int | None,
    typer_option(
        "--last", metavar="N", help="Average the N newest intact checkpoints of SRC.", panel=SELECTION_PANEL
    ),
]
Best = Annotated[
    int | None,
    typer_option("--best", metavar="N", help="Average the N best by --metric of SRC.", panel=SELECTION_PANEL),
]
Metric = Annotated[
    str | None,
    typer_option(
        "--metric",
        metavar="NAME",
        complete="metric",
        help="Compare by this metric for --best.",
        panel=SELECTION_PANEL,
    ),
]
BestMode = Annotated[
    Mode | None,
    typer_option(
        "--mode",
        help="Take the lowest or the highest value as the best. [default: by the name]",
        panel=SELECTION_PANEL,
    ),
]


def average(
    sources: Annotated[
        list[PathText], path_argument("SRC...", "Checkpoints, the oldest first; or a directory of a series.")
    ],
    target: Target,
    *,
    weights: Weights = None,
    ema: Ema = None,
    last: Last = None,
    best: Best = None,
    metric: Metric = None,
    mode: BestMode = None,
    scope: Annotated[Given, OptionsOf(Scope, names=("series", "metrics"))],
    given: Annotated[Given, OptionsOf(ConvertOptions, names=_WRITING)],
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Average the weights of several checkpoints into one and compare the result.

    Sums are made in float64 and rounded once. Whole numbers, such as counters, are those of the last SRC. DST
    holds weights alone, and is written completely or not at all.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.ops.average import open_average, plan_average, shares_of

    options = ConvertOptions(**given, jobs=jobs)
    paths = [str(path) for path in sources]
    if last is not None or best is not None:
        paths = _of_series(paths, last, best, metric, mode, Scope(**scope), jobs)
    elif metric is not None or mode is not None or scope:
        raise UsageError("--metric, --mode, --metrics and --series go with --last N or --best N")
    else:
        paths = [single_checkpoint(path) for path in paths]
    shares = shares_of(len(paths), None if weights is None else _numbers(weights), ema)
    with open_average(paths, shares) as averaged:
        return plan_and_convert(
            lambda path, model: plan_average(averaged, path, options, model),
            str(target),
            options,
            json=json,
            quiet=quiet,
        )


def _of_series(
    paths: list[str],
    last: int | None,
    best: int | None,
    metric: str | None,
    mode: Mode | None,
    scope: Scope,
    jobs: int | None,
) -> list[str]:
    """Return the checkpoints that ``--last`` or ``--best`` chooses in a directory."""
    from ckpttool.cli.paths import say_inferred_mode
    from ckpttool.cli.progress import ProgressLines
    from ckpttool.runs.average_sources import best_checkpoints, newest_checkpoints

    if len(paths) != 1:
        raise UsageError("--last and --best take one directory")
    if (last is None) == (best is None):
        raise UsageError("--last and --best exclude each other")
    if last is not None:
        if metric is not None or mode is not None:
            raise UsageError("--metric and --mode go with --best N")
        return newest_checkpoints(paths[0], last, scope, jobs=jobs, progress=ProgressLines())
    if metric is None or best is None:
        raise UsageError("--best needs --metric NAME, such as val_loss")
    chosen_mode = None if mode is None else mode.value
    found = best_checkpoints(paths[0], best, metric, chosen_mode, scope, jobs=jobs, progress=ProgressLines())
    say_inferred_mode(metric, chosen_mode)
    return found


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--weights {text}: no list of numbers (such as 1,2,1)") from error

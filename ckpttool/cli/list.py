"""``ckpttool list``: which checkpoints are here?"""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli import retention_options as rules
from ckpttool.cli.grouped import LOOKED_AT, RULES, SHOWN
from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet
from ckpttool.cli.series import Depth, Mode, Null

Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        metavar="KEY",
        help="Sort by epoch, step, age, size, name or a metric, the least first.",
        show_default=False,
        rich_help_panel=SHOWN,
    ),
]
Reverse = Annotated[bool, typer.Option("--reverse", help="Turn the order around.", rich_help_panel=SHOWN)]
Best = Annotated[
    str | None,
    typer.Option(
        "--best",
        "--metric",
        metavar="METRIC",
        help="Mark the best of each series by this metric.",
        show_default=False,
        rich_help_panel=SHOWN,
    ),
]
BestMode = Annotated[
    Mode | None,
    typer.Option(
        "--mode",
        help="Whether its least or its greatest value is best.",
        show_default=False,
        rich_help_panel=SHOWN,
    ),
]
Flat = Annotated[
    bool | None,
    typer.Option(
        "--flat/--grouped",
        help="One table of all, or one for each series. [default: grouped on a terminal, flat elsewhere]",
        show_default=False,
        rich_help_panel=SHOWN,
    ),
]
Long = Annotated[
    bool,
    typer.Option(
        "--long", "-l", "--verbose", "-v", help="Show all that is known, in full.", rich_help_panel=SHOWN
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw metrics and sizes of each series: .svg, .png or .html.",
        show_default=False,
        rich_help_panel=SHOWN,
    ),
]
Verify = Annotated[
    Depth,
    typer.Option(
        "--verify", help="Look at the structure alone, or read every byte.", rich_help_panel=LOOKED_AT
    ),
]
KeepBest = Annotated[
    int | None,
    typer.Option(
        "--keep-best",
        metavar="N",
        help="Keep the N best by --best.",
        show_default=False,
        rich_help_panel=RULES,
    ),
]
Recursive = Annotated[
    bool,
    typer.Option(
        "--recursive",
        "-r",
        help="Descend where a configuration doesn't; without one it always does.",
        rich_help_panel=LOOKED_AT,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="List what prune would thin out by this configuration.",
        show_default=False,
        rich_help_panel=RULES,
    ),
]


def list_(
    context: typer.Context,
    directory: rules.Directory = None,
    sort: Sort = None,
    reverse: Reverse = False,
    metric: Best = None,
    mode: BestMode = None,
    flat: Flat = None,
    long: Long = False,
    plot: Plot = None,
    json: Json = False,
    null: Null = False,
    quiet: Quiet = False,
    verify: Verify = Depth.QUICK,
    recursive: Recursive = False,
    metrics: rules.Metrics = [],
    group_by: rules.By = None,
    series: rules.Series = [],
    exclude: Exclude = [],
    max_depth: MaxDepth = None,
    jobs: Jobs = None,
    keep_last: rules.KeepLast = None,
    keep_best: KeepBest = None,
    keep_every_steps: rules.KeepEverySteps = None,
    keep_every_epochs: rules.KeepEveryEpochs = None,
    keep_hourly: rules.KeepHourly = None,
    keep_daily: rules.KeepDaily = None,
    keep_weekly: rules.KeepWeekly = None,
    keep_monthly: rules.KeepMonthly = None,
    keep_yearly: rules.KeepYearly = None,
    keep_within: rules.KeepWithin = None,
    older_than: rules.OlderThan = None,
    keep_names: rules.KeepName = [],
    max_size: rules.MaxSize = None,
    max_total_size: rules.MaxTotalSize = None,
    incomplete: rules.Incomplete = None,
    config: Config = None,
) -> int:
    """List the checkpoints of a directory tree, series by series, each from the oldest on.

    With rules of prune it shows what these would keep and remove. Without DIR and rules, a ckpttool.toml with
    [retention] says where and what, as it does for prune. Nothing on disk is changed.
    """
    from ckpttool.cli.listing import Shown, listed

    shown = Shown(plot=plot, json=json, null=null, quiet=quiet, flat=flat, long=long, wanted=(metric, sort))
    return listed(None if directory is None else str(directory), context.params, config, shown)

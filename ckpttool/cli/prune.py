"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

import typer

from ckpttool.cli import retention_options as flags
from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet, Recursive, Verbose


def prune(
    context: typer.Context,
    directory: flags.Directory = None,
    keep_last: flags.KeepLast = None,
    keep_best: flags.KeepBest = None,
    metric: flags.Metric = None,
    mode: flags.BestMode = None,
    keep_every_steps: flags.KeepEverySteps = None,
    keep_every_epochs: flags.KeepEveryEpochs = None,
    keep_hourly: flags.KeepHourly = None,
    keep_daily: flags.KeepDaily = None,
    keep_weekly: flags.KeepWeekly = None,
    keep_monthly: flags.KeepMonthly = None,
    keep_yearly: flags.KeepYearly = None,
    keep_within: flags.KeepWithin = None,
    older_than: flags.OlderThan = None,
    keep_names: flags.KeepName = [],
    max_size: flags.MaxSize = None,
    max_total_size: flags.MaxTotalSize = None,
    incomplete: flags.Incomplete = None,
    failed: flags.Failed = None,
    recursive: Recursive = False,
    exclude: Exclude = [],
    max_depth: MaxDepth = None,
    series: flags.Series = [],
    group_by: flags.By = None,
    metrics: flags.Metrics = [],
    config: flags.Config = None,
    depth: flags.Verify = None,
    min_age: flags.MinAge = None,
    max_delete: flags.MaxDelete = None,
    trash: flags.Trash = False,
    empty_trash: flags.EmptyTrash = False,
    yes: flags.Yes = False,
    jobs: Jobs = None,
    dry_run: flags.DryRun = False,
    check: flags.Check = False,
    explain: flags.Explain = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Remove old checkpoints, series by series; what is kept is verified first.

    Without DIR and rules, [retention] in ckpttool.toml sets both. The newest intact checkpoint of each series
    is always kept, and so is what a link, a pointer or a pin names.
    """
    from ckpttool.cli.consent import Consent
    from ckpttool.cli.prune_actions import OutputOptions, empty_trashes, explain_checkpoint, prune_directories
    from ckpttool.cli.prune_options import read_prune_options

    options = read_prune_options(
        None if directory is None else str(directory), context.params, config, tells_unread=not empty_trash
    )
    output = OutputOptions(
        consent=Consent(is_given=options.yes or dry_run or check),
        dry_run=dry_run or check,
        check=check,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )
    if empty_trash:
        return empty_trashes(options, output)
    if explain is not None:
        return explain_checkpoint(options, explain, output)
    return prune_directories(options, output)

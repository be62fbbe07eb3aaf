"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

import typer

from ckpttool.cli import retention_options as options
from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet, Verbose
from ckpttool.cli.series import Recursive


def prune(
    context: typer.Context,
    directory: options.Directory = None,
    keep_last: options.KeepLast = None,
    keep_best: options.KeepBest = None,
    metric: options.Metric = None,
    mode: options.BestMode = None,
    keep_every_steps: options.KeepEverySteps = None,
    keep_every_epochs: options.KeepEveryEpochs = None,
    keep_hourly: options.KeepHourly = None,
    keep_daily: options.KeepDaily = None,
    keep_weekly: options.KeepWeekly = None,
    keep_monthly: options.KeepMonthly = None,
    keep_yearly: options.KeepYearly = None,
    keep_within: options.KeepWithin = None,
    older_than: options.OlderThan = None,
    keep_names: options.KeepName = [],
    max_size: options.MaxSize = None,
    max_total_size: options.MaxTotalSize = None,
    incomplete: options.Incomplete = None,
    failed: options.Failed = None,
    recursive: Recursive = False,
    exclude: Exclude = [],
    max_depth: MaxDepth = None,
    series: options.Series = [],
    group_by: options.By = None,
    metrics: options.Metrics = [],
    config: options.Config = None,
    depth: options.Verify = None,
    min_age: options.MinAge = None,
    max_delete: options.MaxDelete = None,
    trash: options.Trash = False,
    empty_trash: options.EmptyTrash = False,
    yes: options.Yes = False,
    jobs: Jobs = None,
    dry_run: options.DryRun = False,
    check: options.Check = False,
    explain: options.Explain = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Remove old checkpoints, series by series; what stays is verified first.

    Without DIR and rules, a ckpttool.toml with [retention] says where and what. The newest intact one of each
    series, and what something points at, always stay.
    """
    from ckpttool.cli.asking import Consent
    from ckpttool.cli.pruning import Manner, pruned
    from ckpttool.cli.retaining import wishes

    wanted = wishes(
        None if directory is None else str(directory), context.params, config, tells_unread=not empty_trash
    )
    manner = Manner(
        consent=Consent(is_given=wanted.yes or dry_run or check),
        dry_run=dry_run or check,
        check=check,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )
    if empty_trash:
        from ckpttool.cli.emptying import emptied

        return emptied(wanted, manner)
    if explain is not None:
        from ckpttool.cli.explaining import explained

        return explained(wanted, explain, manner)
    return pruned(wanted, manner)

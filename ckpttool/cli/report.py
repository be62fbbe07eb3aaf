"""``ckpttool report``: one page of HTML about a directory of checkpoints, to open or to send."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.cli.list import (
    best_option,
    plan_config_option,
    read_listing,
    retention_for_list,
    rules_group,
    status_of,
    verify_option,
    warn,
)
from ckpttool.cli.options import directory_or_paths, in_output, quiet_option
from ckpttool.cli.output import say
from ckpttool.cli.paths import directory_name, say_inferred_mode
from ckpttool.core.options import OUTPUT_PANEL, Depth, Mode, group, jobs_option, mode_option
from ckpttool.runs.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """The options of ``report``."""

    directory: str | None = directory_or_paths()
    output: str = in_output(
        *("--output", "-o"),
        metavar="FILE",
        help="Write the page to this file.",
        default="report.html",
        is_output=True,
    )
    metric: str | None = best_option()
    mode: Mode | None = mode_option(OUTPUT_PANEL)
    verify: Depth = verify_option()
    quiet: bool = quiet_option()
    scope: Mapping[str, Any] = group(
        Scope, ("recursive", "metrics", "group_by", "series", "exclude", "max_depth")
    )
    jobs: int | None = jobs_option()
    rules: Mapping[str, Any] = rules_group()
    config: str | None = plan_config_option()


def report(command: ReportCommand) -> int:
    """Write one HTML page: curves of all runs, sizes, verdicts, and tables to sort and filter.

    With rules of prune, it shows what they would keep and free. The page needs no network.
    """
    import time

    from ckpttool.cli.render.report import report_page
    from ckpttool.cli.reports import check_targets, write_report

    metric, mode, output, quiet = command.metric, command.mode, command.output, command.quiet
    given = {**command.scope, **command.rules, **({} if command.jobs is None else {"jobs": command.jobs})}
    named = [] if command.directory is None else [command.directory]
    retention = retention_for_list(named, given, metric, mode, command.config)
    paths = retention.directories
    check_targets({"--output": output}, [*paths, *retention.request_values.get("metrics", ())])
    listing, read = read_listing(retention, metric, mode, command.verify)
    if not quiet:
        say_inferred_mode(metric, mode)
        warn(listing, everything=not sys.stderr.isatty())
    depth = "every byte was read" if command.verify == "full" else "only the structure was read"
    subtitle = f"{time.strftime('%Y-%m-%d %H:%M %Z')}; {depth}"
    write_report("--output", output, report_page(", ".join(map(directory_name, paths)), subtitle, listing))
    if not quiet:
        say(f"wrote {output}: {len(listing.checkpoints):,} checkpoints in {len(listing.series):,} series")
    return status_of(listing, paths, read)

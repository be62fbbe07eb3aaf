"""``ckpttool report``: write an HTML page on a directory of checkpoints, which needs no network.

The page is ``render/report.html``, with the document of ``list --json`` in a script element.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ckpttool.cli.list import (
    best_option,
    plan_config_option,
    read_listing,
    retention_for_list,
    rules_group,
    say_problems,
    status_of,
    verify_option,
)
from ckpttool.cli.options import directory_or_paths, output_option, quiet_option
from ckpttool.cli.output import say
from ckpttool.cli.paths import directory_name, say_inferred_mode
from ckpttool.core.options import OUTPUT_PANEL, Depth, Mode, group, jobs_option, mode_option
from ckpttool.core.text import printable
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from ckpttool.runs.listing import Listing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """The options of ``report``."""

    directory: str | None = directory_or_paths()
    output: str = output_option(
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

    With prune rules, the page shows which checkpoints they would keep, and the space they would free. It
    works offline.
    """
    import time

    from ckpttool.cli.report_files import check_targets, write_report

    metric, mode, output, quiet = command.metric, command.mode, command.output, command.quiet
    given = {**command.scope, **command.rules, **({} if command.jobs is None else {"jobs": command.jobs})}
    named = [] if command.directory is None else [command.directory]
    retention = retention_for_list(named, given, metric, mode, command.config)
    paths = retention.directories
    check_targets({"--output": output}, [*paths, *retention.request_values.get("metrics", ())])
    listing, read = read_listing(retention, metric, mode, command.verify)
    if not quiet:
        say_inferred_mode(metric, mode)
        say_problems(listing, everything=not sys.stderr.isatty())
    depth = "every byte was read" if command.verify == "full" else "only the structure was read"
    subtitle = f"{time.strftime('%Y-%m-%d %H:%M %Z')}; {depth}"
    write_report("--output", output, report_page(", ".join(map(directory_name, paths)), subtitle, listing))
    if not quiet:
        say(f"wrote {output}: {len(listing.checkpoints):,} checkpoints in {len(listing.series):,} series")
    return status_of(listing, paths, read)


# Page -----------------------------------------------------------------------------------------------


def report_page(title: str, subtitle: str, listing: Listing) -> bytes:
    """Return the page: facts, curves of all runs in one panel, and sortable tables.

    Args:
        title: Directories of the listing.
        subtitle: Time and depth of the listing.
        listing: Checkpoints, with the plan of a policy if one was given.
    """
    from importlib.resources import files

    document = listing.document()
    document["problems"] = [{"path": one.path, "problem": one.message} for one in listing.problems]
    parts = {
        "title": escape(printable(title)),
        "subtitle": escape(printable(subtitle)),
        "data": _script_json(document),
        "best": _script_json(listing.best),
    }
    page = files("ckpttool.cli.render").joinpath("report.html").read_text("utf-8")
    return re.sub("@@([a-z]+)@@", lambda match: parts[match[1]], page).encode()


def _script_json(value: object) -> str:
    """Return JSON for a script element of HTML."""
    # HTML ends a script at ``</script>`` even within a string, and names of files come from downloads. These
    # three characters can be written as escapes of JSON, and occur outside of strings nowhere.
    from ckpttool.core.result import dumps

    return dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

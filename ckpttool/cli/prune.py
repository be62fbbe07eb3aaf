"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.cli.options import (
    dry_run_option,
    in_output,
    json_option,
    quiet_option,
    trash_option,
    verbose_option,
    yes_option,
)
from ckpttool.cli.paths import say_inferred_mode
from ckpttool.core.options import EXECUTION_PANEL, SELECTION_PANEL, argument, group, jobs_option, option
from ckpttool.runs.pruning.request import PruneRequest
from ckpttool.runs.retention.rules import Policy


def directory_or_paths() -> Any:
    return argument(
        "[DIR]", "Directory of checkpoints. [default: paths in ckpttool.toml, or .]", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCommand:
    """The options of ``prune``."""

    directory: str | None = directory_or_paths()
    rules: Mapping[str, Any] = group(Policy)
    request: Mapping[str, Any] = group(PruneRequest)
    require_copy: str | None = option(
        "--require-copy",
        metavar="LOCATION",
        help="Keep what LOCATION is not proven to have, byte for byte.",
        panel=EXECUTION_PANEL,
    )
    config: str | None = option(
        "--config", metavar="FILE", help="Read paths and rules from this file.", panel=SELECTION_PANEL
    )
    dry_run: bool = dry_run_option("Show what would be removed; remove nothing.")
    check: bool = option(
        "--check",
        help="Remove nothing; exit with 1 if something would be removed.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    yes: bool = yes_option()
    trash: bool = trash_option()
    empty_trash: bool = option(
        "--empty-trash",
        help="Delete what is in the trash, and nothing else.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    jobs: int | None = jobs_option()
    explain: str | None = in_output(
        "--explain", metavar="PATH", help="Explain why PATH is kept or removed; remove nothing."
    )
    json: bool = json_option()
    quiet: bool = quiet_option()
    verbose: bool = verbose_option()

    @property
    def is_dry(self) -> bool:
        """Tell whether nothing is changed."""
        return self.dry_run or self.check


def prune(command: PruneCommand) -> int:
    """Remove old checkpoints, series by series; what is kept is verified first.

    Without DIR and rules, [retention] in ckpttool.toml sets both. The newest intact checkpoint of each series
    is always kept, and so is what a link, a pointer or a pin names.
    """
    from ckpttool.cli.consent import Consent
    from ckpttool.cli.prune_actions import empty_trashes, explain_checkpoint, prune_directories
    from ckpttool.cli.prune_options import read_prune_options

    explain = command.explain
    own = {
        name: getattr(command, name) for name in ("trash", "empty_trash", "jobs", "explain", "require_copy")
    }
    own["yes"] = command.yes or command.is_dry or explain is not None  # then nobody is asked
    given = {
        **command.rules,
        **command.request,
        **{name: one for name, one in own.items() if one not in (None, False)},
    }
    options = read_prune_options(
        [] if command.directory is None else [command.directory],
        given,
        command.config,
        tells_unread=not command.empty_trash,
    )
    if not command.quiet and "metric" in command.rules:
        say_inferred_mode(command.rules["metric"], command.rules.get("mode"))
    if explain is not None and not command.empty_trash:
        return explain_checkpoint(options, explain, command)
    carry_out = empty_trashes if command.empty_trash else prune_directories
    return carry_out(options, command, Consent(is_given=options.yes))

"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.cli.options import (
    check_option,
    config_option,
    directory_or_paths,
    dry_run_option,
    in_output,
    json_option,
    quiet_option,
    trash_option,
    verbose_option,
    yes_option,
)
from ckpttool.cli.paths import say_inferred_mode
from ckpttool.core.options import EXECUTION_PANEL, SELECTION_PANEL, group, jobs_option, option
from ckpttool.runs.pruning.request import PruneRequest
from ckpttool.runs.retention.rules import Policy


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
    config: str | None = config_option("Read paths and rules from this file.", SELECTION_PANEL)
    dry_run: bool = dry_run_option("Show what would be removed; remove nothing.")
    check: bool = check_option("Remove nothing; exit with 1 if something would be removed.")
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

    @property
    def given(self) -> dict[str, Any]:
        """Return what the command line says of ``[retention]`` and of the trash, by attribute."""
        own = ("trash", "empty_trash", "jobs", "explain", "require_copy")
        values = {name: value for name in own if (value := getattr(self, name)) not in (None, False)}
        is_agreed = self.yes or self.is_dry or self.explain is not None  # then nobody is asked
        return {**self.rules, **self.request, **values, **({"yes": True} if is_agreed else {})}


def prune(command: PruneCommand) -> int:
    """Remove old checkpoints, series by series; what is kept is verified first.

    Without DIR and rules, [retention] in ckpttool.toml sets both. The newest intact checkpoint of each series
    is always kept, and so is what a link, a pointer or a pin names.
    """
    from ckpttool.cli.consent import Consent
    from ckpttool.cli.prune_actions import empty_trashes, explain_checkpoint, prune_directories
    from ckpttool.cli.retention_config import retention_for

    retention = retention_for(
        [] if command.directory is None else [command.directory],
        command.given,
        command.config,
        finds_unread=not command.empty_trash,
    )
    if not command.quiet and "metric" in command.rules:
        say_inferred_mode(command.rules["metric"], command.rules.get("mode"))
    if command.explain is not None and not command.empty_trash:
        return explain_checkpoint(retention, command.explain, command)
    carry_out = empty_trashes if command.empty_trash else prune_directories
    return carry_out(retention, command, Consent(is_given=retention.yes))

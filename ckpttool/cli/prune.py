"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

from typing import Annotated

from ckpttool.cli.options import (
    Given,
    Jobs,
    Json,
    OptionsOf,
    PathText,
    Quiet,
    Verbose,
    Yes,
    path_argument,
    typer_option,
)
from ckpttool.cli.paths import say_inferred_mode
from ckpttool.core.options import EXECUTION_PANEL, OUTPUT_PANEL, SELECTION_PANEL
from ckpttool.runs.pruning.request import PruneRequest
from ckpttool.runs.retention.rules import Policy

Directory = Annotated[
    PathText | None,
    path_argument("[DIR]", "Directory of checkpoints. [default: paths in ckpttool.toml, or .]"),
]
Config = Annotated[
    str | None,
    typer_option(
        "--config", metavar="FILE", help="Read paths and rules from this file.", panel=SELECTION_PANEL
    ),
]
Trash = Annotated[
    bool,
    typer_option(
        "--trash",
        help="Move checkpoints to the trash, from which undo restores them.",
        panel=EXECUTION_PANEL,
    ),
]
EmptyTrash = Annotated[
    bool,
    typer_option(
        "--empty-trash", help="Delete what is in the trash, and nothing else.", panel=EXECUTION_PANEL
    ),
]
RequireCopy = Annotated[
    str | None,
    typer_option(
        "--require-copy",
        metavar="LOCATION",
        help="Keep what LOCATION is not proven to have, byte for byte.",
        panel=EXECUTION_PANEL,
    ),
]
DryRun = Annotated[
    bool,
    typer_option(
        "--dry-run", "-n", help="Show what would be removed; remove nothing.", panel=EXECUTION_PANEL
    ),
]
Check = Annotated[
    bool,
    typer_option(
        "--check", help="Remove nothing; exit with 1 if something would be removed.", panel=EXECUTION_PANEL
    ),
]
Explain = Annotated[
    str | None,
    typer_option(
        "--explain",
        metavar="PATH",
        help="Explain why PATH is kept or removed; remove nothing.",
        panel=OUTPUT_PANEL,
    ),
]


def prune(
    directory: Directory = None,
    *,
    rules: Annotated[Given, OptionsOf(Policy)],
    request: Annotated[Given, OptionsOf(PruneRequest)],
    require_copy: RequireCopy = None,
    config: Config = None,
    dry_run: DryRun = False,
    check: Check = False,
    yes: Yes = False,
    trash: Trash = False,
    empty_trash: EmptyTrash = False,
    jobs: Jobs = None,
    explain: Explain = None,
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

    is_dry = dry_run or check
    own: dict[str, object] = {"trash": trash, "empty_trash": empty_trash, "jobs": jobs}
    own["yes"] = yes or is_dry or explain is not None  # then nobody is asked
    own |= {"explain": explain, "require_copy": require_copy}
    given = {**rules, **request, **{name: one for name, one in own.items() if one not in (None, False)}}
    options = read_prune_options(
        [] if directory is None else [str(directory)], given, config, tells_unread=not empty_trash
    )
    if not quiet and "metric" in rules:
        say_inferred_mode(rules["metric"], rules.get("mode"))
    output = OutputOptions(
        consent=Consent(is_given=options.yes),
        dry_run=is_dry,
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

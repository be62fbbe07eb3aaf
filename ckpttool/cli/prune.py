"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

from ckpttool.cli.paths import say_inferred_mode
from ckpttool.cli.prune_options import PruneCommand, read_prune_options


def prune(command: PruneCommand) -> int:
    """Remove old checkpoints, series by series; what is kept is verified first.

    Without DIR and rules, [retention] in ckpttool.toml sets both. The newest intact checkpoint of each series
    is always kept, and so is what a link, a pointer or a pin names.
    """
    from ckpttool.cli.consent import Consent
    from ckpttool.cli.prune_actions import empty_trashes, explain_checkpoint, prune_directories

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

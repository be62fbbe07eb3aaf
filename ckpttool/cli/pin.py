"""``ckpttool pin`` and ``ckpttool unpin``: protect checkpoints from retention policies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import json_option, null_option, output_option, quiet_option
from ckpttool.cli.output import FAILED, print_json, say_error, say_warning
from ckpttool.cli.paths import print_paths
from ckpttool.core.errors import UsageError
from ckpttool.core.options import argument
from ckpttool.core.text import printable

if TYPE_CHECKING:
    from ckpttool.core.errors import CheckpointError
    from ckpttool.runs.pointers.pins import Pinning


def _paths_argument() -> Any:
    help = "Checkpoints: a file, directory, prefix, index or shard, or a link to one."
    return argument("[PATH...]", help, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PinCommand:
    """The options of ``pin``."""

    paths: Sequence[str] = _paths_argument()
    list: bool = output_option(
        "--list", "-l", help="List the pinned checkpoints below PATH instead.", default=False
    )
    message: str | None = output_option(
        "--message", "-m", metavar="TEXT", help='Note the reason: "figure 2".'
    )
    until: str | None = output_option(
        "--until", metavar="DATE", help="Let the pin expire after this day: 2027-01-01, or 90d from now."
    )
    json: bool = json_option()
    null: bool = null_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinCommand:
    """The options of ``unpin``."""

    paths: Sequence[str] = _paths_argument()
    json: bool = json_option()
    quiet: bool = quiet_option()


def pin(command: PinCommand) -> int:
    """Pin checkpoints, so that no policy removes them."""
    from ckpttool.runs.pointers.pin_lists import parse_until
    from ckpttool.runs.pointers.pins import pin as carry_out

    if command.list and (command.message is not None or command.until is not None):
        raise UsageError("-m and --until can't be combined with --list")
    if command.list:
        return _list(command)
    if command.null:
        raise UsageError("-0 is only valid with --list")
    day = None if command.until is None else parse_until(command.until)
    done = carry_out(_require_paths(command.paths), note=command.message, until=day)
    _print(done, "pinned", "is already pinned", json=command.json, quiet=command.quiet)
    return 0


def unpin(command: UnpinCommand) -> int:
    """Unpin checkpoints, even those that no longer exist."""
    from ckpttool.runs.pointers.pins import unpin as carry_out

    done = carry_out(_require_paths(command.paths))
    _print(done, "unpinned", "is not pinned", json=command.json, quiet=command.quiet)
    return 0


def _require_paths(paths: Sequence[str]) -> Sequence[str]:
    if not paths:
        raise UsageError("name a PATH")
    return paths


def _print(done: Pinning, did: str, was: str, *, json: bool, quiet: bool) -> None:
    for message in done.recovered if not quiet else ():
        say_warning(message)
    if json:
        print_json(done.document())
    elif not quiet:
        for path in done.changed:
            print(f"{did} {printable(path)}")
        for path in done.unchanged:
            print(f"{printable(path)} {was}")


def _list(command: PinCommand) -> int:
    from ckpttool.runs.pointers.pin_lists import absence_message, pin_fault
    from ckpttool.runs.pointers.pins import pin_document, pins_below
    from ckpttool.transaction.paths import shown

    errors: list[CheckpointError] = []
    paths, quiet = command.paths or (os.curdir,), command.quiet
    listed = {(one.path, one.name): one for path in paths for one in pins_below(path, errors.append)}
    # A pin of a missing path still counts: the checkpoint may be copied back, and then it is protected. A pin
    # whose path exists but isn't a checkpoint protects nothing, so it isn't listed as one.
    missing = [one for one in listed.values() if one.name and not one.exists]
    faults = [(one, fault) for one in listed.values() if one not in missing and (fault := pin_fault(one))]
    void = {(one.path, one.name) for one, _ in faults}
    pins = {one.path: one for key, one in listed.items() if key not in void}
    if command.json:
        print_json(pin_document([*pins.values()], void=faults))
    elif pins and not quiet:
        print_paths([pinned.path for pinned in pins.values()], null=command.null)
    for pinned in pins.values() if not quiet else ():
        if pinned.remark.has_ended:
            say_warning(f"{pinned.path}: its pin expired on {pinned.remark.until}")
    for pinned in missing if not quiet else ():
        say_warning(f"{pinned.path}: it is pinned, but {absence_message(pinned)}")
    for pinned, fault in faults if not quiet else ():
        say_warning(f"{shown(pinned.file)}: pinned has {pinned.name!r}, {fault}")
    for error in errors:
        say_error(error)
    return FAILED if errors else int(bool(missing or faults))

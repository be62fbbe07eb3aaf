"""``ckpttool pin`` and ``ckpttool unpin``: what no policy removes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ckpttool.cli.options import HERE, Json, Null, PathText, Quiet, path_argument, typer_option
from ckpttool.cli.output import COULD_NOT, print_json, say_error, say_warning
from ckpttool.cli.paths import print_paths
from ckpttool.cli.render.terminal import printable
from ckpttool.core.errors import UsageError
from ckpttool.core.options import OUTPUT_PANEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.core.errors import CheckpointError
    from ckpttool.runs.pointers.pins import Pinning

Paths = Annotated[
    list[PathText] | None,
    path_argument("[PATH...]", "Checkpoints: a file, directory, prefix, index or shard, or a link to one."),
]
List = Annotated[
    bool,
    typer_option("--list", "-l", help="List the pinned checkpoints below PATH instead.", panel=OUTPUT_PANEL),
]


Message = Annotated[
    str | None,
    typer_option("--message", "-m", metavar="TEXT", help='Note why: "figure 2".', panel=OUTPUT_PANEL),
]
Until = Annotated[
    str | None,
    typer_option(
        "--until",
        metavar="DATE",
        help="Let the pin end after this day: 2027-01-01, or 90d from now.",
        panel=OUTPUT_PANEL,
    ),
]


def pin(
    paths: Paths = None,
    list_: List = False,
    message: Message = None,
    until: Until = None,
    json: Json = False,
    null: Null = False,
    quiet: Quiet = False,
) -> int:
    """Pin checkpoints, so that no policy removes them."""
    from ckpttool.runs.pointers.pins import pin as carry_out
    from ckpttool.runs.pointers.remarks import parse_until

    if list_ and (message is not None or until is not None):
        raise UsageError("-m and --until go without --list")
    if list_:
        return _list(paths or [HERE], json=json, null=null, quiet=quiet)
    if null:
        raise UsageError("-0 goes with --list")
    day = None if until is None else parse_until(until)
    done = carry_out(_require_paths(paths), note=message, until=day)
    _print(done, "pinned", "is already pinned", json=json, quiet=quiet)
    return 0


def unpin(paths: Paths = None, json: Json = False, quiet: Quiet = False) -> int:
    """Unpin checkpoints, even those that no longer exist."""
    from ckpttool.runs.pointers.pins import unpin as carry_out

    done = carry_out(_require_paths(paths))
    _print(done, "unpinned", "is not pinned", json=json, quiet=quiet)
    return 0


def _require_paths(paths: Sequence[str] | None) -> Sequence[str]:
    if not paths:
        raise UsageError("name a PATH")
    return paths


def _print(done: Pinning, did: str, was: str, *, json: bool, quiet: bool) -> None:
    for message in done.recovered if not quiet else ():
        say_warning(message)
    if json:
        from ckpttool.cli.render.json import pin_document

        print_json(pin_document(done.pins, done.changed))
    elif not quiet:
        for path in done.changed:
            print(f"{did} {printable(path)}")
        for path in done.unchanged:
            print(f"{printable(path)} {was}")


def _list(paths: Sequence[str], *, json: bool, null: bool, quiet: bool) -> int:
    from ckpttool.runs.pointers.pin_lists import absence_message, pin_fault
    from ckpttool.runs.pointers.pins import pins_below
    from ckpttool.transaction.paths import shown

    errors: list[CheckpointError] = []
    listed = {(one.path, one.name): one for path in paths for one in pins_below(path, errors.append)}
    gone = [one for one in listed.values() if one.name and not one.is_there]
    faults = [(one, fault) for one in listed.values() if one not in gone and (fault := pin_fault(one))]
    void = {(one.path, one.name) for one, _ in faults}
    pins = {one.path: one for key, one in listed.items() if key not in void}
    if json:
        from ckpttool.cli.render.json import pin_document

        print_json(pin_document([*pins.values()], void=faults))
    elif pins and not quiet:
        print_paths([pinned.path for pinned in pins.values()], null=null)
    for pinned in pins.values() if not quiet else ():
        if pinned.remark.has_ended:
            say_warning(f"{pinned.path}: its pin ended on {pinned.remark.until}, and protects no more")
    for pinned in gone if not quiet else ():
        say_warning(f"{pinned.path}: it is pinned, and {absence_message(pinned)}")
    for pinned, fault in faults if not quiet else ():
        say_warning(f"{shown(pinned.file)}: pinned has {pinned.name!r}, {fault}")
    for error in errors:
        say_error(str(error))
    return COULD_NOT if errors else int(bool(gone or faults))

"""``ckpttool verify``: is it intact, sane and safe?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet, Verbose
from ckpttool.cli.output import has_colour, progress, say_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.discovery import Walk
    from ckpttool.formats.interface import Unit
    from ckpttool.ops.verify import Verification


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", show_default=False, help="Files, or directories of checkpoints."),
    ],
    json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check structure and safety; read no values.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="NAME,...",
            help="Run these checks: structure, checksum, values, safety.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail.")] = False,
    exclude: Exclude = [],  # noqa: B006 - Typer copies it
    max_depth: MaxDepth = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Check that it is intact, sane and safe.

    Structure, every checksum, NaN and infinities, and what loading it could run. A directory stands for all
    checkpoints in it. Exit status: 0 all is well, 1 invalid or unsafe, 2 not a checkpoint.
    """
    from ckpttool.formats.discovery import Walk

    checks = _checks(quick, only)
    could_not = False
    verifications = []
    walk = Walk(exclude=exclude, max_depth=max_depth, on_error=lambda error: say_error(str(error)))
    for path in paths:
        units = list(_units(str(path), walk))
        could_not |= not units
        verifications += [_verified(unit, checks, strict, jobs) for unit in units]
    if verifications and not quiet:
        _print(verifications, json, verbose)
    if could_not:
        return 2
    return int(not all(_passes(verification, strict) for verification in verifications))


def _checks(quick: bool, only: str | None) -> tuple[str, ...]:
    """Return the names of the checks to run.

    Raises:
        UsageError: A name is none of them.
    """
    from ckpttool.errors import UsageError
    from ckpttool.ops.verify import CHECKS, QUICK_CHECKS

    if only is None:
        return QUICK_CHECKS if quick else CHECKS
    names = tuple(name.strip() for name in only.split(","))
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise UsageError(f"no check {unknown[0]!r}: there are {', '.join(CHECKS)}")
    return tuple(name for name in names if not quick or name in QUICK_CHECKS)


def _units(path: str, walk: Walk) -> Iterator[Unit]:
    """Yield what is to be verified at a path; say so where it is nothing."""
    from ckpttool.errors import CheckpointError
    from ckpttool.formats import unrecognised
    from ckpttool.formats.discovery import discover
    from ckpttool.formats.interface import Probe

    found = False
    try:
        for unit in discover(path, walk):
            found = True
            yield unit
        if not found:
            raise unrecognised(Probe(path))
    except CheckpointError as error:
        say_error(str(error))


def _verified(unit: Unit, checks: tuple[str, ...], strict: bool, jobs: int | None) -> Verification:
    from ckpttool.ops.verify import verify as verify_one

    with progress(unit.path, unit.nbytes) as advance:
        return verify_one(unit, only=checks, strict=strict, jobs=jobs, advance=advance)


def _passes(verification: Verification, strict: bool) -> bool:
    from ckpttool.ops.verify import Safety

    return verification.is_fine and not (strict and verification.safety is Safety.UNKNOWN)


def _print(verifications: list[Verification], json: bool, verbose: bool) -> None:
    if json:
        from ckpttool.cli.output import print_json
        from ckpttool.render.json import verify_document

        print_json(verify_document(verifications))
        return
    from ckpttool.render.text import verify_text

    print(verify_text(verifications, verbose=verbose, colour=has_colour(sys.stdout)))

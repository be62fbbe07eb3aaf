"""``ckpttool verify``: is it intact, sane and safe?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TextIO

import typer

from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet, Verbose
from ckpttool.cli.output import has_colour, progress, say_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.formats.interface import Unit
    from ckpttool.ops.sealing import Sealed
    from ckpttool.ops.verify import Verification


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            readable=False,
            show_default=False,
            help="Files, or directories of checkpoints.",
        ),
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
            help="Run these checks: structure, checksum, values, safety, manifest.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail.")] = False,
    write_manifest: Annotated[
        bool,
        typer.Option(
            "--write-manifest", help="Write NAME.sha256 and NAME.digests.json beside what is valid."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a manifest that says something else.")
    ] = False,
    exclude: Exclude = [],  # noqa: B006 - Typer copies it
    max_depth: MaxDepth = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Check that it is intact, sane and safe.

    Structure, every checksum, NaN and infinities, what loading it could run, and a manifest beside it. A
    directory stands for all checkpoints in it. Exit status: 0 all is well, 1 invalid or unsafe, 2 not a
    checkpoint.
    """
    from ckpttool.errors import CheckpointError

    checks = _checks(quick, only)
    _check_sealing(write_manifest, force, whole=not quick and only is None)
    sealing = _Sealing(force, {}) if write_manifest else None
    wanted = _Wanted(checks, strict, jobs, exclude, max_depth, sealing)
    could_not = False
    verifications: list[Verification] = []
    for path in paths:
        try:
            verifications += _verified_all(str(path), wanted)
        except CheckpointError as error:
            say_error(str(error))
            could_not = True
    sealed = sealing.done if sealing else {}
    _say_refused(sealed)
    if could_not or any(one.failed for one in sealed.values()):
        _say_sealed(sealed, sys.stderr)
        return 2
    if not quiet:
        _print(verifications, sealed, json, verbose)
    passed = all(_passes(verification, strict) for verification in verifications)
    return int(not passed or any(one.refused for one in sealed.values()))


class _Wanted(NamedTuple):
    """What was asked for."""

    checks: tuple[str, ...]
    strict: bool
    jobs: int | None
    exclude: list[str]
    max_depth: int | None
    sealing: _Sealing | None


class _Sealing(NamedTuple):
    """That manifests are wanted, and what became of those so far, by the checkpoints' paths."""

    force: bool
    done: dict[str, Sealed]


def _check_sealing(write_manifest: bool, force: bool, *, whole: bool) -> None:
    """Require that a manifest is only written for what was looked at in full.

    Raises:
        UsageError: It isn't.
    """
    from ckpttool.errors import UsageError

    if force and not write_manifest:
        raise UsageError("--force goes with --write-manifest")
    if write_manifest and not whole:
        raise UsageError("--write-manifest needs all checks: leave --quick and --only out")


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
    checks = tuple(name for name in names if not quick or name in QUICK_CHECKS)
    if not checks:
        raise UsageError("--quick and --only leave no check")
    return checks


def _verified_all(path: str, wanted: _Wanted) -> list[Verification]:
    """Return the verdicts on all checkpoints at a path; what in a directory can't be read is invalid.

    Raises:
        CheckpointError: The path itself can't be looked at, or nothing there is a checkpoint.
    """
    from ckpttool.errors import CheckpointError
    from ckpttool.formats import unrecognised
    from ckpttool.formats.discovery import Walk, discover
    from ckpttool.formats.interface import Probe
    from ckpttool.ops.verify import unreadable

    lost: list[CheckpointError] = []
    walk = Walk(exclude=wanted.exclude, max_depth=wanted.max_depth, on_error=lost.append)
    units = sorted(discover(path, walk), key=lambda unit: unit.path)
    if not units:
        with Probe(path) as probe:
            raise lost[0] if lost else unrecognised(probe)
    verifications = []
    for unit in units:
        try:
            verifications.append(_verified(unit, wanted))
        except CheckpointError as error:
            if unit.path == path:
                raise
            lost.append(error)
    return verifications + [unreadable(error) for error in lost]


def _verified(unit: Unit, wanted: _Wanted) -> Verification:
    from ckpttool.ops.verify import verify as verify_one

    if wanted.sealing is not None:
        from ckpttool.ops.sealing import verify_and_seal

        with progress(unit.path, unit.nbytes) as advance:
            force, strict, jobs = wanted.sealing.force, wanted.strict, wanted.jobs
            verdict, sealed = verify_and_seal(unit, force=force, strict=strict, jobs=jobs, advance=advance)
        wanted.sealing.done[unit.path] = sealed
        return verdict
    with progress(unit.path, unit.nbytes) as advance:
        return verify_one(unit, only=wanted.checks, strict=wanted.strict, jobs=wanted.jobs, advance=advance)


def _passes(verification: Verification, strict: bool) -> bool:
    from ckpttool.ops.verify import Safety, Status

    was_judged = any(
        check.name == "safety" and check.status is not Status.SKIPPED for check in verification.checks
    )
    return verification.is_fine and not (strict and was_judged and verification.safety is Safety.UNKNOWN)


def _print(
    verifications: list[Verification], sealed: Mapping[str, Sealed], json: bool, verbose: bool
) -> None:
    if json:
        from ckpttool.cli.output import print_json
        from ckpttool.render.json import verify_document

        print_json(verify_document(verifications, sealed))
        return
    from ckpttool.render.text import verify_text

    print(verify_text(verifications, verbose=verbose, colour=has_colour(sys.stdout)))
    _say_sealed(sealed, sys.stdout)


def _say_sealed(sealed: Mapping[str, Sealed], stream: TextIO) -> None:
    """Print a line for each manifest that is there now: also for those written before something failed."""
    from ckpttool.render.escape import printable

    for one in sealed.values():
        if one.files:
            verb = "there already" if one.was_there else "wrote"
            print(f"{verb}: {', '.join(map(printable, one.files))}", file=stream)


def _say_refused(sealed: Mapping[str, Sealed]) -> None:
    for path, one in sealed.items():
        if one.refused is not None:
            say_error(f"{path}: no manifest written: {one.refused}")

"""``ckpttool verify``: is it intact, sane and safe, and does it predict?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ckpttool.cli import predict_options as predicting
from ckpttool.cli import reports
from ckpttool.cli.options import Given, Jobs, Json, OptionsOf, Quiet, Verbose
from ckpttool.cli.output import COULD_NOT, has_colour, say_error, say_warning
from ckpttool.predict.request import PredictionRequest
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.cli.verdicts import VerifyOutcome
    from ckpttool.cli.verify_config import VerifyConfig
    from ckpttool.ops.manifest_seal import SealResult


def verify(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...",
            readable=False,
            show_default=False,
            help="Files, or directories of checkpoints. [default: paths in ckpttool.toml]",
        ),
    ] = None,
    json: Json = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check only structure and safety; read no values.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="NAME,...",
            help="Run only these checks: structure, checksum, values, safety, manifest, load, predict.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Read the rules from this file.", show_default=False),
    ] = None,
    write_manifest: Annotated[
        bool,
        typer.Option(
            "--write-manifest", help="Write NAME.sha256 and NAME.digests.json for each valid checkpoint."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing manifest or recording.")
    ] = False,
    predict: predicting.Predict = False,
    *,
    prediction: Annotated[Given, OptionsOf(PredictionRequest)],
    junit: reports.Junit = None,
    sarif: reports.Sarif = None,
    github: reports.Github = None,
    summary: reports.Summary = None,
    scope: Annotated[Given, OptionsOf(Scope, ("exclude", "max_depth"))],
    jobs: Jobs = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Check that checkpoints are intact, sane and safe, and with --predict that they still predict.

    The checks cover structure, every checksum, NaN and infinities, code that loading would run, and the
    manifest, if there is one. A directory means all checkpoints in it. The options from --model to --memory
    control the prediction. Exit status: 0 all is well, 1 invalid, unsafe or not run, 2 not a checkpoint.
    """
    from ckpttool.cli.reports import check_targets, files_read
    from ckpttool.cli.verdicts import VerifyOptions, verify_all
    from ckpttool.core.errors import UsageError

    settings = _configuration(config, has_paths=bool(paths))
    checks, names_prediction = _checks_to_run(quick, only)
    predict = predict or names_prediction
    may_predict = predict or settings is not None
    is_complete = not quick and only is None
    wishes = predicting.read_predict_options(prediction)
    _check_prediction_files(wishes, may_predict=may_predict)
    if write_manifest and not is_complete:
        raise UsageError("--write-manifest needs all checks: leave --quick and --only out")
    if write_manifest and may_predict:
        raise UsageError("--write-manifest takes a PATH, and neither --predict nor a configuration")
    if force and not write_manifest and "record" not in wishes:
        raise UsageError("--force goes with --write-manifest or --record")
    places = [*map(str, paths or (settings.paths if settings else ()))]
    check_targets(
        {"--record": wishes.get("record"), "--junit": junit, "--sarif": sarif, "--summary": summary},
        files_read(places, wishes),
        force=force,
    )
    options = VerifyOptions(
        checks=checks,
        strict=strict or (settings is not None and settings.strict),
        jobs=jobs,
        exclude=[*scope.get("exclude", ()), *(settings.exclude if settings else ())],
        max_depth=scope.get("max_depth"),
        predict=predict,
        wishes=wishes,
        config=settings,
        seal=write_manifest,
        force=force,
    )
    outcome = verify_all(places, options)
    if settings is not None and not paths and is_complete and not outcome.failures:
        _warn_unused_rules(settings, outcome)
    for path, sealed in outcome.sealed.items():
        if sealed.refused is not None:
            say_error(f"{path}: no manifest written: {sealed.refused}")
    for warning in outcome.warnings if not quiet else ():
        say_warning(warning)
    reports.write_reports(
        reports.Reports(junit, sarif, github, summary),
        outcome.verifications,
        outcome.failures,
        outcome.seconds,
    )
    if outcome.failures or any(one.failed for one in outcome.sealed.values()):
        _print_manifests(outcome.sealed, sys.stderr)
        return COULD_NOT
    if not quiet:
        _print_verdicts(outcome, json, verbose)
    return int(not outcome.passes(options.strict))


def _configuration(named: str | None, *, has_paths: bool) -> VerifyConfig | None:
    """Return the configuration that applies: one that is named, or one found if no path is given."""
    if named is None and has_paths:
        return None
    from ckpttool.cli.config import find_config
    from ckpttool.cli.verify_config import read_config
    from ckpttool.core.errors import UsageError

    path = named or find_config()
    if path is None:
        raise UsageError("name a PATH, or write a ckpttool.toml that names some (see docs/config.md)")
    return read_config(path, is_named=named is not None)


def _check_prediction_files(wishes: Mapping[str, object], *, may_predict: bool) -> None:
    """Require that options of a prediction come with one, and that the files they name exist."""
    import os

    from ckpttool.core.errors import NotFound, UsageError

    if wishes and not may_predict:
        raise UsageError(f"{predicting.flag_of(next(iter(wishes)))} goes with --predict")
    for name in ("input", "expect", "labels"):
        path = wishes.get(name)
        if path is not None and not os.path.isfile(str(path)):
            raise NotFound(str(path), "no such file")


def _checks_to_run(quick: bool, only: str | None) -> tuple[tuple[str, ...], bool]:
    """Return the names of the checks to run, and whether a prediction is among them."""
    from ckpttool.core.errors import UsageError
    from ckpttool.ops.verdict import CHECKS, PREDICTION, QUICK_CHECKS

    if only is None:
        return (QUICK_CHECKS if quick else CHECKS), False
    names = tuple(name.strip() for name in only.split(","))
    known = (*CHECKS, *PREDICTION)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no check {unknown[0]!r}: there are {', '.join(known)}")
    predicts = not set(PREDICTION).isdisjoint(names)
    wanted = {*names, *QUICK_CHECKS} if predicts else set(names)  # nothing is loaded that may be unsafe
    checks = tuple(name for name in CHECKS if name in wanted and (not quick or name in QUICK_CHECKS))
    if not checks:
        raise UsageError("--quick and --only leave no check")
    return checks, predicts


def _warn_unused_rules(config: VerifyConfig, outcome: VerifyOutcome) -> None:
    from ckpttool.cli.verify_config import unused_rules

    for sentence in unused_rules(config, outcome.judged):
        say_warning(sentence)


def _print_verdicts(outcome: VerifyOutcome, json: bool, verbose: bool) -> None:
    if json:
        from ckpttool.cli.output import print_json
        from ckpttool.cli.render.json import verify_document

        print_json(verify_document(outcome.verifications, outcome.sealed))
        return
    from ckpttool.cli.render.verdicts import verify_text

    print(verify_text(outcome.verifications, verbose=verbose, colour=has_colour(sys.stdout)))
    _print_manifests(outcome.sealed, sys.stdout)


def _print_manifests(sealed: Mapping[str, SealResult], stream: TextIO) -> None:
    """Print a line for each manifest that is there now: also for those written before something failed."""
    from ckpttool.cli.render.terminal import printable

    for one in sealed.values():
        if one.files:
            verb = "already there" if one.was_there else "wrote"
            print(f"{verb}: {', '.join(map(printable, one.files))}", file=stream)

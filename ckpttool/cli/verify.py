"""``ckpttool verify``: the combination of its options, and its reports, verdicts and exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ckpttool.cli.output import FAILED, has_colour, print_json, say, say_error, say_warning, width
from ckpttool.cli.report_files import Reports, check_targets, files_read, write_reports
from ckpttool.cli.verify_options import VerifyCommand, flag_of, implies_prediction
from ckpttool.ops.workload import Workload
from ckpttool.storage import fs

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpttool.cli.part_documents import PartDocument
    from ckpttool.cli.verdicts import VerifyOutcome
    from ckpttool.cli.verify_config import VerifyConfig


_AUTO = "auto"
"""Value of ``--config`` for the configuration nearest to the paths."""


_WITH_MERGE = frozenset({"paths", "strict", "reports", "merge", "json", "quiet", "verbose"})
"""Attributes of the options that are valid with ``--merge``."""


def verify(command: VerifyCommand) -> int:
    """Check that checkpoints are intact, sane and safe, and with --predict that they still predict.

    The checks cover structure, every checksum, NaN and infinities, code that loading would run, and the
    manifest, if there is one. A directory means all checkpoints in it.
    """
    from ckpttool.cli.verdicts import verify_all_with
    from ckpttool.core.errors import UsageError

    wanted = command.reports
    if wanted.takes_stdout and command.json:
        raise UsageError("--json can't be combined with a report on stdout (-)")
    if command.merge:
        plain = VerifyCommand(reports=wanted, workload=Workload())
        others = (one.name for one in fields(command) if one.name not in _WITH_MERGE)
        if not command.paths or any(getattr(command, name) != getattr(plain, name) for name in others):
            raise UsageError("--merge takes JSON documents of --part, and only output and report options")
        return _show_merged(command, wanted)
    given = {*command.prediction, *(["predict"] if command.predict else [])}
    settings = _configuration(command.config, command.paths, given, quiet=command.quiet)
    checks, names_prediction = _checks_to_run(command.quick, command.only)
    # Options such as --model imply a prediction, but not with a configuration: its rules decide which
    # checkpoints are predicted, and the options only complete them.
    prediction_options = command.prediction
    predict = (
        command.predict or names_prediction or (settings is None and implies_prediction(prediction_options))
    )
    may_predict = predict or settings is not None
    is_complete = not command.quick and command.only is None
    _check_prediction_files(prediction_options, may_predict=may_predict)
    _require_compatible(command, is_complete=is_complete, may_predict=may_predict)
    if command.against is not None and (command.write_manifest or len(command.paths) != 1):
        raise UsageError("--against takes one PATH, and can't be combined with --write-manifest")
    if command.against is not None:
        fs.place_of(command.against).require_askable(command.against)
    if command.force and not command.write_manifest and "record" not in prediction_options:
        raise UsageError("--force is only valid with --write-manifest or --record")
    places = [*(command.paths or (settings.paths if settings else ()))]
    check_targets(
        {"--record": prediction_options.get("record"), **_report_files(wanted)},
        files_read(places, prediction_options),
        force=command.force,
    )
    command = replace(
        command,
        checks=checks,
        settings=settings,
        strict=command.strict or (settings is not None and settings.strict),
        exclude=[*command.exclude, *(settings.exclude if settings else ())],
        predict=predict,
    )
    outcome = verify_all_with(command.executor, places, command)
    # A rule counts as unused only if all that the configuration names was verified, with all checks.
    if settings is not None and not command.paths and is_complete and not outcome.failures:
        from ckpttool.cli.verify_config import unused_rules

        for sentence in unused_rules(settings, outcome.judged):
            say_warning(sentence)
    for path, sealed in outcome.sealed.items():
        if sealed.refused is not None:
            say_error(f"{path}: no manifest written: {sealed.refused}")
    return _report(outcome, wanted, command)


def _report_files(wanted: Reports) -> dict[str, str | None]:
    return {"--junit": wanted.junit, "--sarif": wanted.sarif, "--summary": wanted.summary}


def _require_compatible(command: VerifyCommand, *, is_complete: bool, may_predict: bool) -> None:
    """Require options that can be combined."""
    from ckpttool.core.errors import UsageError

    seals = command.write_manifest
    if seals and not is_complete:
        raise UsageError("--write-manifest needs all checks (omit --quick and --only)")
    if seals and may_predict:
        raise UsageError(
            "--write-manifest needs a PATH, and can't be combined with --predict or a configuration"
        )
    if command.workload.sample is not None and (not is_complete or seals or may_predict):
        raise UsageError(
            "--sample needs a PATH, and can't be combined with --quick, --only, --write-manifest or --predict"
        )
    if command.executor is not None and may_predict:
        raise UsageError("--executor needs a PATH, and can't be combined with --predict or a configuration")


def _report(outcome: VerifyOutcome, wanted: Reports, command: VerifyCommand) -> int:
    """Write the reports, print the warnings and the verdicts, and return the exit status."""
    from ckpttool.cli.paths import say_unread
    from ckpttool.core.errors import NotACheckpoint

    if outcome.strict or not command.quiet:
        for warning in outcome.warnings:
            say_warning(warning)
        say_unread(outcome.unread, "not verified, safety unknown", everything=command.verbose)
    unread = outcome.unread if outcome.strict else {}
    failures = [*outcome.failures, *(NotACheckpoint(path, why) for path, why in unread.items())]
    write_reports(wanted, outcome.verifications, failures, outcome.seconds, strict=outcome.strict)
    has_verdicts = bool(outcome.verifications) or not outcome.failures or outcome.share is not None
    if not (command.json and command.quiet) and has_verdicts and not wanted.takes_stdout:
        _print_verdicts(outcome, command)
    # 2 wins over 1: a checkpoint that couldn't be verified may be worse than the invalid ones.
    if outcome.failures or any(one.failed for one in outcome.sealed.values()):
        return FAILED
    return int(not outcome.passed)


def _show_merged(command: VerifyCommand, wanted: Reports) -> int:
    """Print the combined result of the documents of all parts; --strict was an option of the parts."""
    from ckpttool.cli.part_documents import merge_verdicts, read_parts
    from ckpttool.runs.listing import LIST_SCHEMA

    check_targets(_report_files(wanted), command.paths)
    documents = read_parts(command.paths)
    if documents[0].schema == LIST_SCHEMA:
        return _show_merged_list(documents, command, has_reports=wanted != Reports())
    outcome = merge_verdicts(documents)
    for failure in outcome.failures:
        say_error(failure)
    return _report(outcome, wanted, command)


def _show_merged_list(documents: Sequence[PartDocument], command: VerifyCommand, *, has_reports: bool) -> int:
    from ckpttool.cli.part_documents import merge_lists
    from ckpttool.cli.paths import say_unread
    from ckpttool.core.errors import UsageError

    if not command.json or has_reports:
        raise UsageError("--merge of list documents needs --json, and writes no reports")
    document, problems, unread = merge_lists(documents)
    for path, message in problems:
        say_warning(f"{path}: {message}")
    if not command.quiet:
        say_unread(unread, "not listed", everything=command.verbose)
    print_json(document)
    return int(bool(problems))


def _configuration(
    named: str | None, paths: Sequence[str], given: Collection[str], *, quiet: bool
) -> VerifyConfig | None:
    """Return the configuration that applies: one that is named, or one found if no path is given.

    Args:
        named: The value of ``--config``.
        given: Attributes of a prediction that the command line gives.
    """
    # With paths, one is searched only for ``--config auto``: a configuration next to a downloaded checkpoint
    # must not loosen checks.
    from ckpttool.cli.config import find_config, read_document
    from ckpttool.cli.verify_config import read_config
    from ckpttool.core.errors import UsageError

    if named not in (None, _AUTO):
        return read_config(read_document(named, is_named=True), given=given)
    if paths:
        if named is None and not quiet:
            _say_unread(paths)
        return None if named is None else read_config(read_document(_config_beside(paths)), given=given)
    path = find_config()
    if path is None:
        raise UsageError("name a PATH, or write a ckpttool.toml with paths")
    return read_config(read_document(path), given=given)


def _config_beside(paths: Sequence[str]) -> str:
    """Return the one configuration that is nearest to all paths."""
    from ckpttool.cli.config import find_config_beside
    from ckpttool.core.errors import UsageError

    found = {path: find_config_beside(path) for path in paths}
    (first, config), *others = found.items()
    if config is None:
        raise UsageError(f"--config auto: no configuration for {first} (omit --config)")
    for path, other in others:
        if other is None or os.path.realpath(other) != os.path.realpath(config):
            hint = "verify them separately, or name one"
            raise UsageError(f"--config auto: {config} applies to {first}, but not to {path} ({hint})")
    return config


def _say_unread(paths: Sequence[str]) -> None:
    from ckpttool.cli.config import unread_config_beside
    from ckpttool.core.text import printable

    config = next(filter(None, map(unread_config_beside, paths)), None)
    if config is not None:
        say(f"ckpttool: {printable(config)} is not read when paths are named (--config auto reads it)")


def _check_prediction_files(options: Mapping[str, object], *, may_predict: bool) -> None:
    """Require that options of a prediction are given with one, and that the files they name exist."""
    from ckpttool.core.errors import NotFound, UsageError

    if options and not may_predict:
        raise UsageError(f"{flag_of(next(iter(options)))} is only valid with --predict")
    for name in ("input", "expect", "labels"):
        path = options.get(name)
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
        raise UsageError(f"no check {unknown[0]!r}; expected one of {', '.join(known)}")
    predicts = not set(PREDICTION).isdisjoint(names)
    # A prediction loads the checkpoint, which may run code, so the checks of structure and safety come first.
    wanted = {*names, *QUICK_CHECKS} if predicts else set(names)
    checks = tuple(name for name in CHECKS if name in wanted and (not quick or name in QUICK_CHECKS))
    if not checks:
        raise UsageError("--quick and --only leave no check")
    return checks, predicts


def _print_verdicts(outcome: VerifyOutcome, command: VerifyCommand) -> None:
    if command.json:
        print_json(outcome.document())
        return
    from ckpttool.cli.render.verdicts import VerifyStyle, verify_text
    from ckpttool.core.text import printable

    style = VerifyStyle(
        width=width(sys.stdout) if sys.stdout.isatty() else None,
        colour=has_colour(sys.stdout),
        verbose=command.verbose,
        problems_only=command.quiet,
        strict=outcome.strict,
        part=None if outcome.share is None else str(outcome.share.part),
        read_in_full=outcome.read_in_full,
        unread=len(outcome.unread),
    )
    if text := verify_text(outcome.verifications, style):
        print(text)
    if not command.quiet:
        # Also those written before something failed: they are on the disk.
        for one in outcome.sealed.values():
            if one.files:
                verb = "wrote" if one.written else "already there"
                print(f"{verb}: {', '.join(map(printable, one.files))}")

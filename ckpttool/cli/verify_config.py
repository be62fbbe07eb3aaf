"""``[verify]`` and ``[[verify.rule]]`` of a configuration, and the settings of each checkpoint.

All rules that match a checkpoint apply, later ones over earlier ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

from ckpttool.cli.config import ConfigDocument, code_ownership_doubt
from ckpttool.cli.config_keys import paths_key, read
from ckpttool.cli.options import strict_option
from ckpttool.core.errors import UsageError
from ckpttool.core.options import Reach, group, option, same_option
from ckpttool.ops.ignored_findings import Ignore, is_used
from ckpttool.ops.verdict import Verification
from ckpttool.predict.request import PredictionRequest
from ckpttool.runs.retention.request import glob_below, matches
from ckpttool.runs.scope import Scope

_ONE_OF = {"input": "input_shapes", "input_shapes": "input"}
"""Mutually exclusive options: a later rule with one of them drops the other of an earlier rule."""


@dataclass(frozen=True, slots=True)
class VerifyRule:
    """Settings for checkpoints that match a glob; None and missing ones are left to other rules.

    Attributes:
        origin: Path and heading of the rule.
        glob: Of paths relative to the file.
        predict: Whether checkpoints are loaded and run; None if the rule doesn't have the key.
        prediction_options: Attributes of a ``PredictionRequest``.
        ignores: Expected findings, which are shown but don't fail; those of safety and loading always do.
    """

    origin: str
    glob: str = option(
        "path",
        help="Checkpoints that the rule is for, relative to this file.",
        parse=glob_below,
        expected="a glob of checkpoints",
        example="models/*.pth",
        reach=Reach.HARMLESS,
        default=MISSING,
    )
    predict: bool | None = option(
        "predict", help="Load the model with its framework and run it.", example=True, reach=Reach.CODE
    )
    prediction_options: Mapping[str, Any] = group(
        PredictionRequest,
        refused={
            "trust": "code in a checkpoint is only trusted on the command line: --trust",
            "record": "recordings are only made on the command line: --record FILE",
        },
    )
    ignores: tuple[Ignore, ...] | None = option(
        "ignore",
        help="Findings that are expected.",
        expected='a list like [{code = "infinity", reason = "attention masks"}]',
        example=[{"code": "infinity", "reason": "attention masks", "where": "*.mask"}],
        reach=Reach.HARMLESS,
    )

    def __post_init__(self) -> None:
        if _ONE_OF.keys() <= self.prediction_options.keys():
            raise UsageError("input and input-shape are mutually exclusive")


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """The table ``[verify]`` of a configuration.

    Attributes:
        path: The file, relative to the current directory or as the user named it.
        paths: Paths to verify without a PATH, relative to the current directory.
        exclude: Globs of skipped paths.
        strict: Whether warnings fail.
        rules: In the order of the file; later ones override earlier ones.
        is_named: Whether the user named it, which makes it trusted.
    """

    path: str
    paths: tuple[str, ...] = paths_key("Files and directories to check, relative to this file.")
    exclude: Sequence[str] = same_option(Scope, "exclude")
    strict: bool = strict_option()
    rules: tuple[VerifyRule, ...] = option(
        "rule",
        help="Rules for some checkpoints; all that match a checkpoint apply.",
        reach=Reach.HARMLESS,
        default=(),
    )
    is_named: bool = False

    @property
    def directory(self) -> str:
        """Return the directory, absolute, that the rules' globs are relative to."""
        return os.path.dirname(os.path.abspath(self.path))


def read_config(document: ConfigDocument, *, given: Collection[str] = ()) -> VerifyConfig:
    """Return the table ``[verify]`` of a configuration.

    Args:
        given: Attributes of a ``PredictionRequest`` that the command line gives, and ``predict``.

    Raises:
        UsageError: It is wrong, or needs trust.
    """
    values = read(VerifyConfig, document, "verify", given=given)
    return VerifyConfig(document.path, is_named=document.is_named, **values)


# Settings of a checkpoint ----------------------------------------------------------------------------


class PredictionSettings(NamedTuple):
    """The settings of a checkpoint, and the rules that match it; no prediction if ``request`` is None."""

    request: PredictionRequest | None
    ignores: tuple[Ignore, ...]
    rules: tuple[VerifyRule, ...]


def settings_for(
    config: VerifyConfig, path: str, *, predict: bool = False, given: Mapping[str, Any] | None = None
) -> PredictionSettings:
    """Return the settings of a checkpoint.

    Args:
        config: Its matching rules apply in order; the last value of a key wins.
        path: Path of the checkpoint, from discovery.
        predict: Whether the command line requests a prediction.
        given: Attributes of a ``PredictionRequest`` on the command line; they win over all rules.

    Raises:
        UsageError: The rules contradict each other, have options of a prediction without ``predict``, or
            name code that other users could have written.
    """
    try:  # links aren't followed: rules have the names that users see
        below = os.path.relpath(os.path.abspath(path), config.directory).replace(os.sep, "/")
    except ValueError:  # on another drive
        below = os.pardir
    rules = tuple(rule for rule in config.rules if matches(rule.glob, below))
    prediction_options: dict[str, Any] = {}
    for layer in (*(rule.prediction_options for rule in rules), given or {}):
        for name in layer:
            prediction_options.pop(_ONE_OF.get(name, ""), None)
        prediction_options.update(layer)
    said = [rule.predict for rule in rules if rule.predict is not None]
    ignores = [rule.ignores for rule in rules if rule.ignores is not None]
    request = None
    if predict or (said and said[-1]):
        if not config.is_named:
            _require_own_code(config, rules, given or {}, prediction_options)
        try:
            request = PredictionRequest(**prediction_options)
        except UsageError as failure:
            origin = ", ".join(rule.origin for rule in rules if rule.prediction_options) or config.path
            raise UsageError(f"{origin}: for {path}: {failure}") from failure
    elif not said and any(rule.prediction_options for rule in rules):
        origin = next(rule.origin for rule in rules if rule.prediction_options)
        raise UsageError(f"{origin}: it has prediction keys, but no predict (set predict = true or false)")
    return PredictionSettings(request, ignores[-1] if ignores else (), rules)


def _require_own_code(
    config: VerifyConfig, rules: Sequence[VerifyRule], given: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Require that no other user could have written the code that the rules name."""
    # Trust in a configuration covers its text, but not ``models.py`` that it names: that file may be writable
    # by others, although the configuration isn't. Code that the command line names is the user's choice.
    for name in ("model", "optimizer"):
        if name in given or options.get(name) is None:
            continue
        doubt = code_ownership_doubt(options[name])
        if doubt is not None:
            origin = next(rule.origin for rule in reversed(rules) if name in rule.prediction_options)
            hint = f"--config {config.path} runs it anyway"
            raise UsageError(f"{origin}: {name}: {doubt}, so it is not run ({hint})")


def unused_rules(
    config: VerifyConfig, judged: Sequence[tuple[PredictionSettings, Verification]]
) -> list[str]:
    """Return a sentence for each rule that no checkpoint matched, and each ignore that matched no finding.

    Args:
        config: The configuration, whose own paths must have been verified with all checks.
        judged: Settings and verdict of each checkpoint.
    """
    matched = {rule.origin for settings, _ in judged for rule in settings.rules}
    used = {
        ignore.origin
        for settings, verification in judged
        for ignore in settings.ignores
        if is_used(ignore, verification)
    }
    sentences = []
    for rule in config.rules:
        if rule.origin not in matched:
            sentences.append(f"{rule.origin}: no checkpoint matches {rule.glob!r}")
            continue
        for ignore in rule.ignores or ():
            if ignore.origin not in used:
                place = "" if ignore.where is None else f" at {ignore.where!r}"
                sentences.append(f"{ignore.origin}: no finding {ignore.code}{place}")
    return sentences

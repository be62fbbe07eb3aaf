"""What is asked of one checkpoint: all rules that match it, later ones over earlier ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import UsageError
from ckpttool.ops.ignored_findings import Ignore, is_used
from ckpttool.ops.verdict import Verification
from ckpttool.predict.request import Request
from ckpttool.series.retention.policy import matches

if TYPE_CHECKING:
    from ckpttool.cli.config import Config
    from ckpttool.cli.rules import Rule

_ONE_OF = {"input": "input_shapes", "input_shapes": "input"}
"""Wishes that replace each other: a later rule with one of them drops the other."""


class Settings(NamedTuple):
    """What is asked of one checkpoint, and by which rules; a ``request`` of None asks for no prediction."""

    request: Request | None
    ignores: tuple[Ignore, ...]
    rules: tuple[Rule, ...]


def settings_for(
    config: Config, path: str, *, predict: bool = False, given: Mapping[str, Any] | None = None
) -> Settings:
    """Return what is asked of a checkpoint.

    Args:
        config: Its rules are taken in order; each key has the value that was said last.
        path: The checkpoint's, as discovery knows it.
        predict: Whether a prediction was asked for on the command line.
        given: Attributes of a ``Request`` that stood there; they come after all rules.

    Raises:
        UsageError: The rules contradict each other, say how to predict and not whether, or name code that
            others could have written.
    """
    rules = tuple(rule for rule in config.rules if matches(rule.glob, _relative(path, config.directory)))
    wishes = _merged([*(rule.wishes for rule in rules), given or {}])
    said = [rule.predict for rule in rules if rule.predict is not None]
    ignores = [rule.ignores for rule in rules if rule.ignores is not None]
    request = None
    if predict or (said and said[-1]):
        if not config.is_named:
            _require_own_code(config, rules, given or {}, wishes)
        request = _request(config.path, path, rules, wishes)
    elif not said and any(rule.wishes for rule in rules):
        origin = next(rule.origin for rule in rules if rule.wishes)
        raise UsageError(f"{origin}: it says how to predict, and not whether (predict = true or false)")
    return Settings(request, ignores[-1] if ignores else (), rules)


def _relative(path: str, directory: str) -> str:
    """Return a path as globs know it; links are not followed, since people write the names that they see."""
    try:
        return os.path.relpath(os.path.abspath(path), directory).replace(os.sep, "/")
    except ValueError:  # on another drive
        return os.pardir


def _merged(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for name in layer:
            merged.pop(_ONE_OF.get(name, ""), None)
        merged.update(layer)
    return merged


def _require_own_code(
    config: Config, rules: Sequence[Rule], given: Mapping[str, Any], wishes: Mapping[str, Any]
) -> None:
    """Require that code which the rules name is as much the user's own as their file has to be."""
    from ckpttool.cli.config import doubted_code

    for name in ("model", "optimizer"):
        if name in given or wishes.get(name) is None:
            continue
        doubt = doubted_code(wishes[name])
        if doubt is not None:
            origin = next(rule.origin for rule in reversed(rules) if name in rule.wishes)
            hint = f"--config {config.path} runs it all the same"
            raise UsageError(f"{origin}: {name}: {doubt}, so it is not run ({hint})")


def _request(config: str, path: str, rules: Sequence[Rule], wishes: Mapping[str, Any]) -> Request:
    try:
        return Request(**wishes)
    except UsageError as failure:
        origin = ", ".join(rule.origin for rule in rules if rule.wishes) or config
        raise UsageError(f"{origin}: for {path}: {failure}") from failure


def doubts(config: Config, judged: Sequence[tuple[Settings, Verification]]) -> list[str]:
    """Return a sentence for each rule that no checkpoint matched, and each ignore that meant no finding.

    Args:
        config: Whose own paths were looked at, with all checks; otherwise there is nothing to wonder about.
        judged: What was asked of each checkpoint, and what came of it.
    """
    matched = {rule.origin for settings, _ in judged for rule in settings.rules}
    met = {
        ignore.origin
        for settings, verification in judged
        for ignore in settings.ignores
        if is_used(ignore, verification)
    }
    told = []
    for rule in config.rules:
        if rule.origin not in matched:
            told.append(f"{rule.origin}: no checkpoint matches {rule.glob!r}")
            continue
        unmet = (ignore for ignore in rule.ignores or () if ignore.origin not in met)
        told += [f"{ignore.origin}: there is no finding {_meant(ignore)}" for ignore in unmet]
    return told


def _meant(ignore: Ignore) -> str:
    return ignore.code if ignore.where is None else f"{ignore.code} at {ignore.where!r}"

"""``[verify]`` and ``[[verify.rule]]`` of a configuration, and what they ask of each checkpoint.

``KEYS`` is the table: each key of a rule with the function that reads its value. All rules that match a
checkpoint apply, later ones over earlier ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.cli.config import (
    ConfigDocument,
    Reach,
    Reader,
    WrongValue,
    check_reach,
    described_by,
    glob_below,
    object_schema,
    one_text,
    parse_bytes,
    read_table,
    takes,
    texts,
    truth,
    whole_number,
)
from ckpttool.core.errors import UsageError
from ckpttool.core.options import attributes_by_key
from ckpttool.ops.ignored_findings import Ignore, is_used
from ckpttool.ops.verdict import Verification
from ckpttool.predict.request import InputSpec, PredictionRequest, parse_input
from ckpttool.runs.retention.policies import matches

_COMMAND_LINE_ONLY = {
    "trust": "code in a checkpoint is only trusted on the command line: --trust",
    "record": "recordings are only made on the command line: --record FILE",
}
_NEEDED = {
    "code": "a finding's code, as findings.md lists them",
    "reason": "why it is of no matter",
}
_ATTRIBUTES = attributes_by_key(PredictionRequest)
_ONE_OF = {"input": "input_shapes", "input_shapes": "input"}
"""Options that replace each other: a later rule with one of them drops the other."""


class VerifyConfig(NamedTuple):
    """What a configuration says of ``verify``.

    Attributes:
        path: The file, as the user knows it.
        paths: What is looked at where no PATH is given, as seen from the current directory.
        exclude: Globs that are passed over.
        strict: Whether warnings fail.
        rules: In the order of the file; later ones override earlier ones.
        is_named: Whether the user named it: then what it says is his own word.
    """

    path: str
    paths: tuple[str, ...] = (os.curdir,)
    exclude: tuple[str, ...] = ()
    strict: bool = False
    rules: tuple[VerifyRule, ...] = ()
    is_named: bool = False

    @property
    def directory(self) -> str:
        """Return the directory, absolute, that the rules' globs and files are relative to."""
        return os.path.dirname(os.path.abspath(self.path))


@dataclass(frozen=True, slots=True)
class VerifyRule:
    """What is asked of the checkpoints that match a glob; what is None or absent is left to other rules.

    Attributes:
        origin: Where it stands: the file and the place in it.
        glob: Of paths relative to the file.
        predict: Whether they are loaded and run.
        prediction_options: Attributes of a ``PredictionRequest``.
        ignores: Findings that are expected.
    """

    origin: str
    glob: str
    predict: bool | None = None
    prediction_options: Mapping[str, Any] = field(default_factory=dict)
    ignores: tuple[Ignore, ...] | None = None


def read_config(document: ConfigDocument, *, given: Collection[str] = ()) -> VerifyConfig:
    """Return what a configuration says of ``verify``.

    Args:
        given: Attributes of a ``PredictionRequest`` that the command line gives, and ``predict``.

    Raises:
        UsageError: It says what it can't, or may not.
    """
    table = document.table("verify")
    values = read_table(
        document,
        "verify",
        {key: value for key, value in table.items() if key != "rule"},
        VERIFY_KEYS,
        others=(f"[[{document.prefix}verify.rule]]",),
    )
    here = os.path.dirname(document.path)
    paths = tuple(os.path.normpath(os.path.join(here, one)) for one in values.pop("paths", (os.curdir,)))
    rules = tuple(_verify_rules(document, table, given))
    return VerifyConfig(document.path, paths, rules=rules, is_named=document.is_named, **values)


def _verify_rules(
    document: ConfigDocument, table: Mapping[str, Any], given: Collection[str]
) -> Iterator[VerifyRule]:
    rules = table.get("rule", [])
    if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
        raise document.wrong("verify.rule", "it is no list of tables (write [[verify.rule]])")
    directory = os.path.dirname(os.path.abspath(document.path))
    for number, rule in enumerate(rules, 1):
        place = f"verify.rule {number}"
        try:
            yield read_rule(rule, directory, f"{document.path}[{document.prefix}{place}]")
        except (WrongValue, UsageError) as failure:
            raise document.wrong(place, str(failure)) from failure
        used = {key: value for key, value in rule.items() if _ATTRIBUTES.get(key, key) not in given}
        check_reach(document, place, used, RULE_KEYS)


def read_rule(table: Mapping[str, Any], directory: str, origin: str) -> VerifyRule:
    """Return a rule, read from a table of TOML; its files are relative to ``directory``."""
    for key in table:
        if key in _COMMAND_LINE_ONLY:
            raise UsageError(_COMMAND_LINE_ONLY[key])
        if key not in RULE_KEYS:
            raise UsageError(f"unknown key {key} (there are path, predict, ignore, {', '.join(KEYS)})")
    if "path" not in table:
        raise UsageError("path is missing (a glob of checkpoints)")
    if "input" in table and "input-shape" in table:
        raise UsageError("input and input-shape contradict each other (give one of them)")
    values = {key: KEYS[key](table[key], key) for key in KEYS if key in table}
    predict = truth(table["predict"], "predict") if "predict" in table else None
    ignores = None
    if "ignore" in table:
        read: tuple[Ignore, ...] = RULE_KEYS["ignore"](table["ignore"], "ignore")
        ignores = tuple(one._replace(origin=f"{origin}: {one.origin}") for one in read)
    prediction_options = {
        _ATTRIBUTES[key]: _resolve_paths(key, value, directory) for key, value in values.items()
    }
    return VerifyRule(origin, glob_below(table["path"], "path"), predict, prediction_options, ignores)


def _resolve_paths(key: str, value: Any, directory: str) -> Any:
    """Return a value in which a file's path is absolute."""
    if key in ("model", "optimizer"):
        place, _, name = value.rpartition(":")
        return f"{os.path.join(directory, place)}:{name}" if place.endswith(".py") else value
    return os.path.normpath(os.path.join(directory, value)) if key in ("input", "expect", "labels") else value


# What is asked of one checkpoint --------------------------------------------------------------------


class PredictionSettings(NamedTuple):
    """What is asked of one checkpoint, and by which rules; no ``request`` means no prediction."""

    request: PredictionRequest | None
    ignores: tuple[Ignore, ...]
    rules: tuple[VerifyRule, ...]


def settings_for(
    config: VerifyConfig, path: str, *, predict: bool = False, given: Mapping[str, Any] | None = None
) -> PredictionSettings:
    """Return what is asked of a checkpoint.

    Args:
        config: Its rules are taken in order; each key has the value that was said last.
        path: The checkpoint's, as discovery knows it.
        predict: Whether a prediction was asked for on the command line.
        given: Attributes of a ``PredictionRequest`` that stood there; they come after all rules.

    Raises:
        UsageError: The rules contradict each other, say how to predict and not whether, or name code that
            others could have written.
    """
    try:  # links are not followed: people write the names that they see
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
        raise UsageError(f"{origin}: it says how to predict, and not whether (predict = true or false)")
    return PredictionSettings(request, ignores[-1] if ignores else (), rules)


def _require_own_code(
    config: VerifyConfig, rules: Sequence[VerifyRule], given: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Require that code which the rules name is as much the user's own as their file has to be."""
    from ckpttool.cli.config_trust import code_ownership_doubt

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
        config: Whose own paths were looked at, with all checks; otherwise there is nothing to wonder about.
        judged: What was asked of each checkpoint, and what came of it.
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
                sentences.append(f"{ignore.origin}: there is no finding {ignore.code}{place}")
    return sentences


# Values of a rule -----------------------------------------------------------------------------------


@takes(type="string")
def _state_key(value: object, key: str) -> str:
    return "" if value == "" else str(one_text(value, key))  # the root of the file has no key


@takes(type="string", pattern=".:[^:]+$")
def _reference(value: object, key: str) -> str:
    place, _, name = one_text(value, key).rpartition(":")
    if not place or not name:
        raise WrongValue(key, value, "package.module:Name or file.py:Name")
    return str(value)


@takes(type="object")
def _arguments(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not _is_plain(value):
        raise WrongValue(key, value, "a table of texts, numbers, truth values, lists and tables")
    return dict(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float))


@takes(**texts.schema)
def _shapes(value: object, key: str) -> tuple[InputSpec, ...]:
    return tuple(parse_input(text) for text in texts(value, key))


@takes(type="number", minimum=0)
def _number(value: object, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise WrongValue(key, value, "a number of 0 or more")
    return float(value)


@takes(type="number", minimum=0, maximum=1)
def _share(value: object, key: str) -> float:
    number: float = _number(value, key)
    if number > 1:
        raise WrongValue(key, value, "a number from 0 to 1")
    return number


@takes(type="number", exclusiveMinimum=0)
def _seconds(value: object, key: str) -> float:
    number: float = _number(value, key)
    if number == 0:
        raise WrongValue(key, value, "a number of seconds above 0")
    return number


def _read_ignores(value: object, key: str) -> tuple[Ignore, ...]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise WrongValue(key, value, 'a list like [{code = "infinity", reason = "attention masks"}]')
    ignores = []
    for number, table in enumerate(value, 1):
        unknown = sorted(table.keys() - _IGNORE.keys())
        if unknown:
            raise UsageError(f"unknown key {key}.{unknown[0]} (there are {', '.join(_IGNORE)})")
        for name, needed in _NEEDED.items():
            if name not in table:
                raise UsageError(f"{key}.{name} is missing ({needed})")
            if not isinstance(table[name], str) or not table[name].strip():
                raise WrongValue(f"{key}.{name}", table[name], needed)
        where = one_text(table["where"], f"{key}.where") if "where" in table else None
        ignores.append(Ignore(table["code"], table["reason"], where, f"{key} {number}"))
    return tuple(ignores)


KEYS: Mapping[str, Reader] = described_by(
    PredictionRequest,
    {
        "model": _reference.reaching(Reach.CODE),
        "model-args": _arguments.reaching(Reach.CODE),
        "optimizer": _reference.reaching(Reach.CODE),
        "optimizer-args": _arguments.reaching(Reach.CODE),
        "state-key": _state_key.reaching(Reach.HARMLESS),
        "input": one_text.reaching(Reach.BELOW),
        "input-shape": _shapes.reaching(Reach.HARMLESS),
        "signature": one_text.reaching(Reach.HARMLESS),
        "batch-size": whole_number(1).reaching(Reach.HARMLESS),
        "seed": whole_number(0).reaching(Reach.HARMLESS),
        "expect": one_text.reaching(Reach.BELOW),
        "rtol": _number.reaching(Reach.HARMLESS),
        "atol": _number.reaching(Reach.HARMLESS),
        "labels": one_text.reaching(Reach.BELOW),
        "min-accuracy": _share.reaching(Reach.HARMLESS),
        "max-error": _number.reaching(Reach.HARMLESS),
        "resume-step": truth.reaching(Reach.CODE),
        "timeout": _seconds.reaching(Reach.HARMLESS),
        "memory": parse_bytes.reaching(Reach.HARMLESS),
    },
)
_IGNORE: Mapping[str, Reader] = {
    "code": one_text.described("The finding's code."),
    "reason": one_text.described("Why it doesn't matter."),
    "where": one_text.described("A glob of the place that the finding names."),
}
RULE_KEYS: Mapping[str, Reader] = {
    "path": glob_below.described(
        "Checkpoints that the rule is for, relative to this file.", Reach.HARMLESS, examples=["models/*.pth"]
    ),
    "predict": truth.described("Load the model with its framework and run it.", Reach.CODE, examples=[True]),
    **KEYS,
    "ignore": Reader(
        _read_ignores,
        {
            "description": "Findings that are expected.",
            "type": "array",
            "items": object_schema(_IGNORE, required=[*_NEEDED]),
            "examples": [[{"code": "infinity", "reason": "attention masks", "where": "*.mask"}]],
        },
        Reach.HARMLESS,  # an ignored finding is shown, and one of safety or loading can't be ignored
    ),
}
"""What a ``[[verify.rule]]`` may say."""
VERIFY_KEYS: Mapping[str, Reader] = {
    "paths": texts.described(
        "Files and directories to check, relative to this file.", Reach.BELOW, default=[os.curdir]
    ),
    "exclude": texts.described("Skip matching paths.", Reach.HARMLESS, examples=[["*.tmp"]]),
    "strict": truth.described("Treat warnings as failures.", Reach.HARMLESS, default=False),
}
"""What ``[verify]`` may say."""

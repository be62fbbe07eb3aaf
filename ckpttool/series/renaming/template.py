"""Templates of names: ``{run}-e{epoch:04d}-s{step:08d}-{val_loss:.4f}``.

Fields are ``run``, ``name``, ``format``, ``epoch``, ``step``, ``number``, ``date``, ``time``, and metrics by
their names. A field takes a format of Python's that fits it; ``date`` and ``time`` take one of ``strftime``.
``{field?}`` leaves out what a checkpoint lacks, with the separator and the key before it. ``{{`` and ``}}``
are braces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from ckpttool.errors import UsageError

Value = str | int | float | datetime

TEXTS = ("run", "name", "format")
COUNTS = ("epoch", "step", "number")
TIMES = {"date": "%Y%m%d", "time": "%H%M%S"}
"""Fields of a moment, and what they are written as where no format stands."""

FIELDS = (*TEXTS, *COUNTS, *TIMES)
"""All fields that are no metric."""

MAX_TEMPLATE = 4096
"""Characters; what is written with it has to fit into a name of 255 bytes."""

_SEPARATORS = "-_.=:, +@~"
_SPEC = re.compile(
    r"(?:[^{}/\\\0]?[<>=^])?[-+ ]?z?#?0?[0-9]{0,3}[,_]?(?:\.[0-9]{1,2})?[bdoxXeEfFgGs%]?", re.ASCII
)
_DIRECTIVE = re.compile(r"%([YymdHMSfjGVuUWaAbBpI%])")
_SAMPLE = datetime(2026, 1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a template that something of the checkpoint is written to.

    Attributes:
        name: Of the field.
        spec: Its format; none is the usual one.
        is_optional: Whether it may be left out.
        before: The text between the field before and this one.
    """

    name: str
    spec: str = ""
    is_optional: bool = False
    before: str = ""

    @property
    def shown(self) -> str:
        """Return the field as it stands in the template."""
        return f"{{{self.name}{'?' * self.is_optional}{':' * bool(self.spec)}{self.spec}}}"


@dataclass(frozen=True, slots=True)
class Template:
    """A template that was parsed: its fields, and the text behind the last of them."""

    text: str
    fields: tuple[Field, ...]
    end: str

    @property
    def names(self) -> frozenset[str]:
        """Return the names of its fields."""
        return frozenset(field.name for field in self.fields)


class Lacking(ValueError):
    """A checkpoint lacks a field, or has one that its format doesn't fit; the text says so."""


def parse_template(text: str) -> Template:
    """Return a template.

    Raises:
        UsageError: It is none; the text says where.
    """
    if len(text) > MAX_TEMPLATE:
        raise UsageError(f"a template of {len(text):,} characters (at most {MAX_TEMPLATE:,})")
    fields: list[Field] = []
    literal = ""
    for at, kind, content in _pieces(text):
        if kind == "text":
            literal += content
        else:
            fields.append(_field(text, at, content, literal))
            literal = ""
    if not fields:
        raise UsageError(f"template {text!r}: it has no field, and would give all the same name")
    for part in (*(field.before for field in fields), literal):
        _check_literal(text, part)
    return Template(text, tuple(fields), literal)


def _pieces(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the place, the kind and the content of each piece of a template: texts, and fields."""
    at = 0
    while at < len(text):
        if text[at : at + 2] in ("{{", "}}"):
            yield at, "text", text[at]
            at += 2
        elif text[at] == "{":
            end = text.find("}", at)
            if end < 0:
                raise UsageError(f"template {text!r}: the brace at character {at + 1} is never closed")
            yield at, "field", text[at + 1 : end]
            at = end + 1
        elif text[at] == "}":
            raise UsageError(
                f"template {text!r}: the brace at character {at + 1} closes nothing (}}}} is a brace)"
            )
        else:
            yield at, "text", text[at]
            at += 1


def _field(text: str, at: int, content: str, before: str) -> Field:
    name, _, spec = content.partition(":")
    is_optional = name.endswith("?")
    field = Field(name.removesuffix("?"), spec, is_optional, before)
    if not field.name or not field.name.isprintable() or field.name != field.name.strip() or "{" in content:
        raise UsageError(
            f"template {text!r}: no field at character {at + 1} ({', '.join(FIELDS)}, or a metric)"
        )
    try:
        _written(field, _sample(field.name))
    except Lacking as failure:
        raise UsageError(f"template {text!r}: {failure}") from failure
    return field


def _sample(name: str) -> Value:
    if name in TIMES:
        return _SAMPLE
    if name in TEXTS:
        return "x"
    return 1 if name in COUNTS else 0.5


def _check_literal(text: str, part: str) -> None:
    if "/" in part or "\\" in part:
        raise UsageError(f"template {text!r}: names alone are changed; nothing is moved to another directory")
    if not part.isprintable():
        raise UsageError(f"template {text!r}: it has a character that doesn't show")


def render(template: Template, values: Mapping[str, Value]) -> str:
    """Return the name that a template gives to a checkpoint.

    Args:
        template: The template.
        values: What is known of the checkpoint, by field; what it lacks isn't in it.

    Raises:
        Lacking: A field that isn't optional is missing, or doesn't fit its format.
    """
    name, is_cut = "", False
    for field in template.fields:
        value = values.get(field.name)
        if value is None and not field.is_optional:
            raise Lacking(f"no {field.name} ({{{field.name}?}} leaves it out)")
        before = field.before.lstrip(_SEPARATORS) if is_cut and not name else field.before
        if value is None:
            name += _without_key(before, field.name)
            is_cut = True
        else:
            name += before + _written(field, value)
    return name + (template.end.lstrip(_SEPARATORS) if is_cut and not name else template.end)


def _without_key(literal: str, field: str) -> str:
    """Return the text before a field that is left out, without the separator and the key that lead to it.

    The key is the field's name, its beginning, a word of it, or a letter or two: ``-e``, ``_val_loss=``.
    """
    bare = literal.rstrip(_SEPARATORS)
    signs = literal[len(bare) :]
    separators = re.escape(_SEPARATORS)
    for key in _keys(field, is_named=bool(signs)):
        match = re.search(rf"(?:^|[{separators}]+){re.escape(key)}$", bare, re.IGNORECASE)
        if match is not None:
            return bare[: match.start()]
    letters = None if signs else re.search(rf"(?:^|[{separators}]+)[A-Za-z]{{1,2}}$", bare)
    return bare[: letters.start()] if letters else bare


def _keys(field: str, *, is_named: bool) -> list[str]:
    """Return what may stand before a field to name it, the longest first; before a sign, only whole words."""
    words = [word for word in re.split(rf"[{re.escape(_SEPARATORS)}/]", field) if word]
    keys = {field, *words}
    if is_named:
        return sorted(keys | {f"{field}s"}, key=len, reverse=True)
    return sorted(keys | {field[:end] for end in range(1, len(field))}, key=len, reverse=True)


def _written(field: Field, value: Value) -> str:
    """Return a field's value in its format.

    Raises:
        Lacking: The format doesn't fit.
    """
    if isinstance(value, datetime):
        return _moment(field, value)
    if _SPEC.fullmatch(field.spec) is None:
        raise Lacking(f"{field.shown}: no format: {field.spec!r}")
    try:
        return format(value, field.spec)
    except (ValueError, OverflowError) as failure:
        raise Lacking(f"{field.shown}: its format doesn't fit {value!r}") from failure


def _moment(field: Field, value: datetime) -> str:
    spec = field.spec or TIMES[field.name]
    literal = _DIRECTIVE.sub("", spec)
    if "%" in literal or "/" in literal or "\\" in literal or not spec.isprintable() or literal == spec:
        raise Lacking(f"{field.shown}: no format of a time: {spec!r} (such as {TIMES[field.name]})")
    return _DIRECTIVE.sub(lambda match: value.strftime(match[0]), spec)

"""Templates of names: ``{run}-e{epoch:04d}-s{step:08d}-{val_loss:.4f}``.

Fields are ``run``, ``name``, ``format``, ``epoch``, ``step``, ``number``, ``date``, ``time``, and metrics by
their names. A field takes a format of Python's that fits it; ``date`` and ``time`` take one of ``strftime``.
``{field?}`` is omitted if a checkpoint lacks it, with the separator and the key before it. ``{{`` and ``}}``
are braces.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from ckpttool.core.errors import UsageError
from ckpttool.core.naming import parse_name
from ckpttool.runs.entry import Entry

Value = str | int | float | datetime

TEXTS = ("run", "name", "format")

COUNTS = ("epoch", "step", "number")

TIMES = {"date": "%Y%m%d", "time": "%H%M%S"}
"""Fields of a time, with their default formats."""

FIELDS = (*TEXTS, *COUNTS, *TIMES)
"""All fields but metrics."""

MAX_TEMPLATE = 4096
"""Limit on the characters of a template; names have at most 255 bytes."""

_SEPARATORS = "-_.=:, +@~"

_SPEC = re.compile(
    r"(?:[^{}/\\\0]?[<>=^])?[-+ ]?z?#?0?[0-9]{0,3}[,_]?(?:\.[0-9]{1,2})?[bdoxXeEfFgGs%]?", re.ASCII
)

_DIRECTIVE = re.compile(r"%([YymdHMSfjGVuUWaAbBpI%])")

_SAMPLES: dict[str, Value] = {
    **dict.fromkeys(TEXTS, "x"),
    **dict.fromkeys(COUNTS, 1),
    **dict.fromkeys(TIMES, datetime(2026, 1, 2, 3, 4, 5)),
}
"""Values to try a field's format with; 0.5 for metrics."""

_SUFFIX = re.compile(
    r"\.(?:weights\.h5|(?:pth|pt|ckpt|bin|pkl|pickle|h5|hdf5|keras|npz|npy|safetensors)?\.?tar(?:\.gz)?|pt2|h5|hdf5|[a-z]{1,12})$",
    re.ASCII | re.IGNORECASE,
)
"""Suffix of a file's kind, which may have several parts, such as ``.weights.h5``."""

_DIRECTORY_SUFFIX = re.compile(
    r"\.(?:ckpt|pth|pt|dcp|distcp|bin|keras|tf|orbax|safetensors|model|savedmodel)$", re.ASCII | re.IGNORECASE
)

_RUN_SEPARATORS = "-_=.:, ([+@~"

_KEY = re.compile(
    r"(?:^|[-_=.:, (\[+@~])(?:(?:global|train|total|n)[-_]?)?"
    r"(?:epochs?|ep|e|steps?|s|iterations?|iters?|itr|it|updates?)$",
    re.ASCII | re.IGNORECASE,
)

_UNIX_EPOCH = datetime(1970, 1, 1)

_MAX_SECONDS = 100_000 * 366 * 86_400
"""Limit on a time, before it is added: ``datetime`` ends at the year 9999."""


class FieldError(ValueError):
    """A checkpoint lacks a field of a template, or its value doesn't fit the format; the text is shown."""


@dataclass(frozen=True, slots=True)
class TemplateField:
    """Field of a template.

    Attributes:
        name: Its name.
        spec: Its format; empty for the default.
        is_optional: Whether it is omitted if a checkpoint lacks it.
        before: Text between the previous field and this one.
    """

    name: str
    spec: str = ""
    is_optional: bool = False
    before: str = ""

    @property
    def shown(self) -> str:
        """Return the field as in the template."""
        return f"{{{self.name}{'?' * self.is_optional}{':' * bool(self.spec)}{self.spec}}}"


@dataclass(frozen=True, slots=True)
class Template:
    """Parsed template: its fields, and the text after the last one."""

    text: str
    fields: tuple[TemplateField, ...]
    end: str

    @property
    def names(self) -> frozenset[str]:
        """Return the names of its fields."""
        return frozenset(field.name for field in self.fields)


def parse_template(text: str) -> Template:
    """Return a template."""
    if len(text) > MAX_TEMPLATE:
        raise UsageError(f"the template has {len(text):,} characters (at most {MAX_TEMPLATE:,})")
    fields: list[TemplateField] = []
    literal = ""
    for start, kind, content in _pieces(text):
        if kind == "text":
            literal += content
        else:
            fields.append(_field(text, start, content, literal))
            literal = ""
    if not fields:
        raise UsageError(f"template {text!r}: it has no field, so all would get the same name")
    for part in (*(field.before for field in fields), literal):
        if "/" in part or "\\" in part:
            raise UsageError(f"template {text!r}: rename can't move checkpoints to another directory")
        if not part.isprintable():
            raise UsageError(f"template {text!r}: it has a non-printable character")
    return Template(text, tuple(fields), literal)


def _pieces(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield offset, kind and content of each piece of a template: texts and fields."""
    start = 0
    while start < len(text):
        if text[start : start + 2] in ("{{", "}}"):
            yield start, "text", text[start]
            start += 2
        elif text[start] == "{":
            end = text.find("}", start)
            if end < 0:
                raise UsageError(f"template {text!r}: the brace at character {start + 1} is never closed")
            yield start, "field", text[start + 1 : end]
            start = end + 1
        elif text[start] == "}":
            raise UsageError(
                f"template {text!r}: unmatched brace at character {start + 1} (}}}} is a literal brace)"
            )
        else:
            yield start, "text", text[start]
            start += 1


def _field(text: str, start: int, content: str, before: str) -> TemplateField:
    name, _, spec = content.partition(":")
    is_optional = name.endswith("?")
    field = TemplateField(name.removesuffix("?"), spec, is_optional, before)
    if not field.name or not field.name.isprintable() or field.name != field.name.strip() or "{" in content:
        raise UsageError(
            f"template {text!r}: invalid field at character {start + 1} "
            f"(expected {', '.join(FIELDS)}, or a metric)"
        )
    # A format that fits no value at all is refused before any checkpoint is looked at.
    try:
        _format_value(field, _SAMPLES.get(field.name, 0.5))
    except FieldError as failure:
        raise UsageError(f"template {text!r}: {failure}") from failure
    return field


def render(template: Template, values: Mapping[str, Value]) -> str:
    """Return the name that a template gives to a checkpoint."""
    # ``{run?}-e{epoch}`` without a run is ``e3``, not ``-e3``: if all fields so far were omitted, separators
    # at the start are omitted, too.
    name, is_cut = "", False
    for field in template.fields:
        value = values.get(field.name)
        if value is None and not field.is_optional:
            raise FieldError(f"no {field.name} ({{{field.name}?}} omits it)")
        before = field.before.lstrip(_SEPARATORS) if is_cut and not name else field.before
        if value is None:
            name += _without_key(before, field.name)
            is_cut = True
        else:
            name += before + _format_value(field, value)
    return name + (template.end.lstrip(_SEPARATORS) if is_cut and not name else template.end)


def _without_key(literal: str, field: str) -> str:
    """Return the text before an omitted field, without its separator and key."""
    # The key is the field's name, its beginning, a word of it, or a letter or two: ``-e``, ``_val_loss=``.
    # Before a sign (``=``, ``_``) it is a whole word.
    bare = literal.rstrip(_SEPARATORS)
    is_signed = bare != literal
    separators = re.escape(_SEPARATORS)
    keys = {field, *filter(None, re.split(rf"[{separators}/]", field))}
    keys |= {f"{field}s"} if is_signed else {field[:end] for end in range(1, len(field))}
    for key in sorted(keys, key=len, reverse=True):
        match = re.search(rf"(?:^|[{separators}]+){re.escape(key)}$", bare, re.IGNORECASE)
        if match is not None:
            return bare[: match.start()]
    letters = None if is_signed else re.search(rf"(?:^|[{separators}]+)[A-Za-z]{{1,2}}$", bare)
    return bare[: letters.start()] if letters else bare


def values_of(entry: Entry, stem: str) -> dict[str, Value]:
    """Return the values of a checkpoint's known fields, by name."""
    values: dict[str, Value | None] = {
        name: value
        for name, value in ({"loss": entry.loss} | dict(entry.metrics)).items()
        if value is not None and math.isfinite(value)
    }
    epoch = entry.epoch
    if isinstance(epoch, float) and epoch.is_integer():  # a trainer writes whole epochs as 3.0, too
        epoch = int(epoch)
    values |= {"run": run_of(stem, entry.directory), "name": stem, "format": entry.format}
    values |= {"epoch": epoch, "step": entry.step, "number": entry.fields.number}
    values |= _saved_moments(entry)
    return {name: value for name, value in values.items() if value is not None}


def run_of(stem: str, directory: str) -> str:
    """Return the run in a name: the part before its first field, else the directory's name."""
    fields = parse_name(stem)
    if fields.blank == stem:
        return stem or os.path.basename(os.path.abspath(directory))
    run, before = os.path.commonprefix([stem, fields.blank]), None  # noqa: RUF071, of characters
    # The common start of a name and its pattern (``resnet-epoch_`` of ``resnet-epoch_12``) ends with
    # separators and the keys of fields, which are removed one after the other: ``resnet``.
    while run != before:
        before, bare = run, run.rstrip(_RUN_SEPARATORS)
        metric = next((name for name in fields.metrics if bare.endswith(name)), None)
        run = bare.removesuffix(metric) if metric else _KEY.sub("", bare)
    return run or os.path.basename(os.path.abspath(directory))


def _saved_moments(entry: Entry) -> dict[str, Value | None]:
    """Return date and time in UTC: as recorded inside, else in the name, else of the newest file."""
    written = utc_time(entry.modified_ns / 10**9)
    if entry.saved_at is None:
        return {"date": written, "time": written}
    saved = utc_time(entry.saved_at)
    named = entry.fields.saved_at
    if (
        named is not None
        and "T" not in named
        and saved is not None
        and f"{saved:%Y-%m-%dT%X}" == f"{named}T00:00:00"
    ):
        # The name has only a date. The file's modification time is used if it is of that day.
        is_same = written is not None and written.date() == saved.date()
        return {"date": saved, "time": written if is_same else None}
    return {"date": saved, "time": saved}


def utc_time(seconds: float) -> datetime | None:
    """Return a time in UTC; None if it is beyond the calendar."""
    if not math.isfinite(seconds) or abs(seconds) > _MAX_SECONDS:
        return None
    try:
        return (_UNIX_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=timezone.utc)
    except OverflowError:
        return None


def stem_of(name: str, *, is_directory: bool) -> str:
    """Return a name without the suffix of its kind."""
    match = (_DIRECTORY_SUFFIX if is_directory else _SUFFIX).search(name)
    return name[: match.start()] if match and match.start() else name


def _format_value(field: TemplateField, value: Value) -> str:
    """Return a field's value in its format."""
    if isinstance(value, datetime):
        spec = field.spec or TIMES[field.name]
        literal = _DIRECTIVE.sub("", spec)
        if "%" in literal or "/" in literal or "\\" in literal or not spec.isprintable() or literal == spec:
            raise FieldError(f"{field.shown}: invalid time format {spec!r} (such as {TIMES[field.name]})")
        return _DIRECTIVE.sub(lambda match: value.strftime(match[0]), spec)
    if _SPEC.fullmatch(field.spec) is None:
        raise FieldError(f"{field.shown}: invalid format {field.spec!r}")
    try:
        return format(value, field.spec)
    except (ValueError, OverflowError) as failure:
        is_fraction = isinstance(value, float) and field.name == "epoch"
        hint = "; write {epoch}, or {step:08d}" if is_fraction else ""
        raise FieldError(f"{field.shown}: its format doesn't fit {value!r}{hint}") from failure

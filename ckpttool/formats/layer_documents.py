"""Layer types in sidecars: written as objects, and also read from the sentences of version 0.1."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttool.core.layers import UNWIRED, DoubtReason, LayerKind, LayoutDoubt

_LONGEST = 1000
"""Maximum length of a class or of another layer's name in characters."""
_MOST_AXES = 64
_NORM_WEIGHTS = ("gamma", "beta")

# ``Dense after Flatten (4, 3, 4)``, ``BatchNormalization without gamma``, ``GRU unlike PyTorch's: reset_after
# is not set``: the messages that version 0.1 showed to users, which it also stored.
_OLD = re.compile(
    r"(?P<cls>.*?)(?: without (?P<missing>gamma and beta|gamma|beta))?"
    r"(?P<reset> unlike PyTorch's: reset_after is not set)?"
    r"(?:(?P<flat> after Flatten(?: \((?P<shape>[0-9*, ]+)\))?)| unlike PyTorch's: (?P<why>.+))?"
    r"(?P<unwired> of unknown wiring)?",
    re.DOTALL,
)
_OLD_DOUBTS = (
    (re.compile(r"it has weights along several axes"), LayoutDoubt.SEVERAL_AXES),
    (re.compile(r"it is joined with what (.+) gives"), LayoutDoubt.JOINED),
    (re.compile(r"(.+) takes what it gives"), LayoutDoubt.OUTPUT_ORDER),
    (re.compile(r"(.+) stands before it"), LayoutDoubt.INPUT_ORDER),
    (re.compile(r"(.+)"), LayoutDoubt.INPUT_ORDER),
)


def kind_document(kind: LayerKind) -> dict[str, object]:
    """Return a layer type as plain data; facts that are not known are left out."""
    document: dict[str, object] = {"class": kind.cls}
    if kind.missing:
        document["missing"] = list(kind.missing)
    if not kind.reset_after:
        document["reset_after"] = False
    if kind.flattened is not None:
        document["flattened"] = list(kind.flattened)
    if kind.doubt is not None:
        document["doubt"] = kind.doubt.doubt.value
        if kind.doubt.other:
            document["other"] = kind.doubt.other
    return document


def kind_of_document(value: object) -> LayerKind:
    """Return a layer type from plain data.

    Raises:
        ValueError: It is malformed.
    """
    if isinstance(value, str):
        return _kind_of_sentence(_text(value))
    if not isinstance(value, dict):
        raise ValueError("an invalid type of a layer")
    missing, reset_after = value.get("missing", []), value.get("reset_after", True)
    if not isinstance(missing, list) or any(one not in _NORM_WEIGHTS for one in missing):
        raise ValueError("invalid missing weights of a layer")
    if not isinstance(reset_after, bool):
        raise ValueError("reset_after of a layer is neither true nor false")
    return LayerKind(
        _text(value.get("class")),
        tuple(missing),
        reset_after,
        None if value.get("flattened") is None else _shape(value["flattened"]),
        _doubt(value),
    )


def _doubt(value: Mapping[str, object]) -> DoubtReason | None:
    if "doubt" not in value:
        return None
    reason = DoubtReason(LayoutDoubt(value["doubt"]), _text(value.get("other", "")))
    if "{}" in reason.doubt.text and not reason.other:
        raise ValueError(f"the doubt {reason.doubt.value} of a layer doesn't name the other layer")
    return reason


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError("an invalid type of a layer")
    return value


def _shape(value: object) -> tuple[int | None, ...]:
    if isinstance(value, list) and len(value) <= _MOST_AXES:
        known = value[1:] if len(value) == 2 and value[0] is None else value
        if all(type(length) is int and 0 <= length < 1 << 63 for length in known):
            return tuple(value)
    raise ValueError("an invalid flattened shape of a layer")


def _kind_of_sentence(text: str) -> LayerKind:
    """Return the layer type in a sentence of version 0.1."""
    match = _OLD.fullmatch(text)
    assert match is not None  # all parts but the class are optional, and that may be any text
    flattened: tuple[int | None, ...] | None = None
    if match["flat"]:
        lengths = [one for one in re.split(r"[, ]+", match["shape"] or "") if one]
        flattened = _shape([None if one == "*" else int(one) for one in lengths])
    doubt = None
    if match["unwired"]:
        doubt = UNWIRED
    elif match["why"] is not None:
        doubt = next(
            DoubtReason(kind, found[1] if found.re.groups else "")
            for pattern, kind in _OLD_DOUBTS
            if (found := pattern.fullmatch(match["why"])) is not None
        )
    missing = tuple(name for name in _NORM_WEIGHTS if name in (match["missing"] or ""))
    return LayerKind(match["cls"], missing, not match["reset"], flattened, doubt)

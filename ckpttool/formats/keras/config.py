"""What loading a Keras config could run: it names classes and functions at any depth, and may hold code.

Texts in it that are configurations, or code, are looked into. Nothing is imported or unmarshalled.

Source: Keras ``src/saving/serialization_lib.py``, ``src/layers/core/lambda_layer.py``.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.keras.references import judge_references
from ckpttool.report import Finding, error, warning
from ckpttool.wire.jsontext import Doubled, parse_json

MAX_CONFIG = 100_000_000
"""The longest config in bytes."""

MAX_ALIKE = 100
"""The most findings of one code that are told of a config."""

_MAX_TEXTS = 8
"""How deep texts that are configurations may stand in each other."""

_CODE = ("4w", "Yw")
"""How code begins that Python marshalled, in Base64: the type, with and without a flag."""
_CODE_HEAD = 24


def read_config(path: str, text: bytes, what: str = "config") -> Any:
    """Return the object that a config in JSON holds.

    Raises:
        DamagedCheckpoint: It is no JSON, or no object.
        LimitExceeded: It is too large, or nested too deep.
    """
    told = parse_json(path, text, what, constants=True)
    if isinstance(told, Doubled):
        raise DamagedCheckpoint(path, f"{told.key!r} stands twice", where=what, code="duplicate-key")
    if not isinstance(told, dict):
        found = f"the {what} has type {type(told).__name__}"
        raise DamagedCheckpoint(path, found, expected="an object", code=f"{what}-not-object")
    return told


def judge(config: object, where: str) -> tuple[Finding, ...]:
    """Return an error for all that is known to be dangerous, a warning for what nobody knows."""
    found: dict[str, dict[Finding, None]] = {}
    for finding in _judged(config, where):
        alike = found.setdefault(finding.code, {})
        if len(alike) < MAX_ALIKE:
            alike[finding] = None
    return tuple(finding for alike in found.values() for finding in alike)


def _judged(config: object, where: str) -> Iterator[Finding]:
    """Yield what is to be said of every object and text at any depth."""
    pending = [(where, config, 0)]
    while pending:
        place, node, texts = pending.pop()
        if isinstance(node, dict):
            yield from _judge_node(node, place)
            pending.extend((f"{place}.{key:.40}", value, texts) for key, value in reversed(node.items()))
        elif isinstance(node, list):
            pending.extend((f"{place}[{at}]", node[at], texts) for at in reversed(range(len(node))))
        elif isinstance(node, str):
            if _is_code(node):
                yield error("keras-lambda", "Python code, marshalled", place)
            elif node.lstrip()[:1] in ("{", "["):
                try:
                    pending.append((f"{place}(text)", _inside(node, texts), texts + 1))
                except LimitExceeded as failure:
                    yield warning("not-scanned", f"a text in it was not looked into: {failure.reason}", place)


def _judge_node(node: Mapping[str, Any], place: str) -> Iterator[Finding]:
    if isinstance(node, Doubled):
        yield error("duplicate-key", f"{node.key!r} stands twice; readers take different ones", place)
    is_lambda = "class_name" not in node and isinstance(node.get("code"), str) and "closure" in node
    if is_lambda or "lambda" in (node.get("function_type"), node.get("output_shape_type")):
        yield error("keras-lambda", "loading it would run code that is stored in the config", place)
    yield from judge_references(node, place)


def _inside(text: str, texts: int) -> object:
    """Return the JSON that a text is, None where it is just a text.

    Raises:
        LimitExceeded: It is too large, nested too deep, or in too many other texts.
    """
    try:
        tree = parse_json("", text.encode("utf-8", "replace"), "text", constants=True, surrogates=True)
    except LimitExceeded:
        raise
    except DamagedCheckpoint:
        return None
    if texts >= _MAX_TEXTS and isinstance(tree, dict | list):
        raise LimitExceeded("", f"texts in texts, over {_MAX_TEXTS} deep", expected="less")
    return tree


def _is_code(text: str) -> bool:
    """Tell whether a text is Base64 of a code object: small numbers of arguments stand at its head."""
    head = "".join(text[: 2 * _CODE_HEAD].split())[:_CODE_HEAD]
    if not head.startswith(_CODE) or len(head) < _CODE_HEAD:
        return False
    try:
        data = binascii.a2b_base64(head)
    except ValueError:
        return False
    return all(data[at : at + 2] == b"\0\0" for at in (3, 7, 11))

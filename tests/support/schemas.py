"""The JSON schema of what commands print with ``--json``, and how much of it documents have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "docs" / "reference" / "results.schema.json"


@cache
def published() -> Any:
    """Return the schema."""
    return json.loads(PATH.read_text("utf-8"))


def documents_in(text: str) -> Iterator[dict[str, Any]]:
    """Yield the documents that a command printed."""
    for line in text.splitlines():
        if line.startswith('{"schema": "ckpttool.'):
            yield json.loads(line)


def require_valid(text: str) -> None:
    """Require that the documents that a command printed are as the schema says."""
    for document in documents_in(text):
        from jsonschema.exceptions import best_match

        error = best_match(_validator().iter_errors(document))
        assert error is None, f"{error.json_path}: {error.message}; {PATH} expects another document"


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(published())


def keyed(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part of a schema that lists keys, with its place; conditions are none."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield path, schema
        for key, inner in schema.items():
            if key != "if":
                yield from keyed(inner, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from keyed(inner, f"{path}/{number}")


def looser_than(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys of the schema that no document has, and the optional ones that every document has."""
    from jsonschema import validators

    present: set[tuple[int, str]] = set()
    absent: set[tuple[int, str]] = set()
    plain = type(_validator())
    check = plain.VALIDATORS["properties"]

    def look(validator: Any, properties: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            present.update((id(schema), key) for key in properties.keys() & instance.keys())
            absent.update((id(schema), key) for key in properties.keys() - instance.keys())
        yield from check(validator, properties, instance, schema)

    watching = validators.extend(plain, {"properties": look})(published())
    for document in documents:
        watching.validate(document)
    looser = []
    for path, part in keyed(published()):
        for key in part["properties"]:
            if (id(part), key) not in present:
                looser.append(f"{path}: no document has {key}")
            elif key not in part.get("required", ()) and (id(part), key) not in absent:
                looser.append(f"{path}: every document has {key}")
    return looser

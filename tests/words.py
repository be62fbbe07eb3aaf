"""Finds docstring summaries and messages in words that explain nothing, and fails if there are any.

Usage: ``python -m tests.words``. A summary names a thing or an action in the terms of the field, a message
says in plain English what happened and what to do. "What stands behind it" and the like need the code to be
understood, which they should explain.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckpttool"
_WORDS = (
    r"tells?|told|stands?|lies?|goes|stays?|behind|beside|whoever|nobody|somebody|gone|of which|"
    r"so (?:often|many|much)|hasn't got"
)
VAGUE = re.compile(rf"\b({_WORDS}|what|there are)\b", re.IGNORECASE)
"""Words of summaries."""
ODD = re.compile(
    rf"\b(?!tell whether|lies? outside)({_WORDS}|(?:that|which) (?:is|are) none)\b", re.IGNORECASE
)
"""Words of messages; ``what``, ``there are``, "can't tell whether" and "lie outside the file" are fine."""
_HAS_FIELD = re.compile(r"\(\?|\(\.")
"""Part of a regular expression, which reads the messages of earlier versions."""


def vague_summaries(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the summary of each docstring with a vague word."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or _is_command(node):
            continue
        summary = (ast.get_docstring(node) or "").split("\n\n")[0]
        if VAGUE.search(summary):
            yield getattr(node, "lineno", 1), summary


def odd_messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of several words with an odd one; values are left out."""
    documentation = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    pieces: set[int] = set()  # of f-strings
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            pieces.update(id(value) for value in node.values)
            text = "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            text = node.value
        else:
            continue
        if " " in text and id(node) not in documentation and ODD.search(text) and not _HAS_FIELD.search(text):
            yield node.lineno, text


def _is_command(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(args=ast.arguments(args=[ast.arg(annotation=ast.Name(id=record)), *_])):
            return record.endswith("Command") and not node.name.startswith("_")
    return False


def main() -> int:
    """Print the vague summaries and odd messages of the package."""
    count = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ast.parse(path.read_text("utf-8"))
        for line, text in (*vague_summaries(module), *odd_messages(module)):
            count += 1
            print(f"{path.relative_to(PACKAGE.parent)}:{line}: {' '.join(text.split())}")
    print(f"{count} texts with vague words" if count else "no text with vague words")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())

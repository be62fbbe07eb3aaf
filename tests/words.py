"""Finds docstring summaries in words that explain nothing, and fails if there are any.

Usage: ``python -m tests.words``. A summary names a thing or an action in the terms of the field. "What
stands behind it" and the like need the code to be understood, which the summary should explain. Help texts of
commands are written for users, and are not searched.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckpttool"
VAGUE = re.compile(
    r"\b(what|tells?|told|stands?|lies?|goes|stays?|behind|beside|whoever|nobody|somebody|gone|of which|"
    r"so (?:often|many|much)|hasn't got|there are)\b",
    re.IGNORECASE,
)


def vague_summaries(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the summary of each docstring of a module with a vague word."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or _is_command(node):
            continue
        summary = (ast.get_docstring(node) or "").split("\n\n")[0]
        if VAGUE.search(summary):
            yield getattr(node, "lineno", 1), " ".join(summary.split())


def _is_command(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(args=ast.arguments(args=[ast.arg(annotation=ast.Name(id=record)), *_])):
            return record.endswith("Command") and not node.name.startswith("_")
    return False


def main() -> int:
    """Print the vague summaries of the package."""
    count = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, summary in vague_summaries(path):
            count += 1
            print(f"{path.relative_to(PACKAGE.parent)}:{line}: {summary}")
    print(f"{count} summaries with vague words" if count else "no summary with vague words")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())

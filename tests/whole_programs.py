"""Counts the tests that start programs, and fails if there are more than there should be.

Usage: ``python -m tests.whole_programs MOST``. A whole program costs a second and says little of what went
wrong; an engine is tested in the tests' own process. Who needs one more raises the number, and says why.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
STARTERS = {
    *("python", "ckpttool", "ckpttool_in_terminal", "python_with_frameworks", "in_child"),
    *("subprocess.run", "subprocess.Popen", "subprocess.check_output"),
}


def starting_tests(path: Path) -> Iterator[str]:
    """Yield the tests of a module that start a program, by themselves or through its other functions."""
    tree = ast.parse(path.read_text("utf-8"))
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    called = {name: set(_calls(one)) | {arg.arg for arg in one.args.args} for name, one in functions.items()}
    starting: set[str] = set()
    while more := {name for name in called if called[name] & (STARTERS | starting)} - starting:
        starting |= more
    yield from (name for name in functions if name in starting and name.startswith("test_"))


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def main() -> int:
    """Count, and tell which modules have most if there are too many."""
    most = int(sys.argv[1])
    counts = Counter({path: len([*starting_tests(path)]) for path in TESTS.rglob("test_*.py")})
    total = counts.total()
    if total <= most:
        print(f"{total} tests start programs")
        return 0
    print(f"{total} tests start programs, {most} at most should; most do so in:")
    for path, count in counts.most_common(10):
        print(f"{count:5}  {path.relative_to(TESTS.parent)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Paddle's files and Fluid's directories, under the contract suite."""

from __future__ import annotations

from pathlib import Path

from tests.support.contracts import Contract

FILES = Path(__file__).parents[2] / "fixtures" / "files"

PAIRED = (".pdmodel", ".pdiparams", ".json")


def with_truth(directory: Path) -> tuple[Path, ...]:
    """Return the fixtures in a tree: what a truth lies beside."""
    ending = ".expected.json"
    found = directory.rglob(f"*{ending}")
    return tuple(sorted(path.with_name(path.name.removesuffix(ending)) for path in found))


class TestFluid(Contract):
    format = "fluid"
    fixtures = with_truth(FILES / "fluid")


class TestPaddle(Contract):
    format = "paddle"
    # The suite copies and cuts files one by one: a pair is more, and of parameters without their program
    # nobody knows how many there should be. See test_paddle.
    fixtures = tuple(path for path in with_truth(FILES / "paddle") if path.suffix not in PAIRED)

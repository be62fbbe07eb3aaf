"""Every command that changes a directory, on every kind of checkpoint, interrupted at some of its calls.

With ``CKPTTOOL_KILL_MATRIX=whole``, at all of them; see ``tests/kill_matrix.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kill_matrix import FAULTS, ways

ROOT = Path(__file__).parents[1]
SAMPLES = None if os.environ.get("CKPTTOOL_KILL_MATRIX") == "whole" else 1
"""At how many calls each fault comes; kills come at twice as many."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system")


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Return the program that plays ways."""
    command = [sys.executable, "-m", "tests.kill_matrix", "--serve", str(tmp_path_factory.mktemp("matrix"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        yield process


@pytest.mark.parametrize("name", ways())
def test_whatever_interrupts_it_the_next_command_settles_it(name: str, player: subprocess.Popen[str]) -> None:
    assert player.stdin is not None and player.stdout is not None
    print(json.dumps([name, SAMPLES]), file=player.stdin, flush=True)
    count, wrong = json.loads(player.stdout.readline())
    assert not wrong, wrong
    assert count >= len(FAULTS) + 1

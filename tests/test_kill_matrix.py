"""Each command that changes a directory, and each layout of checkpoints, killed once; some fail, too.

``make kills`` plays all commands on all layouts, interrupted at every call; see ``tests/kill_matrix.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kill_matrix import few, few_faults
from tests.support.commands import python

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system")
def test_whatever_interrupts_it_the_next_command_settles_it() -> None:
    done = python("-m", "tests.kill_matrix", "--few", cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{len(few_faults(at)):6}  {name}" for at, name in enumerate(few())]

"""How much a change costs: a toy option is one field, a toy result is one file, in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ckpttool"
CONFIG = "[retention]\nkeep-last = 1\ngrace = '2h'\n"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the package, for a change."""
    return shutil.copytree(PACKAGE, tmp_path / "ckpttool", ignore=shutil.ignore_patterns("__pycache__"))


def change(path: Path, before: str, added: str) -> None:
    """Insert lines before a line that is there once."""
    text = path.read_text("utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, added + before), "utf-8")


def answers(copied: Path, program: str) -> list[str]:
    """Return the lines that a program prints, with the changed package."""
    path = os.pathsep.join([str(copied.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=copied.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


OPTION = """\
    grace: int | None = _execution(
        "--grace", metavar="TIME", help="Keep what was read less than TIME ago.", parse=seconds, example="1h"
    )
"""
SEES_OPTION = f"""
from pathlib import Path
from ckpttool import PruneRequest
from ckpttool.cli.commands import command_named
from ckpttool.cli.config import read_document
from ckpttool.cli.config_keys import schema_of
from ckpttool.cli.config_tables import TABLES, config_schema
from ckpttool.cli.retention_config import retention_for

Path("ckpttool.toml").write_text({CONFIG!r})
command = command_named("prune")
context = command.make_context("prune", ["runs", "--keep", "1", "--grace", "1h"])
taken = command.record_of(context)
(typed,) = retention_for(["runs"], taken.given).requests()
(read,) = retention_for(["runs"], {{}}, "ckpttool.toml").requests()
(both,) = retention_for(["runs"], {{"grace": 60}}, "ckpttool.toml").requests()
own = PruneRequest(directory="runs", policy=typed.policies.default)
print(typed.grace, read.grace, both.grace, own.grace)
print(config_schema()["properties"]["retention"]["properties"]["grace"]["description"])
print("--grace TIME" in command.get_help(context))
"""


def test_an_option_is_a_field(copied: Path) -> None:
    change(copied / "runs/pruning/request.py", "    max_delete: str | None = _execution(\n", OPTION)
    assert answers(copied, SEES_OPTION) == [
        "3600 7200 60 None",
        "Keep what was read less than TIME ago.",
        "True",
    ]


RESULT = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, NamedTuple
from ckpttool.core.documents import document_of
from ckpttool.core.result import Table

class AgedCheckpoint(NamedTuple):
    path: str
    nbytes: int
    loss: float

@dataclass(frozen=True, slots=True, repr=False)
class Ages(Table):
    checkpoints: tuple[AgedCheckpoint, ...]
    _ROWS = ("checkpoints",)

    @property
    def summary(self) -> str:
        return f"{len(self.checkpoints)} aged"

    def document(self) -> dict[str, Any]:
        return {"schema": "ckpttool.ages/1", **document_of(self)}
"""
SEES_RESULT = """
from ckpttool.core.documents import record_of
from ckpttool.runs.ages import AgedCheckpoint, Ages
ages = Ages((AgedCheckpoint("a.pth", 9, float("inf")),))
print(ages)
print(ages.to_dict())
print(record_of(Ages, {"checkpoints": ages.document()["checkpoints"]}) == ages)
"""


def test_a_result_is_a_file(copied: Path) -> None:
    (copied / "runs/ages.py").write_text(RESULT, "utf-8")
    row = {"path": "a.pth", "bytes": 9, "loss": "Infinity"}
    assert answers(copied, SEES_RESULT) == [
        "<Ages 1 aged>",
        str({"schema": "ckpttool.ages/1", "checkpoints": [row]}),
        "True",
    ]

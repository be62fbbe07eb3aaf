"""How much a change costs: an option is one field, a result one file, a tracker none of this package's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool import UsageError, list_checkpoints, log, prune
from ckpttool.core import plugins
from tests.support.commands import Run

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
from ckpttool.cli.config_commands import config_schema
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
    change(copied / "runs/retention/request.py", "    max_delete: str | None = _execution(\n", OPTION)
    assert answers(copied, SEES_OPTION) == [
        "3600 7200 60 None",
        "Keep what was read less than TIME ago.",
        "True",
    ]


RESULT = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, NamedTuple
from ckpttool.core.result import document_of
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
from ckpttool.core.result import record_of
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


TRACKER = """
from contextlib import contextmanager
from pathlib import Path
from ckpttool.runs.trackers import TrackedModel, TrackedRun, Tracker

class Toy(Tracker):
    one_run = "toy:RUN names one"
    target = "toy:RUN"

    def runs(self, name, places):
        def read(log):
            for epoch in (1, 2, 3):
                log.add(None, epoch, {"score": epoch / 4})

        return [TrackedRun(f"toy:{name}", "7", name, "", {"lr": 0.1}, read)]

    def models(self, places):
        yield TrackedModel("the toy's champion", "toy.txt", f"{places[1]}/model_epoch_1.pth")

    @contextmanager
    def recorder(self, name, places):
        lines = []
        yield lambda one: not lines.append(f"{name} {one.run_name} {one.name} {one.facts['verdict']}")
        Path("toy.txt").write_text(" and ".join(lines))
"""
ENTRY_POINT = "[ckpttool.trackers]\ntoy = toy_tracker:Toy\n"


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with a tracker."""
    package = tmp_path / "package"
    (package / "toy_tracker-1.dist-info").mkdir(parents=True)
    (package / "toy_tracker.py").write_text(TRACKER, "utf-8")
    (package / "toy_tracker-1.dist-info/METADATA").write_text("Name: toy-tracker\nVersion: 1\n")
    (package / "toy_tracker-1.dist-info/entry_points.txt").write_text(ENTRY_POINT)
    monkeypatch.syspath_prepend(package)
    forget_plugins()
    yield
    sys.modules.pop("toy_tracker", None)
    forget_plugins()


def forget_plugins() -> None:
    plugins.entry_points_of.cache_clear()
    plugins._installed.cache_clear()


@pytest.mark.usefixtures("tracker")
def test_a_tracker_is_a_package_of_its_own(
    run: Run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for epoch in (1, 2, 3):
        shutil.copy(files / "series" / f"model_epoch_{epoch}.pth", "runs")
    listed = list_checkpoints("runs", metrics=["toy:x"]).checkpoints
    assert [one.entry.metrics["score"] for one in listed] == [0.25, 0.5, 0.75]
    plan = prune("runs", keep_last=1, depth="quick", dry_run=True).plan
    kept = {one.entry.name: [*map(str, one.reasons)] for group in plan.groups for one in group.keep}
    assert kept == {"model_epoch_3.pth": ["newest", "last 1"], "model_epoch_1.pth": ["the toy's champion"]}
    log(["runs/model_epoch_3.pth"], "toy:x")
    assert Path("toy.txt").read_text() == "x runs model_epoch_3.pth valid"
    with pytest.raises(UsageError, match=r"\(expected mlflow:EXPERIMENT, wandb:DIR, tensorboard:DIR or toy:"):
        log(["runs"], "none:x")
    best = run("latest", "runs", "--best", "score", "--mode", "max", "--metrics", "toy:x")
    assert (best.status, best.out) == (0, "runs/model_epoch_3.pth\n")

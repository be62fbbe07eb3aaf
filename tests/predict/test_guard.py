"""Without ``--trust`` no code that a checkpoint names runs in the child, whatever the verdict on it was.

Every attack is put in the place of a file that was judged, so that the child gets it as if it were fine; and
the framework's own loader is shown to run it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpttool.predict.run import FRAMEWORKS
from tests.predict.attacks import ATTACKS, LINEAR, PADDLE, SIMPLE, Attack
from tests.support.predictions import Start, Watched, done_after, job_of

pytestmark = pytest.mark.framework

HERE = Path(__file__).parent
KERAS_NETS = HERE / "models" / "keras_nets.py"
DENSE, OLD = {"model": f"{KERAS_NETS}:dense"}, {"model": f"{KERAS_NETS}:old"}
PADDLE_NET = f"{PADDLE}:Net"
MISFITS = frozenset(
    {"missing-key", "unexpected-key", "shape-mismatch", "not-consumed", "wrapper-prefix", "no-output"}
    | {"optimizer-mismatch"}
)
"""What is said of a checkpoint that was read, of another model."""


# Honest files ---------------------------------------------------------------------------------------

HONEST: list[tuple[str, str, dict[str, Any]]] = [
    ("torch", "pytorch/guide.pth", LINEAR),
    ("torch", "pytorch-legacy/guide_legacy.pth", LINEAR),
    ("torch", "pytorch-legacy/tar.pth", LINEAR),
    ("torch", "pickle/protocol4.pkl", LINEAR),
    ("torch", "safetensors/unaligned.safetensors", LINEAR),
    ("torch", "torch-dcp/one-rank", LINEAR),
    ("torch", "torch-dcp/two-ranks", LINEAR),
    ("torch", "torch-dcp/in-safetensors", LINEAR),
    ("torch", "deepspeed/zero-0/global_step2", LINEAR),
    ("torch", "torchscript/scripted.pt", {"shapes": "1,3"}),
    ("torch", "torchscript/traced.pt", {"shapes": "1,2,8"}),
    ("torch", "torch-export/program.pt2", {}),
    ("torch", "torch-export/program_old.pt2", {}),
    ("torch", "pytorch/trainer-bin/checkpoint-1", {}),
    ("torch", "safetensors/trainer/checkpoint-4", {}),
    ("tensorflow", "savedmodel/module", {}),
    ("tensorflow", "savedmodel/keras2", {}),
    ("tensorflow", "savedmodel/tf1", {}),
    ("tensorflow", "tensorflow/keras3/ckpt-1", DENSE),
    ("tensorflow", "keras/adam.keras", {}),
    ("tensorflow", "keras/adam.h5", {}),
    ("tensorflow", "keras/adam.weights.h5", DENSE),
    ("tensorflow", "keras/keras2.h5", {}),
    ("tensorflow", "keras/keras2_weights.h5", OLD),
    ("paddle", "fluid/inference-separate", {}),
    ("paddle", "fluid/inference-combined", {}),
    ("paddle", "paddle/net.pdmodel", {}),
    ("paddle", "paddle/protocol2.pdparams", {"model": PADDLE_NET}),
    ("paddle", "paddle/nested.pdparams", {"model": PADDLE_NET, "state_key": "model"}),
    ("paddle", "paddle/bfloat16.pdparams", {"model": PADDLE_NET}),
    ("paddle", "paddle/pieces.pdparams", {"model": PADDLE_NET}),
]


@pytest.mark.parametrize(("family", "path", "options"), HONEST, ids=[path for _, path, _ in HONEST])
def test_no_adapter_unpickles(start: Start, files: Path, family: str, path: str, options: Any) -> None:
    told = start(family).do(job_of(files / path, **options))
    assert start(family).asked == []
    assert set(told.codes) <= MISFITS, told


TRUSTED = {("torch", "module", None), ("torch", "state", "dcp")}
"""Adapters that nothing gets to without ``--trust``."""


def test_each_adapter_is_among_them(start: Start, files: Path) -> None:
    families = (["torch", "transformers"], ["tensorflow", "keras", "tf_keras"], ["paddle"])
    assert {name for family in families for name in family} == FRAMEWORKS.keys()
    adapters = {adapter for family in families for adapter in start(family[0]).adapters(family)}
    jobs = [job_of(files / path, **options) for _, path, options in HONEST]
    done = {(job.framework, job.loader, job.options.get("reader")) for job in jobs}
    assert adapters == done | TRUSTED


# Attacks --------------------------------------------------------------------------------------------


def _honest(attack: Attack, watched: Watched, files: Path, request: pytest.FixtureRequest, to: Path) -> Path:
    """Put an honest file where the hostile one will be, and return what is predicted."""
    if attack.honest.startswith("\n"):
        assert watched.run(attack.honest, path=to / attack.name) is None
    elif attack.family == "paddle":
        shutil.copytree(request.getfixturevalue("paddle_files"), to, dirs_exist_ok=True)
    elif (files / attack.honest).is_dir():
        shutil.copytree(files / attack.honest, to / attack.name)
    else:
        shutil.copy(files / attack.honest, to / attack.name)
    return to / attack.name


@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{one.name}-{one.at}" for one in ATTACKS])
def test_what_takes_the_place_of_a_judged_file_runs_nothing(
    start: Start, files: Path, tmp_path: Path, request: pytest.FixtureRequest, attack: Attack
) -> None:
    watched, mark = start(attack.family), tmp_path / "mark"
    path = _honest(attack, watched, files, request, tmp_path)
    job = job_of(path, **attack.options)
    hostile = Path(os.path.normpath(path / attack.at))
    assert watched.run(attack.write, path=hostile, mark=mark) is None
    assert not mark.exists()

    told = watched.do(job)
    assert not mark.exists()
    assert set(told.codes) == set(attack.codes), told

    watched.run(attack.load, path=hostile, mark=mark)
    assert mark.exists()


def test_a_file_that_was_changed_meanwhile_is_not_loaded(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    shutil.copy(files / "pytorch" / "guide.pth", path)
    answer = done_after(path, lambda: path.write_bytes(path.read_bytes()), model=SIMPLE["model"])
    assert answer.load.is_skipped
    assert answer.load.detail == "it changed while it was checked"

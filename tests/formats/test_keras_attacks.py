"""What makes Keras run, call or read something is never called safe; Keras itself proves that it does."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ckpttool import CheckpointError, Safety, verify
from tests.support.frameworks import python_with_frameworks

SCRIPT = Path(__file__).with_name("keras_attacks.py")
SAVED = Path(__file__).parents[2] / "fixtures" / "files" / "savedmodel" / "keras2"


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keras_attacks", SCRIPT)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def place(tmp_path: Path) -> Path:
    module().write_all(tmp_path, SAVED)
    return tmp_path


def test_every_attack_is_unsafe_and_none_runs(place: Path) -> None:
    before = {path.name for path in place.iterdir()}
    for attack in module().attacks(place):
        path = place / attack.name
        verification = verify(path / "model.weights.h5" if attack.name == "directory" else path)
        assert verification.safety is Safety.UNSAFE, attack.name
        assert attack.name != "twice.keras" or not verification.is_valid
    assert {path.name for path in place.iterdir()} == before
    with pytest.raises(CheckpointError):
        verify(place / module().SECRET)


@pytest.mark.framework
@pytest.mark.parametrize("api", ["keras", "tf_keras"])
def test_keras_does_what_they_are_made_to_do(place: Path, api: str) -> None:
    """It also tells which of the names on our lists are something else in any of its modules: none."""
    told = python_with_frameworks(SCRIPT, api, place)
    shown, misnamed = json.loads(told.splitlines()[-1])
    assert shown == {attack.name: True for attack in module().attacks(place) if attack.api == api}
    assert misnamed == []

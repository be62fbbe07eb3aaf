"""TensorFlow's file ``checkpoint``, which lists those of a directory."""

from __future__ import annotations

from pathlib import Path

from ckpttool.formats.tensorflow.state import CheckpointState, parse_state, state_text


def read_state(directory: Path) -> CheckpointState:
    """Return what the state file of a directory says."""
    state = parse_state((directory / "checkpoint").read_text())
    assert state is not None
    return state


def write_state(directory: Path, state: CheckpointState) -> None:
    """Write the state file of a directory."""
    (directory / "checkpoint").write_text(state_text(state))

"""Checkpoints that PyTorch saves with given counts, weights and times, and what commands say about them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpttool import Policy, list_checkpoints
from tests.support.retention import dry_run

START = 1_700_000_000
"""Seconds since 1970 at which a test's run begins."""

HOUR, DAY = 3_600, 86_400

Facts = Mapping[str, Any]
"""Arguments of ``save`` but the path."""


def save(
    path: Path,
    *,
    modified: float = 0,
    weights: str | None = "w",
    state: bool = False,
    cut: bool = False,
    damaged: bool = False,
    **inside: Any,
) -> Path:
    """Save a checkpoint and return its path.

    Args:
        path: Its path; directories that are missing are made.
        modified: When its file was changed, in seconds after ``START``.
        weights: Name of its only weight, by which kinds of models differ; None for none.
        state: Whether it holds the state of an optimizer.
        cut: Whether its end is missing, as after a kill: it is incomplete.
        damaged: Whether its pickle is damaged.
        inside: What else it says of itself, as ``epoch``, ``global_step``, ``metrics``.
    """
    import torch

    content = dict(inside)
    if weights is not None:
        content["model"] = {weights: torch.zeros(2, 3)}
    if state:
        moments = {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)}
        content["optimizer"] = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    stream = io.BytesIO()
    torch.save(content, stream)
    data = stream.getvalue()
    if damaged:
        data = data.replace(b"PK\x01\x02", b"PK\x01\x00", 1)  # the first in the archive's list of members
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:-300] if cut else data)
    os.utime(path, ns=(round((START + modified) * 10**9),) * 2)
    return path


def save_all(directory: Path, saves: Mapping[str, Facts]) -> Path:
    """Save checkpoints by their names in a directory, and return it."""
    for name, facts in saves.items():
        save(directory / name, **facts)
    return directory


def series_in(directory: Path, **options: Any) -> dict[str, list[str]]:
    """Return the series that ``list`` finds: names by key, the oldest first, relative to the directory."""
    found: dict[str, list[str]] = {}
    for row in list_checkpoints(directory, **options).document()["checkpoints"]:
        key, name = (row[one].removeprefix(f"{directory}/") for one in ("group", "path"))
        found.setdefault(key, []).append(name)
    return found


def warnings_in(directory: Path, **options: Any) -> list[str]:
    """Return what ``list`` warns of; paths are relative to the directory."""
    return [one.replace(f"{directory}/", "") for one in list_checkpoints(directory, **options).warnings]


def protected_in(directory: Path, *, recursive: bool = False, **options: Any) -> dict[str, list[str]]:
    """Return what ``list`` says protects checkpoints, by their paths in a directory."""
    rows = list_checkpoints(directory, recursive=recursive, **options).document()["checkpoints"]
    return {os.path.relpath(row["path"], directory): row["protected"] for row in rows if row["protected"]}


def skipped_in(directory: Path, *, recursive: bool = False) -> dict[str, str]:
    """Return why prune leaves whole series alone though all of their checkpoints would stay, by key."""
    every = {"policy": Policy(keep_last=1000), "recursive": recursive}
    return {key: why for key, why in left_alone(directory, **every).items() if why is not None}


def left_alone(directory: Path, **options: Any) -> dict[str, str | None]:
    """Return why ``--keep 1`` leaves each series as it is, by key; None if it doesn't."""
    request = {"policy": Policy(keep_last=1), "depth": "quick", **options}
    groups = dry_run(directory, **request).document()["groups"]
    return {group["key"].removeprefix(f"{directory}/"): group["skipped"] for group in groups}

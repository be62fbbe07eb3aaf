"""Limits of what is read and opened, lowered so that little is over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMITS = {
    "repeats": "formats.content.tree.MAX_REPEATS",
    "visits": "formats.content.tree.MAX_VISITS",
    "document": "formats.sidecar.MAX_DOCUMENT",
    "collisions": "formats.content.tree_json.MAX_COLLISIONS",
    "modules": "formats.torch.objects.MAX_MODULES",
    "tensors_in_tensors": "formats.torch.objects.MAX_TENSORS",
    "fields_of_a_program": "formats.paddle.program.MAX_FIELDS",
    "fields_of_a_model": "formats.savedmodel.walk.MAX_FIELDS",
    "constants": "formats.savedmodel.body.MAX_READ",
    "journal": "transaction.stages.MAX_BYTES",
    "names_in_a_log": "runs.logs.MAX_NAMES",
    "values_in_a_log": "runs.logs.MAX_VALUES",
    "line_of_a_log": "runs.logs.MAX_LINE",
    "state_of_a_trainer": "runs.logs.MAX_STATE",
    "event_files": "runs.logs.MAX_FILES",
    "files_for_two_threads": "transaction.transaction._MANY",
    "requests_at_once": "transaction.store_directory.REQUESTS_AT_ONCE",
    "units_worth_a_child": "runs.look_workers.WORTH_UNITS",
    "units_at_once": "runs.look_workers._BATCH",
    "short_constant": "formats.savedmodel.body._LONG",
}


def lower_limits(patch: pytest.MonkeyPatch, **limits: int) -> None:
    """Let at most so much be read, by the names in ``LIMITS``."""
    for name, limit in limits.items():
        patch.setattr(f"ckpttool.{LIMITS[name]}", limit)


@contextmanager
def few_files(count: int = 80) -> Iterator[None]:
    """Let this process open so many more files than it has open now, as other tests left it."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd"))) if os.path.isdir("/proc/self/fd") else 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

"""Limits of what is read, lowered so that a small file is over them."""

from __future__ import annotations

import pytest

LIMITS = {
    "repeats": "formats.content.flattening.MAX_REPEATS",
    "visits": "formats.content.flattening.MAX_VISITS",
    "document": "formats.sidecar.MAX_DOCUMENT",
    "collisions": "formats.content.tree_json.MAX_COLLISIONS",
    "modules": "formats.torch.modules.MAX_MODULES",
    "tensors_in_tensors": "formats.torch.objects.MAX_TENSORS",
    "fields_of_a_program": "formats.paddle.program.MAX_FIELDS",
    "fields_of_a_model": "formats.savedmodel.walk.MAX_FIELDS",
    "constants": "formats.savedmodel.computation.MAX_READ",
    "journal": "transaction.journal.MAX_BYTES",
    "short_constant": "formats.savedmodel.computation._LONG",
}


def lower_limits(patch: pytest.MonkeyPatch, **limits: int) -> None:
    """Let at most so much be read, by the names in ``LIMITS``."""
    for name, limit in limits.items():
        patch.setattr(f"ckpttool.{LIMITS[name]}", limit)

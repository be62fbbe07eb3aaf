"""Saves of which every rank wrote its own files, under the contract suite."""

from __future__ import annotations

from pathlib import Path

from ckpttool.testing import FormatContract

RANKS = Path(__file__).parents[2] / "fixtures" / "files" / "ranks"


class TestRanks(FormatContract):
    format = "pytorch"
    fixtures = tuple(RANKS / name for name in ("verl-2", "meshes-4", "old-fsdp-4", "numbered-2"))
    suspected = frozenset({"verl-2", "meshes-4", "old-fsdp-4", "numbered-2"})  # distributed tensors
    damages = 40


class TestTrainer(FormatContract):
    format = "pytorch"
    fixtures = (RANKS / "trainer-2" / "checkpoint-2", RANKS / "trainer-4" / "checkpoint-2")
    suspected = frozenset({"checkpoint-2"})
    damages = 40

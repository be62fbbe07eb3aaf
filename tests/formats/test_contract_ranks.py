"""Saves of which every rank wrote its own files, under the contract suite."""

from __future__ import annotations

from pathlib import Path

from tests.support.contracts import Contract

RANKS = Path(__file__).parents[2] / "fixtures" / "files" / "ranks"


class TestRanks(Contract):
    format = "pytorch"
    fixtures = tuple(RANKS / name for name in ("verl-2", "meshes-4", "old-fsdp-4", "numbered-2"))
    suspected = frozenset({"verl-2", "meshes-4", "old-fsdp-4", "numbered-2"})  # distributed tensors
    damages = min(40, Contract.damages)


class TestTrainer(Contract):
    format = "pytorch"
    fixtures = (RANKS / "trainer-2" / "checkpoint-2", RANKS / "trainer-4" / "checkpoint-2")
    suspected = frozenset({"checkpoint-2"})
    damages = min(40, Contract.damages)

"""How much of a damaged checkpoint is saved, by what its tensors serve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ckpttool.core.tensor import Role

_RNG = re.compile(r"(^|[._])rng(_?states?)?([._]|$)|(^|[._])random_states?([._]|$)", re.IGNORECASE)
"""Names of the states of random generators."""


class Amount(NamedTuple):
    """How many tensors are saved, of how many that are known."""

    saved: int
    of: int

    @property
    def lost(self) -> int:
        """Return how many are lost."""
        return self.of - self.saved


@dataclass(frozen=True, slots=True)
class Survival:
    """What is saved of a damaged checkpoint.

    Attributes:
        weights: Amount of the model's weights; the others are named after the roles of tensors, too.
        rng_state_lost: Whether a state of random generators is lost; it counts in no amount then.
        names_all: Whether the names of all tensors are known; else more may be lost.
    """

    weights: Amount
    optimizer: Amount
    training: Amount
    other: Amount
    rng_state_lost: bool
    names_all: bool


def survival_of(kept: Iterable[Role], lost: Iterable[tuple[str, Role]], *, names_all: bool) -> Survival:
    """Return what is saved, from the roles of what is kept, and the names and roles of what is lost."""
    have, gone, rng_state_lost = Counter(kept), Counter[Role](), False
    for name, role in lost:
        if _RNG.search(name):
            rng_state_lost = True
        else:
            gone[role] += 1
    amounts = {role.value: Amount(have[role], have[role] + gone[role]) for role in Role}
    return Survival(**amounts, rng_state_lost=rng_state_lost, names_all=names_all)

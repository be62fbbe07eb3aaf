"""The contract suite as ckpttool's own formats are put under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hypothesis import settings

from ckpttool.core.tensor import Extent
from ckpttool.testing import FormatContract
from ckpttool.testing.damage import DAMAGES

FILES = settings().max_examples // 10
"""How many files of a set are damaged, evenly spread: a few, and in ``make thorough`` all."""


class Contract(FormatContract):
    """A fixture is damaged at few places, and in ``make thorough`` at all that the suite has."""

    damages: ClassVar[int] = min(DAMAGES, settings().max_examples // 8)

    def _places(self, path: Path, extents: Sequence[Extent]) -> list[tuple[Path, list[int]]]:
        places = super()._places(path, extents)
        return places[:: math.ceil(len(places) / FILES)]

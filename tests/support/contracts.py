"""The contract suite as ckpttool's own formats are put under it."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings

from ckpttool.testing import FormatContract
from ckpttool.testing.damage import DAMAGES


class Contract(FormatContract):
    """A fixture is damaged at few places, and in ``make thorough`` at all that the suite has."""

    damages: ClassVar[int] = min(DAMAGES, settings().max_examples // 3)

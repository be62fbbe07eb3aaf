"""What the benchmarks call met: nothing that they did not measure."""

from __future__ import annotations

import pytest

from tests.benchmarks.claims import Claim
from tests.benchmarks.frameworks import DCP, FLUID, KERAS, TENSORFLOW, Listing, lacking
from tests.benchmarks.measure import Measurement
from tests.benchmarks.rows import row

CLAIM = Claim("inspect it", "inspect", "peer", ratio=0.5, resident=100)
OURS = Measurement("inspect", (10.0,), 50_000_000)
BAD_PEER = Measurement("peer", failure="exit 1")


@pytest.mark.parametrize(("theirs", "is_met"), [(30.0, True), (20.0, True), (19.0, False)])
def test_a_bar_is_met_or_missed(theirs: float, is_met: bool) -> None:
    told = row(CLAIM, {"inspect": OURS, "peer": Measurement("peer", (theirs,), 1)})
    assert (told.is_met, told.is_unmeasured) == (is_met, False)


def test_a_ratio_to_a_peer_that_failed_is_not_met() -> None:
    told = row(CLAIM, {"inspect": OURS, "peer": BAD_PEER})
    assert (told.is_met, told.is_unmeasured) == (None, True)


def test_too_much_memory_is_missed_whatever_the_peer_does() -> None:
    told = row(CLAIM, {"inspect": Measurement("inspect", (10.0,), 200_000_000), "peer": BAD_PEER})
    assert (told.is_met, told.is_unmeasured) == (False, False)


def test_what_is_skipped_is_not_measured() -> None:
    told = row(CLAIM, {}, "not installed: paddle")
    assert (told.is_met, told.is_unmeasured) == (None, True)


def test_without_a_bar_nothing_is_missing() -> None:
    told = row(Claim("inspect it", "inspect"), {"inspect": OURS})
    assert (told.is_met, told.is_unmeasured) == (None, False)


@pytest.mark.framework
@pytest.mark.parametrize("listing", [TENSORFLOW, KERAS, FLUID, DCP], ids=lambda listing: listing.kind)
def test_no_framework_is_left_out(listing: Listing) -> None:
    assert lacking(listing) is None

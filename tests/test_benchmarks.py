"""What the benchmarks call met: nothing that they did not measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.claims import PYTHON, Claim, Group
from tests.benchmarks.earlier import against
from tests.benchmarks.frameworks import DCP, FLUID, KERAS, TENSORFLOW, Listing, lacking
from tests.benchmarks.measure import Command, Measurement, Ratio, Run, measure_in_turn, ratio_of
from tests.benchmarks.rows import row

CLAIM = Claim("inspect it", "inspect", "peer", ratio=0.5, resident=100)
BAD_PEER = Measurement("peer", failure="exit 1")


def measured(name: str, *processor: float, resident: int = 50_000_000) -> Measurement:
    return Measurement(name, tuple(Run(time, 1000.0, resident) for time in processor))


OURS = measured("inspect", 10.0)


@pytest.mark.parametrize(
    ("theirs", "is_met"), [(30.0, True), (20.0, True), (17.5, True), (17.3, False), (5.0, False)]
)
def test_a_bar_is_missed_beyond_its_tolerance(theirs: float, is_met: bool) -> None:
    told = row(CLAIM, {"inspect": OURS, "peer": measured("peer", theirs)})
    assert (told.is_met, told.is_unmeasured) == (is_met, False)


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert ratio_of(measured("a", 10, 20, 90), measured("b", 20, 20, 30)) == Ratio(1, 0.5, 3)


def test_a_ratio_to_a_peer_that_failed_is_not_met() -> None:
    told = row(CLAIM, {"inspect": OURS, "peer": BAD_PEER})
    assert (told.is_met, told.is_unmeasured) == (None, True)


def test_too_much_memory_is_missed_whatever_the_peer_does() -> None:
    told = row(CLAIM, {"inspect": measured("inspect", 10, resident=200_000_000), "peer": BAD_PEER})
    assert (told.is_met, told.is_unmeasured) == (False, False)


def test_what_is_skipped_is_not_measured() -> None:
    told = row(CLAIM, {}, "not installed: paddle")
    assert (told.is_met, told.is_unmeasured) == (None, True)


def test_without_a_bar_nothing_is_missing() -> None:
    told = row(Claim("inspect it", "inspect"), {"inspect": OURS})
    assert (told.is_met, told.is_unmeasured) == (None, False)


def test_a_command_is_measured_beside_its_earlier_self(tmp_path: Path) -> None:
    writes = ("sh", "-c", 'echo "$PYTHONPATH" >> "$0"', str(tmp_path / "calls"))
    group = Group((Command("inspect", writes), Command("peer", ("false",))), (CLAIM,))
    pair = against(group, Path("/earlier"))
    both = measure_in_turn(pair.commands, rounds=2)
    here, *_ = calls = (tmp_path / "calls").read_text("utf-8").splitlines()
    assert calls == [here, "/earlier"] * 3  # a round that isn't counted, and two
    (told,) = (row(claim, both) for claim in pair.claims)
    assert (told.job, told.bars) == ("inspect it", ("≤ 1 ×",))
    assert told.is_met is not None


@pytest.mark.parametrize("start", [("-c", "import ckpttool"), ("-m", "ckpttool")])
def test_what_is_measured_is_the_earlier_package(start: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "ckpttool").mkdir()
    (tmp_path / "ckpttool" / "__init__.py").write_text("raise SystemExit('earlier')")
    group = Group((Command("inspect", (PYTHON, *start)),), (CLAIM,))
    _, earlier = against(group, tmp_path).commands
    assert measure_in_turn([earlier], rounds=1)[earlier.name].failure == "exit 1: earlier"


def test_processor_time_is_not_wall_time() -> None:
    (slept,) = measure_in_turn([Command("sleep", ("sleep", "0.3"))], rounds=1).values()
    assert slept.processor < 300 <= slept.wall


@pytest.mark.framework
@pytest.mark.parametrize("listing", [TENSORFLOW, KERAS, FLUID, DCP], ids=lambda listing: listing.kind)
def test_no_framework_is_left_out(listing: Listing) -> None:
    assert lacking(listing) is None

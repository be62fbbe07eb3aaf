"""Which checkpoints a part has, and which of them a sample reads in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import UsageError
from ckpttool.ops.workload import Part, Sample, choose, split

SIZES = st.dictionaries(st.text("abc/", min_size=1, max_size=6), st.integers(0, 1 << 40), max_size=40)


@given(SIZES, st.integers(1, 9), st.randoms())
def test_parts_do_not_depend_on_the_order(sizes: dict[str, int], parts: int, random) -> None:
    paths = list(sizes)
    random.shuffle(paths)
    numbers = split(sizes, parts)
    assert split({path: sizes[path] for path in paths}, parts) == numbers
    assert numbers.keys() == sizes.keys()
    assert set(numbers.values()) <= set(range(1, parts + 1))


@given(SIZES, st.integers(1, 9))
def test_parts_differ_by_one_checkpoint_at_most(sizes: dict[str, int], parts: int) -> None:
    loads = dict.fromkeys(range(1, parts + 1), 0)
    for path, number in split(sizes, parts).items():
        loads[number] += sizes[path] + (1 << 20)
    largest = max(sizes.values(), default=0) + (1 << 20)
    assert max(loads.values()) - min(loads.values()) <= largest


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/4", "a/b", "1 / 4"])
def test_a_text_that_is_no_part(text: str) -> None:
    with pytest.raises(UsageError, match="invalid part"):
        Part.parse(text)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "5", "x", "0", "%"])
def test_a_text_that_is_no_sample(text: str) -> None:
    with pytest.raises(UsageError):
        Sample.parse(text)


@given(
    st.sampled_from(["1%", "5%", "7%", "33.3%", "50%", "100%", "3kB", "700B", "10G"]), st.integers(0, 9999)
)
def test_without_manifests_each_has_its_turn(text: str, first: int) -> None:
    candidates = [(f"runs/{number}.pth", 1000, None) for number in range(100)]
    sample = Sample.parse(text)
    days = -(-1 // sample.fraction_of(100_000))
    turns = [choose(candidates, sample, first + day) for day in range(int(days))]
    assert sorted(path for turn in turns for path in turn) == sorted(path for path, _, _ in candidates)


def test_with_manifests_the_least_recently_read_come_first() -> None:
    read = {"a": "2026-01-03", "b": "", "c": "2026-01-01", "d": "2026-01-02"}
    candidates = [(path, 10, at) for path, at in read.items()]
    assert choose(candidates, Sample.parse("25%"), 0) == {"b"}
    assert choose(candidates, Sample.parse("50%"), 0) == {"b", "c"}
    assert choose(candidates, Sample.parse("30B"), 7) == {"b", "c", "d"}
    assert choose(candidates, Sample.parse("1B"), 7) == {"b"}  # one at least, however large it is

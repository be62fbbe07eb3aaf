"""The fuzzer does what it says, and a fixed set of its mutations brings nothing about."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from random import Random
from zipfile import ZipFile

import pytest

from fixtures.table_raw import masked
from tests.security.assembler import Call, Name, call, pickled
from tests.security.fuzz import UNREADABLE, Found, Fuzzer, calls_of, report
from tests.security.mutations import _blocks, archive, messages, opcodes, sstable

ROOT = Path(__file__).parents[2]
MUTATIONS = 100


def test_a_fixed_set_of_mutations_brings_nothing_about() -> None:
    command = [sys.executable, "-m", "tests.security.fuzz", "--count", str(MUTATIONS), "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{MUTATIONS} mutations in ")


def test_the_same_number_is_the_same_mutation(tmp_path: Path) -> None:
    one, other = Fuzzer(7, tmp_path / "a"), Fuzzer(7, tmp_path / "b")
    for number in (0, 1, 2, 3):
        assert one.write(number)[1].read_bytes() == other.write(number)[1].read_bytes()


@pytest.mark.parametrize("how", ["reduce", "obj", "newobj", "inst"])
def test_the_witness_sees_what_would_be_called(how: str) -> None:
    data = pickled({"a": Call(Name("os", "system"), ("true",), how=how)}, 2)
    assert calls_of(data) == {"os system"}


def test_the_witness_sees_what_is_handed_to_a_call_and_not_what_is_named() -> None:
    handed = call("numpy.random._pickle", "__generator_ctor", "x", Name("builtins", "eval"))
    assert calls_of(pickled(handed, 4)) == {"numpy.random._pickle __generator_ctor", "builtins eval"}
    assert calls_of(pickled([Name("builtins", "eval")], 4)) == set()
    assert calls_of(pickled(call("os", "system"), 2)[:-1] + b"\xff") == {"os system"}


def test_no_honest_fixture_calls_what_the_fuzzer_adds(tmp_path: Path) -> None:
    assert (
        not {"os system", "builtins exec", "posix system", "functools partial"} & Fuzzer(0, tmp_path).honest
    )


def test_opcodes_are_the_pickle_again() -> None:
    data = pickled({"a": [1, "b"]}, 4) + pickled(None, 0)
    assert b"".join(opcodes(data)) == data
    assert b"".join(opcodes(data + b"\xff\xff")) == data + b"\xff\xff"


def test_a_mutated_archive_is_whole(files: Path) -> None:
    """Nearly all are, so that what lies behind the checksums is reached."""
    whole = (files / "pytorch" / "guide.pth").read_bytes()
    intact = 0
    for seed in range(40):
        try:
            with ZipFile(io.BytesIO(archive(whole, Random(seed), [whole[100:200]]))) as opened:
                intact += opened.testzip() is None
        except UNREADABLE:  # one header of it lies
            continue
    assert intact >= 20


def test_a_mutated_table_has_right_checksums(files: Path) -> None:
    """What is changed is a block's content; every checksum of the table fits what it covers."""
    whole = next((files / "tensorflow").rglob("*.index")).read_bytes()
    made = {sstable(whole, Random(seed)) for seed in range(10)}
    assert len(made) > 5 and {len(one) for one in made} == {len(whole)}
    for one in made:
        for start, size in _blocks(whole):
            stored = one[start + size + 1 : start + size + 5]
            assert stored == masked(one[start : start + size + 1]).to_bytes(4, "little")


def test_a_mutated_message_differs(files: Path) -> None:
    whole = (files / "savedmodel" / "plain" / "saved_model.pb").read_bytes()
    assert len({messages(whole, Random(seed)) for seed in range(20)}) > 15


def test_the_report_names_a_mutation_to_repeat() -> None:
    found = Found(mutations=3)
    found.add("verify: KeyError at x.py:1", "--seed 1 --only 2")
    found.add("verify: KeyError at x.py:1", "--seed 1 --only 9")
    assert report(found, 2.0).splitlines() == [
        "3 mutations in 2 s, 2 failures",
        "     2 verify: KeyError at x.py:1  (--seed 1 --only 2)",
    ]
